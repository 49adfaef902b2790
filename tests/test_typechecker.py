"""The tests' own check of shapes: arrays of other shapes than a signature says raise, in functions, methods and properties."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from polyak.core.types import TimeStep
from polyak.ops.losses import weighted_sum
from polyak.ops.returns import gae
from polyak.replay.uniform import UniformReplay


@pytest.mark.parametrize(
    "call",
    [
        lambda: weighted_sum(jnp.zeros(3), jnp.zeros(4)),
        lambda: gae(*(jnp.zeros(3),) * 3, jnp.zeros(4, bool), jnp.zeros(3, bool), gamma=0.9, gae_lambda=0.9),
        lambda: UniformReplay(8).draw(
            UniformReplay(8).init(jnp.zeros(2), jnp.zeros(1), num_steps=1), jax.random.key(0), "four", 1
        ),
    ],
)
def test_another_shape_or_type_than_the_signature_says_raises(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def test_structs_hold_arrays_of_more_axes_than_their_fields_say():
    many = TimeStep(jnp.zeros((5, 4, 2)), *(jnp.zeros((5, 4)) for _ in range(4)))
    assert many.reward.shape == (5, 4)

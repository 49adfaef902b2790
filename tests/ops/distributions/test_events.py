import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.distributions.continuous import Normal, TanhNormal
from polyak.ops.distributions.events import add, check_same_kind, sum_event


def test_an_event_is_the_last_dimensions():
    x = jnp.ones((2, 3, 4))
    for event_ndims, shape in ((0, (2, 3, 4)), (1, (2, 3)), (3, ())):
        np.testing.assert_array_equal(sum_event(x, event_ndims), np.full(shape, x.size / max(np.prod(shape), 1)))


def test_adding_takes_any_iterable():
    np.testing.assert_array_equal(add(jnp.full(2, float(i)) for i in range(4)), [6, 6])


def test_a_divergence_between_two_kinds_is_an_error():
    p, q = (kind(jnp.zeros(3), jnp.ones(3)) for kind in (Normal, TanhNormal))
    check_same_kind(p, p)
    with pytest.raises(TypeError, match="kl_divergence: both must be Normal, got TanhNormal"):
        check_same_kind(p, q)

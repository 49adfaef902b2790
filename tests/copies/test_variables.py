"""Storage of copies: separate buffers, float32 for soft targets, and their description."""

import jax
import jax.numpy as jnp
import pytest

from polyak.copies.follow import Follow
from polyak.copies.network_copies import cast_like, describe_variables, target_storage
from polyak.copies.shared import Shared
from polyak.core.types import Variables

NARROW = Variables({"w": jnp.ones(3, jnp.bfloat16)}, {"mean": jnp.zeros(2, jnp.float16), "calls": jnp.array(1, jnp.int32)})


@pytest.mark.parametrize(
    ("follow", "dtypes"),
    [
        (Follow(), ("bfloat16", "float16")),
        (Follow(0.1), ("float32", "float32")),
        (Follow(0.1, stats_tau=1.0), ("float32", "float16")),
        (Follow(stats_tau=0.1), ("bfloat16", "float32")),
    ],
)
def test_soft_targets_are_stored_in_float32_and_cast_to_the_network_dtype(follow, dtypes):
    held = target_storage(NARROW, follow)
    assert (str(held.params["w"].dtype), str(held.stats["mean"].dtype)) == dtypes and held.stats["calls"].dtype == jnp.int32
    assert jax.tree.map(lambda x: x.dtype, cast_like(held, NARROW)) == jax.tree.map(lambda x: x.dtype, NARROW)


def test_a_shared_copy_has_buffers_of_its_own():
    shared = Shared.init(NARROW, ())
    pairs = zip(jax.tree.leaves(shared.variables), jax.tree.leaves(NARROW), strict=True)
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in pairs)


def test_describe_variables_reports_size_and_dtypes():
    assert describe_variables(NARROW) == "3 parameters (bfloat16), 3 statistics"
    assert describe_variables(Variables({}, {})) == "0 parameters (none), 0 statistics"

"""A tree as one vector per dtype, and back to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.train.packing import packing
from tests.agents.rollouts import same_bits

TREES = {
    "mixed": {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.float32(7.0),
        "c": jnp.arange(3),
        "d": (jnp.zeros((0, 4)), jnp.array([True, False]), jnp.array([np.nan, -0.0, np.inf])),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(0), 2),
        "narrow": jnp.ones((2, 2), jnp.bfloat16),
        "none": None,
    },
    "alone": jnp.arange(4.0),
    "empty": (),
    "one of each": {"f": jnp.ones((2, 2)), "i": jnp.arange(2)},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_the_round_trip_changes_no_bit(tree):
    pack, unpack = packing(tree)
    assert same_bits(unpack(pack(tree)), tree)
    assert same_bits(jax.jit(unpack)(jax.jit(pack)(tree)), tree)
    shapes_pack, shapes_unpack = packing(jax.eval_shape(lambda: tree))
    assert same_bits(shapes_unpack(shapes_pack(tree)), tree)


def test_there_is_one_vector_for_each_dtype():
    pack, _ = packing(TREES["mixed"])
    kinds = [str(x.dtype) for x in jax.tree.leaves(pack(TREES["mixed"]))]
    assert sorted(kinds) == ["bfloat16", "bool", "float32", "int32", "key<fry>", "key<fry>"]


def test_other_values_of_the_same_shapes_pass_too():
    pack, unpack = packing(TREES["mixed"])
    other = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros_like(x), TREES["mixed"])
    assert same_bits(unpack(pack(other)), other)

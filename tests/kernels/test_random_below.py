"""Integers below a bound: floor(n · x / 2³²) of 32 random bits x, for every n."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.kernels.random_below import random_below

KEY = jax.random.key(0)


@pytest.mark.parametrize("n", [1, 7, 255, 65_535, 65_536, 65_537, 999_999, 2**31 - 1])
def test_integers_are_the_upper_half_of_the_product_with_the_random_bits(n):
    got = np.asarray(jax.jit(random_below, static_argnums=1)(KEY, (4, 1_000), jnp.uint32(n)))
    bits = np.asarray(jax.random.bits(KEY, (4, 1_000))).astype(np.uint64)
    np.testing.assert_array_equal(got, bits * np.uint64(n) >> np.uint64(32))


def test_every_integer_is_as_likely():
    counts = np.bincount(np.asarray(random_below(KEY, (70_000,), jnp.uint32(7))), minlength=7)
    assert len(counts) == 7 and np.sum((counts - 10_000) ** 2 / 10_000) < 6 + 4 * np.sqrt(12)

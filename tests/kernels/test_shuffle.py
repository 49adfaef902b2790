from functools import partial

import jax
import numpy as np
import pytest
from scipy import stats

from polyak.kernels.shuffle import permutation, permutation_seeds


@partial(jax.jit, static_argnums=1)
def shuffled(key, n):
    return permutation(permutation_seeds(key), n)


@partial(jax.jit, static_argnums=1)
def many(words, n):
    return jax.vmap(lambda these: permutation(these, n))(words)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 1000, 4096, 20_000])
def test_every_index_comes_once(n):
    order = np.asarray(shuffled(jax.random.key(n), n))
    assert np.array_equal(np.sort(order), np.arange(n))


def test_positions_are_uniform():
    orders = np.asarray(many(permutation_seeds(jax.random.key(0), 20_000), 48))
    for column in orders.T:
        assert stats.chisquare(np.bincount(column, minlength=48)).pvalue > 1e-5


def test_neighbours_do_not_stay_together():
    orders = np.asarray(many(permutation_seeds(jax.random.key(1), 5000), 64))
    positions = np.argsort(orders, axis=1)
    distance = np.abs(positions[:, 10] - positions[:, 11])
    # For a random order |i - j| = d has probability 2 (n - d) / (n (n - 1)).
    d = np.arange(1, 64)
    expected = 2 * (64 - d) / (64 * 63) * len(orders)
    assert stats.chisquare(np.bincount(distance, minlength=64)[1:], expected).pvalue > 1e-5


def test_keys_decide_the_order():
    a, b, c = (np.asarray(shuffled(jax.random.key(s), 256)) for s in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize("n", [0, -1, 2**31 + 1])
def test_a_size_out_of_range_is_refused(n):
    with pytest.raises(ValueError, match=f"n must be in .*got {n}"):
        permutation(permutation_seeds(jax.random.key(0)), n)

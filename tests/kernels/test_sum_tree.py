"""The sum tree: it draws as a search in the running sum does, and its sums never drift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.kernels.sum_tree import SumTree

KEY = jax.random.key(0)


def chi_square(counts, expected):
    return np.sum((counts - expected) ** 2 / expected), len(counts) - 1


def recomputed(nodes, rows):
    """All levels of a tree over the first `rows` rows, each sum in float64."""
    capacity = len(nodes) // 2
    level = np.where(np.arange(capacity) < rows, nodes[:capacity], 0.0).astype(np.float64)
    sums = []
    while len(level) > 8:
        level = np.pad(level, (0, -len(level) % 8)).reshape(-1, 8).sum(1)
        sums.append(level)
    return np.concatenate(sums) if sums else np.zeros(0), level.sum()


@pytest.mark.parametrize("capacity", [37, 5_000, 40_000])
def test_draws_of_a_large_tree_follow_priorities_of_six_orders_of_magnitude(capacity):
    rng = np.random.default_rng(0)
    priority = 10.0 ** rng.uniform(-6, 0, capacity).astype(np.float32)
    priority[rng.integers(0, capacity, capacity // 3)] = 0.0
    rows = jnp.int32(capacity)
    tree = jax.jit(SumTree.set)(
        SumTree.init(capacity), jnp.arange(capacity, dtype=jnp.int32), jnp.asarray(priority), jnp.ones(capacity, bool), rows
    )
    index, probability = jax.jit(SumTree.draw, static_argnums=2)(tree, KEY, 400_000, rows)
    index, probability = np.asarray(index), np.asarray(probability)
    assert (priority[index] > 0).all()
    exact = priority.astype(np.float64) / priority.astype(np.float64).sum()
    np.testing.assert_allclose(probability, exact[index], rtol=1e-5)
    # In 30 groups of about equal probability.
    order = np.argsort(exact)
    group = np.empty(capacity, int)
    group[order] = np.minimum((np.cumsum(exact[order]) * 30).astype(int), 29)
    used = np.unique(group)
    counts, expected = (np.bincount(x, w, 30)[used] for x, w in ((group[index], None), (group, exact * len(index))))
    statistic, degrees = chi_square(counts, expected)
    assert statistic < degrees + 4 * np.sqrt(2 * max(degrees, 1))


def test_draws_are_those_of_a_search_in_the_running_sum():
    rng = np.random.default_rng(1)
    priority = rng.exponential(size=3_000).astype(np.float32) * (rng.random(3_000) < 0.7)
    rows = jnp.int32(3_000)
    tree = SumTree.init(3_000).set(jnp.arange(3_000, dtype=jnp.int32), jnp.asarray(priority), jnp.ones(3_000, bool), rows)
    index, _ = tree.draw(KEY, 1_000, rows)
    shares = (np.arange(1_000) + np.asarray(jax.random.uniform(KEY, (1, 1_000))[0], np.float64)) / 1_000
    ends = np.cumsum(priority.astype(np.float64))
    wanted = np.searchsorted(ends, shares * ends[-1], side="right")
    # Rounding to float32 moves a draw at the border of two rows.
    assert np.mean(np.asarray(index) == wanted) > 0.99
    assert (np.abs(ends[np.asarray(index)] - ends[wanted]) <= 2 * priority.max()).all()


@pytest.mark.slow
def test_a_million_priorities_set_leave_no_drift():
    capacity, rows = 4_096, jnp.int32(4_096)

    def step(tree, key):
        row_key, key = jax.random.split(key)
        index = jax.random.randint(row_key, (512,), 0, capacity)
        # Large and tiny values in turn, which running differences would not survive.
        value = 10.0 ** jax.random.uniform(key, (512,), minval=-7.0, maxval=7.0)
        return tree.set(index, value, jnp.ones(512, bool), rows), None

    keys = jax.random.split(KEY, 2_500)
    tree, _ = jax.jit(lambda tree: jax.lax.scan(step, tree, keys))(SumTree.init(capacity))
    wanted, total = recomputed(np.asarray(tree.nodes), capacity)
    np.testing.assert_allclose(np.asarray(tree.nodes)[capacity : capacity + len(wanted)], wanted, rtol=2e-6)
    np.testing.assert_allclose(tree.total(rows), total, rtol=2e-6)
    # All but one row back to 0: a sum of differences would leave a rest that draws rows of priority 0.
    only = jnp.where(jnp.arange(capacity) == 77, 1e-6, 0.0)
    tree = tree.set(jnp.arange(capacity, dtype=jnp.int32), only, jnp.ones(capacity, bool), rows)
    index, probability = tree.draw(KEY, 4_096, rows)
    assert (index == 77).all() and (probability == 1).all()

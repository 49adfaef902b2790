"""Histograms against NumPy's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from polyak.learning.histogram import BINS, histogram

of = jax.jit(histogram)


def test_counts_and_sums_are_numpys_over_what_counts_and_is_finite():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    keep = rng.random(40) < 0.7
    x[keep.argmax(), 1], x[keep.argmin(), 0] = np.nan, 1e9
    got = of(x, keep)
    shown = x[keep][np.isfinite(x[keep])]
    counts, edges = np.histogram(shown, BINS)
    np.testing.assert_array_equal(got.counts, counts)
    np.testing.assert_allclose([got.low, got.high], edges[[0, -1]], rtol=1e-6)
    np.testing.assert_allclose([got.total, got.squares], [shown.sum(), np.square(shown).sum()], rtol=1e-5)


def test_integers_one_number_and_nothing():
    assert of(jnp.array([2, 2, 5], jnp.int32)).counts.tolist() == [2.0] + [0.0] * (BINS - 2) + [1.0]
    same = of(jnp.full(7, 3.0))
    assert float(same.counts.sum()) == 7.0 and float(same.low) == float(same.high) == 3.0
    wide = of(jnp.array([-2e38, 1e37, 2.1e38, 3e38])).counts
    assert np.flatnonzero(wide).tolist() == [0, 12, 24, BINS - 1] and float(wide.sum()) == 4.0
    none = of(jnp.array([jnp.nan]))
    assert [float(x) for x in (none.low, none.high, none.counts.sum(), none.total)] == [0.0] * 4


def test_over_devices_it_is_that_of_the_whole():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 8)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("envs",))
    split = jax.shard_map(partial(histogram, axis_name="envs"), mesh=mesh, in_specs=P(None, "envs"), out_specs=P())
    for got, wanted in zip(jax.tree.leaves(jax.jit(split)(x)), jax.tree.leaves(of(x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)

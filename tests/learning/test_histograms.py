"""Histograms of an update: of what it learned from, and of what it moved."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from polyak.core.types import Histogram
from polyak.learning.histograms import BINS, histogram
from polyak.loops.compiled_loop import compiled
from tests.agents.rollouts import fresh, on_device
from tests.agents.test_ppo_options import KEY, ZOO, flat_params, gradient_taken, make, noise
from tests.loops.setting import AGENT, ENV

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.slow
def test_they_are_numpys_of_the_rows_that_count_of_the_weights_and_of_the_gradient():
    agent = make(ZOO, histograms=True)
    state, data = fresh(agent), noise(agent)
    after, metrics = jax.jit(agent.update)(state, on_device(data), KEY)
    found = {name.removeprefix("histogram/"): x for name, x in metrics.items() if isinstance(x, Histogram)}
    counts = ~data.time_steps.last[:-1]
    leaves = jax.tree_util.tree_leaves_with_path(data.actions)
    columns = {"/".join(["actions", *(str(k.key) for k in path)]): action[counts] for path, action in leaves}
    columns["weights"] = flat_params(after)
    # The only step was one along the gradient.
    columns["gradients"] = gradient_taken(state, after)
    assert set(found) == {*columns, "advantages", "values", "value_targets"}
    for name, column in columns.items():
        got, wanted = found[name], np.asarray(column, np.float64).reshape(-1)
        assert float(got.counts.sum()) == wanted.size, name
        np.testing.assert_allclose([got.low, got.high], [wanted.min(), wanted.max()], rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(got.total, wanted.sum(), rtol=1e-3, atol=1e-4, err_msg=name)
    assert float(found["advantages"].counts.sum()) == counts.sum()


@pytest.mark.slow
def test_loop_passes_histograms_to_callbacks_with_the_scalars():
    seen = []
    agent = type(AGENT)(AGENT.spec, network=AGENT.network, num_steps=8, num_epochs=1, num_minibatches=2, histograms=True)

    def look(progress, metrics, state):
        assert all(isinstance(value, float) for value in metrics.values())
        seen.append(progress.histograms)

    compiled(agent, ENV, env_steps=60, key=KEY, callbacks=[look], report_every=30)
    assert len(seen) == 2 and {"histogram/actions", "histogram/gradients"} <= set(seen[-1])
    assert seen[-1]["histogram/actions"].counts.sum() > 0


# Against NumPy's

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


def test_histogram_over_devices_equals_that_of_the_whole_batch():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 8)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("envs",))
    split = jax.shard_map(partial(histogram, axis_name="envs"), mesh=mesh, in_specs=P(None, "envs"), out_specs=P())
    for got, wanted in zip(jax.tree.leaves(jax.jit(split)(x)), jax.tree.leaves(of(x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)

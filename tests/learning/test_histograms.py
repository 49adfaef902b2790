"""Histograms of an update: of what it learned from, and of what it moved."""

import jax
import numpy as np
import pytest

from polyak.core.types import Histogram
from polyak.train.compiled_loop import compiled
from tests.agents.rollouts import fresh, on_device
from tests.agents.test_ppo_options import KEY, ZOO, flat_params, gradient_taken, make, noise
from tests.train.setting import AGENT, ENV

pytestmark = pytest.mark.usefixtures("unchecked")


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


def test_a_loop_hands_them_to_its_callbacks_beside_the_scalars():
    seen = []
    agent = type(AGENT)(AGENT.spec, network=AGENT.network, num_steps=8, num_epochs=1, num_minibatches=2, histograms=True)

    def look(progress, metrics, state):
        assert all(isinstance(value, float) for value in metrics.values())
        seen.append(progress.histograms)

    compiled(agent, ENV, env_steps=60, key=KEY, callbacks=[look], report_every=30)
    assert len(seen) == 2 and {"histogram/actions", "histogram/gradients"} <= set(seen[-1])
    assert seen[-1]["histogram/actions"].counts.sum() > 0

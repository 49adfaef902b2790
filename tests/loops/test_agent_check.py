"""Mistakes in an agent of one's own are named in its own words, whichever loop trains it."""

import dataclasses

import jax.numpy as jnp
import pytest

from polyak.core.struct import static, struct
from polyak.core.types import Histogram, Mean
from tests.loops.setting import ENV, LOOPS, run
from tests.reinforce import Reinforce

each_loop = pytest.mark.parametrize("loop", LOOPS)


@struct
class Faulty(Reinforce):
    """REINFORCE whose `update` gives something else: `change(state, metrics)`."""

    change: object = static(default=None)

    def update(self, state, rollout, key, *, axis_name=None):
        return self.change(*super().update(state, rollout, key, axis_name=axis_name))


def replaced(**fields):
    return lambda state, metrics: (dataclasses.replace(state, **fields), metrics)


UPDATES = {
    "state only": (lambda state, _: state, TypeError, r"must return the state and a dict of metrics, got ReinforceState"),
    "no dict": (lambda state, _: (state, 1.0), TypeError, r"a dict of metrics, got \(ReinforceState, float\)"),
    "dtype": (replaced(updates=jnp.float32(0)), ValueError, r"leaf 'updates': .* is float32\[\], .* before is uint32\[\]"),
    "width": (replaced(baseline=jnp.float16(0)), ValueError, r"leaf 'baseline' .* must stay float32\[\], got float16"),
    "shape": (replaced(baseline=jnp.zeros(3)), ValueError, r"leaf 'baseline': the returned state is float32\[3\]"),
    "a leaf more": (replaced(baseline={"a": jnp.zeros(())}), ValueError, r"only in the returned state: 'baseline/a'"),
    "vector": (lambda state, _: (state, {"x": jnp.zeros(3)}), TypeError, r"Histogram by name, got 'x': float32\[3\]"),
    "text": (lambda state, _: (state, {"x": "much"}), TypeError, r"Histogram by name, got 'x': 'much'"),
    "no name": (lambda state, _: (state, {3: jnp.zeros(())}), TypeError, r"Histogram by name, got 3: float32\[\]"),
    "mean of rows": (lambda state, _: (state, {"x": Mean(jnp.zeros(2), jnp.ones(2))}), TypeError, r"got 'x': Mean"),
}


@each_loop
@pytest.mark.parametrize("fault", UPDATES)
def test_what_update_returns_is_checked_while_it_is_traced(loop, fault):
    change, error, says = UPDATES[fault]
    with pytest.raises(error, match=rf"^Faulty\.update.*{says}"):
        run(loop, env_steps=100, agent=Faulty(ENV.spec, change=change))


@each_loop
def test_numbers_means_and_histograms_are_metrics(loop):
    def change(state, metrics):
        zero = jnp.zeros(())
        counts = Histogram(zero, zero, jnp.zeros(30), zero, zero)
        return state, {"number": jnp.int32(3), "mean": Mean(jnp.float32(3), jnp.float32(2)), "histogram": counts, **metrics}

    metrics = run(loop, env_steps=100, agent=Faulty(ENV.spec, change=change)).metrics
    assert metrics["number"] == 3 and metrics["mean"] == 1.5 and "train/loss" in metrics


@each_loop
def test_a_collect_policy_that_is_none_is_named(loop):
    class Idle(Reinforce):
        def collect_policy(self, state):
            return None

    with pytest.raises(TypeError, match=r"^Idle\.collect_policy must return a policy, got None"):
        run(loop, env_steps=100, agent=struct(Idle)(ENV.spec))


@each_loop
def test_a_class_of_python_is_told_to_become_a_pytree(loop, unchecked):
    methods = {name: method for name, method in vars(Reinforce).items() if callable(method) and not name.startswith("__")}
    Plain = type("Plain", (), {**methods, "spec": ENV.spec, "num_steps": 16})  # an agent, but none of JAX's trees
    with pytest.raises(TypeError, match=r"agent must be a pytree, got .*; decorate Plain with polyak\.core\.struct\.struct"):
        run(loop, env_steps=100, agent=Plain())
    del Plain.diagnose, Plain.check
    with pytest.raises(TypeError, match=r"must be an agent .*Plain.*, which lacks check, diagnose$"):
        run(loop, env_steps=100, agent=Plain())

"""Mistakes in an agent of one's own are named in its own words, in the compiled and in the host loop."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import loops
from polyak.core.struct import static, struct
from polyak.core.types import Histogram, Mean
from tests.loops.setting import ENV, KEY, LOOPS, run
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
    "no dict": (lambda state, _: (state, 1.0), TypeError, r"a dict of metrics, got ReinforceState, float"),
    "dtype": (
        replaced(updates=jnp.float32(0)),
        TypeError,
        r"changes the state\.updates from uint32\[\] to float32\[\]; cast it",
    ),
    "width": (replaced(baseline=jnp.float16(0)), TypeError, r"the state\.baseline from float32\[\] to float16"),
    "shape": (replaced(baseline=jnp.zeros(3)), TypeError, r"state\.baseline from float32\[\] to float32\[3\]; it must"),
    "a leaf less": (replaced(baseline=None), TypeError, r"changes the tree of the state: \.baseline is gone"),
    "another leaf": (
        replaced(baseline={"a": jnp.zeros(())}),
        TypeError,
        r"the state: \.baseline is gone, \.baseline\['a'\] is new",
    ),
    "containers": (lambda state, metrics: (vars(state), metrics), TypeError, r"changes the tree of the state: \..* is gone"),
    "vector": (lambda state, _: (state, {"x": jnp.zeros(3)}), TypeError, r"Histogram by name, got 'x': float32\[3\]"),
    "vector of NumPy": (lambda state, _: (state, {"x": np.zeros(3)}), TypeError, r"got 'x': float32\[3\]"),
    "text": (lambda state, _: (state, {"x": "much"}), TypeError, r"Histogram by name, got 'x': 'much'"),
    "key": (lambda state, _: (state, {"x": jax.random.key(0)}), TypeError, r"Histogram by name, got 'x': key<\w+>\[\]"),
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
def test_numbers_means_and_histograms_are_metrics(loop, unchecked):
    def change(state, metrics):
        zero = jnp.zeros(())
        counts = Histogram(zero, zero, jnp.zeros(30), zero, zero)
        numbers = {"jax": jnp.int32(3), "numpy": np.float32(2), "array": np.asarray(1.0, np.float32), "python": 4, "bool": True}
        means = {"mean": Mean(jnp.float32(3), jnp.float32(2)), "numpy mean": Mean(np.float32(5), np.float32(2))}
        return state, {**numbers, **means, "histogram": counts, **metrics}

    metrics = run(loop, env_steps=100, agent=Faulty(ENV.spec, change=change)).metrics
    expected = {"jax": 3, "numpy": 2, "array": 1, "python": 4, "bool": 1, "mean": 1.5, "numpy mean": 2.5}
    assert {name: metrics[name] for name in expected} == expected and "train/loss" in metrics


@struct
class WithMore:
    """A state with leaves of all kinds."""

    inner: Any
    key: Any
    narrow: Any
    nothing: Any


@struct
class Collector(Reinforce):
    """REINFORCE with such a state, whose `update` returns a list."""

    def init(self, key):
        return WithMore(super().init(key), key, jnp.zeros(2, jnp.bfloat16), None)

    def collect_policy(self, state):
        return super().collect_policy(state.inner)

    def update(self, state, rollout, key, *, axis_name=None):
        inner, _ = super().update(state.inner, rollout, key)
        return [WithMore(inner, jax.random.fold_in(state.key, 1), state.narrow + 1, None), {}]


@each_loop
def test_keys_narrow_floats_and_none_are_leaves(loop, unchecked):
    result = run(loop, env_steps=100, agent=Collector(ENV.spec))
    assert result.state.narrow.dtype == jnp.bfloat16 and result.state.narrow[0] > 0 and result.state.nothing is None


def test_several_seeds_and_devices_are_checked_too():
    vector = UPDATES["vector"][0]
    agent = Faulty(ENV.spec, change=vector)
    with pytest.raises(TypeError, match=r"^Faulty\.update.*got 'x': float32\[3\]"):
        loops.compiled_seeds(agent, ENV, env_steps=100, keys=jax.random.split(KEY, 2))
    for loop in LOOPS:
        with pytest.raises(TypeError, match=r"^Faulty\.update.*got 'x': float32\[3\]"):
            run(loop, env_steps=100, agent=agent, devices=2)


@each_loop
def test_a_collect_policy_needs_what_loops_call(loop):
    class Idle(Reinforce):
        def collect_policy(self, state):
            return None

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'initial_state'"):
        run(loop, env_steps=100, agent=struct(Idle)(ENV.spec))


@each_loop
def test_a_class_of_python_is_told_to_become_a_pytree(loop, unchecked):
    methods = {name: method for name, method in vars(Reinforce).items() if callable(method) and not name.startswith("__")}
    Plain = type("Plain", (), {**methods, "spec": ENV.spec, "num_steps": 16})  # an agent, but none of JAX's trees
    with pytest.raises(
        TypeError, match=r"agent must be a pytree, got a Plain object; decorate Plain with polyak\.core\.struct"
    ):
        run(loop, env_steps=100, agent=Plain())
    del Plain.update
    with pytest.raises(TypeError, match=r"must be an agent .*, got Plain object, which lacks update$"):
        run(loop, env_steps=100, agent=Plain())
    Plain.diagnose = None
    with pytest.raises(TypeError, match=r"must be an agent .*, got Plain object, which lacks diagnose, update$"):
        run(loop, env_steps=100, agent=Plain())
    with pytest.raises(TypeError, match=r"must be an agent or the name of an algorithm, such as 'ppo', got 3$"):
        run(loop, env_steps=100, agent=3)

"""Runs of BC and FQL with flows: resumed, loaded, and with parallel seeds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, EnvSpec

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def trees():
    """Data with a Dict of observations and a Dict of actions, in other units than [-1, 1]."""
    rng, n = np.random.default_rng(0), 200
    obs = Dict({"camera": Box([0.0], [9.0]), "joint": Box([-1.0] * 2, [1.0] * 2)})
    spec = EnvSpec(obs, Dict({"a": Box([-1.0] * 2, [1.0] * 2), "b": Box([0.0], [5.0])}), action_scaling="rescale")
    arrays = {
        "observations": {"camera": rng.uniform(0, 9, (n, 1)), "joint": rng.uniform(-1, 1, (n, 2))},
        "actions": {"a": rng.uniform(-1, 1, (n, 2)), "b": rng.uniform(0, 5, (n, 1))},
        "rewards": rng.normal(size=n),
        "terminations": np.arange(n) % 5 == 4,
    }
    return polyak.data.load(arrays, spec=spec)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def arrays_of(copies):
    return [np.asarray(x) for x in jax.tree.leaves(copies)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fql", "bc"])
def test_a_resumed_run_equals_an_uninterrupted_one_and_its_policy_is_loaded(name, trees, tmp_path):
    settings = {"batch_size": 16, "normalize_obs": True, "flow_steps": 2}
    if name == "bc":
        settings |= {"network": polyak.MLP((8,))}
    else:
        settings |= {"actor": polyak.Actor((8,), std="fixed"), "critics": polyak.Critics((8,))}
        settings |= {"actor_obs": ("joint",), "q_aggregation": "min"}

    def train(directory, steps):
        return polyak.train.offline(
            name, trees, gradient_steps=steps, settings=settings, run_dir=directory, seed=3, progress=False
        )

    whole = train(tmp_path / "whole", 40)
    train(tmp_path / "part", 20)
    resumed = polyak.train.resume(tmp_path / "part", env_steps=40, progress=False)
    assert_same(arrays_of(whole.state.copies), arrays_of(resumed.state.copies))
    obs = {"camera": np.float32([4.0]), "joint": np.float32([0.5, -0.5])}
    seen = {"joint": obs["joint"]} if name == "fql" else obs
    loaded = polyak.load_policy(tmp_path / "part")
    for options in ({}, {"deterministic": False, "key": KEY}):
        action, _ = whole.policy.predict(seen, **options)
        assert_same(action, loaded.predict(seen, **options)[0])
        assert np.all((action["b"] >= 0) & (action["b"] <= 5))


@pytest.mark.slow
def test_seeds_train_in_parallel_as_one_by_one(trees):
    spec = dataclasses.replace(trees.spec, action_scaling="rescale")
    networks = polyak.Actor((6,), std="fixed"), polyak.Critics((6,))
    agent = polyak.FQL(spec, *networks, flow_steps=2, batch_size=8, replay=polyak.UniformReplay(256))
    rollout = trees.rollout(spec, pad=True)
    keys = jax.random.split(KEY, 2)
    states = [agent.add_data(agent.init(key), rollout) for key in keys]
    both = jax.jit(jax.vmap(agent.learn))(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)[0].copies
    for i, (state, key) in enumerate(zip(states, keys, strict=True)):
        one = jax.jit(agent.learn)(state, key)[0].copies
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(both), strict=True):
            np.testing.assert_allclose(x, y[i], rtol=1e-5, atol=1e-6)

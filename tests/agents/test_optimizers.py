"""Optimizers of Optax in agents: averages that are evaluated, and those that no agent can call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.agents import agent_class
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP
from polyak.ops.gradient_step import evaluated_params
from polyak.replay import UniformReplay
from tests.agents.rollouts import on_device, rollout
from tests.selection import quick

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
DISCRETE, BOX = EnvSpec(OBS, Discrete(3)), EnvSpec(OBS, Box(-1, 1, (2,)), action_scaling="rescale")
OFF_POLICY = {"replay": UniformReplay(64), "batch_size": 8, "learning_starts": 4}
AGENTS = {
    "a2c": (DISCRETE, {"network": MLP((4,))}),
    "ppo": (DISCRETE, {"network": MLP((4,)), "num_minibatches": 2, "num_epochs": 2}),
    "pqn": (DISCRETE, {"network": MLP((4,)), "num_minibatches": 2, "num_epochs": 2}),
    "dqn": (DISCRETE, {"network": MLP((4,)), **OFF_POLICY}),
    "bc": (DISCRETE, {"network": MLP((4,)), **OFF_POLICY}),
    "td3": (BOX, {"actor": Actor((4,), std="fixed"), "critics": Critics((4,)), **OFF_POLICY}),
}


def make(name, **settings):
    spec, defaults = AGENTS[name]
    return agent_class(name)(spec, num_steps=8, **defaults, **settings)


@pytest.mark.parametrize("name", quick("ppo", "dqn", of=list(AGENTS)))
def test_the_average_of_schedule_free_is_evaluated_and_the_weights_explore(name):
    b1 = 0.8
    agent = make(name, optimizer=optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(0.1, b1=b1)))
    state, update = agent.init(jax.random.key(0)), jax.jit(agent.update)
    for seed in range(3):
        state, _ = update(state, on_device(rollout(agent.spec, seed)), jax.random.key(seed))
    copies = state.copies.actor if name == "td3" else state.copies
    trained, z = copies.online.params, copies.optimizer_state[1].z
    average = jax.tree.map(lambda y, z: (y - (1 - b1) * z) / b1, trained, z)
    evaluated = agent.policy(state).policy.variables.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), evaluated, average)
    far = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (trained, average)), strict=True))
    assert far > 1e-3
    exploring = jax.tree.leaves(agent.collect_policy(state))
    assert all(any(leaf is other for other in exploring) for leaf in jax.tree.leaves(trained))


@pytest.mark.parametrize("name", ["ppo", "pqn", "dqn"])
def test_optimizers_that_need_the_loss_are_rejected(name):
    for optimizer in (optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau()), optax.lbfgs()):
        with pytest.raises(TypeError, match=r"the update of optimizer must take .* params alone, .*: .*'value'"):
            make(name, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"params alone, unlike .* or lookahead: .* fast"):
        make(name, optimizer=optax.lookahead(optax.sgd(1e-3), 5, 0.5))


def test_the_error_for_multi_steps_names_its_transformation():
    steps = optax.MultiSteps(optax.sgd(0.1), 2)
    with pytest.raises(TypeError, match=r"PPO: optimizer must be .* \(of MultiSteps, its gradient_transformation\(\)\) or"):
        make("ppo", optimizer=steps)
    assert make("ppo", optimizer=steps.gradient_transformation()).optimizer


def test_optimizers_for_the_parts_of_a_network_are_accepted():
    parts = {"torso": optax.sgd(0.1), "head": optax.set_to_zero()}
    labels = lambda params: {name: "head" if name == "policy" else "torso" for name in params}  # noqa: E731
    agent = make("ppo", optimizer=optax.partition(parts, labels))
    assert agent.init(jax.random.key(0)).copies.optimizer_state


def test_the_average_of_a_part_is_evaluated_with_the_other_parts():
    b1, parts = 0.8, {"torso": optax.contrib.schedule_free_sgd(0.1, b1=0.8), "head": optax.sgd(0.1)}
    labels = lambda params: {name: "head" if name == "policy" else "torso" for name in params}  # noqa: E731
    agent = make("ppo", optimizer=optax.partition(parts, labels))
    state, _ = jax.jit(agent.update)(agent.init(jax.random.key(0)), on_device(rollout(agent.spec, 0)), jax.random.key(0))
    trained, z = state.copies.online.params, state.copies.optimizer_state.inner_states["torso"].inner_state.z
    evaluated = state.copies.evaluated().params
    assert all(x is y for x, y in zip(*(jax.tree.leaves(tree["policy"]) for tree in (trained, evaluated)), strict=True))
    for name in trained.keys() - {"policy"}:
        average = jax.tree.map(lambda y, z: (y - (1 - b1) * z) / b1, trained[name], z[name])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), evaluated[name], average)
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (trained[name], average)), strict=True))


def test_the_average_of_a_flattened_schedule_free_is_evaluated():
    optimizers = [optax.contrib.schedule_free_sgd(0.1, b1=0.8), optax.flatten(optax.contrib.schedule_free_sgd(0.1, b1=0.8))]
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([1.0, -1.0])}
    results = []
    for optimizer in optimizers:
        state, y = optimizer.init(params), params
        for _ in range(2):
            updates, state = optimizer.update(y, state, y)
            y = optax.apply_updates(y, updates)
        results.append((y, evaluated_params(state, y)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, results[1]), strict=True))


def test_an_array_that_schedule_free_does_not_train_is_evaluated_as_it_is():
    params = jnp.ones(3)
    optimizer = optax.masked(optax.contrib.schedule_free_sgd(0.1), lambda params: params.ndim > 1)
    assert evaluated_params(optimizer.init(params), params) is params


@pytest.mark.parametrize("name", ["ppo", "td3"])
def test_a_part_of_a_flattened_schedule_free_is_rejected_as_its_parameters_are_unknown(name):
    flat = optax.flatten(optax.contrib.schedule_free_sgd(0.1))
    labels = lambda params: {name: "head" if name == "policy" else "torso" for name in params}  # noqa: E731
    agent = make(name, optimizer=optax.partition({"torso": flat, "head": optax.sgd(0.1)}, labels))
    state = agent.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"optimizer: optax.flatten around schedule_free must take all parameters"):
        jax.eval_shape(agent.update, state, on_device(rollout(agent.spec, 0)), jax.random.key(0))

"""Agents count environment steps beyond 32 bits, and their schedules end where they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents import agent_class
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP
from polyak.ops.schedules import Linear, StepCount
from polyak.replay import UniformReplay
from tests.agents.rollouts import on_device, rollout
from tests.selection import quick

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
DISCRETE, BOX = EnvSpec(OBS, Discrete(3)), EnvSpec(OBS, Box(-1, 1, (2,)), action_scaling="rescale")
RATE = Linear(1.0, 0.0, 10**12)
OFF_POLICY = {"replay": UniformReplay(64), "batch_size": 4, "learning_starts": 8}
AGENTS = {
    "a2c": {"network": MLP((4,))},
    "ppo": {"network": MLP((4,)), "num_minibatches": 1, "num_epochs": 1},
    "pqn": {"network": MLP((4,)), "num_minibatches": 1, "num_epochs": 1, "epsilon": RATE},
    "dqn": {"network": MLP((4,)), "epsilon": RATE, **OFF_POLICY},
    "sac": {"actor": Actor((4,)), "critics": Critics((4,)), **OFF_POLICY},
}


@pytest.mark.parametrize("name", quick("ppo", "dqn", of=list(AGENTS)))
def test_schedules_go_on_beyond_32_bits(name):
    spec = BOX if name == "sac" else DISCRETE
    agent = agent_class(name)(spec, num_steps=8, learning_rate=RATE, **AGENTS[name])
    data = rollout(spec)
    update = jax.jit(agent.update)
    state = agent.init(jax.random.key(0))
    for before in (0, 2**32 - 2, 5 * 10**11):
        state = dataclasses.replace(state, env_steps=StepCount.of(before))
        state, metrics = update(state, on_device(data), jax.random.key(1))
        assert int(state.env_steps) == before + int(data.valid.sum())
        assert float(metrics["train/learning_rate"]) == pytest.approx(1 - before / 1e12, rel=1e-5)
        if "epsilon" in AGENTS[name] and before:
            assert float(metrics["rollout/exploration_rate"]) == pytest.approx(1 - before / 1e12, rel=1e-5)
    agent.collect_policy(state).action(jax.tree.map(lambda x: jnp.asarray(x[0]), data.time_steps), (), jax.random.key(2))

"""A replay is filled where it is."""

import dataclasses

import jax
import numpy as np

from polyak.agents.dqn import DQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep
from polyak.networks.q_network import q_mlp

SPEC = EnvSpec(Box(-np.ones(2), np.ones(2)), Discrete(3))
AGENT = DQN(SPEC, network=q_mlp((2,)), num_steps=2, capacity=16, batch_size=2, updates_per_step=0.5)


def make_rollout():
    flags = np.zeros((5, 2), bool)
    obs = np.arange(20, dtype=np.float32).reshape(5, 2, 2) / 20
    steps = TimeStep(obs, np.ones((5, 2), np.float32), terminated=flags, truncated=flags, first=flags)
    return Rollout(steps, np.ones((4, 2), np.int32))


def test_a_rollout_is_copied_to_the_device_of_the_replay():
    """As of an accelerator's policy and a replay in the host's memory."""
    here, host, accelerator = jax.local_devices()[:3]
    state, rollout = AGENT.init(jax.random.key(0)), make_rollout()
    expected = jax.jit(AGENT.add)(state, rollout).replay
    assert int(expected.size) == 4
    for place in (here, host):
        # That of a new state is not committed to a device.
        replay = state.replay if place is here else jax.device_put(state.replay, place)
        filled = AGENT.add(dataclasses.replace(state, replay=replay), jax.device_put(rollout, accelerator)).replay
        assert {device for x in jax.tree.leaves(filled) for device in x.devices()} == {place}
        jax.tree.map(np.testing.assert_array_equal, filled, expected)

"""A replay is filled where it is, and rollouts that are added are streams of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.dqn import DQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep
from polyak.networks.feedforward import MLP
from polyak.networks.heads import QValues
from polyak.networks.recurrent import GRU
from polyak.replay import PrioritizedReplay, SequenceReplay, UniformReplay
from tests.replay.streams import add, rollouts_of, stream

SPEC = EnvSpec(Box(-np.ones(2), np.ones(2)), Discrete(3))
AGENT = DQN(SPEC, network=MLP((2,)), num_steps=2, replay=UniformReplay(16), batch_size=2, updates_per_step=0.5)


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
    # Four transitions, and the rows after them.
    assert int(expected.size) == 6
    for place in (here, host):
        # That of a new state is not committed to a device.
        replay = state.replay if place is here else jax.device_put(state.replay, place)
        filled = AGENT.add(dataclasses.replace(state, replay=replay), jax.device_put(rollout, accelerator)).replay
        assert {device for x in jax.tree.leaves(filled) for device in x.devices()} == {place}
        jax.tree.map(np.testing.assert_array_equal, filled, expected)


KINDS = {
    "uniform": UniformReplay,
    "prioritized": PrioritizedReplay,
    "frames": functools.partial(UniformReplay, frame_stack=4),
    "sequences": functools.partial(SequenceReplay, sequence_length=4),
}
DEMONSTRATION = 10_000


def make_stream(kind, start, total):
    """Within an episode at both ends; observations, or their frames, are the numbers of their time steps."""
    steps = stream(np.ones(total + 1), envs=2, start=start)
    history = jnp.arange(-3.0, 1.0)[None, None, :, None]
    return steps if kind != "frames" else dataclasses.replace(steps, obs=steps.obs[..., None, :] + history)


def filled_around_a_demonstration(kind, num_steps, capacity):
    """Three rollouts of a run, six steps of a demonstration in one, and three rollouts with which the run goes on."""
    shape = (4, 1) if kind == "frames" else (1,)
    spec = EnvSpec(Box(np.full(shape, -1e6), np.full(shape, 1e6)), Discrete(9))
    network = GRU(2, hidden=(), head=QValues()) if kind == "sequences" else MLP((2,), head=QValues())
    agent = DQN(spec, network=network, num_steps=num_steps, replay=KINDS[kind](capacity), updates_per_step=0.5)
    ring, state = agent.replay, agent.init(jax.random.key(0))
    for start in (1, 1 + 3 * num_steps):
        for rollout in rollouts_of(make_stream(kind, start, 3 * num_steps), num_steps):
            state = dataclasses.replace(state, replay=add(ring, state.replay, rollout))
        if start == 1:
            steps = make_stream(kind, DEMONSTRATION, 6)
            state = agent.add(state, Rollout(steps, jnp.zeros((6, 2), jnp.int32)))
    return ring, state.replay


@pytest.mark.parametrize(("num_steps", "capacity"), [(1, 64), (2, 64), (2, 24)])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "frames"])
def test_no_transition_leads_into_or_out_of_an_added_rollout(kind, num_steps, capacity):
    ring, state = filled_around_a_demonstration(kind, num_steps, capacity)
    rows = ring if kind != "prioritized" else ring._rows
    index = jnp.arange(capacity, dtype=jnp.int32)
    batch = jax.jit(lambda state: rows.transitions(state, index, num_envs=2, n_step=3, gamma=1.0))(state)
    weight = np.asarray(batch.weight) > 0
    obs, next_obs, summed = (np.asarray(x)[weight] for x in (batch.obs, batch.next_obs, batch.num_summed))
    newest = obs.reshape(len(obs), -1)[:, -1]
    if kind == "frames":
        for stacks in (obs, next_obs):
            np.testing.assert_array_equal(stacks[..., 0], stacks[:, -1] + np.arange(-3.0, 1.0))
    np.testing.assert_array_equal(next_obs.reshape(len(obs), -1)[:, -1] - newest, summed)
    np.testing.assert_array_equal(np.asarray(batch.reward)[weight], summed)
    run, resumed, added = np.arange(1, 1 + 3 * num_steps), np.arange(1 + 3 * num_steps, 1 + 6 * num_steps), np.arange(6)
    # Stacks of a stream that begins within a game are not complete at first.
    skipped = 3 if kind == "frames" else 0
    wanted = {*run[skipped:], *(DEMONSTRATION + added[skipped:]), *resumed[skipped:]}
    got = set(newest[newest % DEMONSTRATION < 1_000].tolist())
    assert got == wanted if capacity == 64 else set(resumed[skipped:]) <= got < wanted
    assert {x + 1_000 for x in got} == set(newest[newest % DEMONSTRATION >= 1_000].tolist())
    if kind == "prioritized":
        np.testing.assert_array_equal(np.asarray(state.priorities.tree.priority) > 0, weight)
        drawn = ring.sample(state, jax.random.key(0), 256, num_envs=2, n_step=3, gamma=1.0)
        assert weight[np.asarray(drawn.index)].all() and (np.asarray(drawn.weight) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2])
def test_no_sequence_reaches_into_or_out_of_an_added_rollout(num_steps):
    ring, state = filled_around_a_demonstration("sequences", num_steps, 64)
    batch = ring.sample(state, jax.random.key(0), 512, num_envs=2, n_step=3, gamma=1.0)
    sequences = np.asarray(batch.obs.obs)[..., 0]
    weight = np.asarray(batch.weight) > 0
    step, env = np.asarray(batch.obs.index)[weight] // 512, np.asarray(batch.obs.index)[weight] % 512
    after = np.asarray(batch.next_obs.index)[weight] // 512
    # From its beginning to the next observation, a sequence is of one stream.
    np.testing.assert_array_equal(sequences[after, env] - sequences[0, env], after)
    assert ((sequences[after, env] < DEMONSTRATION) == (sequences[0, env] < DEMONSTRATION)).all()
    learned = set(sequences[step, env].tolist())
    assert {DEMONSTRATION + t for t in range(6)} | set(range(1, 1 + 3 * num_steps)) <= learned


def test_rollouts_added_in_a_row_are_divided_once():
    state = AGENT.init(jax.random.key(0))
    for _ in range(2):
        state = AGENT.add(state, make_rollout())
    # Four transitions and two other rows of each; the first stands where the replay began.
    assert int(state.replay.size) == 7 and int(state.replay.position) == 4
    larger = dataclasses.replace(AGENT, replay=UniformReplay(64))
    state = larger.init(jax.random.key(0))
    for _ in range(2):
        state = larger.add(state, make_rollout())
    assert int(state.replay.size) == int(state.replay.position) == 12

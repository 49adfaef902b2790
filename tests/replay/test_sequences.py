"""Sequences: what is drawn, from which recurrent state, and that nothing passes between episodes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.types import Rollout
from polyak.replay.sequences import SequenceReplay
from tests.replay.streams import rollouts_of, slow_lines, stream

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def add(replay, state, rollout):
    return replay.add(state, rollout)


def filled(replay, steps, num_steps=2):
    """The recurrent state before each rollout is the number of its first time step, and of its environment."""
    state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=num_steps, carry=(jnp.zeros(2),))
    for number, rollout in enumerate(rollouts_of(steps, num_steps)):
        envs = rollout.reward.shape[1]
        carry = jnp.stack([jnp.full(envs, number * float(num_steps)), jnp.arange(envs, dtype=jnp.float32)], axis=1)
        state = add(replay, state, dataclasses.replace(rollout, carry=(carry,)))
    return state


@pytest.mark.parametrize(("length", "burn_in", "num_steps"), [(6, 0, 2), (5, 2, 3), (4, 3, 4)])
@pytest.mark.parametrize("total", [pytest.param(25, marks=pytest.mark.slow), 70])
def test_sequences_are_consecutive_time_steps_from_a_stored_state(length, burn_in, num_steps, total):
    envs, capacity = 2, 96
    steps = stream(np.arange(total) * 1.0, terminated=[7, 31, 55], truncated=[16, 44], envs=envs)
    replay = SequenceReplay(capacity, length, burn_in)
    state = filled(replay, steps, num_steps)
    sample = jax.jit(functools.partial(replay.sample, batch_size=300, num_envs=envs, n_step=3, gamma=0.5))
    # In NumPy: below, single numbers are read by the hundred.
    batch, steps = jax.tree.map(np.asarray, (sample(state, KEY), steps))
    rows = batch.obs
    obs = np.asarray(rows.obs)[..., 0]
    number, env = obs % 1000, obs[0] // 1000
    assert obs.shape == (length + 1, 300)
    np.testing.assert_array_equal(np.diff(number, axis=0), 1)
    np.testing.assert_array_equal(np.asarray(rows.carry[0]), np.stack([number[0], env], axis=1))
    np.testing.assert_array_equal(np.asarray(rows.first), np.asarray(steps.first)[number.astype(int), 0])
    # Rollouts that are stored entirely, and from which on there are `length` steps.
    newest, slots = (total - 1) // num_steps * num_steps, capacity // envs // num_steps * num_steps
    starts = [s for s in range(0, newest, num_steps) if s + length <= newest and s >= newest - slots + 1]
    assert sorted(set(number[0].astype(int))) == starts and set(env) == {0.0, 1.0}
    assert (length - burn_in) * 300 == len(batch.reward)

    flat = obs.reshape(-1)
    at, after = flat[np.asarray(rows.index)], flat[np.asarray(batch.next_obs.index)]
    end = np.repeat(number[-1][None], length - burn_in, axis=0).ravel()
    np.testing.assert_array_equal(at % 1000, np.asarray(batch.action))
    last = np.asarray(steps.last)[:, 0]
    for row in range(0, len(at), 7):
        t = start = int(at[row] % 1000)
        total_reward = 0.0
        while t < end[row] and t - start < 3 and not last[t]:
            total_reward += 0.5 ** (t - start) * float(steps.reward[t + 1, 0])
            t += 1
        assert float(batch.weight[row]) == float(not last[start])
        if not last[start]:
            np.testing.assert_allclose(batch.reward[row], total_reward, rtol=1e-6)
            assert after[row] % 1000 == t
            assert float(batch.discount[row]) == (0.0 if bool(steps.terminated[t, 0]) else 0.5 ** (t - start))


@pytest.mark.slow
def test_nothing_is_learned_before_a_sequence_is_stored():
    replay = SequenceReplay(64, 6)
    for total, weight in ((5, 0.0), (7, 1.0)):
        state = filled(replay, stream(np.ones(total)))
        batch = replay.sample(state, KEY, 8, num_envs=1, gamma=0.9)
        assert set(np.asarray(batch.weight).tolist()) == {weight}


def test_a_rollout_without_recurrent_state_gets_zeros():
    replay = SequenceReplay(64, 4)
    state = filled(replay, stream(np.ones(9)))
    for rollout in rollouts_of(stream(np.ones(67)), 2):
        state = add(replay, state, Rollout(rollout.time_steps, rollout.actions))
    assert not np.asarray(state.carries[0]).any()


def test_a_recurrent_state_that_is_not_finite_is_stored_as_the_initial_one():
    replay = SequenceReplay(64, 4)
    rollout = next(iter(rollouts_of(stream(np.ones(9), envs=2), 2)))
    carry = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, 4.0, 5.0]])
    state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=2, carry=carry[0])
    state = add(replay, state, dataclasses.replace(rollout, carry=carry))
    np.testing.assert_array_equal(state.carries[:2], [[0.0, 0.0, 0.0], [3.0, 4.0, 5.0]])


def test_no_storage_is_copied_or_sorted():
    replay = SequenceReplay(50_000, 8, 2)
    state = replay.init(jnp.zeros(3), jnp.zeros((), jnp.int32), num_steps=4, carry=jnp.zeros(8))
    steps = jax.tree.map(lambda x: x[:5], stream(np.ones(9), envs=2))
    steps = dataclasses.replace(steps, obs=jnp.zeros((5, 2, 3)))
    rollout = Rollout(steps, jnp.zeros((4, 2), jnp.int32), carry=jnp.zeros((2, 8)))

    def step(state, key):
        state = replay.add(state, rollout)
        batch = replay.sample(state, key, 16, num_envs=2, n_step=3, gamma=0.9)
        return state, batch

    def several(state, keys):
        return jax.lax.scan(step, state, keys)

    for function, key in ((step, KEY), (several, jax.random.split(KEY, 3))):
        text = jax.jit(function, donate_argnums=0).lower(state, key).compile().as_text()
        assert "[12500" in text
        assert not slow_lines(text, 50_000, 12_500)


def test_the_burn_in_must_be_shorter_than_the_sequence():
    with pytest.raises(ValueError, match="burn_in=4 must be less than sequence_length=4"):
        SequenceReplay(64, 4, 4)

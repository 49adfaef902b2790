"""Uniform replay: what is stored, what is drawn, and how n-step transitions end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.types import Rollout, TimeStep
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.sequences import SequenceReplay
from polyak.replay.uniform import UniformReplay
from tests.replay.streams import add, filled_with, rollouts_of, slow_lines, stream

KEY = jax.random.key(0)


def filled(steps, *, num_steps=1, capacity=64):
    replay = UniformReplay(capacity)
    return replay, filled_with(replay, steps, num_steps=num_steps)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def sample(replay, state, batch, envs, n_step, gamma):
    return replay.sample(state, KEY, batch, num_envs=envs, n_step=n_step, gamma=gamma)


def drawn(replay, state, *, envs=1, n_step=1, gamma=0.9, batch=2048):
    """`(reward, discount, next_obs)` of every observation that was drawn with weight."""
    batch = sample(replay, state, batch, envs, n_step, gamma)
    columns = (batch.obs[:, 0], batch.reward, batch.discount, batch.next_obs[:, 0], batch.weight)
    rows = {tuple(row) for row in np.round(np.stack([np.asarray(x) for x in columns], axis=1).astype(np.float64), 4)}
    return {row[0]: row[1:4] for row in rows if row[4] > 0}


# The stream of docs/replay.md: step 3 terminates, step 7 is cut short, and 0, 4 and 8 begin episodes.
REWARDS = (0, 1, 2, 4, 0, 8, 16, 32, 0, 64)


@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_three_step_transitions_stop_at_ends_and_at_the_newest_row(num_steps):
    replay, state = filled(stream(REWARDS, terminated=[3], truncated=[7]), num_steps=num_steps)
    wanted = {
        0: (6.04, 0.0, 3),
        1: (5.6, 0.0, 3),
        2: (4.0, 0.0, 3),
        4: (48.32, 0.729, 7),
        5: (44.8, 0.81, 7),
        6: (32.0, 0.9, 7),
        8: (64.0, 0.9, 9),
    }
    got = drawn(replay, state, n_step=3)
    assert got.keys() == wanted.keys()
    for row, values in wanted.items():
        np.testing.assert_allclose(got[row], values, rtol=1e-5)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("replay", [UniformReplay(16), PrioritizedReplay(16)], ids=["uniform", "prioritized"])
def test_the_next_action_is_that_of_the_next_row_of_the_episode(replay, n_step):
    """Actions are the numbers of their rows, as observations are; the ring has wrapped."""
    steps = stream(np.ones(24), terminated=[13], truncated=[18])
    batch = sample(replay, filled_with(replay, steps), 512, 1, n_step, 0.9)
    drawn = np.asarray(batch.weight) > 0
    has_next, after = np.asarray(batch.has_next_action)[drawn], np.asarray(batch.next_obs)[drawn, 0]
    np.testing.assert_array_equal(has_next, ~np.isin(after, (13, 18, 23)))  # two ends, and the newest row
    np.testing.assert_array_equal(np.asarray(batch.next_action)[drawn][has_next], after[has_next])
    assert {13, 18, 23} < set(after.tolist())


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_n_step_returns_are_those_of_a_loop_over_each_episode(end, at, n_step):
    rewards = np.arange(1.0, 10.0)
    steps = stream(rewards, **{end: [at]})
    got = drawn(*filled(steps), n_step=n_step)
    last = np.asarray(steps.last)[:, 0]
    for row in range(8):
        if last[row]:
            assert row not in got
            continue
        total, t = 0.0, row
        while t < 8 and t - row < n_step and not last[t]:
            total += 0.9 ** (t - row) * rewards[t + 1]
            t += 1
        ended = end == "terminated" and last[t]
        np.testing.assert_allclose(got[row], (total, 0.0 if ended else 0.9 ** (t - row), t), rtol=1e-4)


@pytest.mark.parametrize(("num_steps", "capacity"), [(1, 8), (2, 9), (4, 8)])
def test_the_oldest_rows_are_overwritten(num_steps, capacity):
    replay, state = filled(stream(np.ones(33)), num_steps=num_steps, capacity=capacity)
    assert int(state.size) == 7
    assert sorted(drawn(replay, state)) == list(range(25, 32))
    assert max(next_obs for _, _, next_obs in drawn(replay, state, n_step=3).values()) == 32


@pytest.mark.slow
def test_draws_are_uniform_over_transitions_and_environments():
    replay, state = filled(stream(np.ones(41), terminated=[5, 20], truncated=[30], envs=3), capacity=90)
    batch = replay.sample(state, KEY, 60_000, num_envs=3, gamma=0.9)
    rows, counts = np.unique(np.asarray(batch.obs[:, 0])[np.asarray(batch.weight) > 0], return_counts=True)
    # 29 rows of each environment, without the two after an end.
    assert len(rows) == 3 * 27
    expected = counts.sum() / len(rows)
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert chi_square < len(rows) + 4 * np.sqrt(2 * len(rows))


def test_transitions_with_nan_are_dropped_and_counted():
    steps = stream(np.ones(9))
    steps = TimeStep(
        steps.obs.at[4].set(jnp.nan), steps.reward.at[7].set(jnp.inf), *[steps.terminated, steps.truncated, steps.first]
    )
    replay, state = filled(steps, num_steps=4)
    # The transitions to and from observation 4, and the one with reward 7.
    assert int(state.dropped) == 3
    assert sorted(drawn(replay, state)) == [0, 1, 2, 5, 7]
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.rows) if jnp.issubdtype(x.dtype, jnp.floating))


def test_integer_observations():
    steps = stream(np.ones(5))
    replay = UniformReplay(16)
    state = replay.init(jnp.zeros(1, jnp.int32), jnp.zeros((), jnp.int32), num_steps=1)
    for rollout in rollouts_of(dataclasses.replace(steps, obs=steps.obs.astype(jnp.int32)), 1):
        state = add(replay, state, rollout)
    assert state.rows.obs.dtype == jnp.int32 and sorted(drawn(replay, state)) == [0, 1, 2, 3]


def test_new_episodes_after_a_gap_leave_no_transition_across_it():
    replay, state = filled(stream(np.ones(5)))
    assert 3.0 in drawn(replay, state)
    for rollout in rollouts_of(stream(np.ones(3)), 1):
        state = add(replay, state, rollout)
    assert sorted(drawn(replay, state, n_step=3)) == [0.0, 1.0, 2.0]
    assert drawn(replay, state, n_step=3)[2.0][2] == 3.0


@pytest.mark.parametrize("changed", ["num_envs", "num_steps"])
def test_another_layout_starts_an_empty_replay(changed):
    replay, state = filled(stream(np.ones(9), envs=2), num_steps=2)
    envs, steps = (3, 2) if changed == "num_envs" else (2, 3)
    # As of a checkpoint of an agent with other rollouts.
    state = dataclasses.replace(state, num_steps=steps)
    state = add(replay, state, next(iter(rollouts_of(stream(np.ones(steps + 1), envs=envs), steps))))
    transitions = {(row, next_obs) for row, (_, _, next_obs) in drawn(replay, state, envs=envs).items()}
    assert transitions == {(1000 * env + t, 1000 * env + t + 1) for env in range(envs) for t in range(steps)}


def test_arrays_must_be_those_of_the_replay(unchecked):
    replay, state = filled(stream(np.ones(3)))
    rollout = next(iter(rollouts_of(stream(np.ones(2)), 1)))
    wide = dataclasses.replace(rollout.time_steps, obs=jnp.zeros((2, 1, 3)))
    with pytest.raises(ValueError, match=r"obs must be float32\[1\], got float32\[3\]"):
        replay.add(state, Rollout(wide, rollout.actions))
    with pytest.raises(ValueError, match=r"action must be int32\[\], got float32\[\]"):
        replay.add(state, Rollout(rollout.time_steps, rollout.actions.astype(jnp.float32)))
    whole = dataclasses.replace(rollout.time_steps, reward=jnp.ones((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"reward must be float32\[\], got int32\[\]"):
        replay.add(state, Rollout(whole, rollout.actions))


def test_each_observation_is_stored_once():
    obs = {"image": np.zeros((4, 12, 12), np.uint8), "vector": np.zeros(3, np.float32)}
    state = jax.eval_shape(lambda: UniformReplay(1_000).init(obs, jnp.zeros((), jnp.int32), jnp.zeros(5, bool), num_steps=4))
    # A row is an observation, an action, its mask, a reward and three flags; position, size, dropped and layout are 24 bytes.
    assert state.nbytes == 1_000 * (4 * 12 * 12 + 3 * 4 + 4 + 5 + 4 + 3) + 24


def test_adding_and_sampling_neither_copies_nor_sorts_the_storage():
    """rejax draws by a sort of the whole capacity, in every update (defect 16)."""
    replay = UniformReplay(50_000)
    state = replay.init(jnp.zeros(17), jnp.zeros((), jnp.int32), num_steps=4)
    steps = TimeStep(jnp.zeros((5, 8, 17)), *[jnp.zeros((5, 8), dtype) for dtype in (jnp.float32, bool, bool, bool)])

    def step(state, rollout):
        state = replay.add(state, rollout)
        return state, replay.sample(state, KEY, 32, num_envs=8, n_step=3, gamma=0.9)

    program = jax.jit(step, donate_argnums=0).lower(state, Rollout(steps, jnp.zeros((4, 8), jnp.int32))).compile()
    assert "[50000" in program.as_text() and not slow_lines(program.as_text(), 50_000)


@pytest.mark.parametrize(
    "replay", [UniformReplay(64), PrioritizedReplay(64), SequenceReplay(64, sequence_length=4)], ids=lambda x: type(x).__name__
)
def test_samples_of_another_number_of_environments_are_rejected(replay):
    state = filled_with(replay, stream(np.ones(9), envs=2), num_steps=2)
    with pytest.raises(ValueError, match=r"Replay: 2 environments of 32 rows filled it, got 4 of 16"):
        replay.sample(state, KEY, 4, num_envs=4, gamma=0.9)
    of_two_devices = dataclasses.replace(state, layout=state.layout // jnp.array([2, 1, 1], jnp.uint32))
    with pytest.raises(ValueError, match=r"Replay: 2 environments of 16 rows filled it, got 2 of 32"):
        replay.sample(of_two_devices, KEY, 4, num_envs=2, gamma=0.9)


def test_rollouts_must_have_the_length_of_the_replay():
    replay, state = filled(stream(np.ones(5)))
    with pytest.raises(ValueError, match="num_steps=1 steps, got 2"):
        replay.add(state, next(iter(rollouts_of(stream(np.ones(3)), 2))))
    with pytest.raises(ValueError, match=r"UniformReplay: capacity=8 must be at least 12 for num_envs=3, num_steps=2"):
        UniformReplay(8).check(3, 2)
    with pytest.raises(ValueError, match=r"capacity=64 must be at least .* = 66"):
        replay.sample(state, KEY, 4, num_envs=33, gamma=0.9)

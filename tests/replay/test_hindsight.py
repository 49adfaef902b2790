"""Hindsight replay against a slow model: which goals are drawn, how often, and the returns under them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.types import Rollout, TimeStep
from polyak.replay import HindsightReplay, PrioritizedReplay, UniformReplay
from polyak.replay.streams import end_stream
from tests.replay.goals import GAMMA, NumberGoals, Stream, expected_pairs, expected_return, fill, time_steps_of
from tests.replay.streams import slow_lines

KEY = jax.random.key(0)
ENVS, SLOTS, NUM_STEPS, DRAWS = 2, 24, 4, 40_000
LENGTHS = ([3, 5, 2, 4], [4, 1, 6])

# Rows of the streams, and rows with NaN: a part of the ring, episodes that still run, and rings that have wrapped around so
# that the oldest episode has lost its first rows; at last an episode that is longer than the ring.
SCENARIOS = {
    "few": (21, LENGTHS, ()),
    "wrapped": (61, LENGTHS, ()),
    "nan": (21, LENGTHS, (7,)),
    "long": (65, ([70], [30, 40]), ()),
}


@functools.partial(jax.jit, static_argnums=(0, 2))
def sample(replay, state, n_step, key=KEY):
    return replay.sample(state, key, DRAWS, num_envs=ENVS, gamma=GAMMA, n_step=n_step)


def filled(replay, rows, lengths, nan_at=()):
    streams = [Stream.of(one, rows, env, nan_at if env == 0 else ()) for env, one in enumerate(lengths)]
    return streams, fill(replay, time_steps_of(streams, nan_at), NUM_STEPS)


def chi_square(batch, expected):
    """Compare the drawn pairs with their probabilities; every possible pair is drawn, and no other."""
    drawn = np.stack([batch.obs["observation"][:, 0], batch.obs["desired_goal"][:, 0]], axis=1)[np.asarray(batch.weight) > 0]
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    counts = {tuple(pair): count for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)}
    assert counts.keys() == {pair for pair, p in expected.items() if p > 0}
    total = sum(counts.values())
    statistic = sum((counts[pair] - total * p) ** 2 / (total * p) for pair, p in expected.items() if p > 0)
    degrees = len(counts) - 1
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees), (statistic, degrees)


def check_returns(batch, streams, n_step, ends):
    """Compare rewards, discounts and next observations of all drawn pairs with the model's."""
    batch = jax.tree.map(np.asarray, batch)
    columns = [batch.obs["observation"][:, 0], batch.obs["desired_goal"][:, 0], batch.next_obs["desired_goal"][:, 0]]
    columns += [batch.reward, batch.discount, batch.next_obs["achieved_goal"][:, 0]]
    for row, goal, next_goal, *values in np.unique(np.stack(columns, axis=1)[batch.weight > 0], axis=0).tolist():
        stream = streams[int(row >= 1000)]
        assert next_goal == goal
        np.testing.assert_allclose(values, expected_return(stream, row, goal, n_step, ends), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_transitions_and_goals_have_the_probabilities_of_the_model(strategy):
    replay = HindsightReplay(ENVS * SLOTS, strategy=strategy, ratio=0.75, goals=NumberGoals())
    for rows, lengths, nan_at in SCENARIOS.values():
        streams, state = filled(replay, rows, lengths, nan_at)
        assert int(state.size) == min(rows - 1, SLOTS - 1)
        batch = sample(replay, state, 1)
        chi_square(batch, expected_pairs(streams, int(state.size), strategy, 0.75))
        check_returns(batch, streams, 1, ends=False)


@pytest.mark.parametrize("n_step", [2, 3])
@pytest.mark.parametrize("ends", [False, True])
def test_n_step_returns_have_the_rewards_and_ends_of_the_drawn_goal(n_step, ends):
    replay = HindsightReplay(ENVS * SLOTS, strategy="episode", goals=NumberGoals(ends))
    for name in ("few", "wrapped"):
        rows, lengths, _ = SCENARIOS[name]
        streams, state = filled(replay, rows, lengths)
        check_returns(sample(replay, state, n_step), streams, n_step, ends)


def test_truncations_by_the_goal_end_the_return_and_bootstrap():
    class Truncating(NumberGoals):
        def outcomes(self, achieved, desired):
            new = super().outcomes(achieved, desired)
            return new._replace(terminated=None, truncated=new.terminated)

    replay = HindsightReplay(ENVS * SLOTS, strategy="future", ratio=1.0, goals=Truncating(True))
    _, state = filled(replay, *SCENARIOS["few"][:2])
    batch = jax.tree.map(np.asarray, sample(replay, state, 3))
    reached = batch.next_obs["achieved_goal"] == batch.obs["desired_goal"]
    steps = batch.next_obs["observation"] - batch.obs["observation"]
    is_short = (steps < 3)[:, 0] & (batch.weight > 0) & (batch.discount > 0)
    assert (reached[:, 0] & is_short).sum() > 1000
    np.testing.assert_allclose(batch.discount[is_short], GAMMA ** steps[is_short, 0], rtol=1e-5)


def test_goals_stay_within_a_stream():
    replay = HindsightReplay(ENVS * SLOTS, strategy="episode", ratio=1.0, goals=NumberGoals())
    # The run is within its episodes both times: without streams, they would go on.
    _, state = filled(replay, 9, ([20], [20]))
    state = jax.jit(end_stream, static_argnums=1)(state, ENVS)
    later = [dataclasses.replace(Stream.of([20], 18, env), first=[False] * 18) for env in range(2)]
    state = fill(replay, jax.tree.map(lambda x: x[9:], time_steps_of(later)), NUM_STEPS, state)
    batch = jax.tree.map(np.asarray, sample(replay, state, 1))
    row, goal = batch.obs["observation"][:, 0] % 1000, batch.obs["desired_goal"][:, 0] % 1000
    drawn = batch.weight > 0
    assert set(row[drawn & (row < 9)]) == set(range(8)) and set(goal[drawn & (row < 9)]) == set(range(1, 9))
    assert set(row[drawn & (row >= 9)]) == set(range(9, 17)) and set(goal[drawn & (row >= 9)]) == set(range(10, 18))


def test_new_environments_begin_new_episodes():
    replay = HindsightReplay(ENVS * SLOTS, strategy="future", ratio=1.0, goals=NumberGoals())
    _, state = filled(replay, 9, ([20], [20]))
    state = fill(replay, time_steps_of([Stream.of([20], 5, env + 2) for env in range(2)]), NUM_STEPS, state)
    batch = jax.tree.map(np.asarray, sample(replay, state, 1))
    row, goal = batch.obs["observation"][:, 0], batch.obs["desired_goal"][:, 0]
    assert np.all((row // 1000 == goal // 1000)[batch.weight > 0])
    # The transition to the row that the new episodes replaced is gone, and so is its goal.
    assert {int(g) for g in goal[(row < 1000) & (batch.weight > 0)]} == set(range(1, 8))


def test_another_number_of_environments_begins_anew():
    replay = HindsightReplay(ENVS * SLOTS, strategy="episode", ratio=1.0, goals=NumberGoals())
    state = fill(replay, time_steps_of([Stream.of([3, 5], 33, env) for env in range(3)]), NUM_STEPS)
    streams = [Stream.of(one, 13, env) for env, one in enumerate(LENGTHS)]
    state = fill(replay, time_steps_of(streams), NUM_STEPS, state)
    chi_square(sample(replay, state, 1), expected_pairs(streams, 12, "episode", 1.0))


def test_ratio_of_zero_draws_the_transitions_of_the_inner_replay():
    for inner in (UniformReplay(ENVS * SLOTS), PrioritizedReplay(ENVS * SLOTS)):
        replay = HindsightReplay(inner, ratio=0.0, goals=NumberGoals())
        _, state = filled(replay, 61, LENGTHS)
        same = sample(inner, state, 3)
        assert all(map(np.array_equal, jax.tree.leaves(sample(replay, state, 3)), jax.tree.leaves(same)))


def test_prioritized_transitions_have_the_goals_of_their_episodes():
    replay = HindsightReplay(PrioritizedReplay(ENVS * SLOTS, alpha=1.0, eps=0.0), goals=NumberGoals())
    streams, state = filled(replay, 61, LENGTHS)
    index = jnp.arange(ENVS * SLOTS, dtype=jnp.int32)
    state = jax.jit(replay.set_priorities)(state, index, 1.0 + (index % 3).astype(jnp.float32))
    batch, plain = sample(replay, state, 1), sample(replay.replay, state, 1)
    np.testing.assert_array_equal(batch.index, plain.index)
    np.testing.assert_array_equal(batch.weight, plain.weight)
    expected = expected_pairs(streams, int(state.size), "future", 0.8)
    priority = {int(row): 1.0 + i % 3 for i, row in enumerate(np.asarray(state.rows.obs["observation"][:, 0]))}
    weighted = {pair: p * priority[pair[0]] for pair, p in expected.items()}
    chi_square(batch, {pair: p / sum(weighted.values()) for pair, p in weighted.items()})
    assert replay.has_priorities and "replay/mean_priority" in replay.metrics(state)


def test_adding_and_sampling_neither_copies_nor_sorts_the_storage():
    replay = HindsightReplay(50_000, goals=NumberGoals(True))
    obs = {name: jnp.zeros(17) for name in ("observation", "achieved_goal", "desired_goal")}
    state = replay.init(obs, jnp.zeros((), jnp.int32), num_steps=4)
    obs = jax.tree.map(lambda x: jnp.zeros((5, 8, 17)), obs)
    steps = TimeStep(obs, *[jnp.zeros((5, 8), dtype) for dtype in (jnp.float32, bool, bool, bool)])

    def step(state, rollout):
        state = replay.add(state, rollout)
        return state, replay.sample(state, KEY, 32, num_envs=8, n_step=3, gamma=0.9)

    program = jax.jit(step, donate_argnums=0).lower(state, Rollout(steps, jnp.zeros((4, 8), jnp.int32))).compile()
    assert "[50000" in program.as_text() and not slow_lines(program.as_text(), 50_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.5}, "ratio must be a number in"),
        ({"strategy": "past"}, "strategy must be"),
        ({"replay": "prioritized"}, "replay must be a capacity, a UniformReplay or a PrioritizedReplay, got 'prioritized'"),
        ({"replay": UniformReplay(100, frame_stack=4)}, "frame_stack=1"),
        ({"goals": lambda a, d: 0.0}, "goals must be polyak.core.goals.Goals or None"),
        ({"replay": 0}, "capacity must be an integer"),
        ({"replay": True}, "replay must be a capacity"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HindsightReplay(**arguments)

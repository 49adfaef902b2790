"""The data set as an object: episodes, statistics, splits, and the rollout that fills a replay."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec

SPEC = EnvSpec(Box([-99.0] * 2, [99.0] * 2), Box([0.0], [4.0]), id="Toy-v0")


@pytest.fixture(scope="module")
def data():
    """Episodes of 3, 1 and 2 steps; observations are (time step, episode), rewards count all steps."""
    lengths = [3, 1, 2]
    obs = [[t, i] for i, length in enumerate(lengths) for t in range(length)]
    return polyak.data.load(
        {
            "observations": np.array(obs, np.float64),
            "actions": np.arange(6.0)[:, None] % 5,
            "rewards": np.arange(6),
            "terminations": [0, 0, 1, 0, 0, 0],
            "truncations": [0, 0, 0, 1, 0, 1],
            "final_observations": [[3, 0], [1, 1], [2, 2]],
        },
        spec=SPEC,
    )


def test_episodes_have_their_final_observations_and_ends(data):
    assert (data.num_transitions, data.num_episodes) == (6, 3) and data.lengths.tolist() == [3, 1, 2]
    first, second, third = data.episodes
    np.testing.assert_array_equal(first.obs, [[0, 0], [1, 0], [2, 0], [3, 0]])
    np.testing.assert_array_equal(second.obs, [[0, 1], [1, 1]])
    np.testing.assert_array_equal(third.action[:, 0], [4, 0])
    assert [(e.terminated, e.truncated) for e in data.episodes] == [(True, False), (False, True), (False, True)]
    assert repr(third) == "Episode(2 steps, return 9.0, truncated)"
    np.testing.assert_array_equal(data.returns, [3, 3, 9])


def test_it_is_frozen(data):
    with pytest.raises(ValueError, match="read-only"):
        data.reward[0] = 1.0
    with pytest.raises(AttributeError):
        data.reward = np.zeros(6)


def test_printing_shows_counts_returns_and_ends(data):
    assert str(data).splitlines() == [
        "DataSet arrays: 6 transitions in 3 episodes",
        "  obs     Box(-99, 99, shape=(2,), dtype=float32)",
        "  action  Box(0, 4, shape=(1,), dtype=float32)",
        "  return  5.0 ± 2.8, from 3.0 to 9.0",
        "  length  2.0 ± 0.8, from 1.0 to 3.0",
        "  reward  2.5 ± 1.7, from 0.0 to 5.0",
        "  ends    1 terminated, 2 truncated",
    ]
    np.testing.assert_allclose(data.statistics["obs"].high, [3, 2])


@pytest.mark.parametrize("numbers_at_once", [1, 50, 2**20])
def test_statistics_are_those_of_numpy_however_many_numbers_a_part_has(numbers_at_once, monkeypatch):
    monkeypatch.setattr("polyak.data.data_set.NUMBERS_AT_ONCE", numbers_at_once)
    rng = np.random.default_rng(0)
    for values in (
        rng.integers(0, 256, (37, 3, 2), np.uint8),
        rng.normal(1e3, 1e-2, 37).astype(np.float32),
        rng.random(5) > 0.5,
    ):
        wide, got = values.astype(np.float64), polyak.data.Statistics.of(values)
        for name, wanted in (("mean", wide.mean(0)), ("std", wide.std(0)), ("low", wide.min(0)), ("high", wide.max(0))):
            np.testing.assert_allclose(getattr(got, name), wanted, rtol=1e-12)
            assert np.asarray(getattr(got, name)).dtype == np.float64


def peak_bytes(function):
    """The most bytes that Python and NumPy have allocated at a time."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_images_are_copied_once_when_loaded_and_never_for_statistics(monkeypatch):
    monkeypatch.setattr("polyak.data.data_set.NUMBERS_AT_ONCE", 2**16)
    count = 1_000
    for dtype in (np.uint8, np.float32):
        images = np.zeros((count, 64, 64, 1), dtype)
        arrays = {"observations": images, "actions": np.zeros(count, int), "rewards": np.zeros(count)}
        arrays |= {"terminations": np.arange(count) % 100 == 99, "next_observations": images}
        loaded = []
        # Comparisons with bounds and with the next row take a byte for each number.
        assert peak_bytes(lambda a=arrays, to=loaded: to.append(polyak.data.load(a))) < 1.15 * images.nbytes + 3 * images.size
        data = loaded[0]
        assert peak_bytes(lambda d=data: str(d)) < images.nbytes / 10
        assert peak_bytes(lambda d=data: d.statistics) < images.nbytes
        assert images.flags.writeable and not np.shares_memory(images, data.obs)


def test_selected_episodes_are_complete(data):
    part = data.select([2, 0])
    np.testing.assert_array_equal(part.returns, [9, 3])
    for got, wanted in zip(part.episodes, (data.episodes[2], data.episodes[0]), strict=True):
        jax.tree.map(np.testing.assert_array_equal, vars(got), vars(wanted))
    np.testing.assert_array_equal(data.select(data.returns > 5).lengths, [2])
    with pytest.raises(ValueError, match="select at least one of the 3 episodes"):
        data.select([])
    for wrong in (slice(0, 1), 0, None):
        with pytest.raises(TypeError, match="episodes must be a sequence of numbers or bools, got "):
            data.select(wrong)


def test_a_split_is_by_episode(data):
    train, test = data.split(0.6, seed=3)
    assert train.num_episodes == 2 and test.num_episodes == 1
    assert sorted([*train.returns, *test.returns]) == [3, 3, 9]
    again, _ = data.split(0.6, seed=3)
    np.testing.assert_array_equal(again.obs, train.obs)
    with pytest.raises(ValueError, match="must leave at least one episode in each part, got 3 and 0"):
        data.split(0.9)


def test_the_rollout_is_in_the_agents_units_and_loses_no_transition_when_padded(data):
    spec = EnvSpec(SPEC.obs, SPEC.action, action_scaling="rescale")
    rollout = data.rollout(spec, num_steps=5, pad=True)
    steps, valid = rollout.time_steps, np.asarray(rollout.valid[:, 0])
    assert len(valid) == 10 and valid.sum() == 6
    np.testing.assert_array_equal(valid, [1, 1, 1, 0, 1, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(steps.obs[:9, 0], data.obs)
    np.testing.assert_array_equal(rollout.reward[valid, 0], data.reward)
    np.testing.assert_array_equal(rollout.actions[valid, 0, 0], np.arange(6) % 5 / 2 - 1)
    np.testing.assert_array_equal(np.flatnonzero(steps.first[:, 0]), [0, 4, 6])
    np.testing.assert_array_equal(np.flatnonzero(steps.terminated[:, 0]), [3])
    assert len(data.rollout(num_steps=5).reward) == 5  # without padding, what is left is cut


def test_one_stream_shares_its_observations_with_the_data(data):
    rollout = data.rollout(pad=True)
    assert np.shares_memory(rollout.time_steps.obs, data.obs) and not rollout.time_steps.obs.flags.writeable
    copied = data.rollout(num_steps=5, pad=True)  # padded
    assert len(copied.reward) > len(rollout.reward)
    for x, y in zip(jax.tree.leaves(rollout), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(x, y[: len(x)])


def test_transitions_of_a_replay_are_those_of_the_data(data):
    replay = polyak.UniformReplay(64)
    rollout = data.rollout(num_steps=10, pad=True)
    state = replay.init(np.zeros(2, np.float32), np.zeros(1, np.float32), num_steps=10)
    state = replay.add(state, jax.tree.map(jnp.asarray, rollout))
    batch = replay.sample(state, jax.random.key(0), 256, num_envs=1, gamma=0.9, n_step=2)
    rows = np.stack([batch.reward, batch.discount, *batch.next_obs.T], axis=1)[np.asarray(batch.weight) > 0]
    got = {tuple(x.tolist()) for x in rows}
    exact = {tuple(np.float32([r, d, *o]).tolist()) for r, d, o in [
        (0.9, 0.81, (2, 0)), (1 + 0.9 * 2, 0.0, (3, 0)), (2, 0.0, (3, 0)), (3, 0.9, (1, 1)), (4 + 0.9 * 5, 0.81, (2, 2)),
        (5, 0.9, (2, 2)),
    ]}  # fmt: skip
    assert {tuple(np.round(x, 4)) for x in got} == {tuple(np.round(x, 4)) for x in exact}


def test_a_rollout_for_another_environment_is_an_error(data):
    data.rollout(EnvSpec(Box([-np.inf] * 2, [np.inf] * 2), SPEC.action))  # bounds of observations may differ
    for other in (
        EnvSpec(SPEC.obs, Discrete(5)),
        EnvSpec(SPEC.obs, Box([-1.0], [1.0])),
        EnvSpec(Box([0.0], [1.0]), SPEC.action),
    ):
        with pytest.raises(ValueError, match=r"DataSet.rollout: the data set 'arrays' is of another environment: (action|obs)"):
            data.rollout(other)


def test_discrete_actions_count_from_the_environments_start():
    spec = EnvSpec(Box([-1.0], [1.0]), Discrete(3, start=2))
    arrays = {"observations": np.zeros((2, 1)), "actions": [2, 4], "rewards": [0.0, 1.0], "terminals": [0, 1]}
    data = polyak.data.load(arrays, spec=spec)
    np.testing.assert_array_equal(data.action, [2, 4])
    np.testing.assert_array_equal(data.rollout(spec).actions[:, 0], [0, 2])

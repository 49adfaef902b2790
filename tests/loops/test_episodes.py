"""Returns and lengths of episodes against a slow oracle."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.types import EpisodeRecord, TimeStep
from polyak.loops.episodes import Episodes, EpisodeStatistics, EpisodeTotals, measure
from tests.agents.rollouts import flags


def stream(seed, steps=40, num_envs=3, ends=0.2):
    rng = np.random.default_rng(seed)
    terminated, truncated, first = flags(rng, steps, num_envs, ends)
    first[0], terminated[0], truncated[0] = True, False, False
    reward = np.where(first, 0.0, rng.integers(-3, 4, first.shape)).astype(np.float32)
    return TimeStep(np.zeros((*first.shape, 1), np.float32), reward, terminated, truncated, first)


def by_hand(steps):
    """Every finished episode's return and length, and what is under way at the end."""
    finished, under_way = [], []
    for env in range(steps.first.shape[1]):
        total, length = 0.0, 0
        for t in range(steps.first.shape[0]):
            if steps.first[t, env]:
                total, length = 0.0, 0
            else:
                total, length = total + steps.reward[t, env], length + 1
            if steps.last[t, env]:
                finished.append((total, length))
        under_way.append((total, length))
    return finished, under_way


@pytest.mark.parametrize("ends", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("cuts", [(0, 40), (0, 1, 2, 17, 40)])
def test_episodes_are_those_of_the_oracle_however_the_stream_is_cut(ends, cuts):
    steps = stream(0, ends=ends)
    episodes, total = Episodes.fresh(3), EpisodeTotals.none()
    go_on = jax.jit(measure)
    for start, end in itertools.pairwise(cuts):
        episodes, finished = go_on(episodes, jax.tree.map(lambda x, a=start, b=end: jnp.asarray(x[a : b + 1]), steps))
        total = jax.tree.map(jnp.add, total, finished)
    expected, under_way = by_hand(steps)
    assert int(total.count) == len(expected)
    assert float(total.returns) == pytest.approx(sum(r for r, _ in expected))
    assert int(total.lengths) == sum(n for _, n in expected)
    assert [(float(r), int(n)) for r, n in zip(episodes.returns, episodes.lengths, strict=True)] == under_way


def test_score_is_counted_instead_of_the_reward():
    seen, whole = stream(0, ends=0.5), stream(2, ends=0.1)
    steps = dataclasses.replace(seen, record=EpisodeRecord(whole.reward, whole.last, whole.first))
    episodes, total = jax.jit(measure)(Episodes.fresh(3), jax.tree.map(jnp.asarray, steps))
    wanted, alone = jax.jit(measure)(Episodes.fresh(3), jax.tree.map(jnp.asarray, whole))
    jax.tree.map(np.testing.assert_array_equal, (episodes, total), (wanted, alone))
    assert int(total.count) == len(by_hand(whole)[0]) < len(by_hand(seen)[0])


@pytest.mark.parametrize("rewards", [(0.1,), (1e6, 0.1, -1e6, 0.1)])
def test_returns_of_long_episodes_lose_nothing_to_float32(rewards):
    steps = 100_000
    reward = np.tile(np.float32(rewards), steps // len(rewards))[:, None]
    flags = np.zeros((steps + 1, 1), bool)
    first, last = flags.copy(), flags.copy()
    first[0] = last[-1] = True
    time_steps = TimeStep(np.zeros((steps + 1, 1, 1), np.float32), np.concatenate([reward[:1], reward]), last, flags, first)
    _, finished = jax.jit(measure)(Episodes.fresh(1), jax.tree.map(jnp.asarray, time_steps))
    assert float(finished.returns) == pytest.approx(reward.sum(dtype=np.float64), rel=1e-6)


def test_an_infinite_reward_makes_an_infinite_return():
    reward = np.float32([0, np.inf, 1, 1])[:, None]
    flags = np.zeros((4, 1), bool)
    first, last = flags.copy(), flags.copy()
    first[0] = last[-1] = True
    _, finished = measure(Episodes.fresh(1), jax.tree.map(jnp.asarray, TimeStep(reward[..., None], reward, last, flags, first)))
    assert float(finished.returns) == np.inf


def test_the_first_time_step_was_measured_before():
    steps = stream(1, steps=2, ends=0.0)
    steps.reward[:] = 100.0
    steps.terminated[0] = True
    _, finished = measure(Episodes.fresh(3), jax.tree.map(jnp.asarray, steps))
    assert int(finished.count) == 0


def finished(count, returns, lengths):
    return EpisodeTotals(jnp.uint32(count), jnp.float32(returns), jnp.uint32(lengths))


def test_the_window_forgets_all_but_about_the_last_hundred():
    window = EpisodeStatistics()
    assert window.metrics() == {}
    window.add(finished(0, 0.0, 0))
    assert window.metrics() == {}
    window.add(finished(60, 600.0, 60))
    window.add(finished(40, 0.0, 80))
    assert window.metrics() == {"rollout/ep_rew_mean": 6.0, "rollout/ep_len_mean": 1.4}
    window.add(finished(59, 59.0, 59))
    assert window.metrics()["rollout/ep_rew_mean"] == pytest.approx(659 / 159)
    window.add(finished(1, 1.0, 1))
    assert window.metrics()["rollout/ep_rew_mean"] == pytest.approx(60 / 100)
    window.add(finished(5000, 5000.0, 5000))
    assert window.metrics()["rollout/ep_rew_mean"] == 1.0


def test_the_newest_iterations_with_episodes_are_the_window_of_all():
    iterations = [finished(count, 3.0 * i, i) for i, count in enumerate(np.random.default_rng(0).integers(0, 3, 300))]
    each, together = EpisodeStatistics(), EpisodeStatistics()
    newest = jax.tree.map(lambda x: jnp.zeros(100, x.dtype), finished(0, 0.0, 0))
    for iteration in iterations:
        each.add(iteration)
        newest = newest.append(iteration)
    together.add(newest)
    assert together.metrics() == each.metrics() != {}

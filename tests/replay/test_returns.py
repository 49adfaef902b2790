"""Returns of a replay against sums over whole episodes, and the target of mixed Monte Carlo."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep
from polyak.learning.normalizers import create_normalizers
from polyak.learning.replay_batch import normalize
from polyak.replay import Transition, UniformReplay
from polyak.replay.returns import ReturnReplay
from tests import probe_envs
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.rollouts import flags
from tests.selection import quick

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0], [9.0]), Discrete(2))
GAMMA, STEPS, ENVS = 0.9, 4, 3


def timeline(total=48, seed=0):
    """Rewards and flags: NaN at the end of an episode and before the end of another, and a new stream at step 24."""
    rng = np.random.default_rng(seed)
    terminated, truncated, first = flags(rng, total, ENVS, 0.06)
    for t in range(24, total):
        first[t] = (t == 24) | terminated[t - 1] | truncated[t - 1]
        terminated[t], truncated[t] = terminated[t] & ~first[t], truncated[t] & ~first[t]
    reward = np.where(first, 0.0, rng.normal(size=first.shape)).astype(np.float32)
    end, other = (np.flatnonzero(terminated[:, env])[-1] for env in (1, 2))
    assert end > 0 and not first[other - 3 : other, 2].any()
    reward[end, 1] = reward[other - 1, 2] = np.nan
    return reward, terminated, truncated, first


def rollout_at(line, start):
    reward, terminated, truncated, first = (jnp.asarray(x[start : start + STEPS + 1]) for x in line)
    if start == 20:  # What the last step of the first stream leads to.
        first = first.at[-1].set(False)
    obs = jnp.zeros((STEPS + 1, ENVS, 1))
    return Rollout(TimeStep(obs, reward, terminated, truncated, first), jnp.zeros((STEPS, ENVS), jnp.int32))


def slow(line, t, env, newest):
    """The return from step t and True, or None and False where the episode has not terminated by the newest step."""
    reward, terminated, truncated, _ = (x[:, env] for x in line)
    total, power = 0.0, 1.0
    for step in range(t, newest):
        if not np.isfinite(reward[step + 1]) or step + 1 == 24:
            return None, False
        total, power = total + power * reward[step + 1], power * GAMMA
        if terminated[step + 1]:
            return total, True
        if truncated[step + 1]:
            return None, False
    return None, False


@pytest.mark.parametrize("capacity", quick("overwritten", of={"overwritten": ENVS * 16, "not full": ENVS * 64 + 1}))
def test_returns_are_sums_to_the_end_of_terminated_episodes(capacity):
    ring, line = ReturnReplay(capacity, gamma=GAMMA), timeline()
    state = ring.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=STEPS)
    add, slots, known, unknown = jax.jit(ring.add), capacity // (ENVS * STEPS) * STEPS, 0, 0
    for start in range(0, 48, STEPS):
        state = add(state, rollout_at(line, start))
        newest = start + STEPS
        for t in range(max(0, newest - slots + 1), newest):
            for env in range(ENVS):
                row = t % slots * ENVS + env
                if not state.rows.valid[row]:
                    continue
                value, is_whole = slow(line, t, env, newest)
                assert bool(state.returns.is_whole[row]) == is_whole, (start, t, env)
                known, unknown = known + is_whole, unknown + (not is_whole)
                if is_whole:
                    np.testing.assert_allclose(state.returns.value[row], value, rtol=1e-5, atol=1e-6)
    assert min(known, unknown) > 40
    assert bool(jnp.isfinite(state.returns.value).all())
    batch = ring.sample(state, KEY, 64, num_envs=ENVS, gamma=GAMMA)
    np.testing.assert_array_equal(batch.whole_return, state.returns.value[batch.index])
    np.testing.assert_array_equal(batch.has_whole_return, state.returns.is_whole[batch.index])
    # Known returns are not computed again, and rows of a replay that was emptied are none.
    terminated = np.zeros_like(line[1])
    terminated[STEPS] = True
    end = rollout_at((np.ones_like(line[0]), terminated, *(np.zeros_like(x) for x in line[2:])), 0)
    state = add(state, end)
    known = np.arange(STEPS * ENVS) + (int(state.position) - STEPS) % slots * ENVS
    assert bool(state.returns.is_whole[known].all())
    marked = dataclasses.replace(state.returns, value=state.returns.value.at[known].set(77.0))
    assert bool((add(dataclasses.replace(state, returns=marked), end).returns.value[known] == 77.0).all())
    rows = dataclasses.replace(state.rows, valid=state.rows.valid | True)
    emptied = add(dataclasses.replace(state, rows=rows, layout=0 * state.layout, returns=marked), end)
    np.testing.assert_array_equal(emptied.returns.value[ENVS * STEPS :], marked.value[ENVS * STEPS :])


def test_no_whole_buffer_is_copied_or_selected_also_for_several_seeds():
    """Adding costs what an episode has, not what the replay holds."""
    ring, line = ReturnReplay(4_096, gamma=GAMMA), timeline()
    states = jax.vmap(lambda _: ring.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=STEPS))(jnp.arange(2))
    rollouts = jax.tree.map(lambda *x: jnp.stack(x), *(rollout_at(line, 4 * i) for i in range(6)))
    seeds = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), rollouts)

    def fill(state, rollouts):
        return jax.lax.scan(lambda state, rollout: (ring.add(state, rollout), None), state, rollouts)[0]

    compiled = jax.jit(jax.vmap(fill), donate_argnums=0).lower(states, seeds).compile()
    for word in (" copy(", " select("):
        assert not [x for x in compiled.as_text().splitlines() if word in x and "[2,4096]" in x]
    got = compiled(states, seeds).returns
    for seed in range(2):
        state = ring.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=STEPS)
        wanted = jax.jit(fill)(state, jax.tree.map(lambda x, seed=seed: x[seed], seeds)).returns
        np.testing.assert_array_equal(got.is_whole[seed], wanted.is_whole)
        np.testing.assert_array_equal(np.where(wanted.is_whole, got.value[seed], 0), np.where(wanted.is_whole, wanted.value, 0))


def make(spec=SPEC, **settings):
    small = {"network": polyak.MLP((8,)), "batch_size": 16, "replay": UniformReplay(512), "monte_carlo_weight": 0.25}
    return polyak.DQN(spec, **{**small, "learning_starts": 32, "num_steps": 4, **settings})


def test_the_target_mixes_known_returns_alone():
    agent = make(gamma=0.8, reward_scale=2.0)
    assert agent.replay == ReturnReplay(512, gamma=0.8) and dataclasses.replace(agent, gamma=0.5).replay.gamma == 0.5
    plain, state = make(monte_carlo_weight=None, gamma=0.8, reward_scale=2.0), agent.init(KEY)
    assert type(plain.replay) is UniformReplay and plain.init(KEY).replay.returns is None
    line = (np.ones((5, ENVS), np.float32), *(np.zeros((5, ENVS), bool) for _ in range(3)))
    line[1][2, 0] = line[3][3, 0] = True  # The first environment terminates at its second step.
    replay = agent.replay.add(state.replay, rollout_at(line, 0))
    batch = agent.replay.sample(replay, KEY, 64, num_envs=ENVS, gamma=agent.gamma)
    online, target = state.copies.online, state.copies.variables("target")
    mixed, td = (each.td_target(batch, online=online, target=target) for each in (agent, plain))
    row = np.asarray(batch.index)
    whole = np.select([row == 0, row == ENVS], [1.0 + 0.8, 1.0], np.nan)
    assert np.isfinite(whole).any() and np.isnan(whole).any()
    np.testing.assert_allclose(mixed, np.where(np.isnan(whole), td, 0.75 * td + 0.25 * 2.0 * whole), rtol=1e-5)
    hidden = dataclasses.replace(batch, whole_return=jnp.where(batch.has_whole_return, batch.whole_return, jnp.nan))
    np.testing.assert_array_equal(agent.td_target(hidden, online=online, target=target), mixed)


def test_returns_are_scaled_as_rewards():
    normalizers = create_normalizers(make(normalize_reward="reward")).update(rollout_at(timeline(), 8), GAMMA)
    ones = jnp.ones(2)
    batch = Transition(
        (), (), None, ones, ones, (), None, ones, jnp.arange(2), whole_return=3 * ones, has_whole_return=ones > 0
    )
    scaled = normalize(batch, normalizers)
    np.testing.assert_allclose(scaled.whole_return, 3 * scaled.reward, rtol=1e-6)
    assert not np.array_equal(scaled.reward, ones)


def test_without_a_weight_the_replay_has_no_returns():
    assert dataclasses.replace(make(), monte_carlo_weight=None).replay == UniformReplay(512)
    assert make(monte_carlo_weight=None, replay=ReturnReplay(256)).replay == UniformReplay(256)


def test_what_has_no_returns_is_rejected():
    wanted = "DQN: monte_carlo_weight must be None unless replay is exactly a UniformReplay, no class derived from it, got Hind"
    with pytest.raises(ValueError, match=wanted):
        make(replay=polyak.HindsightReplay(512))
    message = r"DQN.update: this state was created with replay\.returns=False but the agent has True"
    state = jax.eval_shape(make(monte_carlo_weight=None).init, KEY)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make().update, state, rollout_at(timeline(), 0), KEY)
    with pytest.raises(ValueError, match=r"train\.run: data must be None with monte_carlo_weight=0.25; polyak\.train\.offline"):
        polyak.train.run(make(), "CartPole-v1", data="nowhere.h5", env_steps=64)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(partial(make, normalize_reward="return"), "CartPole-v1", loop, devices, tmp_path)


@pytest.mark.slow
def test_values_are_returns_with_a_weight_of_one():
    """Of a reward at the end of three steps, with targets that hardly follow: one-step targets would not have arrived."""
    env = probe_envs.settings(sees="step", pays="at the end", length=3)
    agent = make(env.spec, monte_carlo_weight=1.0, gamma=0.5, learning_rate=1e-2, updates_per_step=1.0, target_period=10**6)
    (state,) = probe_envs.train_in(agent, [env], 4, 150)
    values, _ = agent.network.apply(state.copies.online, jnp.array([[0.0], [1.0], [2.0]]))[0]
    np.testing.assert_allclose(values, np.array([[0.25], [0.5], [1.0]]) * np.ones(2), atol=0.1)

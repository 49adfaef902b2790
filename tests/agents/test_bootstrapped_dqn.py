"""Bootstrapped DQN: its loss and masks against a slow version, heads, votes and bounds, exploration, and resuming."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.bootstrapped_dqn import BootstrappedDQN
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from polyak.core.struct import struct
from polyak.core.types import TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.networks.heads_of_values import UpperBound, for_votes
from polyak.replay import UniformReplay
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_value_family import MASKED, SMALL, SPEC, transitions

KEY, HEADS = jax.random.key(0), 5


def make(spec=SPEC, **settings):
    return BootstrappedDQN(spec, **{**SMALL, "network": polyak.MLP((8,)), "num_heads": HEADS, **settings})


def steps(obs, first, mask=None):
    zeros = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs), jnp.zeros(len(obs)), zeros, zeros, jnp.asarray(first), mask)


@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_that_of_a_slow_version(double):
    agent, rows = make(MASKED, double=double, bootstrap_probability=0.5, reward_scale=2.0), transitions(masked=True)
    online, target = (agent.init(jax.random.key(i)).copies.online for i in range(2))
    loss, aux = jax.jit(agent.loss)(online.params, rows, online=online, target=target)
    q, next_q, chosen_by = (
        np.asarray(agent.network.apply(variables, obs)[0])
        for variables, obs in ((online, rows.obs), (target, rows.next_obs), (online if double else target, rows.next_obs))
    )
    wanted, sizes = 0.0, np.zeros(6)
    for n in range(6):
        draw = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), rows.index[n]), 0.5, (HEADS,))
        for k in range(HEADS):
            allowed = np.flatnonzero(rows.next_action_mask[n])
            best = allowed[np.argmax(chosen_by[n, allowed, k])]
            error = abs(2.0 * rows.reward[n] + 0.9 * next_q[n, best, k] - q[n, rows.action[n], k])
            huber = 0.5 * error**2 if error <= 1 else error - 0.5
            wanted += float(draw[k]) * huber * rows.weight[n] / HEADS
            sizes[n] += error / HEADS
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(aux.terms["priority"], sizes, rtol=1e-4)


@pytest.mark.parametrize(
    ("nvec", "mask", "wanted"),
    [((2, 2), [True, False, True, True], [0, 1]), ((3, 2), [False, True, False, True, False], [1, 0])],
)
def test_votes_are_for_combinations_whose_parts_are_allowed(nvec, mask, wanted):
    values = jnp.broadcast_to(jnp.arange(float(np.prod(nvec)))[None, :, None], (1, int(np.prod(nvec)), HEADS))
    assert np.array_equal(for_votes(MultiDiscrete(nvec), values, jnp.array([mask])).mode()[0], wanted)


def test_each_row_of_the_replay_keeps_its_heads():
    agent, index = make(bootstrap_probability=0.25), jnp.arange(4_000, dtype=jnp.int32)
    masks = np.asarray(agent.bootstrap_mask(index))
    assert np.array_equal(masks[:100], agent.bootstrap_mask(index[:100]))
    with jax.default_prng_impl("rbg"):
        assert np.array_equal(masks[100:200], agent.bootstrap_mask(index[100:200]))
    np.testing.assert_allclose(masks.mean(0), np.full(HEADS, 0.25), atol=0.03)
    assert abs(np.corrcoef(masks.T)[np.triu_indices(HEADS, 1)]).max() < 0.06
    assert np.all(np.asarray(make().bootstrap_mask(index)) == 1)


def test_one_head_acts_in_an_episode():
    agent = make(learning_starts=0)
    state, rng = agent.init(KEY), np.random.default_rng(0)
    policy, size = agent.collect_policy(state), 400
    carry, acting, heads = policy.initial_state(size), jax.jit(policy.action), []
    for t in range(4):
        obs = rng.normal(size=(size, 3)).astype(np.float32)
        step = acting(steps(obs, np.full(size, t in (0, 2))), carry, jax.random.key(t))
        carry, best = step.carry, np.argmax(agent.network.apply(state.copies.online, jnp.asarray(obs))[0], axis=1)
        heads.append(np.floor(np.asarray(carry.number) * HEADS).astype(int))
        np.testing.assert_array_equal(step.action, best[np.arange(size), heads[-1]])
    assert np.array_equal(heads[0], heads[1]) and np.array_equal(heads[2], heads[3])
    assert 0.1 < (heads[1] == heads[2]).mean() < 0.3
    assert np.bincount(heads[0], minlength=HEADS).min() > 50


def test_the_greedy_policy_takes_the_vote_of_the_heads_and_the_mean_with_bounds():
    values = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [9.0, 2.0, 0.9]]])  # the heads choose 2, 2, 1
    votes = for_votes(Discrete(3), values)
    assert int(votes.mode()[0]) == 2 and np.array_equal(votes.logits[0], [0, 1, 2])
    masked = for_votes(Discrete(3), values, jnp.array([[True, True, False]]))
    assert int(masked.mode()[0]) == 1 and np.array_equal(masked.logits[0, :2], [1, 2])
    np.testing.assert_allclose(UpperBound(None, 0.5).output(values)[0], values[0].mean(1) + 0.5 * values[0].std(1))

    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    agent, bounded = make(), make(exploration="ucb", ucb_scale=2.0, learning_starts=0)
    state = agent.init(KEY)
    q = np.asarray(agent.network.apply(state.copies.online, jnp.asarray(obs))[0])
    counts = np.stack([(np.argmax(q, axis=1) == a).sum(1) for a in range(4)], axis=1)
    np.testing.assert_array_equal(agent.policy(state).predict(obs)[0], counts.argmax(1))
    np.testing.assert_array_equal(bounded.policy(state).predict(obs)[0], q.mean(2).argmax(1))
    explorer = bounded.collect_policy(state)
    np.testing.assert_array_equal(explorer.predict(obs)[0], (q.mean(2) + 2 * q.std(2)).argmax(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": polyak.LSTM()}, "BootstrappedDQN: network must not be recurrent"),
        ({"bootstrap_probability": 0.0}, "BootstrappedDQN: bootstrap_probability must be"),
        ({"exploration": "vote"}, "BootstrappedDQN: exploration must be"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_scale_of_bounds_without_bounds_warns():
    with pytest.warns(UserWarning, match="ucb_scale=0.5 has no effect with exploration='head'"):
        make(ucb_scale=0.5)


@struct
class Chain:
    """The reward 1 is at the end of 12 steps to the right, each of which costs a little, of an episode of 12."""

    length = 12

    @property
    def spec(self):
        return EnvSpec(Box(0.0, 1.0, (2 * self.length,)), Discrete(2), "chain")

    def reset(self, key, num_envs):
        return jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, jnp.int32)

    def step(self, state, action, key):
        place, time = state
        is_right = action == 1
        place, time = jnp.where(is_right, place + 1, jnp.maximum(place - 1, 0)), time + 1
        over = time >= self.length
        reward = jnp.where(is_right, -0.01 / self.length, 0.0) + jnp.where(over & (place == self.length), 1.0, 0.0)
        return (jnp.minimum(place, self.length - 1), time), reward, over, jnp.zeros(over.shape, bool)

    def observe(self, state):
        return jnp.concatenate([jax.nn.one_hot(x, self.length) for x in state], axis=1)


@pytest.mark.slow
def test_heads_explore_a_chain_and_random_actions_do_not():
    env = AutoReset(Chain(), 1)
    options = {
        "learning_starts": 64, "batch_size": 64, "num_steps": 2, "updates_per_step": 0.5, "learning_rate": 1e-3,
        "replay": UniformReplay(20_000), "target_period": 50, "network": polyak.MLP((50,)),
    }  # fmt: skip
    agents = BootstrappedDQN(env.spec, bootstrap_probability=0.5, **options), polyak.DQN(env.spec, epsilon=0.1, **options)
    solved = []
    for agent in agents:
        runs = [polyak.loops.compiled(agent, env, env_steps=5_000, key=jax.random.key(seed)) for seed in (1, 2, 3)]
        solved.append(sum(float(run.metrics["rollout/ep_rew_mean"]) > 0.5 for run in runs))
    assert solved[0] >= 2 and solved[1] == 0, solved


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(partial(make, learning_starts=32, bootstrap_probability=0.5), "CartPole-v1", loop, devices, tmp_path)

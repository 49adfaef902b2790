"""Agents of action values with MultiDiscrete actions: those of the same agent with one Discrete action of all combinations."""

import dataclasses
import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import train
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from polyak.core.types import Rollout, TimeStep
from polyak.networks.feedforward import MLP
from polyak.ops.distributions.combinations import Combinations, combine_mask, ravel_action, unravel_action
from polyak.policies.exploration import Boltzmann, EpsilonGreedy

KEY = jax.random.key(0)
NVEC, OBS = (2, 3, 2), Box([-9.0] * 3, [9.0] * 3)
COMBINATIONS = list(itertools.product(*map(range, NVEC)))
MULTI = EnvSpec(OBS, MultiDiscrete(NVEC), has_action_mask=True)
FLAT = EnvSpec(OBS, Discrete(len(COMBINATIONS)), has_action_mask=True)
SMALL = {"replay": polyak.UniformReplay(512), "batch_size": 16, "learning_starts": 8, "num_steps": 4, "updates_per_step": 0.25}
AGENTS = {
    "dqn": lambda spec: polyak.DQN(spec, network=polyak.MLP((8,)), **SMALL),
    "iqn": lambda spec: polyak.IQN(spec, network=MLP((8, 8)), num_tau=4, num_target_tau=4, num_policy_tau=4, **SMALL),
    "pqn": lambda spec: polyak.PQN(spec, network=polyak.MLP((8,)), num_steps=4, num_minibatches=1, num_epochs=1),
}


def masks(*shape, seed=0):
    """Random masks of parts, each of which allows a choice."""
    random = np.random.default_rng(seed)
    parts = [random.uniform(size=(*shape, n)) < 0.6 for n in NVEC]
    for part in parts:
        part[..., 0] |= ~part.any(-1)
    return np.concatenate(parts, -1)


def allowed(mask):
    """Whether each combination is allowed, one by one."""
    parts = np.split(mask, np.cumsum(NVEC)[:-1], axis=-1)
    rows = [[all(part[i][a] for part, a in zip(parts, c, strict=True)) for c in COMBINATIONS] for i in range(len(mask))]
    return np.array(rows)


def rollout(agent, num_envs=4):
    random, shape = np.random.default_rng(1), (agent.num_steps + 1, num_envs)
    none = jnp.zeros(shape, bool)
    mask = masks(*shape)
    steps = TimeStep(
        jnp.asarray(random.normal(size=(*shape, 3)), jnp.float32),
        jnp.asarray(random.normal(size=shape), jnp.float32),
        none.at[2, 1].set(True),
        none,
        none.at[3, 1].set(True),
        jnp.asarray(mask),
    )
    number = random.integers(0, len(COMBINATIONS), (agent.num_steps, num_envs))
    flat_steps = dataclasses.replace(
        steps, action_mask=jnp.asarray(allowed(mask.reshape(-1, sum(NVEC))).reshape(*shape, len(COMBINATIONS)))
    )
    actions = jnp.asarray(np.array(COMBINATIONS)[number], jnp.int32)
    return Rollout(steps, actions), Rollout(flat_steps, jnp.asarray(number, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("make", [AGENTS["iqn"], AGENTS["pqn"]], ids=["iqn", "pqn"])
def test_updates_and_actions_are_those_of_one_discrete_action(make):
    multi, flat = make(MULTI), make(FLAT)
    states = []
    for agent, steps in zip((multi, flat), rollout(multi), strict=True):
        update, state = jax.jit(agent.update), agent.init(KEY)
        for i in range(2):
            state, _ = update(state, steps, jax.random.key(i))
        states.append(state)
    jax.tree.map(np.testing.assert_array_equal, states[0].copies.online.params, states[1].copies.online.params)
    fresh = make(MULTI).init(KEY).copies.online.params
    assert any(
        not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (fresh, states[0].copies.online.params)), strict=True)
    )
    step, flat_step = (jax.tree.map(lambda x: x[1], r.time_steps) for r in rollout(multi))
    acted = multi.policy(states[0]).action(step, (), KEY).action
    number = flat.policy(states[1]).action(flat_step, (), KEY).action
    np.testing.assert_array_equal(acted, np.array(COMBINATIONS)[np.asarray(number)])


def test_combinations_are_counted_with_the_last_part_fastest_and_masked_by_every_part():
    actions = jnp.array(COMBINATIONS)
    np.testing.assert_array_equal(ravel_action(NVEC, actions), np.arange(len(COMBINATIONS)))
    np.testing.assert_array_equal(unravel_action(NVEC, jnp.arange(len(COMBINATIONS))), actions)
    mask = masks(50)
    np.testing.assert_array_equal(combine_mask(NVEC, jnp.asarray(mask)), allowed(mask))


def test_a_distribution_over_combinations():
    random, mask = np.random.default_rng(2), masks(1)
    logits = random.normal(size=(1, len(COMBINATIONS)))
    weights = np.where(allowed(mask), np.exp(logits), 0)[0]
    p = weights / weights.sum()
    distribution = Combinations(jnp.asarray(logits, jnp.float32), NVEC, jnp.asarray(mask))
    for combination, expected in zip(COMBINATIONS, p, strict=True):
        log_prob = distribution.log_prob(jnp.array([combination]))
        np.testing.assert_allclose(np.exp(log_prob), expected, atol=1e-6)
    np.testing.assert_array_equal(distribution.mode()[0], COMBINATIONS[int(p.argmax())])
    np.testing.assert_allclose(distribution.entropy(), -np.sum(p[p > 0] * np.log(p[p > 0])), rtol=1e-5)
    other = Combinations(jnp.zeros_like(distribution.logits), NVEC, distribution.mask)
    uniform = np.log(1 / (p > 0).sum())
    np.testing.assert_allclose(distribution.kl_divergence(other), np.sum(p[p > 0] * (np.log(p[p > 0]) - uniform)), rtol=1e-4)
    samples = jax.vmap(lambda key: distribution.sample(seed=key))(jax.random.split(KEY, 4_000))[:, 0]
    frequency = np.bincount(ravel_action(NVEC, samples), minlength=len(p)) / len(samples)
    np.testing.assert_allclose(frequency, p, atol=0.04)
    assert (frequency[p == 0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("explore", [lambda policy: EpsilonGreedy(policy, 1.0), lambda policy: Boltzmann(policy, 1e6)])
def test_exploration_draws_uniformly_among_the_allowed_combinations(explore):
    agent = AGENTS["dqn"](MULTI)
    mask = masks(1, seed=5)
    can = allowed(mask)[0]
    assert 1 < can.sum() < len(can)
    size, none = 4_000, jnp.zeros(4_000, bool)
    step = TimeStep(jnp.zeros((size, 3)), jnp.zeros(size), none, none, ~none, jnp.asarray(np.repeat(mask, size, 0)))
    action = explore(agent.policy(agent.init(KEY)).policy).action(step, (), KEY).action
    frequency = np.bincount(ravel_action(NVEC, action), minlength=len(can)) / size
    np.testing.assert_allclose(frequency, can / can.sum(), atol=0.03)
    assert (frequency[~can] == 0).all()


class Locks(gymnasium.Env):
    """Pays for the one combination of two locks; the mask forbids a choice of the first one, which the environment checks."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"action_mask": (np.array([1, 0, 1], np.int8), np.ones(2, np.int8))}

    def step(self, action):
        assert self.action_space.contains(action) and action[0] != 2, action
        reward = float(tuple(action) == (3, 1))
        return *self.reset()[:1], reward, True, False, self.reset()[1]


@pytest.mark.slow
def test_dqn_learns_a_combination_and_never_takes_a_forbidden_one(tmp_path):
    settings = {
        "network": polyak.MLP((16,)),
        "learning_starts": 32,
        "learning_rate": 1e-2,
        "target_period": 10,
        "epsilon": 0.5,
    }
    result = train.run("dqn", Locks, env_steps=600, num_envs=4, settings=settings, run_dir=tmp_path / "run", progress=False)
    policy = polyak.load_policy(tmp_path / "run")
    mask = np.array([1, 0, 1, 1, 1], bool)
    for each in (result.policy, policy):
        np.testing.assert_array_equal(each.predict(np.zeros(1, np.float32), action_mask=mask)[0], [3, 1])


@pytest.mark.parametrize(
    "agent", [polyak.DQN, polyak.C51, polyak.QRDQN, polyak.BootstrappedDQN, polyak.IQN, polyak.PQN, polyak.RNDDQN]
)
def test_too_many_combinations_are_rejected_with_their_number(agent):
    assert agent(EnvSpec(OBS, MultiDiscrete((64, 64)))).spec.action.nvec == (64, 64)
    with pytest.raises(ValueError, match=rf"{agent.__name__}: actions must have at most 4096 combinations, got 4160 of Multi"):
        agent(EnvSpec(OBS, MultiDiscrete((64, 65))))

"""State-dependent exploration: the same state has the same action until the noise is drawn anew, and the density is closed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.ops.distributions import Normal
from polyak.policies import NetworkPolicy, StateDependentExploration
from tests.agents.test_actor_critics import random_rollout

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0] * 2, [1.0] * 2))
NETWORK = polyak.Actor((6,), std="sde", log_std=-0.5)
RNG = np.random.default_rng(0)


def variables(network):
    """σ differs from number to number."""
    found = network.init(KEY, SPEC)
    head = found.params["policy"] | {"log_std": {"all": jnp.asarray(RNG.normal(size=(6, 2)), jnp.float32)}}
    return dataclasses.replace(found, params=found.params | {"policy": head})


VARIABLES = variables(NETWORK)


def policy(sample_freq=None, squash=False):
    return StateDependentExploration(NetworkPolicy(VARIABLES, None, NETWORK, SPEC, squash=squash), sample_freq)


def steps(obs, first=False):
    flags = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs, jnp.float32), jnp.zeros(len(obs)), flags, flags, flags | first)


def features_and_mean(obs):
    params = jax.tree.map(np.asarray, VARIABLES.params)
    layer, head = params["actor"]["dense"]["layers"][0], params["policy"]["linear"]
    z = np.maximum(obs @ layer["kernel"] + layer["bias"], 0.0)
    return z, z @ head["kernel"] + head["bias"], np.exp(params["policy"]["log_std"]["all"])


def test_the_deviation_is_that_of_features_times_sigma():
    obs = RNG.normal(size=(5, 3)).astype(np.float32)
    z, mean, sigma = features_and_mean(obs)
    found, _ = policy().distribution(steps(obs))
    assert isinstance(found, Normal)
    np.testing.assert_allclose(found.loc, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.scale, np.sqrt(z**2 @ sigma**2 + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("squash", [False, True])
def test_actions_are_the_mean_and_the_noise_of_the_state(squash):
    obs = RNG.normal(size=(4, 3)).astype(np.float32)
    z, mean, sigma = features_and_mean(obs)
    acting = policy(squash=squash)
    step = acting.action(steps(obs, first=True), acting.initial_state(4), KEY)
    noise = np.asarray(step.carry.noise)
    wanted = np.array([mean[b] + z[b] @ (sigma * noise[b]) for b in range(4)])
    np.testing.assert_allclose(step.action, np.tanh(wanted) if squash else wanted, rtol=1e-4, atol=1e-5)


def test_actions_have_the_distribution_over_all_draws():
    count, obs = 20_000, np.array([[0.5, -1.0, 2.0]], np.float32)
    acting, many = policy(), np.repeat(obs, 20_000, axis=0)
    actions = np.asarray(acting.action(steps(many, first=True), acting.initial_state(count), KEY).action)
    found, _ = acting.distribution(steps(obs))
    np.testing.assert_allclose(actions.mean(0), found.loc[0], atol=4 * float(found.scale.max()) / count**0.5)
    np.testing.assert_allclose(actions.std(0), found.scale[0], rtol=0.03)


@pytest.mark.parametrize(("sample_freq", "changes"), [(None, []), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_the_same_state_has_the_same_action_until_the_noise_is_drawn_anew(sample_freq, changes):
    acting = policy(sample_freq)
    carry, actions = acting.initial_state(1), []
    for number in range(7):
        step = acting.action(steps([[1.0, 2.0, -1.0]]), carry, jax.random.fold_in(KEY, number))
        carry = step.carry
        actions.append(np.asarray(step.action))
    assert [i for i in range(1, 7) if not np.array_equal(actions[i], actions[i - 1])] == changes


def test_an_episode_that_begins_draws_its_own_noise():
    acting = policy()
    carry = acting.action(steps(np.ones((2, 3)), first=True), acting.initial_state(2), KEY).carry
    begins = dataclasses.replace(steps(np.ones((2, 3))), first=jnp.array([False, True]))
    after = acting.action(begins, carry, jax.random.key(1)).carry
    assert np.array_equal(after.noise[0], carry.noise[0]) and not np.array_equal(after.noise[1], carry.noise[1])
    assert after.steps.tolist() == [1, 0]


def sigma_of(online):
    return online.params["policy"]["log_std"]["all"]


def make(spec=SPEC, agent=polyak.SAC, **settings):
    small = {
        "actor": NETWORK,
        "critics": polyak.Critics((8,)),
        "replay": polyak.UniformReplay(512),
        "batch_size": 16,
        "learning_starts": 0,
    }
    return agent(spec, **{**small, "sde_sample_freq": 4, "num_steps": 4, "updates_per_step": 0.5, **settings})


@pytest.mark.slow
def test_sac_learns_sigma():
    agent = make()
    state, metrics = jax.jit(agent.update)(agent.init(KEY), random_rollout(agent), KEY)
    before, after = (sigma_of(s.copies.actor.online) for s in (agent.init(KEY), state))
    assert int(metrics["train/skipped_steps"]) == 0 and not np.array_equal(before, after)
    assert isinstance(agent.collect_policy(state).policy, StateDependentExploration)


@pytest.mark.slow
def test_sac_with_state_dependent_exploration_trains_in_both_loops():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=4, action_scaling="rescale")
    agent = make(env.spec, learning_starts=32, updates_per_step=0.25)
    results = [loop(agent, env, env_steps=128, key=KEY) for loop in (loops.compiled, loops.host)]
    assert int(results[0].state.updates) > 0
    for a, b in zip(*(jax.tree.leaves(r.state.copies) for r in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("agent", [polyak.SAC, polyak.TD3, polyak.TQC])
def test_default_actors_follow_the_setting(agent):
    assert agent(SPEC, sde_sample_freq=8).actor == polyak.Actor(std="sde", log_std=-3.0)


@pytest.mark.parametrize("agent", [polyak.PPO, polyak.A2C])
def test_default_networks_follow_the_setting(agent):
    assert agent(SPEC, sde_sample_freq=4).network == polyak.MLP(head=polyak.PolicyAndValue(std="sde"))


def test_td3_explores_by_the_state_and_keeps_sigma():
    agent = make(agent=polyak.TD3)
    state, metrics = jax.jit(agent.update)(agent.init(KEY), random_rollout(agent), KEY)
    before, after = (s.copies.actor.online for s in (agent.init(KEY), state))
    assert int(metrics["train/skipped_steps"]) == 0
    np.testing.assert_array_equal(sigma_of(before), sigma_of(after))
    assert not np.array_equal(before.params["policy"]["linear"]["kernel"], after.params["policy"]["linear"]["kernel"])
    explorer = agent.collect_policy(state).policy
    assert isinstance(explorer, StateDependentExploration) and explorer.policy.squash and explorer.sample_freq == 4


def test_log_probabilities_of_actor_critics_are_those_of_stable_baselines3():
    """Normal(μ, √(z² · σ² + 1e-6)), whose gradient reaches the features z by μ alone: `learn_features=False`."""
    network = polyak.MLP((6,), head=polyak.PolicyAndValue(std="sde"))
    params = jax.tree.map(np.asarray, variables(network).params)
    obs, action = (RNG.normal(size=(5, n)).astype(np.float32) for n in (3, 2))

    def log_prob(params):
        found = dataclasses.replace(network.init(KEY, SPEC), params=params)
        distribution, _ = NetworkPolicy(found, None, network, SPEC).distribution(steps(obs))
        return distribution.log_prob(jnp.asarray(action)).sum()

    found, gradient = jax.value_and_grad(log_prob)(jax.tree.map(jnp.asarray, params))
    layer, head = params["actor"]["dense"]["layers"][0], params["policy"]["linear"]
    sigma = np.exp(params["policy"]["log_std"]["all"])
    z = np.tanh(obs @ layer["kernel"] + layer["bias"])
    error = action - z @ head["kernel"] - head["bias"]
    variance = z**2 @ sigma**2 + 1e-6
    np.testing.assert_allclose(found, np.sum(-0.5 * (error**2 / variance + np.log(2 * np.pi * variance))), rtol=1e-4)
    of_variance = 0.5 * (error**2 / variance - 1) / variance
    np.testing.assert_allclose(gradient["policy"]["log_std"]["all"], 2 * sigma**2 * (z.T**2 @ of_variance), rtol=2e-4)
    of_features = (error / variance) @ head["kernel"].T
    wanted = obs.T @ (of_features * (1 - z**2))
    np.testing.assert_allclose(gradient["actor"]["dense"]["layers"][0]["kernel"], wanted, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_ppo_learns_the_same_from_values_of_acting_and_of_updating():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=2)
    settings = {"num_steps": 8, "num_minibatches": 2, "num_epochs": 1, "normalize_reward": "return"}
    results = []
    for values_when in ("collect", "update"):
        agent = polyak.PPO(
            env.spec,
            polyak.MLP((4,), head=polyak.PolicyAndValue(std="sde", log_std=-1.0)),
            sde_sample_freq=4,
            values_when=values_when,
            **settings,
        )
        results.append(loops.compiled(agent, env, env_steps=32, key=KEY).state.copies.online)
    assert not np.array_equal(sigma_of(results[0]), np.full((4, 1), -1.0, np.float32))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(sde_sample_freq=None), "sde_sample_freq must be set with a network"),
        (lambda: make(actor=polyak.Actor((8,))), "sde_sample_freq must be set with a network"),
        (lambda: make(sde_sample_freq=0), "sde_sample_freq"),
        (lambda: make(EnvSpec(SPEC.obs, Discrete(2))), "sde_sample_freq must be None unless the action is one Box, got 4 with"),
        (lambda: NETWORK.init(KEY, EnvSpec(SPEC.obs, Discrete(2))), "std='sde' needs an action that is one Box"),
        (lambda: polyak.LSTM(head=polyak.PolicyAndValue(std="sde")), "std must be"),
        (lambda: make(agent=polyak.TQC, sde_sample_freq=None), "sde_sample_freq must be set with a network"),
        (lambda: make(agent=polyak.TD3, exploration_noise=0.2), "exploration_noise has no effect with sde_sample_freq"),
        (
            lambda: polyak.PPO(SPEC, sde_sample_freq=4, network=polyak.MLP(head=polyak.PolicyAndValue())),
            "sde_sample_freq must be set with a network",
        ),
        (
            lambda: polyak.A2C(SPEC, network=polyak.MLP(head=polyak.PolicyAndValue(std="sde"))),
            "sde_sample_freq must be set with a network",
        ),
        (
            lambda: polyak.IMPALA(SPEC, network=polyak.MLP(head=polyak.PolicyAndValue(std="sde"))),
            "IMPALA: has no state-dependent exploration",
        ),
        (
            lambda: polyak.DDPG(dataclasses.replace(SPEC, action_scaling="rescale"), actor=polyak.Actor(std="sde")),
            "DDPG: has no state-dependent exploration",
        ),
        (
            lambda: polyak.BC(SPEC, polyak.Actor(std="sde"), replay=polyak.UniformReplay(64)),
            "BC: has no state-dependent exploration",
        ),
        (
            lambda: StateDependentExploration(NetworkPolicy(VARIABLES, None, polyak.Actor((6,)), SPEC)),
            "the network must have std='sde'",
        ),
    ],
)
def test_settings_are_checked(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()

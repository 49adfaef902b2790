"""Noise on parameters: actions against a network whose parameters are changed by hand, when noise is new, and the pace of σ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.policies import NetworkPolicy, ParameterNoise
from polyak.policies.parameter_noise import PERIOD, _adapt
from polyak.presets import preset
from tests.agents.test_crossq import Aim, AutoReset

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0] * 2, [1.0] * 2))
NETWORK = polyak.Actor((6,), std="fixed", norm="layer")
VARIABLES = NETWORK.init(KEY, SPEC)
RNG = np.random.default_rng(0)
VALUES = polyak.MLP((4,), head=polyak.QValues())
AGENTS = {"ddpg": polyak.DDPG, "td3": polyak.TD3}


def noisy(delta=0.2):
    return ParameterNoise(NetworkPolicy(VARIABLES, None, NETWORK, SPEC, squash=True, is_deterministic=True), delta)


act = jax.jit(lambda policy, step, carry, key: policy.action(step, carry, key))


def steps(obs, first=False, last=False):
    flags = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs, jnp.float32), jnp.zeros(len(obs)), flags | last, flags, flags | first)


def mode(params, obs):
    (out, _), _, _ = NETWORK.apply(dataclasses.replace(VARIABLES, params=params), jnp.asarray(obs, jnp.float32))
    return np.tanh(np.asarray(out["loc"]))


def test_each_environment_acts_by_its_own_parameters():
    policy, obs = noisy(), RNG.normal(size=(3, 3))
    step = act(policy, steps(obs, first=True), policy.initial_state(3), KEY)
    vector, unravel = ravel_pytree(VARIABLES.params)
    np.testing.assert_array_equal(step.carry.std, np.float32([0.2] * 3))
    for row in range(3):
        noise = 0.2 * step.carry.noise[row]
        np.testing.assert_allclose(step.action[row], mode(unravel(vector + noise), obs[row : row + 1])[0], rtol=1e-5, atol=1e-6)
    leaves = jax.tree_util.tree_leaves_with_path(unravel(step.carry.noise[0]))
    norms = [np.abs(x).max() for path, x in leaves if "norm" in jax.tree_util.keystr(path)]
    others = [np.abs(x).min() for path, x in leaves if "norm" not in jax.tree_util.keystr(path)]
    assert norms == [0.0, 0.0] and len(others) == 4 and min(others) > 0
    assert 0.8 < np.std(np.asarray(step.carry.noise)[:, np.asarray(policy._has_noise)]) < 1.2


def test_noise_is_new_where_an_episode_begins_and_nowhere_else():
    policy, obs = noisy(), np.ones((2, 3))
    steady = act(policy, steps(obs), policy.initial_state(2), KEY)
    again = act(policy, steps(obs), steady.carry, jax.random.key(1))
    np.testing.assert_array_equal(again.action, steady.action)
    begins = dataclasses.replace(steps(obs), first=jnp.array([False, True]))
    after = act(policy, begins, again.carry, jax.random.key(2))
    np.testing.assert_array_equal(after.action[0], steady.action[0])
    assert not np.array_equal(after.action[1], steady.action[1]) and not np.array_equal(steady.action[0], steady.action[1])


def test_sigma_changes_after_50_valid_steps_by_their_distance():
    """Against a slow version; the observation of a step that only resets is NaN."""
    policy = noisy(0.15)
    squares, std = [[] for _ in range(4)], np.float32([0.02, 0.05, 0.5, 1.0])
    carry = dataclasses.replace(policy.initial_state(4), std=jnp.asarray(std))
    for number in range(120):
        obs, last = RNG.normal(size=(4, 3)), np.arange(4) == number % 7
        before = carry
        step = act(policy, steps(np.where(last[:, None], np.nan, obs), last=last), carry, jax.random.fold_in(KEY, number))
        carry = step.carry
        if number == 0:
            before = carry
        action = act(policy, steps(obs), before, KEY).action
        for row in np.flatnonzero(~last):
            squares[row].append(np.mean((np.asarray(action[row]) - mode(VARIABLES.params, obs[row : row + 1])[0]) ** 2))
            if len(squares[row]) == 50:
                std[row] *= 1.01 if np.sqrt(np.mean(squares[row])) <= 0.15 else 1 / 1.01
                squares[row] = []
        np.testing.assert_allclose(carry.std, std, rtol=1e-5)
    assert std[0] > 0.02 and std[3] < 1.0


def test_sigma_is_bounded_where_no_noise_moves_the_actions():
    carry = dataclasses.replace(noisy(0.15).initial_state(2), std=jnp.array([15.0, 1.0]), steps=jnp.full(2, PERIOD - 1))
    np.testing.assert_allclose(_adapt(carry, jnp.zeros(2), jnp.ones(2, bool), 0.15).std, [15.0, 1.01], rtol=1e-6)


def test_layers_of_normalization_are_known_by_their_names():
    """A name that begins with `norm` is none."""
    policy = noisy()

    def flags(*names):
        params = {name: {"x": jnp.zeros(2)} for name in names}
        network = dataclasses.replace(policy.policy, variables=dataclasses.replace(VARIABLES, params=params))
        return dataclasses.replace(policy, policy=network)

    names = {"LayerNorm_0": False, "a_norm": False, "norm": False, "normal_mean": True, "normalizer": True, "norms": False}
    np.testing.assert_array_equal(flags(*names)._has_noise, np.repeat(list(names.values()), 2))
    with pytest.raises(ValueError, match="ParameterNoise: policy must have parameters outside of normalization, got Actor"):
        flags("norm").initial_state(2)


@pytest.mark.slow
def test_sigma_settles_where_actions_differ_by_delta():
    policy = noisy(0.3)

    @jax.jit
    def run(carry):
        def step(carry, key):
            obs_key, first_key, key = jax.random.split(key, 3)
            time_step = steps(jax.random.normal(obs_key, (16, 3)), first=jax.random.bernoulli(first_key, 0.05, (16,)))
            step = policy.action(time_step, carry, key)
            distance = jnp.square(step.action - policy.policy.distribution(time_step)[0].mode()).mean()
            return step.carry, distance

        return jax.lax.scan(step, carry, jax.random.split(KEY, 6_000))

    for std in (0.1, 0.3):
        _, distances = run(dataclasses.replace(policy.initial_state(16), std=jnp.full(16, std)))
        first, last = (np.sqrt(np.mean(part)) for part in (distances[:300], distances[-2_000:]))
        # A little above: the mean of squares is of a few noises at a time, of which most are below it.
        assert abs(last - 0.31) < 0.03 and abs(first - 0.31) > 0.1


def make(name, spec=SPEC, **settings):
    small = {"critics": polyak.Critics((8,), num_critics=1 if name == "ddpg" else 2), "num_steps": 4, "updates_per_step": 0.5}
    small |= {"batch_size": 16, "learning_starts": 0, "replay": polyak.UniformReplay(512), "parameter_noise": 0.2}
    return AGENTS[name](spec, **{**small, **settings})


@pytest.mark.parametrize("name", AGENTS)
def test_agents_explore_by_it_in_place_of_noise_on_actions(name):
    agent = make(name)
    assert agent.actor == polyak.Actor(std="fixed", norm="layer") and make(name, parameter_noise=None).actor.norm is None
    explorer = agent.collect_policy(agent.init(KEY)).policy
    assert type(explorer) is ParameterNoise and explorer.delta == 0.2
    assert type(make(name, parameter_noise=None).collect_policy(agent.init(KEY)).policy) is not ParameterNoise
    with pytest.raises(ValueError, match=f"{AGENTS[name].__name__}: exploration_noise has no effect with parameter_noise"):
        make(name, exploration_noise=0.3)
    settings = preset(name, "Pendulum-v1").settings(1_000, {"parameter_noise": 0.1})
    assert "exploration_noise" not in settings and AGENTS[name](SPEC, **settings).actor.norm == "layer"


def test_wrong_policies_are_rejected():
    categorical = EnvSpec(SPEC.obs, Discrete(2))
    values = NetworkPolicy(VALUES.init(KEY, categorical), None, VALUES, categorical)
    with pytest.raises(ValueError, match="ParameterNoise: actions must be Box, got Discrete"):
        ParameterNoise(values)
    with pytest.raises(TypeError, match="ParameterNoise: policy must be a NetworkPolicy without a recurrent network, got"):
        ParameterNoise(polyak.policies.Uniform(SPEC))
    with pytest.raises(ValueError, match="ParameterNoise: delta must be a number"):
        noisy(0.0)


@pytest.mark.slow
def test_it_finds_the_best_action():
    env = AutoReset(Aim(), 8)
    agent = make("td3", env.spec, actor=polyak.Actor((32,), std="fixed", norm="layer"), batch_size=32, learning_starts=64,
        critics=polyak.Critics((32,)), learning_rate=1e-2, num_steps=1,
        replay=polyak.UniformReplay(16_000))  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=3_000, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    np.testing.assert_allclose(agent.policy(state).predict(obs)[0], 0.5 * obs, atol=0.1)

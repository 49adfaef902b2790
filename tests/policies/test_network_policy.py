"""Policies: sampling, the greedy action, what is remembered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Policy, TimeStep, Variables
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU, LSTM
from polyak.ops.distributions import TanhNormal
from polyak.ops.normalize import ObsNormalizer
from polyak.ops.returns import running_return
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.numpy_policies import numpy_actor
from tests.agents.rollouts import rollout, same_bits

KEY = jax.random.key(0)
VECTOR = Box([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0])
SPEC = EnvSpec(VECTOR, Discrete(4, start=2))


BOX = EnvSpec(VECTOR, Box([-2.0, 0.0], [2.0, 6.0]))


@functools.cache
def fresh(network, spec):
    return jax.eval_shape(lambda key: network.init(key, spec), KEY)


def policy_for(spec, scale=1.0, network=MLP((5,), head=PolicyAndValue()), **settings):  # noqa: B008
    """A policy with random parameters, so that different observations have different actions."""
    variables = fresh(network, spec)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray((scale * rng.normal(size=x.shape)).astype(x.dtype)), variables.params)
    return NetworkPolicy(dataclasses.replace(variables, params=params), None, network, spec, **settings)


def time_step(obs, mask=None, first=None):
    size = len(jax.tree.leaves(obs)[0])
    no = jnp.zeros(size, bool)
    return TimeStep(obs, jnp.zeros(size), no, no, no if first is None else jnp.asarray(first), mask)


def greedy(spec):
    return Greedy(policy_for(spec))


# Compiled, as they are used; and one compilation is quicker than one for each operation.


@jax.jit
def act(policy, now, carry):
    return policy.action(now, carry, KEY)


@jax.jit
def said(policy, obs, carry):
    return policy.network.apply(policy.variables, obs, carry)


@jax.jit
def modes(policy, now, carry):
    return policy.distribution(now, carry)[0].mode()


@jax.jit
def normalizer_of(obs):
    return ObsNormalizer.init(VECTOR).update(obs, jnp.ones(len(obs)))


def test_policies_implement_the_policy_protocol():
    policy = policy_for(SPEC)
    for one in (policy, Greedy(policy), DiscountedReturn(policy, 0.9)):
        assert isinstance(one, Policy)
        assert jax.tree.structure(jax.tree.map(lambda x: x, one)) == jax.tree.structure(one)
    assert policy.initial_state(3) == ()


def test_the_greedy_action_is_the_most_probable_one():
    policy = policy_for(SPEC)
    obs = jnp.asarray(np.random.default_rng(1).normal(size=(20, 3)), jnp.float32)
    (logits, _), _, _ = said(policy, obs, ())
    assert np.array_equal(Greedy(policy).predict(np.asarray(obs))[0], np.argmax(logits, -1) + 2)
    step = act(Greedy(policy), time_step(obs), ())
    distribution, _ = Greedy(policy).distribution(time_step(obs))
    assert np.array_equal(step.action, np.argmax(logits, -1)) and np.array_equal(distribution.sample(seed=KEY), step.action)


def test_observations_are_normalised_as_in_training():
    policy = policy_for(SPEC)
    obs = np.random.default_rng(0).normal(3.0, 2.0, (100, 3)).astype(np.float32)
    normalised = dataclasses.replace(policy, normalizer=normalizer_of(obs))
    by_hand = ((obs - obs.mean(0)) / obs.std(0)).astype(np.float32)
    assert np.array_equal(Greedy(normalised).predict(obs)[0], Greedy(policy).predict(by_hand)[0])


def test_the_discounted_return_is_kept_per_environment_and_begins_with_an_episode():
    gamma = 0.5
    data = rollout(SPEC, 3, num_steps=12, num_envs=3, ends=0.2)
    steps = data.time_steps
    slow, now = [], np.array([1.0, -2.0, 0.0])
    for t in range(13):
        now = np.where(steps.first[t], 0.0, steps.reward[t] + gamma * now)
        slow.append(now)
    before = jnp.array([1.0, -2.0, 0.0])
    fast = running_return(jnp.asarray(steps.reward), jnp.asarray(steps.first), before, gamma=gamma)
    np.testing.assert_allclose(fast, np.array(slow), atol=1e-6)

    policy = DiscountedReturn(policy_for(SPEC), gamma)
    carry = ((), before)
    for t in range(3):
        one = jax.tree.map(lambda x, t=t: jnp.asarray(x[t]), steps)
        acted = act(policy, one, carry)
        carry = acted.carry
        assert np.array_equal(acted.action, act(policy.policy, one, ()).action)
        np.testing.assert_allclose(carry[1], slow[t], atol=1e-6)


def test_every_collecting_policy_predicts():
    inner = policy_for(SPEC)
    assert DiscountedReturn(inner, 0.9).predict(np.ones(3)) == inner.predict(np.ones(3))


REMEMBERS = {
    "lstm": LSTM(3, hidden=(2,), head=PolicyAndValue()),
    "gru": GRU(3, hidden=(2,), head=PolicyAndValue(shared_torso=True)),
}
each_memory = pytest.mark.parametrize("network", REMEMBERS.values(), ids=REMEMBERS.keys())


@each_memory
def test_carry_is_reset_between_episodes(network):
    policy = policy_for(SPEC, network=network)
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), jnp.float32)
    initial = policy.initial_state(2)
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, network.initial_carry(2))

    @jax.jit
    def act(first, obs, carry):
        distribution, after = policy.distribution(time_step(obs, first=first), carry)
        step = policy.action(time_step(obs, first=first), carry, KEY)
        return distribution.logits, after, step.carry

    carry = initial
    for t in range(3):
        _, carry, same = act(jnp.array([t == 0, t == 0]), obs[t], carry)
        assert same_bits(carry, same)
    (logits, _, _), (anew, _, _) = act(jnp.array([True, False]), obs[3], carry), act(jnp.array([True, True]), obs[3], initial)
    assert np.array_equal(logits[0], anew[0]) and not np.allclose(logits[1], anew[1])
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), carry)
    assert same_bits(act(jnp.array([True, False]), obs[3], broken)[0], logits)


@each_memory
def test_wrappers_pass_the_carry_through(network):
    policy = policy_for(SPEC, network=network)
    obs = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 3)), jnp.float32)
    wrapped, nested = Greedy(policy), DiscountedReturn(policy, 0.9)
    plain, greedy_carry, pair = policy.initial_state(2), wrapped.initial_state(2), nested.initial_state(2)
    for t in range(3):
        now = time_step(obs[t], first=np.full(2, t == 0))
        expected = act(policy, now, plain)
        best, step = act(wrapped, now, greedy_carry), act(nested, now, pair)
        mode = modes(policy, now, plain)
        plain, greedy_carry, pair = expected.carry, best.carry, step.carry
        assert np.array_equal(step.action, expected.action) and np.array_equal(best.action, mode)
        assert same_bits(pair[0], plain) and same_bits(greedy_carry, plain) and pair[1].shape == (2,)
    assert jax.tree.structure(pair) == jax.tree.structure(nested.initial_state(2))


@pytest.mark.parametrize("network", [MLP((5,), head=PolicyAndValue()), REMEMBERS["gru"]], ids=["mlp", "gru"])
def test_return_info_stores_value_and_params(network):
    policy = policy_for(BOX, network=network, return_info=True)
    obs = jnp.ones((4, 3))
    now, carry = time_step(obs, first=np.ones(4, bool)), policy.initial_state(4)
    step = act(policy, now, carry)
    (params, value), _, _ = said(policy, obs, carry)
    assert same_bits(step.info, {"value": value, "params": params}) and value.shape == (4,)
    outer = act(DiscountedReturn(policy, 0.9), now, (carry, jnp.zeros(4)))
    assert same_bits(outer.info, step.info) and same_bits(outer.action, step.action)
    without = act(dataclasses.replace(policy, return_info=False), now, carry)
    assert without.info == () and same_bits(without.action, step.action)


def test_squashed_actions_lie_between_minus_one_and_one_and_reach_the_bounds():
    spec = EnvSpec(VECTOR, BOX.action, action_scaling="rescale")
    policy = policy_for(spec, squash=True)
    obs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    now = time_step(jnp.asarray(obs))
    distribution, sample = jax.jit(lambda policy, now: (d := policy.distribution(now, ())[0], d.sample(seed=KEY)))(policy, now)
    assert isinstance(distribution, TanhNormal)
    drawn = act(policy, now, ()).action
    assert same_bits(drawn, sample) and np.abs(drawn).max() <= 1.0
    native, _ = policy.predict(obs, deterministic=False, key=KEY)
    np.testing.assert_allclose(native, np.asarray(drawn) * [2, 3] + [0, 3], atol=1e-5)


def test_numpy_acting_is_limited_to_supported_networks():
    def suits(network=MLP((5,), head=PolicyAndValue()), **settings):  # noqa: B008
        policy = NetworkPolicy(Variables({}), None, network, BOX, **settings)
        is_small = numpy_actor(policy, 2) is not None
        assert is_small == (numpy_actor(DiscountedReturn(policy, 0.9), 2) is not None)
        return is_small

    assert suits() and suits(squash=True) and suits(MLP((5,), head=PolicyAndValue(squash_mean=True)))
    assert suits(return_info=True) and not suits(MLP((5,), head=PolicyAndValue(value_hidden=(1024, 1024))), return_info=True)
    assert not suits(REMEMBERS["lstm"]) and not suits(MLP((5,), head=PolicyAndValue(std="state")))

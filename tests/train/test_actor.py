"""Both ways of acting: their actions are the policy's, and no more than needed is handed over."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.networks.actor_critic import mlp
from polyak.train.actor import Jitted, NumPyActor, acting
from polyak.train.loop import initial, iteration_keys
from polyak.train.philox import philox_key

NUM_ENVS, NUM_STEPS = 8, 5
OBS = Box([-9.0] * 3, [9.0] * 3)
ACTIONS = {
    "discrete": Discrete(3),
    "many": Discrete(40),
    "box": Box([-1.0] * 2, [1.0] * 2),
    "wide": Box([-1.0, 0.0], [7.0, 1.0]),
    "matrix": Box(-np.ones((2, 2)), np.ones((2, 2))),
}
pytestmark = pytest.mark.usefixtures("unchecked")


def time_step(rng, obs=OBS):
    flags = rng.random((3, NUM_ENVS)) < 0.3
    reward = np.where(flags[2], 0, rng.normal(size=NUM_ENVS)).astype(np.float32)
    return TimeStep(3 * rng.normal(size=(NUM_ENVS, *obs.shape)).astype(np.float32), reward, *flags)


seen_by = jax.jit(lambda normalizer, obs: normalizer.update(obs, jnp.ones(50)))


def started(agent, rng):
    """A loop's state with weights and statistics that are not those of the beginning."""
    state = initial(agent, NUM_ENVS, jax.random.key(3), (), jax.tree.map(jnp.asarray, time_step(rng)))
    fresh = state.agent
    larger = jax.tree.map(lambda x: jnp.asarray(3 * np.asarray(x) + np.float32(0.1)), fresh.variables.params)
    grown = dataclasses.replace(fresh.variables, params=larger)
    normalizer = fresh.normalizer
    if normalizer is not None:
        normalizer = seen_by(normalizer, jnp.asarray(2 + 5 * rng.normal(size=(50, 3)), jnp.float32))
    return dataclasses.replace(state, agent=dataclasses.replace(fresh, variables=grown, normalizer=normalizer))


@jax.jit
def policy_step(agent, state, t, now, carry):
    """What the policy itself answers at step t."""
    words = iteration_keys(state.key, state.iteration, agent.num_steps).act[t]
    return agent.collect_policy(state.agent).action(now, carry, philox_key(words))


def agent_for(action, *, action_scaling="clip", network=mlp((16, 8)), **settings):  # noqa: B008
    spec = EnvSpec(OBS, action, action_scaling=action_scaling)
    return PPO(spec, num_steps=NUM_STEPS, num_minibatches=1, network=network, **settings)


@pytest.mark.parametrize(
    ("action", "settings", "exact"),
    [
        *((action, {}, False) for action in ACTIONS),
        *((action, {"normalize_obs": True, "normalize_reward": "return"}, False) for action in ("discrete", "box")),
        ("discrete", {"network": mlp((16,), "relu")}, False),
        *(("wide", {"network": mlp((16,), squash_mean=True), "action_scaling": s}, False) for s in ("clip", "rescale")),
        *((action, {"squash": True, "action_scaling": "rescale"}, False) for action in ("wide", "matrix")),
        ("discrete", {}, True),
        ("box", {"normalize_obs": True, "normalize_reward": "return"}, True),
    ],
)
def test_both_ways_give_the_policys_actions_and_carry(action, settings, exact):
    rng = np.random.default_rng(0)
    agent = agent_for(ACTIONS[action], **settings)
    state = started(agent, rng)
    how = acting(agent, state, None, exact=exact)
    assert isinstance(how, Jitted if exact else NumPyActor)
    act, carry, its_carry = how.rollout(agent, state), jax.tree.map(np.asarray, state.carry), state.carry
    for t in range(NUM_STEPS):
        now = time_step(rng)
        acted, wanted = act(t, now, carry), policy_step(agent, state, t, now, its_carry)
        carry, its_carry = acted.carry, wanted.carry
        assert acted.action.dtype == wanted.action.dtype and acted.action.shape == wanted.action.shape
        np.testing.assert_allclose(acted.action, wanted.action, rtol=2e-5, atol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), carry, its_carry)


def test_the_next_rollout_has_the_next_keys_and_the_weights_of_its_state():
    rng = np.random.default_rng(1)
    agent = agent_for(ACTIONS["box"])
    first, now = started(agent, rng), time_step(rng)
    how = acting(agent, first, None, exact=False)
    before = how.rollout(agent, first)(0, now, ()).action
    second = dataclasses.replace(first, iteration=first.iteration + jnp.uint32(1))
    after = how.rollout(agent, second)(0, now, ()).action
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, policy_step(agent, second, 0, now, ()).action, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("agent", "num_envs"),
    [
        (agent_for(ACTIONS["box"], network=mlp((16,), "gelu")), 8),
        (agent_for(ACTIONS["box"], network=mlp((256, 256))), 8),
        (agent_for(ACTIONS["box"], network=mlp(())), 8),
        (PPO(EnvSpec(OBS, Discrete(2), has_action_mask=True), num_minibatches=1), 8),
        (PPO(EnvSpec(Discrete(5), Discrete(2)), num_minibatches=1), 8),
        (
            PPO(
                EnvSpec(Box(np.zeros((40, 40, 3), np.uint8), np.full((40, 40, 3), 255, np.uint8)), Discrete(2)),
                num_minibatches=1,
            ),
            8,
        ),
    ],
    ids=["activation", "large", "linear", "mask", "integers", "image"],
)
def test_what_numpy_has_no_form_of_or_is_slow_at_is_jitted(agent, num_envs):
    policy = jax.eval_shape(lambda key: agent.collect_policy(agent.init(key)), jax.random.key(0))
    assert not policy.suits_numpy(num_envs)


def test_a_nan_observation_still_gives_an_action_of_the_space():
    rng = np.random.default_rng(2)
    agent = agent_for(ACTIONS["discrete"])
    state, now = started(agent, rng), time_step(rng)
    now.obs[3] = np.nan
    action = acting(agent, state, None, exact=False).rollout(agent, state)(0, now, ()).action
    assert np.all((action >= 0) & (action < 3))


@pytest.mark.parametrize(
    ("agent", "sees"),
    [
        (agent_for(ACTIONS["box"]), ("obs",)),
        (agent_for(ACTIONS["box"], normalize_reward="return"), ("obs", "reward", "first")),
        (PPO(EnvSpec(OBS, Discrete(2), has_action_mask=True), num_steps=NUM_STEPS, num_minibatches=1), ("obs", "action_mask")),
    ],
    ids=["plain", "rewards", "mask"],
)
def test_a_jitted_policy_is_handed_only_what_it_reads(agent, sees):
    now = time_step(np.random.default_rng(4))
    if agent.spec.has_action_mask:
        now = dataclasses.replace(now, action_mask=np.ones((NUM_ENVS, 2), bool))
    state = initial(agent, NUM_ENVS, jax.random.key(3), (), jax.tree.map(jnp.asarray, now))
    assert Jitted(agent, state, None)._sees == tuple(sorted(sees))


def test_preparing_a_long_rollout_is_a_program_of_a_few_results():
    # With one for each step, 2,048 steps compiled for minutes and took 3 GB.
    rng = np.random.default_rng(3)
    agent = dataclasses.replace(agent_for(ACTIONS["box"]), num_steps=200)
    state = started(agent, rng)
    how = acting(agent, state, None, exact=True)
    assert len(jax.tree.leaves(jax.eval_shape(how._prepare, agent, state))) < 10
    act, now = how.rollout(agent, state), time_step(rng)
    np.testing.assert_allclose(act(199, now, ()).action, policy_step(agent, state, 199, now, ()).action, rtol=2e-5, atol=2e-6)

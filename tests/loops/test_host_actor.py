"""Both actors take the policy's actions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete
from polyak.core.struct import struct
from polyak.core.types import TimeStep
from polyak.loops import rollout_actors
from polyak.loops.host_actor import acts_in_numpy, choose_actors, make_actor, step_keys
from polyak.loops.host_loop import start_host
from polyak.loops.loop import initial, iteration_keys
from polyak.loops.rollout_actors import RolloutActors, rollout_actor
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.ops.schedules import StepCount
from polyak.policies.exploration import EpsilonGreedy
from tests.agents.rollouts import with_online

NUM_ENVS, NUM_STEPS = 8, 5
OBS = Box([-9.0] * 3, [9.0] * 3)
ACTIONS = {
    "discrete": Discrete(3),
    "many": Discrete(40),
    "box": Box([-1.0] * 2, [1.0] * 2),
    "wide": Box([-1.0, 0.0], [7.0, 1.0]),
    "matrix": Box(-np.ones((2, 2)), np.ones((2, 2))),
}
NARROW = {polyak.SAC: polyak.Actor((16,)), polyak.TD3: polyak.Actor((16,), std="fixed")}
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
    larger = jax.tree.map(lambda x: jnp.asarray(3 * np.asarray(x) + np.float32(0.1)), fresh.copies.online.params)
    grown = dataclasses.replace(fresh.copies.online, params=larger)
    normalizer = fresh.obs_normalizer
    if normalizer is not None:
        normalizer = seen_by(normalizer, jnp.asarray(2 + 5 * rng.normal(size=(50, 3)), jnp.float32))
    return dataclasses.replace(state, agent=dataclasses.replace(with_online(fresh, grown), obs_normalizer=normalizer))


@jax.jit
def policy_step(agent, state, t, now, carry):
    """The policy's own step at time t."""
    key = jax.random.fold_in(iteration_keys(state.key, state.iteration, agent.num_steps).act, t)
    return agent.collect_policy(state.agent).action(now, carry, key)


def agent_for(action, *, action_scaling="clip", network=MLP((16, 8), head=PolicyAndValue()), **settings):  # noqa: B008
    spec = EnvSpec(OBS, action, action_scaling=action_scaling)
    return PPO(spec, num_steps=NUM_STEPS, num_minibatches=1, network=network, **settings)


@pytest.mark.parametrize(
    ("action", "settings", "exact"),
    [
        *((action, {}, False) for action in ACTIONS),
        *((action, {"normalize_obs": True, "normalize_reward": "return"}, False) for action in ("discrete", "box")),
        ("discrete", {"network": MLP((16,), activation="relu")}, False),
        *(
            ("wide", {"network": MLP((16,), head=PolicyAndValue(squash_mean=True)), "action_scaling": s}, False)
            for s in ("clip", "rescale")
        ),
        *((action, {"squash": True, "action_scaling": "rescale"}, False) for action in ("wide", "matrix")),
        *((action, {"values_when": "collect"}, False) for action in ("discrete", "matrix")),
        ("discrete", {"values_when": "collect", "normalize_obs": True, "normalize_reward": "return"}, False),
        ("box", {"values_when": "collect", "network": MLP((16,), head=PolicyAndValue(shared_torso=True))}, False),
        (
            "box",
            {
                "values_when": "collect",
                "network": MLP((16,), head=PolicyAndValue(value_hidden=(8, 4), value_activation="relu")),
            },
            False,
        ),
        ("wide", {"values_when": "collect", "network": MLP((16,), head=PolicyAndValue(squash_mean=True))}, False),
        ("discrete", {}, True),
        ("box", {"normalize_obs": True, "normalize_reward": "return"}, True),
    ],
)
def test_both_actors_give_the_policys_actions_carry_and_info(action, settings, exact):
    rng = np.random.default_rng(0)
    agent = agent_for(ACTIONS[action], **settings)
    state = started(agent, rng)
    actors = RolloutActors(agent, state, None, jax.tree.leaves(agent), exact=exact)
    assert actors.inputs.actors.in_numpy == (not exact)
    act = actors.from_state(jax.tree.leaves(state))
    carry, its_carry = jax.tree.map(np.asarray, state.carry), state.carry
    for t in range(NUM_STEPS):
        now = time_step(rng)
        acted, wanted = act(t, now, carry), policy_step(agent, state, t, now, its_carry)
        carry, its_carry = acted.carry, wanted.carry
        assert acted.action.dtype == wanted.action.dtype and acted.action.shape == wanted.action.shape
        np.testing.assert_allclose(acted.action, wanted.action, rtol=2e-5, atol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), carry, its_carry)
        assert jax.tree.map(np.shape, acted.info) == jax.tree.map(np.shape, wanted.info)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), acted.info, wanted.info)


STEEP = polyak.Actor((16, 8), clip_mean=0.5, log_std=-1.0)


@pytest.mark.parametrize(
    ("kind", "action", "settings", "is_over"),
    [
        (polyak.SAC, "box", {}, False),
        (polyak.SAC, "matrix", {"actor": STEEP, "normalize_obs": True, "normalize_reward": "return"}, True),
        (polyak.SAC, "wide", {"actor": polyak.Actor((8,), std="free")}, True),
        (polyak.TD3, "wide", {"exploration_noise": polyak.Linear(1.0, 0.0, 80), "normalize_obs": True}, True),
        (polyak.TD3, "matrix", {"actor": polyak.Actor((8,), std="fixed"), "exploration_noise": 0.5}, False),
    ],
)
def test_actors_of_replay_agents_act_in_numpy(kind, action, settings, is_over):
    """With random actions until learning starts, and after that."""
    rng = np.random.default_rng(0)
    small = {"critics": polyak.Critics((4,)), "replay": polyak.UniformReplay(64), "learning_starts": 50, "num_steps": NUM_STEPS}
    agent = kind(EnvSpec(OBS, ACTIONS[action], action_scaling="rescale"), **{"actor": NARROW[kind], **small, **settings})
    state = agent.init(jax.random.key(3))
    larger = jax.tree.map(lambda x: 4 * x + 0.1, state.copies.actor.online.params)
    actor = dataclasses.replace(state.copies.actor.online, params=larger)
    copies = dataclasses.replace(state.copies, actor=dataclasses.replace(state.copies.actor, online=actor))
    normalizers = state.normalizers
    if normalizers.obs is not None:
        seen = seen_by(normalizers.obs, jnp.asarray(2 + 5 * rng.normal(size=(50, 3)), jnp.float32))
        normalizers = dataclasses.replace(normalizers, obs=seen)
    env_steps = StepCount.of(50 if is_over else 49)
    state = dataclasses.replace(state, copies=copies, normalizers=normalizers, env_steps=env_steps)
    policy, key = agent.collect_policy(state), jax.random.key(5)
    assert choose_actors(policy, "threefry2x32", NUM_ENVS, exact=False).in_numpy
    act = make_actor(policy, key, NUM_ENVS, exact=False, block=2)
    carry = policy.initial_state(NUM_ENVS)
    its_carry, wanted_step = jax.tree.map(np.asarray, carry), jax.jit(type(policy).action)
    for t in range(3):
        now = time_step(rng)
        acted, wanted = act(t, now, its_carry), wanted_step(policy, now, carry, jax.random.fold_in(key, t))
        its_carry, carry = acted.carry, wanted.carry
        assert acted.action.dtype == wanted.action.dtype and acted.action.shape == wanted.action.shape
        np.testing.assert_allclose(acted.action, wanted.action, rtol=2e-5, atol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), its_carry, carry)
        assert np.std(acted.action) > 0.2


def test_the_next_rollout_has_the_next_keys_and_the_weights_of_its_state():
    rng = np.random.default_rng(1)
    agent = agent_for(ACTIONS["box"])
    first, now = started(agent, rng), time_step(rng)
    before = rollout_actor(agent, first, exact=False)(0, now, ()).action
    second = dataclasses.replace(first, iteration=first.iteration + jnp.uint32(1))
    after = rollout_actor(agent, second, exact=False)(0, now, ()).action
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, policy_step(agent, second, 0, now, ()).action, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("agent", "num_envs"),
    [
        (agent_for(ACTIONS["box"], network=MLP((16,), activation="gelu")), 8),
        (agent_for(ACTIONS["box"], network=MLP((256, 256))), 8),
        (agent_for(ACTIONS["box"], network=MLP(())), 8),
        (agent_for(ACTIONS["box"], values_when="collect", network=MLP((16,), head=PolicyAndValue(value_hidden=(512, 512)))), 8),
        (PPO(EnvSpec(OBS, Discrete(2), has_action_mask=True), num_minibatches=1), 8),
        (PPO(EnvSpec(Discrete(5), Discrete(2)), num_minibatches=1), 8),
        (PPO(EnvSpec(Box(0, 255, (40, 40, 3), np.uint8), Discrete(2)), num_minibatches=1), 8),
    ],
    ids=["activation", "large", "linear", "large value", "mask", "integers", "image"],
)
def test_policy_without_a_faster_numpy_form_is_jitted(agent, num_envs):
    policy = jax.eval_shape(lambda key: agent.collect_policy(agent.init(key)), jax.random.key(0))
    assert not acts_in_numpy(policy, num_envs)


def test_a_nan_observation_still_gives_an_action_of_the_space():
    rng = np.random.default_rng(2)
    agent = agent_for(ACTIONS["discrete"])
    state, now = started(agent, rng), time_step(rng)
    now.obs[3] = np.nan
    action = rollout_actor(agent, state, exact=False)(0, now, ()).action
    assert np.all((action >= 0) & (action < 3))


def test_random_numbers_drawn_in_blocks_are_those_of_each_step():
    rng = np.random.default_rng(3)
    agent = agent_for(ACTIONS["box"])
    state, now, key = started(agent, rng), time_step(rng), jax.random.key(5)
    policy = agent.collect_policy(state.agent)
    in_blocks, at_once = (make_actor(policy, key, NUM_ENVS, exact=False, block=block) for block in (2, 5))
    for t in range(5):
        np.testing.assert_array_equal(in_blocks(t, now, ()).action, at_once(t, now, ()).action)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_jitted_actor_accepts_every_kind_of_key(impl):
    rng = np.random.default_rng(4)
    agent = agent_for(ACTIONS["box"])
    policy, now, key = agent.collect_policy(started(agent, rng).agent), time_step(rng), jax.random.key(5, impl=impl)
    expected = policy.action(now, (), jax.random.fold_in(key, 3)).action
    actors = choose_actors(policy, impl, NUM_ENVS, exact=True)
    act, draws = actors.start(jax.tree.leaves(policy)), np.asarray(actors.draws(policy, step_keys(key, 0, 4)))
    actions = [act(now, (), draw).action for draw in draws]
    np.testing.assert_allclose(actions[3], expected, rtol=2e-5, atol=2e-6)


def small_dqn(num_steps=1, **settings):
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    small = {
        "network": polyak.MLP((8,)),
        "learning_starts": 20,
        "batch_size": 8,
        "replay": polyak.UniformReplay(200),
        "epsilon": 0.3,
    }
    return polyak.DQN(env.spec, num_steps=num_steps, updates_per_step=0.5 / num_steps, **{**small, **settings}), env


def test_a_rollout_of_one_step_acts_as_the_collecting_policy_with_the_rollouts_key():
    agent, env = small_dqn()
    state = start_host(agent, env, jax.random.key(0))
    time_step = jax.tree.map(np.asarray, state.time_step)
    act = jax.jit(lambda policy, key: policy.action(time_step, (), key).action)
    for iteration in range(20):
        state = dataclasses.replace(state, iteration=jnp.uint32(iteration))
        key = jax.random.fold_in(iteration_keys(state.key, state.iteration, 1).act, 0)
        expected = act(agent.collect_policy(state.agent), key)
        got = rollout_actor(agent, state, exact=False)(0, time_step, ()).action
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"network": polyak.MLP((8, 4), activation="tanh", head=polyak.QValues(dueling=True))},
        {"normalize_obs": True, "normalize_reward": "return"},
    ],
    ids=["plain", "dueling", "normalized"],
)
def test_epsilon_greedy_acts_in_numpy_as_it_is_defined(settings, epsilon):
    """Actions, log-probabilities and carries, of a policy that has learned something."""
    rng = np.random.default_rng(6)
    spec = EnvSpec(OBS, Discrete(5))
    agent = polyak.DQN(spec, **{"network": polyak.MLP((8,)), "epsilon": epsilon, "learning_starts": 0, **settings})
    state = agent.init(jax.random.key(3))
    online = jax.tree.map(lambda x: 4 * x + 0.1, state.copies.online.params)
    copies = dataclasses.replace(state.copies, online=dataclasses.replace(state.copies.online, params=online))
    normalizers = state.normalizers
    if normalizers.obs is not None:
        seen = seen_by(normalizers.obs, jnp.asarray(2 + 5 * rng.normal(size=(50, 3)), jnp.float32))
        normalizers = dataclasses.replace(normalizers, obs=seen)
    policy = agent.collect_policy(dataclasses.replace(state, copies=copies, normalizers=normalizers))
    key = jax.random.key(5)
    assert choose_actors(policy, "threefry2x32", NUM_ENVS, exact=False).in_numpy
    act, wanted_step = make_actor(policy, key, NUM_ENVS, exact=False, block=8), jax.jit(type(policy).action)
    carry = policy.initial_state(NUM_ENVS)
    its_carry, chosen = jax.tree.map(np.asarray, carry), []
    for t in range(20):
        now = time_step(rng)
        acted, wanted = act(t, now, its_carry), wanted_step(policy, now, carry, jax.random.fold_in(key, t))
        its_carry, carry = acted.carry, wanted.carry
        np.testing.assert_array_equal(acted.action, wanted.action)
        assert acted.action.dtype == wanted.action.dtype
        np.testing.assert_allclose(acted.info["log_prob"], wanted.info["log_prob"], rtol=1e-5, atol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), its_carry, carry)
        chosen.append(acted.action)
    assert len(np.unique(chosen)) > 1


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (EnvSpec(OBS, Discrete(3)), {"network": polyak.MLP((8,), norm="layer")}),
        (EnvSpec(OBS, Discrete(3)), {"network": polyak.MLP((8,), head=polyak.QValues(noisy=True))}),
        (EnvSpec(OBS, Discrete(3)), {"network": polyak.MLP((512, 512))}),
        (EnvSpec(OBS, Discrete(3)), {"network": polyak.MLP(())}),
        (EnvSpec(OBS, Discrete(3)), {"network": polyak.MLP((8,)), "temperature": 1.0}),
        (EnvSpec(OBS, Discrete(3), has_action_mask=True), {}),
        (EnvSpec(OBS, MultiDiscrete((2, 2))), {}),
        (EnvSpec(Discrete(4), Discrete(3)), {}),
        (EnvSpec(Dict({"a": OBS, "b": OBS}), Discrete(3)), {}),
    ],
    ids=["layer norm", "noisy", "large", "linear", "boltzmann", "mask", "combinations", "integers", "dict"],
)
def test_policies_of_action_values_that_numpy_cannot_act_for_are_jitted(spec, settings):
    agent = polyak.DQN(spec, **settings)
    policy = jax.eval_shape(lambda key: agent.collect_policy(agent.init(key)), jax.random.key(0))
    assert not choose_actors(policy, "threefry2x32", NUM_ENVS, exact=False).in_numpy


def test_a_schedule_of_epsilon_a_derived_class_and_a_distribution_of_values_are_jitted():
    agent = polyak.DQN(EnvSpec(OBS, Discrete(3)), network=polyak.MLP((8,)))
    inner = agent.policy(agent.init(jax.random.key(0))).policy

    @struct
    class Derived(EpsilonGreedy):
        pass

    c51 = polyak.C51(EnvSpec(OBS, Discrete(3)), network=polyak.MLP((8,)))
    policies = {
        "number": EpsilonGreedy(inner, 0.1),
        "schedule": EpsilonGreedy(inner, polyak.Linear(1.0, 0.0, 100)),
        "derived": Derived(inner, 0.1),
        "distribution": c51.collect_policy(c51.init(jax.random.key(0))),
    }
    kinds = {name: choose_actors(policy, "threefry2x32", NUM_ENVS, exact=False) for name, policy in policies.items()}
    assert [name for name, actors in kinds.items() if actors.in_numpy] == ["number"]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 4])
def test_an_update_computes_what_the_next_actor_needs_so_that_only_the_first_takes_a_call(num_steps, monkeypatch):
    calls, make_program = [], rollout_actors._inputs_program

    def counted(shape, inputs):
        compute = make_program(shape, inputs)
        return lambda *arguments: calls.append(arguments) or compute(*arguments)

    monkeypatch.setattr(rollout_actors, "_inputs_program", counted)
    agent, env = small_dqn(num_steps)
    result = polyak.loops.host(agent, env, env_steps=40 * num_steps, key=jax.random.key(1))
    assert int(result.loop_state.iteration) >= 20
    # One before training, from whose shapes the update is compiled, and the first action.
    assert len(calls) == 2


@pytest.mark.to_the_bit
@pytest.mark.parametrize(
    ("num_steps", "settings"),
    [
        (1, {"epsilon": polyak.Linear(1.0, 0.1, 390)}),
        (4, {"epsilon": polyak.Linear(1.0, 0.1, 390)}),
        (4, {"temperature": polyak.Linear(2.0, 0.1, 390), "epsilon": None}),
    ],
    ids=["once", "numpy", "jitted"],
)
def test_short_rollouts_resume_to_the_bit(num_steps, settings):
    """The first actor of the rest comes from a program of its own, those of the whole from the updates."""
    agent, env = small_dqn(num_steps, **settings)
    key = jax.random.key(1)
    whole = polyak.loops.host(agent, env, env_steps=400, key=key)
    half = polyak.loops.host(agent, env, env_steps=201, key=key)
    rest = polyak.loops.host(
        agent, env, env_steps=400, key=key, resume_from=half.loop_state, env_steps_done=half.progress.env_steps
    )
    assert int(whole.state.updates) > 20
    for got, expected in zip(jax.tree.leaves(rest.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(got, expected)

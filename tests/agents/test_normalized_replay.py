"""Observations and rewards of a replay, normalised by the statistics of now: when drawn, when acting, and in exports."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout
from polyak.export.write_policy import write_policy
from polyak.policies.network_policy import DiscountedReturn
from tests.agents import test_value_family
from tests.agents.test_actor_critics import KEY, SPEC, equal, first_steps, random_rollout

Q_AGENTS = test_value_family.AGENTS
AGENTS = {"ddpg": polyak.DDPG, "td3": polyak.TD3, "sac": polyak.SAC, "tqc": polyak.TQC}
# The normalization is in the bases: one agent that has a distribution and one that has none.
of_the_bases = pytest.mark.parametrize("name", ["td3", "sac"])
every_q_agent = pytest.mark.parametrize("name", Q_AGENTS)
update = jax.jit(lambda agent, state, rollout, key: agent.update(state, rollout, key))


def make(name, spec=SPEC, **settings):
    actor = polyak.Actor((8,), std="fixed" if name in ("ddpg", "td3") else "state")
    critics = polyak.Critics((8,), num_critics=1 if name == "ddpg" else 2)
    small = {
        "actor": actor,
        "critics": critics,
        "replay": polyak.UniformReplay(512),
        "batch_size": 16,
        "learning_starts": 0,
        "num_steps": 4,
    }
    return AGENTS[name](spec, **{**small, "updates_per_step": 0.5, "normalize_obs": True, **settings})


def make_q(name, spec=test_value_family.SPEC, **settings):
    return Q_AGENTS[name](spec, **{"learning_starts": 0, "normalize_obs": True, **settings})


def collected(agent, seed=0, **changes):
    """A rollout of large numbers, with the returns so far in its carry."""
    far = {"obs": lambda x: 3.0 + 5.0 * x, "reward": lambda x: 10.0 * x, **changes}
    rollout = random_rollout(agent, seed=seed, **far)
    return dataclasses.replace(rollout, carry=((), jnp.array([1.0, -2.0])))


def collected_q(agent, seed=0):
    """Likewise, with the actions of an agent of action values."""
    rollout, steps = test_value_family.rollout_of(agent, seed), collected(agent, seed).time_steps
    return dataclasses.replace(rollout, time_steps=steps, carry=((), jnp.array([1.0, -2.0])))


def normalised(rollouts):
    """The rollouts as an agent with the statistics of all of them sees them, rewards divided by their standard deviation."""
    obs, rewards = (np.concatenate([np.asarray(get(r)) for r in rollouts]) for get in (lambda r: r.obs, lambda r: r.reward))
    mean, std, scale = obs.mean((0, 1)), obs.std((0, 1)), rewards.std()

    def normal(rollout):
        steps = rollout.time_steps
        obs, reward = (np.asarray(steps.obs) - mean) / std, np.asarray(steps.reward) / scale
        steps = dataclasses.replace(steps, obs=jnp.asarray(obs), reward=jnp.asarray(reward))
        return Rollout(steps, rollout.actions, rollout.carry[0])

    return [normal(rollout) for rollout in rollouts]


def update_of_normalised(plain, before, first, second):
    """The state of an agent that normalises nothing, after an update on normalised rows, from the copies of `before`."""
    seen, added = normalised([first, second])
    ring, start = plain.replay, plain.init(KEY)
    state = dataclasses.replace(start, copies=before.copies, replay=ring.add(start.replay, seen), env_steps=before.env_steps)
    after, _ = update(plain, state, added, jax.random.key(5))
    return after


@pytest.mark.slow
def test_statistics_are_those_of_the_valid_rows_of_all_rollouts():
    agent = make("sac")
    rollouts = [collected(agent, seed, terminated=lambda x: x.at[2].set(True)) for seed in range(3)]
    state = agent.init(KEY)
    for rollout in rollouts:
        state, _ = update(agent, state, rollout, KEY)
    # Row 2 is a terminal state, from which the environment only resets.
    seen = np.concatenate([np.asarray(r.obs)[[0, 1, 3]].reshape(-1, 3) for r in rollouts])
    stats = state.normalizers.obs.stats
    assert int(stats.count) == len(seen) == 18
    np.testing.assert_allclose(stats.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.variance, seen.var(0), rtol=1e-4)


def test_a_row_with_nan_is_left_out_of_the_statistics():
    agent = make("sac")
    state, _ = update(agent, agent.init(KEY), collected(agent, obs=lambda x: x.at[1, 0, 0].set(jnp.nan)), KEY)
    assert int(state.normalizers.obs.stats.count) == 7
    assert bool(jnp.isfinite(state.normalizers.obs.stats.mean).all())


@pytest.mark.slow
def test_batches_are_normalised_by_the_statistics_of_now():
    """The update equals one on a replay of normalised rows, with an agent that normalises nothing."""
    agent = make("td3", normalize_reward="reward", updates_per_step=0.125)
    first, second = collected(agent, 0), collected(agent, 1)
    before, _ = update(agent, agent.init(KEY), first, KEY)
    found, _ = update(agent, before, second, jax.random.key(5))
    wanted = update_of_normalised(make("td3", normalize_obs=False, updates_per_step=0.125), before, first, second)
    for a, b in zip(jax.tree.leaves(found.copies), jax.tree.leaves(wanted.copies), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    assert not equal(found.copies.critics.online.params, before.copies.critics.online.params)
    np.testing.assert_array_equal(found.replay.rows.obs[:4], np.asarray(first.obs)[:2].reshape(4, 3))


@pytest.mark.slow
@of_the_bases
def test_policies_see_normalised_observations_in_jax_numpy_and_exports(name, tmp_path):
    agent = make(name, normalize_obs=True)
    state, _ = update(agent, agent.init(KEY), collected(agent), KEY)
    stats = state.normalizers.obs.stats
    obs = np.linspace(-12.0, 15.0, 30, dtype=np.float32).reshape(10, 3)
    normal = np.clip((obs - np.asarray(stats.mean)) / np.sqrt(np.asarray(stats.variance) + 1e-8), -10, 10)
    copies = state.copies.actor.online
    (params, _), _, _ = agent.actor.apply(copies, jnp.asarray(normal))
    wanted = np.tanh(params["loc"])
    policy = agent.policy(state)
    np.testing.assert_allclose(policy.action(first_steps(jnp.asarray(obs)), (), KEY).action, wanted, atol=1e-5)
    np.testing.assert_allclose(policy.predict(obs)[0], wanted, atol=1e-5)
    write_policy(policy, SPEC, "numpy", tmp_path / "policy.npz", {})
    np.testing.assert_allclose(polyak.load_policy(tmp_path / "policy.npz").predict(obs)[0], wanted, atol=1e-5)
    if all(importlib.util.find_spec(package) for package in ("onnx", "onnxruntime")):
        import onnxruntime

        write_policy(policy, SPEC, "onnx", tmp_path / "policy.onnx", {})
        session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(["action"], {"obs": obs})[0], wanted, atol=1e-5)


@pytest.mark.slow
def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    agent = make("sac", normalize_reward="return", gamma=0.9)
    rollout = collected(agent)
    state, _ = update(agent, agent.init(KEY), rollout, KEY)
    running, seen = np.array([1.0, -2.0]), []
    for step in range(5):
        running = np.asarray(rollout.time_steps.reward)[step] + 0.9 * running
        seen.append(running)
    np.testing.assert_allclose(state.normalizers.reward.stats.stddev(), np.std(seen[1:]), rtol=1e-5)
    assert isinstance(agent.collect_policy(state), DiscountedReturn)
    with pytest.raises(ValueError, match="normalize_reward='return' needs rollouts of collect_policy"):
        agent.update(state, random_rollout(agent), KEY)


@pytest.mark.slow
def test_normalised_agents_train_in_the_compiled_loop():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=4, action_scaling="rescale")
    agent = make("td3", env.spec, normalize_reward="return", learning_starts=64, updates_per_step=0.25)
    result = loops.compiled(agent, env, env_steps=256, key=KEY)
    assert int(result.state.updates) > 0
    # A step that truncates is one of the environment's, and the one after it is not.
    assert int(result.state.normalizers.obs.stats.count) == int(result.state.env_steps) >= 256
    assert int(result.state.normalizers.reward.stats.count) == int(result.state.env_steps)
    assert float(result.state.normalizers.reward.stats.stddev()) > 1.0


def test_observations_without_numbers_are_rejected():
    spec = EnvSpec(Discrete(3), Box([-1.0], [1.0]))
    for name in AGENTS:
        with pytest.raises(ValueError, match=f"{AGENTS[name].__name__}: normalize_obs must be False for observations without"):
            make(name, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "iqn"])
def test_policies_of_action_values_see_normalised_observations_in_jax_and_exports(name, tmp_path):
    agent, plain = make_q(name, epsilon=0.0), make_q(name, epsilon=0.0, normalize_obs=False)
    state = agent.init(KEY)
    state = dataclasses.replace(state, normalizers=state.normalizers.update(collected_q(agent), 0.9))
    obs = 3.0 + 5.0 * jax.random.normal(KEY, (100, 3))
    normal = first_steps(state.normalizers.obs.normalize(obs))
    wanted = np.asarray(plain.policy(plain.init(KEY)).action(normal, (), KEY).action)
    assert not np.array_equal(wanted, plain.policy(plain.init(KEY)).action(first_steps(obs), (), KEY).action)
    policy = agent.policy(state)
    for acting in (policy, agent.collect_policy(state)):
        np.testing.assert_array_equal(acting.action(first_steps(obs), (), KEY).action, wanted)
    write_policy(policy, agent.spec, "stablehlo", tmp_path / "policy.stablehlo", {})
    for predicting in (policy, polyak.load_policy(tmp_path / "policy.stablehlo")):
        np.testing.assert_array_equal(predicting.predict(np.asarray(obs))[0], wanted)


@pytest.mark.slow
@every_q_agent
def test_reward_scale_is_a_factor_of_the_rewards_of_action_values(name):
    batch = test_value_family.transitions()
    scaled = dataclasses.replace(batch, reward=2.0 * batch.reward)
    found, wanted = (
        test_value_family.loss_of(make_q(name, normalize_obs=False, reward_scale=scale), batch)
        for scale, batch in ((2.0, batch), (1.0, scaled))
    )
    np.testing.assert_array_equal(found[0], wanted[0])
    assert float(found[0]) != float(test_value_family.loss_of(make_q(name), batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("normalize_reward", ["reward", "return"])
def test_sequences_are_normalised_by_the_statistics_of_now(normalize_reward):
    network = polyak.GRU(4, hidden=(4,), head=polyak.QValues())
    settings = {"network": network, "num_steps": 4, "learning_starts": 0, "replay": polyak.SequenceReplay(64, 4)}
    settings |= {"batch_size": 4, "updates_per_step": 0.125}
    agent = polyak.DQN(test_value_family.SPEC, **settings, normalize_obs=True, normalize_reward=normalize_reward)
    carry = network.initial_carry(2)
    first, second = (dataclasses.replace(collected_q(agent, seed), carry=carry) for seed in range(2))
    with_returns = [dataclasses.replace(r, carry=(carry, jnp.array([1.0, -2.0]))) for r in (first, second)]
    first, second = with_returns if normalize_reward == "return" else (first, second)
    before, _ = update(agent, agent.init(KEY), first, KEY)
    found, metrics = update(agent, before, second, jax.random.key(5))
    assert int(metrics["train/n_updates"]) == 2
    if normalize_reward == "return":
        assert isinstance(agent.collect_policy(found), DiscountedReturn)
        return
    assert not equal(found.copies.online.params, before.copies.online.params)
    wanted = update_of_normalised(polyak.DQN(test_value_family.SPEC, **settings), before, *with_returns)
    for a, b in zip(jax.tree.leaves(found.copies), jax.tree.leaves(wanted.copies), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_normalised_action_values_train_in_the_host_loop():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    network = polyak.MLP((8,), head=polyak.QValues(noisy=True))
    agent = polyak.C51(env.spec, **{**test_value_family.SMALL, "network": network, "epsilon": 0.0},
                       normalize_obs=True, normalize_reward="return")  # fmt: skip
    result = loops.host(agent, env, env_steps=128, key=KEY)
    counts = [int(stats.count) for stats in (result.state.normalizers.obs.stats, result.state.normalizers.reward.stats)]
    assert int(result.state.updates) > 0 and counts == [int(result.state.env_steps)] * 2
    assert float(result.state.normalizers.reward.stats.stddev()) > 1.0


@pytest.mark.parametrize("name", ["dqn", "iqn"])
def test_images_cannot_be_normalised(name):
    images = EnvSpec(Box(0, 255, (4, 8, 8), np.uint8), Discrete(2))
    with pytest.raises(ValueError, match="normalize_obs must be False for observations without a Box other than uint8"):
        make_q(name, images)


@pytest.mark.parametrize(
    ("made", "agent", "message"),
    [
        ({"normalize_obs": False}, {"normalize_obs": True}, "normalize_obs=False but the agent sets normalize_obs=True"),
        ({"normalize_obs": True}, {"normalize_obs": False}, "normalize_obs=True but the agent sets normalize_obs=False"),
        ({"clip_obs": 5.0}, {"clip_obs": 2.0}, "clip_obs=5.0 but the agent sets clip_obs=2.0"),
        ({}, {"normalize_reward": "reward"}, "normalize_reward=None but the agent sets normalize_reward='reward'"),
    ],
)
@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_states_of_other_settings_of_normalisation_are_rejected(name, made, agent, message):
    creates, has = ((make if name == "sac" else make_q)(name, **settings) for settings in (made, agent))
    rollout = (collected if name == "sac" else collected_q)(has)
    with pytest.raises(ValueError, match=f"this state was created with {message}"):
        jax.eval_shape(has.update, creates.init(KEY), rollout, KEY)

"""PQN: its λ-returns against a slow loop, what it learns from, and what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak import loops
from polyak.agents.pqn import PQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep
from tests import probe_envs

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
MASKED = dataclasses.replace(SPEC, has_action_mask=True)
STEPS, ENVS = 6, 3


def make(spec=SPEC, **settings):
    network = polyak.MLP((8,), norm="layer", head=polyak.QValues())
    return PQN(spec, **{"network": network, "num_steps": STEPS, "num_epochs": 1, "num_minibatches": 1, **settings})


def rollout_of(agent, seed=0, **changes):
    """Environment 0 terminates at step 3, environment 1 is truncated there, environment 2 goes on."""
    random = np.random.default_rng(seed)
    shape = STEPS + 1, ENVS
    flags = np.zeros(shape, bool)
    terminated, truncated, first = flags.copy(), flags.copy(), flags.copy()
    terminated[3, 0], truncated[3, 1], first[4, :2] = True, True, True
    mask = random.uniform(size=(*shape, 4)) < 0.5
    mask[..., 1] = True
    steps = TimeStep(
        jnp.asarray(random.normal(size=(*shape, 3)), jnp.float32),
        jnp.asarray(np.where(first, 0.0, random.normal(size=shape)), jnp.float32),
        *map(jnp.asarray, (terminated, truncated, first)),
        jnp.asarray(mask) if agent.spec.has_action_mask else None,
    )
    actions = jnp.asarray(random.integers(0, 4, size=(STEPS, ENVS)), jnp.int32)
    return Rollout(dataclasses.replace(steps, **{n: f(getattr(steps, n)) for n, f in changes.items()}), actions)


def slow_returns(q, rollout, gamma, lam):
    """From the last step back; with a mask, q is -inf where an action is not allowed."""
    steps, value = rollout.time_steps, q.max(axis=-1)
    returns = np.zeros((STEPS, ENVS))
    for env in range(ENVS):
        following = value[STEPS, env]
        for t in reversed(range(STEPS)):
            if steps.terminated[t + 1, env]:
                following = 0.0
            elif steps.truncated[t + 1, env] or t == STEPS - 1:
                following = value[t + 1, env]
            else:
                following = lam * following + (1 - lam) * value[t + 1, env]
            following = returns[t, env] = float(steps.reward[t + 1, env]) + gamma * following
    return returns


@pytest.mark.parametrize("spec", [SPEC, MASKED], ids=["all actions", "masked"])
@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
def test_lambda_returns_against_a_slow_loop(spec, lam):
    """A truncated episode bootstraps from its last observation; purejaxql's PQN takes it for a terminal one (defect 2)."""
    agent = make(spec, q_lambda=lam, gamma=0.9)
    variables, rollout = agent.init(KEY).copies.online, rollout_of(agent)
    obs = rollout.time_steps.obs.reshape(-1, 3)
    q = np.asarray(agent.network.apply(variables, obs)[0][0]).reshape(STEPS + 1, ENVS, 4)
    if spec.has_action_mask:
        q = np.where(rollout.time_steps.action_mask, q, -np.inf)
    got, valid = np.asarray(agent.lambda_returns(variables, rollout)), np.asarray(rollout.valid)
    np.testing.assert_allclose(got[valid], slow_returns(q, rollout, 0.9, lam)[valid], rtol=1e-4, atol=1e-5)


def test_an_episode_that_is_truncated_where_no_action_is_allowed_bootstraps_from_all():
    agent = make(MASKED, q_lambda=0.5)
    variables, rollout = agent.init(KEY).copies.online, rollout_of(agent)
    masks = [rollout.time_steps.action_mask.at[3].set(allowed) for allowed in (True, False)]
    changed = [dataclasses.replace(rollout.time_steps, action_mask=mask) for mask in masks]
    returns = [agent.lambda_returns(variables, Rollout(steps, rollout.actions))[:3] for steps in changed]
    np.testing.assert_array_equal(*returns)
    # Where it is terminated, the value does not count: the last reward is the return.
    np.testing.assert_allclose(returns[1][2, 0], rollout.time_steps.reward[3, 0], rtol=1e-5)
    assert not np.allclose(returns[1][2, 1], rollout.time_steps.reward[3, 1])


@pytest.mark.slow
def test_one_step_of_gradient_descent_is_that_of_the_squared_error():
    agent = make(optimizer=optax.sgd(0.1), q_lambda=0.5)
    state, rollout = agent.init(KEY), rollout_of(make())
    before, valid = state.copies.online, np.asarray(rollout.valid)
    returns = np.asarray(agent.lambda_returns(before, rollout))[valid]

    def loss(params):
        variables = dataclasses.replace(before, params=params)
        q = agent.network.apply(variables, rollout.obs[valid])[0][0]
        chosen = jnp.take_along_axis(q, rollout.actions[valid][:, None], axis=1)[:, 0]
        return jnp.mean(jnp.square(chosen - returns))

    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, before.params, jax.grad(loss)(before.params))
    state, metrics = jax.jit(agent.update)(state, rollout, KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.copies.online.params, wanted)
    np.testing.assert_allclose(metrics["train/loss"], loss(before.params), rtol=1e-4)
    assert int(state.env_steps) == valid.sum() == 16 and int(state.updates) == 1


def test_rows_that_only_reset_are_not_learned_from():
    agent = make()
    update = jax.jit(agent.update)
    # The rows from the end of an episode: their actions, and the rewards of the steps that reset.
    other = rollout_of(agent, reward=lambda r: r.at[4, :2].set(1e6))
    other = dataclasses.replace(other, actions=other.actions.at[3, :2].set(0))
    states = [update(agent.init(KEY), rollout, KEY)[0] for rollout in (rollout_of(agent), other)]
    jax.tree.map(np.testing.assert_array_equal, *(state.copies.online.params for state in states))


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_nan_is_skipped_and_diagnosed(where):
    agent = make(max_skipped_updates=2)
    state, update = agent.init(KEY), jax.jit(agent.update)
    before = state.copies.online.params
    for _ in range(2):
        state, metrics = update(state, rollout_of(agent, **{where: lambda x: x.at[1].set(jnp.nan)}), KEY)
    jax.tree.map(np.testing.assert_array_equal, state.copies.online.params, before)
    assert repr(where) in agent.diagnose(metrics)


def test_observations_are_normalised_by_the_statistics_from_before_the_rollout():
    agent, plain = make(normalize_obs=True), make()
    update = jax.jit(lambda agent, state, rollout: agent.update(state, rollout, KEY))
    first, second = (rollout_of(plain, seed, obs=lambda x: 3.0 + 5.0 * x) for seed in range(2))
    before, _ = update(agent, agent.init(KEY), first)
    stats, seen = before.obs_normalizer.stats, np.asarray(first.obs)[np.asarray(first.valid)]
    assert int(stats.count) == 16
    np.testing.assert_allclose(stats.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.variance, seen.var(0), rtol=1e-4)

    found, _ = update(agent, before, second)
    normal = dataclasses.replace(second.time_steps, obs=before.obs_normalizer.normalize(second.time_steps.obs))
    wanted, _ = update(plain, dataclasses.replace(before, obs_normalizer=None), Rollout(normal, second.actions))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.copies.online, wanted.copies.online)
    assert int(found.obs_normalizer.stats.count) == 32
    acted, acted_plain = (
        agent.policy(state).policy.distribution(jax.tree.map(lambda x: x[0], steps))[0].logits
        for state, steps in ((before, second.time_steps), (dataclasses.replace(before, obs_normalizer=None), normal))
    )
    np.testing.assert_array_equal(acted, acted_plain)

    # Clipping would make infinity finite.
    infinite = dataclasses.replace(second.time_steps, obs=second.time_steps.obs.at[1].set(jnp.inf))
    after, metrics = update(agent, before, Rollout(infinite, second.actions))
    jax.tree.map(np.testing.assert_array_equal, after.copies.online, before.copies.online)
    assert int(metrics["train/skipped_steps"]) == 1 and int(after.obs_normalizer.stats.count) == 16 + 13
    with pytest.raises(ValueError, match="PQN: normalize_obs must be False for observations without a Box other than uint8"):
        PQN(EnvSpec(Discrete(4), Discrete(3)), normalize_obs=True)


@pytest.mark.slow
def test_values_of_probe_environments():
    network = polyak.MLP((32,), norm="layer", head=polyak.QValues())
    settings = {"num_steps": 16, "num_minibatches": 4, "gamma": 0.9, "learning_rate": 1e-2, "epsilon": 0.3}
    agent = PQN(probe_envs.probe(1).spec, network=network, **settings)
    probes, values = zip(
        (probe_envs.settings(pays="action"), 1.0),
        (probe_envs.settings(sees="step", pays="at the end", length=2), 0.9),
        # A time limit is no terminal state: 1 + 0.9 + 0.81 + ...
        (probe_envs.settings(length=4, terminates=False), 10.0),
        strict=True,
    )
    states, no = probe_envs.train_in(agent, probes, 16, 200), jnp.zeros(1, bool)
    step = TimeStep(jnp.zeros((1, 1)), jnp.zeros(1), no, no, ~no)
    for state, value in zip(states, values, strict=True):
        np.testing.assert_allclose(agent.policy(state).policy.value(step), value, rtol=0.1, atol=0.1)
    assert int(agent.policy(states[0]).action(step, (), KEY).action[0]) == 1


@pytest.mark.slow
def test_host_and_compiled_loop_and_two_devices_agree():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = PQN(env.spec, network=polyak.MLP((16,), norm="layer"), num_steps=8, num_minibatches=2, epsilon=0.2)
    compiled, host = (loop(agent, env, env_steps=128, key=KEY) for loop in (loops.compiled, loops.host))
    split = loops.compiled(agent, env, env_steps=128, key=KEY, devices=2)
    for other in (host, split):
        for a, b in zip(*(jax.tree.leaves(x.state.copies.online) for x in (compiled, other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_default_network_is_normalized_and_settings_are_checked():
    assert PQN(SPEC).network.norm == "layer" and polyak.DQN(SPEC).network.norm is None
    with pytest.raises(ValueError, match="PQN: actions must be Discrete"):
        PQN(EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])))
    with pytest.raises(ValueError, match="PQN: num_minibatches=5 must divide"):
        make(num_minibatches=5).check(ENVS)
    with pytest.raises(ValueError, match="created with another optimizer"):
        agent = make()
        make(optimizer=optax.sgd(0.1)).update(agent.init(KEY), rollout_of(agent), KEY)


@pytest.mark.parametrize(("made", "has"), [(False, True), (True, False)])
def test_states_of_another_normalize_obs_are_rejected(made, has):
    agent = make(normalize_obs=has)
    with pytest.raises(ValueError, match=f"created with normalize_obs={made} but the agent sets normalize_obs={has}"):
        jax.eval_shape(agent.update, make(normalize_obs=made).init(KEY), rollout_of(agent), KEY)

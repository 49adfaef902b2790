"""Random network distillation: bonus, normalization and both advantages against slow NumPy, masks, resume to the bit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import polyak
from polyak.agents.a2c import A2C
from polyak.agents.impala import IMPALA
from polyak.agents.ppo import PPO
from polyak.agents.rnd import RND
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import mesh_over, update_on
from polyak.loops.metrics import as_numbers
from polyak.networks.feedforward import MLP
from polyak.reports.tags import healthy_curve
from polyak.workers.worker_group import without_weight
from tests.agents.rollouts import on_device, rollout, same_bits
from tests.selection import quick

SPEC = EnvSpec(Box(-np.ones(3, np.float32), np.ones(3, np.float32)), Discrete(3))
KEY = jax.random.key(3)
T, B = 8, 5
GAMMA, LAMBDA = 0.9, 0.7


@struct(kw_only=True)
class Spy(A2C):
    """An agent that learns nothing, and returns the intrinsic advantages among its metrics."""

    def update(self, state, rollout, key, *, weights=None, intrinsic_advantage=None, axis_name=None):
        return state, {"advantage": intrinsic_advantage, "reward": rollout.reward}


def small(agent=None, **settings):
    agent = Spy(SPEC, MLP((4,)), num_steps=T) if agent is None else agent
    defaults = {"network": MLP((6,)), "value": MLP((5,)), "num_features": 4, "intrinsic_gamma": GAMMA, "gae_lambda": LAMBDA}
    return RND(agent, **defaults | {"num_epochs": 1, "num_minibatches": 1, "predictor_fraction": 1.0} | settings)


@jax.jit
def update(agent, state, data, weights=None):
    return agent.update(state, data, KEY, weights=weights)


def data_of(agent, state, seed, before=None):
    """A rollout whose episodes end within it; far observations are clipped."""
    inner, returns = agent.collect_policy(state).initial_state(B)
    returns = returns if before is None else jnp.asarray(before, jnp.float32)
    data = rollout(SPEC, seed, num_steps=T, num_envs=B, ends=0.15, carry=(inner, returns))
    assert not data.valid.all()
    data.time_steps.obs[2, 1] = 40.0
    return data


def after_first(agent):
    """A state with statistics of observations."""
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    return update(agent, state, on_device(data_of(agent, state, 1)))[0]


def dense(layer, x):
    return x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)


def slow_features(params, obs):
    layers = params["dense"]["layers"]
    for name in sorted(layers):
        obs = np.maximum(dense(layers[name], obs), 0.0)
    return dense(params["head"]["advantage"], obs)


def slow_value(params, obs):
    for name in sorted(params["critic"]["dense"]["layers"]):
        obs = np.tanh(dense(params["critic"]["dense"]["layers"][name], obs))
    return dense(params["value"], obs)[..., 0]


def slow_error(random, predictor, obs):
    return ((slow_features(predictor, obs) - slow_features(random, obs)) ** 2).mean(-1)


def normalized(seen, obs):
    return np.clip((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -5, 5)


def test_advantages_are_those_of_a_slow_numpy_version():
    agent = small(Spy(SPEC, MLP((4,)), num_steps=T, normalize_obs=True, clip_obs=1.5), coefficient=0.3)
    state = after_first(agent)
    before = np.linspace(0.1, 2.0, B)
    first, data = (data_of(agent, state, seed, before) for seed in (1, 2))
    normalizer = state.agent.obs_normalizer.update(jnp.asarray(first.obs), jnp.ones((T, B)))
    state = dataclasses.replace(state, agent=dataclasses.replace(state.agent, obs_normalizer=normalizer))
    seen = np.asarray(first.time_steps.obs[1:], np.float64).reshape(-1, 3)
    obs = np.asarray(data.time_steps.obs, np.float64)
    assert (np.abs(normalized(seen, obs)) == 5).any(), "some observations are clipped"

    # The error of every observation, and its discounted sums through all episodes.
    error = slow_error(state.random.params, state.predictor.online.params, normalized(seen, obs))
    sums = [before]
    for row in error:
        sums.append(row + GAMMA * sums[-1])
    std = np.array(sums[2:]).std()
    reward = error[1:] / np.sqrt(std**2 + 1e-8)

    # Every row is a step to the next one: those that end an episode, and those that reset. The agent normalizes what V_I sees.
    value = slow_value(state.value.online.params, np.asarray(normalizer.normalize(jnp.asarray(obs, jnp.float32)), np.float64))
    wanted = np.zeros((T, B))
    for start in range(T):
        for t in range(start, T):
            wanted[start] += (GAMMA * LAMBDA) ** (t - start) * (reward[t] + GAMMA * value[t + 1] - value[t])

    after, metrics = update(agent, state, on_device(data))
    np.testing.assert_allclose(metrics["advantage"], 0.3 * wanted, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(metrics["train/intrinsic_reward"], reward.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["train/intrinsic_return_std"], std, rtol=1e-4)
    assert all(healthy_curve(tag) for tag in metrics if "intrinsic" in tag or "predictor" in tag)
    np.testing.assert_array_equal(metrics["reward"], data.reward)
    loss = metrics["train/intrinsic_value_loss"]
    np.testing.assert_allclose(loss.total / loss.count, 0.5 * np.square(wanted).mean(), rtol=1e-4)

    # Statistics of all observations so far, each counted when it is reached.
    both = np.concatenate([seen, obs[1:].reshape(-1, 3)])
    np.testing.assert_allclose(after.obs_stats.mean + after.obs_stats.mean_rest, both.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.obs_stats.variance, both.var(0), rtol=1e-4)


def test_predictor_and_value_take_the_step_of_a_slow_numpy_version():
    agent = small(optimizer=optax.sgd(0.1), vf_coef=0.25)
    state = after_first(agent)
    data = data_of(agent, state, 2)
    after, metrics = update(agent, state, on_device(data))
    obs = np.asarray(data.time_steps.obs, np.float64)
    seen = np.concatenate([x.time_steps.obs[1:].reshape(-1, 3) for x in (data_of(agent, state, 1), data)]).astype(np.float64)
    value_target = np.asarray(metrics["advantage"]) / 0.5 + slow_value(state.value.online.params, obs[:-1])

    def predictor_loss(params):
        return slow_error(state.random.params, params, normalized(seen, obs[1:])).mean()

    def value_loss(params):
        return 0.25 * ((slow_value(params, obs[:-1]) - value_target) ** 2).mean()

    losses = {"predictor": predictor_loss, "value": value_loss}
    for (name, loss), metric in zip(losses.items(), ("predictor_loss", "intrinsic_value_loss"), strict=True):
        params = getattr(state, name).online.params
        mean = metrics[f"train/{metric}"]
        np.testing.assert_allclose(mean.total / mean.count, loss(params), rtol=1e-3)
        vector, _ = ravel_pytree(params)
        step = np.asarray(ravel_pytree(getattr(after, name).online.params)[0] - vector, np.float64)
        # In float64, or differences are rounding.
        leaves, tree = jax.tree.flatten(params)
        sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]

        def at(vector, leaves=leaves, tree=tree, sizes=sizes, loss=loss):
            parts = np.split(vector, sizes)
            return loss(jax.tree.unflatten(tree, [x.reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)]))

        start = np.asarray(vector, np.float64)
        gradient = [(at(start + e) - at(start - e)) / 2e-5 for e in 1e-5 * np.eye(len(start))]
        np.testing.assert_allclose(step, -0.1 * np.array(gradient), rtol=2e-3, atol=2e-6)
    assert same_bits(after.random, state.random)


def test_the_policy_sums_the_errors_of_what_it_sees_through_all_episodes():
    agent = small()
    state = after_first(agent)
    data, policy = on_device(data_of(agent, state, 2)), agent.collect_policy(state)

    def step(carry, now):
        return policy.action(now, carry, KEY).carry, carry[1]

    (_, last), found = jax.jit(partial(jax.lax.scan, step))(policy.initial_state(B), data.time_steps)
    error = np.asarray(jax.vmap(policy.distillation.error)(data.time_steps.obs), np.float64)
    sums = np.zeros((T + 2, B))
    for t in range(T + 1):
        sums[t + 1] = error[t] + GAMMA * sums[t]
    np.testing.assert_allclose(np.concatenate([found, last[None]]), sums, rtol=1e-5, atol=1e-6)


def test_the_first_rollout_has_no_intrinsic_rewards_and_sets_the_statistics():
    agent = small()
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    after, metrics = update(agent, state, on_device(data_of(agent, state, 1)))
    assert not metrics["advantage"].any() and metrics["train/intrinsic_reward"] == 0
    assert int(after.obs_stats.count) == T * B and int(after.return_stats.count) == 0
    _, metrics = update(agent, after, on_device(data_of(agent, state, 2)))
    assert metrics["advantage"].all() and metrics["train/intrinsic_reward"] > 0


def test_time_steps_of_a_lost_worker_change_nothing():
    agent = small()
    state = after_first(agent)
    data = data_of(agent, state, 2)
    lost = without_weight(jax.tree.map(np.zeros_like, jax.tree.map(lambda x: x[:, 1:], data.time_steps)))
    steps = jax.tree.map(lambda x, y: np.concatenate([x[:, :1], y], axis=1), data.time_steps, lost)
    excluded = np.zeros(B, np.float32)
    excluded[0] = 1
    found, _ = update(agent, state, on_device(dataclasses.replace(data, time_steps=steps)))
    wanted, _ = update(agent, state, on_device(data), weights=jnp.asarray(excluded))
    assert int(found.obs_stats.count) == int(state.obs_stats.count) + T
    for name in ("predictor", "obs_stats", "return_stats"):
        assert same_bits(getattr(found, name), getattr(wanted, name)), name


def inner(name, **settings):
    if name == "ppo":
        settings = {"num_epochs": 1, "num_minibatches": 1, "normalize_advantage": None, **settings}
    return {"ppo": PPO, "a2c": A2C}[name](SPEC, MLP((4,)), num_steps=T, **settings)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_the_agent_learns_from_the_sum_of_both_advantages(name):
    agent = inner(name)
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    data = on_device(rollout(SPEC, 2, num_steps=T, num_envs=B))
    more = np.random.default_rng(0).normal(size=(T, B)).astype(np.float32)
    step = jax.jit(lambda more: agent.update(state, data, KEY, intrinsic_advantage=more)[1])
    plain, found = (jax.tree.map(float, _means(step(x))) for x in (None, jnp.asarray(more)))
    # -E[ρ A] at ρ = 1, or -E[log π A].
    factor = np.ones((T, B))
    if name == "a2c":
        flat = data.obs.reshape(-1, 3)
        (params, _), _, _ = agent.network.apply(state.copies.online, flat)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(params), data.actions.reshape(-1, 1), 1)
        factor = np.asarray(chosen, np.float64).reshape(T, B)
    change = -(factor * more)[np.asarray(data.valid)].mean()
    assert found["train/policy_gradient_loss"] - plain["train/policy_gradient_loss"] == pytest.approx(change, abs=1e-5)
    assert found["train/value_loss"] == plain["train/value_loss"]


def test_impala_corrects_the_intrinsic_advantage_for_the_policy_that_acted():
    agent = IMPALA(SPEC, MLP((4,)), num_steps=T, rho_clip=1.2)
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    data, rng = rollout(SPEC, 2, num_steps=T, num_envs=B), np.random.default_rng(0)
    acted = rng.normal(size=(T, B, 3)).astype(np.float32)
    data = on_device(dataclasses.replace(data, info={"params": acted, "value": np.zeros((T, B), np.float32)}))
    more = rng.normal(size=(T, B)).astype(np.float32)
    step = jax.jit(lambda more: agent.update(state, data, KEY, intrinsic_advantage=more)[1])
    plain, found = (jax.tree.map(float, _means(step(x))) for x in (None, jnp.asarray(more)))
    (params, _), _, _ = agent.network.apply(state.copies.online, data.obs.reshape(-1, 3))
    log_probs = [jax.nn.log_softmax(x.reshape(T, B, 3)) for x in (params, acted)]
    new, old = (np.take_along_axis(np.asarray(x), np.asarray(data.actions)[..., None], 2)[..., 0] for x in log_probs)
    rho = np.minimum(1.2, np.exp(new - old))
    change = -(new * rho * more)[np.asarray(data.valid)].mean()
    assert found["train/policy_gradient_loss"] - plain["train/policy_gradient_loss"] == pytest.approx(change, abs=1e-5)


def _means(metrics):
    names = ("train/policy_gradient_loss", "train/value_loss")
    return {name: metrics[name].total / metrics[name].count for name in names}


@pytest.mark.parametrize("name", quick("a2c", of=["ppo", "a2c"]))
def test_without_a_coefficient_it_is_the_agent_itself(name):
    agent = small(inner(name), coefficient=0.0)
    state = after_first(agent)
    data = data_of(agent, state, 2)
    found, _ = update(agent, state, on_device(data))
    wanted, _ = update(agent.agent, state.agent, on_device(dataclasses.replace(data, carry=data.carry[0])))
    assert same_bits(found.agent, wanted) and not same_bits(found.predictor, state.predictor)


def test_environments_without_weight_change_no_bit_and_nan_skips_all_steps():
    agent = small(inner("a2c"), num_minibatches=2, predictor_fraction=0.5, num_epochs=2)
    state = after_first(agent)
    data, weights = data_of(agent, state, 2), jnp.array([1.0, 0.0, 2.0, jnp.nan, 1.0])
    expected, _ = update(agent, state, on_device(data), weights)
    junk = jax.tree.map(np.array, data)
    for x in (junk.time_steps.obs, junk.time_steps.reward):
        x[:, [1, 3]] = np.nan
    junk.carry[1][[1, 3]] = np.nan
    got, metrics = update(agent, state, on_device(junk), weights)
    assert same_bits(got, expected) and metrics["train/skipped_steps"] == 0

    junk.time_steps.obs[3, 0] = np.nan
    got, metrics = update(agent, state, on_device(junk), weights)
    # Two epochs of two minibatches, of the predictor and of V_I.
    assert metrics["train/skipped_steps"] == 1 and metrics["train/intrinsic_skipped_steps"] == 8
    for name in ("predictor", "value", "obs_stats", "return_stats"):
        before, after = (getattr(s, name) for s in (state, got))
        if name in ("predictor", "value"):
            before, after = before.online, after.online
        assert same_bits(after, before), name


def test_observations_whose_squares_are_infinite_end_the_training_with_their_cause():
    """They reach no statistics, without which there are no intrinsic rewards."""
    agent = small(inner("a2c", max_skipped_updates=2))
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    data = data_of(agent, state, 1)
    data.time_steps.obs[..., 0] = 1e20
    reasons = []
    for _ in range(2):
        state, metrics = update(agent, state, on_device(data))
        reasons.append(agent.diagnose(as_numbers(metrics)))
    assert reasons[0] is None and reasons[1].startswith("RND: 2 updates had no intrinsic rewards, as an observation of each")


def test_images_are_normalized_by_their_statistics():
    images = EnvSpec(Box(np.zeros((2, 2)), np.full((2, 2), 255.0), dtype=np.uint8), Discrete(2))
    agent = RND(A2C(images, MLP((4,))), num_features=4)
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    obs = np.random.default_rng(0).integers(0, 256, (50, 2, 2)).astype(np.uint8)
    state = dataclasses.replace(state, obs_stats=state.obs_stats.update(obs, np.ones(50)))
    found = agent.distillation(state).normalize(obs) / 255  # as networks divide it
    np.testing.assert_allclose(found, (obs - obs.mean(0)) / obs.std(0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_update_over_devices_is_that_of_one():
    agent = small(inner("a2c"), num_epochs=2, num_minibatches=2, predictor_fraction=0.25)
    state = jax.jit(lambda agent: agent.init(KEY))(agent)
    carry = agent.collect_policy(state).initial_state(8)
    data = [on_device(rollout(SPEC, seed, num_steps=T, num_envs=8, carry=carry)) for seed in (0, 1)]
    results = []
    for mesh in (None, mesh_over(4, 8)):
        step, now = jax.jit(update_on(mesh)), state
        for part in data:
            now, _ = step(agent, now, part, KEY)
        results.append(now)
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["jax/CartPole-v1", "CartPole-v1"])
def test_resumed_equals_uninterrupted(env, tmp_path):
    spec = polyak.envs.make("jax/CartPole-v1").spec
    agent = RND(PPO(spec, MLP((8,)), num_steps=16, num_epochs=1, num_minibatches=2), network=MLP((8,)), value=MLP((8,)))
    options = {"num_envs": 2, "seed": 2, "progress": False}
    whole = polyak.train.run(agent, env, env_steps=400, run_dir=tmp_path / "whole", **options)
    polyak.train.run(agent, env, env_steps=200, run_dir=tmp_path / "parts", **options)
    parts = polyak.train.resume(tmp_path / "parts", env_steps=400, progress=False)
    assert same_bits(parts.state, whole.state)
    policy = polyak.load_policy(tmp_path / "parts")
    assert policy.predict(np.zeros(4, np.float32))[0] in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PPOKL", "IMPALA", "REINFORCE", "A2C"])
def test_every_agent_of_rollouts_trains_inside_of_it(name):
    """Two seeds in one program, and with a recurrent state and a return inside of the carry."""
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    settings = {"num_epochs": 1, "num_minibatches": 2} if name == "PPOKL" else {}
    agent = RND(
        getattr(polyak, name)(env.spec, polyak.GRU(4, hidden=(4,)), num_steps=16, normalize_reward="return", **settings),
        network=MLP((8,)),
    )
    keys = jax.random.split(KEY, 2)
    body = jax.jit(jax.vmap(partial(iteration, agent, env, update_on(None))))
    state = jax.vmap(partial(start_compiled, agent, env))(keys)
    for _ in range(4):
        state = body(state)[0]
    assert state.agent.agent.updates.tolist() == [4, 4] and not state.agent.agent.guard.skipped.any()
    assert (state.agent.return_stats.stddev() != 1).all()
    assert len({*np.asarray(state.agent.return_stats.variance).tolist()}) == 2


def test_bad_settings_are_rejected_by_name():
    dqn = polyak.DQN(SPEC)
    with pytest.raises(TypeError, match="RND: agent must learn from rollouts, such as PPO or A2C, got DQN"):
        RND(dqn)
    with pytest.raises(TypeError, match=r"RND: agent must be an agent such as PPO\(env.spec\), got EnvSpec"):
        RND(SPEC)
    with pytest.raises(ValueError, match="RND: predictor_fraction"):
        RND(inner("a2c"), predictor_fraction=0.0)
    with pytest.raises(TypeError, match="RND: network must be an MLP or a NatureCNN with layers and without a head"):
        RND(inner("a2c"), network=polyak.GRU(4))
    with pytest.raises(ValueError, match="RND: num_minibatches"):
        RND(inner("a2c"), num_minibatches=7).check(B)
    agent = small(inner("a2c"))
    state = jax.eval_shape(agent.init, KEY)
    plain = on_device(rollout(SPEC, 1, num_steps=T, num_envs=B))
    with pytest.raises(ValueError, match="RND needs rollouts of collect_policy"):
        jax.eval_shape(agent.update, state, plain, KEY)
    with pytest.raises(TypeError, match="RND: network must be an MLP or a NatureCNN with layers"):
        RND(inner("a2c"), network=MLP(()))
    with pytest.raises(TypeError, match=r"RND: value must not be recurrent, got GRU"):
        RND(inner("a2c"), value=polyak.GRU(4))

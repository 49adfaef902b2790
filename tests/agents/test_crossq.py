"""CrossQ: a gradient step of all networks against a slow version in NumPy, its defaults, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.ops.schedules import StepCount
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated

KEY = jax.random.key(0)
NORM = {"norm": "batch_renorm", "norm_before": "linear", "renorm_warmup": 0}
SMALL = {"batch_size": 16, "learning_starts": 0, "num_steps": 4, "updates_per_step": 0.5, "replay": polyak.UniformReplay(512)}


def make(spec=SPEC, **settings):
    networks = {"actor": polyak.Actor((6,), **NORM), "critics": polyak.Critics((8,), **NORM)}
    return polyak.CrossQ(spec, **{**SMALL, **networks, **settings})


# A slow version in NumPy. Parameters and statistics are lists of arrays, float64; gradients are differences.


class Norms:
    """Batch renormalization after the warm-up; r and d are those of the first training call, as they have no gradient."""

    def __init__(self, means, variances):
        self.means, self.variances, self.corrections, self.new = means, variances, {}, {}

    def __call__(self, i, x, scale, bias, *, train):
        std = np.sqrt(self.variances[i] + 1e-3)
        if not train:
            return (x - self.means[i]) / std * scale + bias
        mean, var = x.mean(0), x.var(0)
        batch_std = np.sqrt(var + 1e-3)
        if i not in self.corrections:
            r, d = np.clip(batch_std / std, 1 / 3, 3), np.clip((mean - self.means[i]) / std, -5, 5)
            self.corrections[i] = r, d
            self.new[i] = 0.99 * self.means[i] + 0.01 * mean, 0.99 * self.variances[i] + 0.01 * var
        r, d = self.corrections[i]
        return ((x - mean) / batch_std * r + d) * scale + bias


def features(params, norms, x, *, train):
    """The normalized features of one hidden layer; `params` has the scale and bias of two norms, and kernel and bias."""
    scale0, bias0, kernel, bias, scale1, bias1 = params
    hidden = np.maximum(norms(0, x, scale0, bias0, train=train) @ kernel + bias, 0)
    return norms(1, hidden, scale1, bias1, train=train)


def q_of(params, norms, obs, action, *, train):
    """Q of one critic."""
    *body, kernel, bias = params
    return (features(body, norms, np.c_[obs, action], train=train) @ kernel + bias)[:, 0]


def act(params, norms, obs, noise, *, train):
    """Actions with this noise and their log-probabilities, and the numbers before the noise."""
    *body, kernel, bias, scale_kernel, scale_bias = params
    z = features(body, norms, obs, train=train)
    mean, log_std = z @ kernel + bias, z @ scale_kernel + scale_bias
    u = mean + np.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(u), (normal - np.log(1 - np.tanh(u) ** 2)).sum(1)


def noise_of(params, norms, obs, action, *, train):
    """The noise of actions that were drawn from an actor."""
    *body, kernel, bias, scale_kernel, scale_bias = params
    z = features(body, norms, obs, train=train)
    return (np.arctanh(action) - z @ kernel - bias) / np.exp(z @ scale_kernel + scale_bias)


def gradient(loss, params):
    """Central differences of a loss, for each number of each array."""
    slopes = []
    for i, array in enumerate(params):
        slope = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            ends = []
            for step in (1e-6, -1e-6):
                other = array.copy()
                other[index] += step
                ends.append(loss([*params[:i], other, *params[i + 1 :]]))
            slope[index] = (ends[0] - ends[1]) / 2e-6
        slopes.append(slope)
    return slopes


def critic_arrays(tree, i):
    """The parameters, or what has their tree, of critic i."""
    layer, last, head = tree["layers"][0], tree["last_norm"], tree["head"]
    rows = [layer["norm"]["scale"], layer["norm"]["bias"], layer["linear"]["bias"], last["scale"], last["bias"], head["bias"]]
    scale0, bias0, bias, scale1, bias1, head_bias = (np.asarray(x[i, 0], float) for x in rows)
    kernel, head_kernel = (np.asarray(x["kernel"][i], float) for x in (layer["linear"], head))
    return [scale0, bias0, kernel, bias, scale1, bias1, head_kernel, head_bias]


def actor_arrays(tree):
    dense, policy = tree["actor"]["dense"], tree["policy"]
    (first, last), layer, (scales,) = (dense["norms"][i] for i in range(2)), dense["layers"][0], policy["scales"].values()
    arrays = [first["scale"][0], first["bias"][0], layer["kernel"], layer["bias"], last["scale"][0], last["bias"][0]]
    arrays += [policy["linear"]["kernel"], policy["linear"]["bias"], scales["kernel"], scales["bias"]]
    return [np.asarray(x, float) for x in arrays]


def critic_norms(stats, i):
    parts = [stats["layers"][0]["norm"], stats["last_norm"]]
    return Norms(*([np.asarray(part[name][i, 0], float) for part in parts] for name in ("mean", "var")))


def actor_norms(stats):
    parts = [stats["actor"]["dense"]["norms"][i] for i in range(2)]
    return Norms(*([np.asarray(part[name][0], float) for part in parts] for name in ("mean", "var")))


def other_statistics(copies, key):
    """Copies whose running statistics are not the initial ones, some so far away that r and d are clipped."""

    def move(path, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        draw = jax.random.normal(jax.random.fold_in(key, len(jax.tree_util.keystr(path))), x.shape)
        return jnp.exp(1.5 * draw) if "var" in jax.tree_util.keystr(path) else 0.5 * draw

    stats = jax.tree_util.tree_map_with_path(move, copies.online.stats)
    return dataclasses.replace(copies, online=dataclasses.replace(copies.online, stats=stats))


@pytest.fixture(scope="module")
def step():
    """One `train_step` by gradient descent, with the copies before and after it, and the batch."""
    agent = make(optimizer=optax.sgd(0.1), policy_delay=1, reward_scale=2.0)
    copies = agent.init(KEY).copies
    critics, actor = other_statistics(copies.critics, KEY), other_statistics(copies.actor, jax.random.key(1))
    temperature = dataclasses.replace(copies.temperature, log_alpha=jnp.log(jnp.float32(0.2)))
    copies = dataclasses.replace(copies, critics=critics, actor=actor, temperature=temperature)
    rows = batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]), weight=jnp.array([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
    after, log = jax.jit(partial(agent.train_step, env_steps=StepCount.of(0), axis_name=None))(
        copies, rows, KEY, jnp.array(True)
    )
    return agent, copies, rows, after, log


def arrays_of(rows):
    names = ("obs", "action", "reward", "discount", "next_obs", "weight")
    return (np.asarray(getattr(rows, name), float) for name in names)


def test_a_gradient_step_of_the_critics_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, action, reward, discount, next_obs, weight = arrays_of(rows)
    key = jax.random.split(jax.random.split(KEY, 3)[0])[0]
    draw, _ = agent.draw_actions(copies.actor.online, rows.next_obs, None, key)
    policy = actor_arrays(copies.actor.online.params), actor_norms(copies.actor.online.stats)
    noise = noise_of(*policy, next_obs, np.asarray(draw.action, float), train=False)
    next_action, log_prob = act(*policy, next_obs, noise, train=False)
    np.testing.assert_allclose(log_prob, draw.log_prob, rtol=1e-3, atol=1e-3)
    params = [critic_arrays(copies.critics.online.params, i) for i in range(2)]
    norms = [critic_norms(copies.critics.online.stats, i) for i in range(2)]
    joint = np.r_[obs, next_obs], np.r_[action, next_action]
    q, next_q = np.split(np.stack([q_of(p, n, *joint, train=True) for p, n in zip(params, norms, strict=True)], axis=1), 2)
    r = np.concatenate([n.corrections[i][0] for n in norms for i in range(2)])
    d = np.concatenate([n.corrections[i][1] for n in norms for i in range(2)])
    assert 0 < np.mean((r > 0.334) & (r < 3)) < 1 and np.mean(np.abs(d) > 0.1) > 0.5, "some are clipped"
    y = 2.0 * reward + discount * (next_q.min(1) - 0.2 * log_prob)
    loss = np.sum(weight * np.sum(0.5 * (y[:, None] - q) ** 2, axis=1))
    np.testing.assert_allclose(log.terms["critic_loss"], loss, rtol=1e-3)
    np.testing.assert_allclose(log.terms["priority"], np.abs(y[:, None] - q).mean(1), rtol=1e-2, atol=1e-3)
    for i in range(2):
        loss_of = lambda p, i=i: np.sum(weight * 0.5 * (y - q_of(p, norms[i], *joint, train=True)[:6]) ** 2)  # noqa: E731
        for before, slope, found in zip(
            params[i], gradient(loss_of, params[i]), critic_arrays(after.critics.online.params, i), strict=True
        ):
            np.testing.assert_allclose((before - found) / 0.1, slope, rtol=5e-3, atol=5e-3 * np.abs(slope).max())
        found = critic_norms(after.critics.online.stats, i)
        for j, (mean, var) in norms[i].new.items():
            np.testing.assert_allclose(found.means[j], mean, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(found.variances[j], var, rtol=1e-3)


def test_a_gradient_step_of_the_actor_and_of_alpha_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    _, key, alpha_key = jax.random.split(KEY, 3)
    params, norms = actor_arrays(copies.actor.online.params), actor_norms(copies.actor.online.stats)
    draw, _ = agent.draw_actions(copies.actor.online, rows.obs, None, key, train=True)
    noise = noise_of(params, norms, obs, np.asarray(draw.action, float), train=True)
    # The new critics, in evaluation mode.
    critics = [(critic_arrays(after.critics.online.params, i), critic_norms(after.critics.online.stats, i)) for i in range(2)]

    def loss_of(params):
        action, log_prob = act(params, norms, obs, noise, train=True)
        q = np.stack([q_of(*critic, obs, action, train=False) for critic in critics], axis=1).min(1)
        return np.sum(weight * (0.2 * log_prob - q))

    np.testing.assert_allclose(log.terms["actor_loss"], loss_of(params), rtol=2e-3, atol=2e-3)
    for before, slope, found in zip(params, gradient(loss_of, params), actor_arrays(after.actor.online.params), strict=True):
        np.testing.assert_allclose((before - found) / 0.1, slope, rtol=1e-2, atol=1e-2 * np.abs(slope).max())
    found = actor_norms(after.actor.online.stats)
    for j, (mean, var) in norms.new.items():
        np.testing.assert_allclose(found.means[j], mean, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found.variances[j], var, rtol=1e-3)
    # α of the new actor, in evaluation mode: dJ/d log α = -α (log π + H̄), H̄ = -2.
    draw, _ = agent.draw_actions(after.actor.online, rows.obs, None, alpha_key)
    slope = -0.2 * np.sum(weight * (np.asarray(draw.log_prob, float) - 2.0))
    np.testing.assert_allclose(after.temperature.log_alpha, np.log(0.2) - 0.1 * slope, rtol=1e-4)


def test_the_defaults_are_those_of_the_authors_code():
    agent = polyak.CrossQ(SPEC)
    settings = {"norm": "batch_renorm", "norm_before": "linear"}
    assert agent.actor == polyak.Actor((256, 256), **settings) and agent.critics == polyak.Critics((2048, 2048), **settings)
    assert (agent.learning_rate, agent.adam_b1, agent.policy_delay, agent.learning_starts) == (1e-3, 0.5, 3, 5_000)
    assert (agent.gamma, agent.batch_size, agent.updates_per_step, agent.alpha_loss) == (0.99, 256, 1.0, "alpha")
    assert agent.replay == polyak.UniformReplay(1_000_000) and agent.critics.renorm_warmup == 100_000
    sde = polyak.CrossQ(SPEC, sde_sample_freq=4).actor
    assert sde == polyak.Actor(std="sde", log_std=-3.0, **settings)


def test_the_mean_of_gradients_decays_by_adam_b1():
    adam, params = polyak.CrossQ(SPEC).optimizer_at(), {"w": jnp.array([1.0, 2.0])}
    state, mean, square = adam.init(params), 0.0, 0.0
    for count, gradient in enumerate((np.array([0.3, -2.0]), np.array([-0.1, 0.7])), start=1):
        with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic
            updates, state = adam.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        mean, square = 0.5 * mean + 0.5 * gradient, 0.999 * square + 0.001 * gradient**2
        wanted = -1e-3 * mean / (1 - 0.5**count) / (np.sqrt(square / (1 - 0.999**count)) + 1e-8)
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-4)


ROLLOUTS_OF_8 = {"batch_size": 64, "num_steps": 8, "updates_per_step": 0.25}


def test_there_are_no_targets_and_the_actor_trains_every_third_step():
    agent = make(**ROLLOUTS_OF_8)
    assert agent.init(KEY).copies.critics.target is None and "tau" not in agent.__dataclass_fields__
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    assert int(state.copies.critics.steps) == 12 and int(state.copies.actor.steps) == 4
    counts = [
        state.copies.critics.online.stats["last_norm"]["steps"],
        state.copies.actor.online.stats["actor"]["dense"]["norms"][0]["steps"],
    ]
    assert [int(count) for count in counts] == [12, 4]
    assert {"train/critic_loss", "train/actor_loss", "train/alpha", "train/entropy"} <= set(metrics)


def test_rows_that_are_not_learned_from_reach_no_network():
    agent = make(**ROLLOUTS_OF_8)

    def after(ignored):
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored, rollout.actions)
        copies = updated(agent, [dataclasses.replace(rollout, actions=actions)] * 3)[0].copies
        return copies.critics.online, copies.actor.online

    assert equal(after(0.9), after(-0.9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, r"CrossQ: actions must be Boxes, got Discrete\(n=2\); SAC, DQN and PPO"),
        ({"critics": polyak.Critics(num_quantiles=5)}, r"q of B = 97 observations must have shape \[B, N\]"),
        ({"adam_b1": 1.0}, r"CrossQ: adam_b1 must be a number in \[0, 0.9999\], got 1.0"),
        ({"optimizer": optax.sgd(0.1), "adam_b1": 0.9}, "CrossQ: adam_b1 has no effect with optimizer"),
        ({"alpha": 0.1, "alpha_loss": "log_alpha"}, "CrossQ: alpha_loss has no effect with a fixed alpha"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def test_a_row_of_state_dependent_exploration_does_not_see_the_others():
    agent = make(actor=polyak.Actor((6,), std="sde", log_std=-3.0, **NORM), sde_sample_freq=4)
    policy, obs = agent.collect_policy(agent.init(KEY)).policy, jax.random.normal(KEY, (4, 3))
    no = jnp.zeros(4, bool)
    steps = [TimeStep(x, jnp.zeros(4), no, no, ~no) for x in (obs, obs.at[1:].mul(9.0))]
    actions = [policy.action(step, policy.initial_state(4), KEY).action for step in steps]
    np.testing.assert_allclose(actions[0][0], actions[1][0], rtol=1e-5)
    assert not np.allclose(actions[0][1:], actions[1][1:], rtol=1e-2)


def test_critics_and_actor_see_their_entries_of_the_observation():
    box = Box([-9.0] * 3, [9.0] * 3)
    spec = EnvSpec(Dict({"all": box, "seen": box}), SPEC.action)
    plain, losses = batch(), []
    obs, next_obs = ({"all": x, "seen": x} for x in (plain.obs, plain.next_obs))
    seen = dataclasses.replace(plain, obs=obs, next_obs=next_obs)
    for agent, rows in ((make(spec, actor_obs="seen", critic_obs="all"), seen), (make(), plain)):
        copies = agent.init(KEY).copies
        critics, actor = copies.critics.online, copies.actor.online
        args = {"critics": critics, "target": critics, "actor": actor, "alpha": jnp.float32(0.2), "key": KEY}
        losses.append(agent.critic_loss(critics.params, rows, **args)[0])
    np.testing.assert_allclose(*losses, rtol=1e-6)


@struct
class Aim:
    """Episodes of one step: the observation is a sign, and the best action half of it."""

    @property
    def spec(self):
        return EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0]), "aim")

    def reset(self, key, num_envs):
        return jnp.where(jax.random.bernoulli(key, 0.5, (num_envs,)), 1.0, -1.0)

    def step(self, state, action, key):
        return state, -jnp.square(action[:, 0] - 0.5 * state), jnp.ones(state.shape, bool), jnp.zeros(state.shape, bool)

    def observe(self, state):
        return state[:, None]


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env, norm = AutoReset(Aim(), 8), NORM | {"renorm_warmup": 100}
    agent = make(
        env.spec, actor=polyak.Actor((32,), **norm), critics=polyak.Critics((64,), **norm), learning_starts=512,
        batch_size=64, num_steps=1, learning_rate=3e-3, alpha=0.05, replay=polyak.UniformReplay(16_000),
    )  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=4_000, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.15)
    best, worse = (agent.q_values(state.copies.critics.online, jnp.asarray(obs), x) for x in (action, -action))
    np.testing.assert_allclose(best, np.zeros((2, 2)), atol=0.15)
    np.testing.assert_allclose(worse, np.full((2, 2), -1.0), atol=0.4)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(partial(make, learning_starts=32), "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")


def test_critics_without_batch_normalization_warn():
    with pytest.warns(UserWarning, match="CrossQ: critics have no batch normalization, which replaces the target networks"):
        make(critics=polyak.Critics((8,), norm="layer")).init(KEY)

"""XQC: a gradient step of all networks against a slow version in NumPy, its projections and defaults, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyak
from polyak.core.spaces import Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.ops.schedules import StepCount
from polyak.ops.weight_norm import DenseKernels, normalize_weights
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated
from tests.agents.test_crossq import Aim, arrays_of, gradient, other_statistics

KEY = jax.random.key(0)
NORM = {"norm": "batch", "norm_inputs": True}
SMALL = {
    "batch_size": 16, "learning_starts": 0, "num_steps": 4, "updates_per_step": 0.5, "normalize_reward": None,
    "replay": polyak.UniformReplay(512),
}  # fmt: skip
ATOMS, RATE = np.linspace(-2.0, 2.0, 5), 0.1


def make(spec=SPEC, **settings):
    networks = {"actor": polyak.Actor((6,), **NORM), "critics": polyak.Critics((8,), **NORM)}
    support = {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0}
    return polyak.XQC(spec, **{**SMALL, **networks, **support, **settings})


# A slow version in NumPy. Parameters are lists of arrays, float64; gradients are differences.


def normalize(x, stats, i, scale, bias):
    """Batch normalization: of the batch without running statistics, else of these."""
    mean, var = (x.mean(0), x.var(0)) if stats is None else stats[i]
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


def features(params, x, stats=None):
    """Normalize the inputs, a linear layer, normalize, relu."""
    scale0, bias0, kernel, bias, scale1, bias1 = params
    hidden = normalize(x, stats, 0, scale0, bias0) @ kernel + bias
    return np.maximum(normalize(hidden, stats, 1, scale1, bias1), 0)


def probs_of(params, obs, action, stats=None):
    """The distribution of one critic."""
    *body, kernel, bias = params
    logits = features(body, np.c_[obs, action], stats) @ kernel + bias
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return exps / exps.sum(1, keepdims=True)


def act(params, obs, noise, stats=None):
    """Actions with this noise, and their log-probabilities."""
    *body, kernel, bias, scale_kernel, scale_bias = params
    z = features(body, obs, stats)
    mean, log_std = z @ kernel + bias, z @ scale_kernel + scale_bias
    u = mean + np.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(u), (normal - np.log(1 - np.tanh(u) ** 2)).sum(1)


def noise_of(params, obs, action, stats=None):
    """The noise of actions that were drawn from an actor."""
    *body, kernel, bias, scale_kernel, scale_bias = params
    z = features(body, obs, stats)
    return (np.arctanh(action) - z @ kernel - bias) / np.exp(z @ scale_kernel + scale_bias)


def project(values, probs):
    """C51's projection, value by value: each gives its probability to its two neighbours among the atoms."""
    shares = np.zeros((len(values), len(ATOMS)))
    for row, (of_row, weights) in enumerate(zip(values, probs, strict=True)):
        for value, weight in zip(np.clip(of_row, -2, 2), weights, strict=True):
            below = min(int(np.floor(value + 2)), len(ATOMS) - 2)
            upper = value + 2 - below
            shares[row, below] += weight * (1 - upper)
            shares[row, below + 1] += weight * upper
    return shares


def critic_arrays(tree, i):
    """The parameters, or what has their tree, of critic i of 2: normalizations have both critics' features side by side."""
    layer, head = tree["layers"][0], tree["head"]
    parts = [tree["input_norm"]["norm"], layer["norm"]["norm"]]
    norms = [[np.asarray(x[name], float).reshape(2, -1)[i] for name in ("scale", "bias")] for x in parts]
    dense = [[np.asarray(x["kernel"][i], float), np.asarray(x["bias"][i, 0], float)] for x in (layer["linear"], head)]
    return [*norms[0], *dense[0], *norms[1], *dense[1]]


def actor_arrays(tree):
    dense, policy = tree["actor"]["dense"], tree["policy"]
    (scales,) = policy["scales"].values()
    norms = [[x["scale"], x["bias"]] for x in (dense["input_norm"], dense["norms"][0])]
    linear = [[x["kernel"], x["bias"]] for x in (dense["layers"][0], policy["linear"], scales)]
    return [np.asarray(x, float) for x in (*norms[0], *linear[0], *norms[1], *linear[1], *linear[2])]


def critic_stats(stats, i):
    norms = stats["input_norm"]["norm"], stats["layers"][0]["norm"]["norm"]
    return [[np.asarray(x[name], float).reshape(2, -1)[i] for name in ("mean", "var")] for x in norms]


def actor_stats(stats):
    dense = stats["actor"]["dense"]
    return [[np.asarray(x[name], float) for name in ("mean", "var")] for x in (dense["input_norm"], dense["norms"][0])]


def after_step(before, slopes, kernels):
    """Parameters after a step of gradient descent, and the projection of the weight vectors."""
    new = [x - RATE * slope for x, slope in zip(before, slopes, strict=True)]
    return [x / np.linalg.norm(x, axis=0) if i in kernels else x for i, x in enumerate(new)]


def other_weights(copies, key):
    """Copies whose scales and biases are not the initial ones."""
    leaves, tree = jax.tree.flatten(copies.online.params)
    keys = jax.random.split(key, len(leaves))
    params = jax.tree.unflatten(tree, [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    kernels = DenseKernels(3) if copies.name == "critics" else DenseKernels(without=("scales",))
    online = dataclasses.replace(copies.online, params=normalize_weights(params, kernels))
    return dataclasses.replace(copies, online=online)


@pytest.fixture(scope="module")
def step():
    """One `train_step` by gradient descent, with the copies before and after it, and the batch."""
    agent = make(optimizer=optax.sgd(RATE), policy_delay=1, reward_scale=2.0, tau=0.25)
    copies = agent.init(KEY).copies
    critics, actor = other_statistics(copies.critics, KEY), other_statistics(copies.actor, jax.random.key(1))
    critics, actor = other_weights(critics, jax.random.key(2)), other_weights(actor, jax.random.key(3))
    temperature = dataclasses.replace(copies.temperature, log_alpha=jnp.log(jnp.float32(0.2)))
    copies = dataclasses.replace(copies, critics=critics, actor=actor, temperature=temperature)
    rows = batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]), weight=jnp.array([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
    after, log = jax.jit(partial(agent.train_step, env_steps=StepCount.of(0), axis_name=None))(
        copies, rows, KEY, jnp.array(True)
    )
    return agent, copies, rows, after, log


def test_a_gradient_step_of_the_critics_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, action, reward, discount, next_obs, weight = arrays_of(rows)
    key = jax.random.split(jax.random.split(KEY, 3)[0], 3)[0]
    draw, _ = agent.draw_actions(copies.actor.online, rows.next_obs, None, key)
    policy, stats = actor_arrays(copies.actor.online.params), actor_stats(copies.actor.online.stats)
    noise = noise_of(policy, next_obs, np.asarray(draw.action, float), stats)
    next_action, log_prob = act(policy, next_obs, noise, stats)
    np.testing.assert_allclose(log_prob, draw.log_prob, rtol=1e-3, atol=1e-3)
    joint = np.r_[obs, next_obs], np.r_[action, next_action]
    next_probs = np.stack([probs_of(critic_arrays(copies.critics.target.params, i), *joint)[6:] for i in range(2)], axis=1)
    lowest = np.argmin(next_probs @ ATOMS, axis=1)
    assert set(lowest) == {0, 1}, "each critic has the lower value somewhere"
    values = 2.0 * reward[:, None] + discount[:, None] * (ATOMS - 0.2 * log_prob[:, None])
    assert np.any(np.abs(values) > 2), "some values are clipped"
    wanted = project(values, next_probs[np.arange(6), lowest])
    params = [critic_arrays(copies.critics.online.params, i) for i in range(2)]
    entropies = [-np.sum(wanted * np.log(probs_of(p, *joint)[:6]), axis=1) for p in params]
    np.testing.assert_allclose(log.terms["critic_loss"], weight @ sum(entropies), rtol=1e-3)
    own = -np.sum(wanted * np.log(np.where(wanted > 0, wanted, 1)), axis=1)
    np.testing.assert_allclose(log.terms["priority"], np.mean(entropies, axis=0) - own, rtol=1e-2, atol=1e-3)
    for i in range(2):
        loss_of = lambda p: -weight @ np.sum(wanted * np.log(probs_of(p, *joint)[:6]), axis=1)  # noqa: E731
        new = after_step(params[i], gradient(loss_of, params[i]), kernels=(2, 6))
        found = critic_arrays(after.critics.online.params, i)
        for x, y in zip(found, new, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
        # The target follows the projected weights.
        target = critic_arrays(copies.critics.target.params, i)
        for x, y, z in zip(critic_arrays(after.critics.target.params, i), target, found, strict=True):
            np.testing.assert_allclose(x, 0.75 * y + 0.25 * z, rtol=1e-4, atol=1e-5)
        x = np.c_[joint]
        (mean, var), _ = critic_stats(copies.critics.online.stats, i)
        (new_mean, new_var), _ = critic_stats(after.critics.online.stats, i)
        np.testing.assert_allclose(new_mean, 0.99 * mean + 0.01 * x.mean(0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(new_var, 0.99 * var + 0.01 * x.var(0), rtol=1e-3)


def test_a_gradient_step_of_the_actor_and_of_alpha_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    _, key, alpha_key = jax.random.split(KEY, 3)
    params = actor_arrays(copies.actor.online.params)
    draw, _ = agent.draw_actions(copies.actor.online, rows.obs, None, key, train=True)
    noise = noise_of(params, obs, np.asarray(draw.action, float))
    # The new critics, in evaluation mode.
    online = after.critics.online
    critics = [(critic_arrays(online.params, i), critic_stats(online.stats, i)) for i in range(2)]

    def loss_of(params):
        action, log_prob = act(params, obs, noise)
        q = np.stack([probs_of(arrays, obs, action, stats) @ ATOMS for arrays, stats in critics], axis=1).min(1)
        return np.sum(weight * (0.2 * log_prob - q))

    np.testing.assert_allclose(log.terms["actor_loss"], loss_of(params), rtol=2e-3, atol=2e-3)
    # The kernel of the standard deviation, the last but one, is not projected.
    new = after_step(params, gradient(loss_of, params), kernels=(2, 6))
    for x, y in zip(actor_arrays(after.actor.online.params), new, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)
    # α of the new actor, in evaluation mode: dJ/d log α = -α (log π + H̄), H̄ = -2 / 2.
    draw, _ = agent.draw_actions(after.actor.online, rows.obs, None, alpha_key)
    slope = -0.2 * np.sum(weight * (np.asarray(draw.log_prob, float) - 1.0))
    np.testing.assert_allclose(after.temperature.log_alpha, np.log(0.2) - RATE * slope, rtol=1e-4)


def test_the_defaults_are_those_of_the_authors_code():
    agent = polyak.XQC(SPEC)
    assert agent.actor == polyak.Actor((256,) * 4, **NORM)
    assert agent.critics == polyak.Critics((512,) * 4, **NORM, num_atoms=101)
    assert (agent.learning_rate, agent.adam_b1, agent.policy_delay, agent.learning_starts) == (3e-4, 0.9, 3, 5_000)
    assert (agent.batch_size, agent.updates_per_step, agent.alpha_loss, agent.initial_alpha) == (256, 2.0, "alpha", 0.01)
    assert (agent.tau, agent.target_period, agent.v_min, agent.v_max) == (0.005, 1, -5.0, 5.0)
    assert agent.normalize_reward == "return" and agent.weight_norm and agent.replay == polyak.UniformReplay(1_000_000)
    np.testing.assert_array_equal(agent.default_target_entropy(None), [-1.0])


def kernels_of(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {key: x for path, x in leaves if "kernel" in (key := jax.tree_util.keystr(path)) and "scales" not in key}


@pytest.mark.parametrize("algorithm", ["XQC", "SimbaV2", pytest.param("SAC", marks=pytest.mark.slow)])
def test_weight_vectors_have_norm_1_from_the_start_and_after_each_step(algorithm):
    agent = make(num_steps=8, updates_per_step=0.25, ema_tau=0.1)
    if algorithm == "SimbaV2":
        blocks = {"residual": "hypersphere"}
        agent = dataclasses.replace(agent, actor=polyak.Actor((6,), **blocks), critics=polyak.Critics((8,), **blocks))
    if algorithm == "SAC":
        networks = {"actor": agent.actor, "critics": dataclasses.replace(agent.critics, num_atoms=None)}
        agent = polyak.SAC(
            SPEC, **{**SMALL, **networks, "num_steps": 8, "updates_per_step": 0.25}, weight_norm=True, ema_tau=0.1
        )
    before = agent.init(KEY)
    after, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    assert int(after.copies.critics.steps) > 0
    for state in (before, after):
        for copies in (state.copies.actor, state.copies.critics):
            kernels = kernels_of(copies.online.params)
            assert len(kernels) == (5 if algorithm == "SimbaV2" else 2)
            for path, kernel in kernels.items():
                # Values have the scale of returns.
                is_unit = not (algorithm == "SAC" and "head" in path)
                assert np.allclose(np.linalg.norm(kernel, axis=-2), 1.0, rtol=1e-5) == is_unit
    copies = before.copies
    assert equal(copies.critics.target, copies.critics.online) and equal(copies.average, copies.actor.online)
    average = dataclasses.replace(after.copies.average, params=jax.tree.map(lambda x: 0.5 * x, after.copies.average.params))
    inside = dataclasses.replace(after, copies=dataclasses.replace(after.copies, average=average))
    for kernel in kernels_of(agent.policy(inside).policy.variables.params).values():
        np.testing.assert_allclose(np.linalg.norm(kernel, axis=-2), 1.0, rtol=1e-5)
    assert not equal(kernels_of(after.copies.critics.online.params), kernels_of(copies.critics.online.params))


def test_rows_that_are_not_learned_from_reach_no_network():
    agent = make(batch_size=64, num_steps=8, updates_per_step=0.25)

    def after(ignored):
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored, rollout.actions)
        copies = updated(agent, [dataclasses.replace(rollout, actions=actions)] * 3)[0].copies
        assert int(copies.critics.steps) > 0
        return copies.critics.online, copies.actor.online

    assert equal(after(0.9), after(-0.9))


def test_the_warm_up_of_batch_renormalization_ends_for_target_and_online_critics_at_once():
    agent = make(critics=polyak.Critics((8,), norm="batch_renorm", norm_inputs=True, renorm_warmup=1))
    copies = agent.create_copies(KEY)
    cold = copies.critics.online
    counted = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == jnp.uint32 else x, cold.stats)
    warm = dataclasses.replace(cold, stats=counted)

    @jax.jit
    def loss(critics, target):
        options = {"actor": copies.actor.online, "alpha": jnp.float32(0.1), "key": KEY}
        return agent.critic_loss(critics.params, batch(), critics=critics, target=target, **options)[0]

    # A soft update leaves the target's count of steps at 0.
    assert loss(warm, cold) == loss(warm, warm) != loss(cold, cold)


class Unnamed(nnx.Module):
    """An actor whose weights have another name."""

    def __init__(self, spec, rngs):
        self.w = nnx.Param(jnp.zeros((3, 2)))

    def __call__(self, obs):
        return {"loc": obs @ self.w, "log_scale": jnp.zeros((len(obs), 2))}, None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, r"XQC: actions must be Boxes, got Discrete\(n=2\); SAC, DQN and PPO"),
        (
            {"critics": polyak.Critics(num_atoms=7)},
            "XQC: num_atoms=5 of the agent must equal the number of its critics",
        ),
        ({"critics": polyak.Critics(num_quantiles=5)}, "Critics: num_atoms must be None with num_quantiles=5, got 5"),
        ({"v_min": 2.0}, r"XQC: v_min=2.0 must be below v_max=2.0"),
        ({"actor": polyak.FlaxNNX(Unnamed)}, "network: weight_norm=True needs dense layers with weights named kernel, as Flax"),
        ({"optimizer": optax.contrib.schedule_free_sgd(0.1)}, "XQC: weight_norm must be False with schedule_free"),
        (
            {"optimizer": optax.flatten(optax.contrib.schedule_free_sgd(0.1))},
            "XQC: weight_norm must be False with schedule_free",
        ),
        (
            {"optimizer": optax.partition({"all": optax.contrib.schedule_free_sgd(0.1)}, lambda p: dict.fromkeys(p, "all"))},
            "XQC: weight_norm must be False with schedule_free",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def check_action_and_values(agent, env, env_steps):
    """Check that an agent with 41 atoms learns `Aim`: the best action, the value of it, and the value of the opposite one."""
    state = polyak.loops.compiled(agent, env, env_steps=env_steps, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.2)
    critics, atoms = state.copies.critics.online, np.linspace(-2, 2, 41)
    best, worse = (jax.nn.softmax(agent.q_values(critics, jnp.asarray(obs), x)) @ atoms for x in (action, -action))
    np.testing.assert_allclose(best, np.zeros((2, 2)), atol=0.2)
    np.testing.assert_allclose(worse, np.full((2, 2), -1.0), atol=0.5)


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = make(
        env.spec, actor=polyak.Actor((32,), **NORM), critics=polyak.Critics((64,), **NORM), learning_starts=512,
        batch_size=64, num_steps=1, learning_rate=3e-3, alpha=0.05, num_atoms=41,
        replay=polyak.UniformReplay(16_000),
    )  # fmt: skip
    check_action_and_values(agent, env, env_steps=4_000)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(
        partial(make, learning_starts=32, normalize_reward="return"),
        "Pendulum-v1",
        loop,
        devices,
        tmp_path,
        action_scaling="rescale",
    )

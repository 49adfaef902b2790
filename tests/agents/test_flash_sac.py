"""FlashSAC, XQC with inverted blocks: a gradient step of all networks against a slow version in NumPy, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.envs.autoreset import AutoReset
from polyak.ops.schedules import StepCount
from polyak.ops.weight_norm import normalize_weights
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import batch
from tests.agents.test_crossq import Aim, arrays_of, gradient, other_statistics
from tests.agents.test_xqc import ATOMS, RATE, check_action_and_values, make, other_weights, project

KEY = jax.random.key(0)
BLOCKS = {"residual": "inverted"}
ACTOR = {**BLOCKS, "squash_log_std": True, "log_std": -1.0}
NORMS, KERNELS = (0, 3, 5, 6), (1, 2, 4, 7)
"""Positions of the scales and biases, and of the kernels on unit spheres, in a list of parameters."""


def flash_sac(*args, width=4, **settings):
    networks = {"actor": polyak.Actor((width,), **ACTOR), "critics": polyak.Critics((width,), **BLOCKS)}
    return make(*args, **{**networks, "max_noise_repeats": 16, **settings})


# A slow version in NumPy. Parameters are lists of arrays, float64; gradients are differences.


def normalize(x, affine, stats):
    """Batch normalization: of the batch without running statistics, else of these."""
    mean, var = (x.mean(0), x.var(0)) if stats is None else stats
    return (x - mean) / np.sqrt(var + 1e-5) * affine[0] + affine[1]


def features(params, x, stats=None):
    """The inputs normalized, a linear layer, one inverted block, and the root mean square."""
    of_inputs, of_inner, of_outer = (None,) * 3 if stats is None else stats
    affine, first, inner, inner_affine, outer, outer_affine, last = params
    x = normalize(x, affine, of_inputs) @ first
    hidden = np.maximum(normalize(x @ inner, inner_affine, of_inner), 0)
    x = x + np.maximum(normalize(hidden @ outer, outer_affine, of_outer), 0)
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * last[0]


def probs_of(params, obs, action, stats=None):
    """The distribution of one critic."""
    logits = features(params[:7], np.c_[obs, action], stats) @ params[7] + params[8]
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return exps / exps.sum(1, keepdims=True)


def moments(params, obs, stats=None):
    """Mean and standard deviation of the action before tanh."""
    z = features(params[:7], obs, stats)
    return z @ params[7] + params[8], np.exp(-10 + 6 * (1 + np.tanh(z @ params[9] + params[10])))


def act(params, obs, noise, stats=None):
    """Actions with this noise, and their log-probabilities."""
    mean, std = moments(params, obs, stats)
    action = np.tanh(mean + std * noise)
    normal = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return action, (normal - np.log(1 - action**2)).sum(1)


def noise_of(params, obs, action, stats=None):
    """The noise of actions that were drawn from an actor."""
    mean, std = moments(params, obs, stats)
    return (np.arctanh(np.asarray(action, float)) - mean) / std


def block_arrays(tree):
    (block,) = tree["blocks"].values()
    norms = tree["input_norm"], block["inner_norm"], block["outer_norm"], tree["last_norm"]
    affine = [x["unit_affine"] for x in norms]
    first, inner, outer = (x["kernel"] for x in (tree["first"], block["inner"], block["outer"]))
    return [affine[0], first, inner, affine[1], outer, affine[2], affine[3]]


def critic_arrays(params, i):
    head = params["head"]
    return [np.asarray(x[i], float) for x in (*block_arrays(params["layers"][0]), head["kernel"], head["bias"])]


def actor_arrays(params):
    policy = params["policy"]
    (scales,) = policy["scales"].values()
    rest = [x[name] for x in (policy["linear"], scales) for name in ("kernel", "bias")]
    return [np.asarray(x, float) for x in (*block_arrays(params["actor"]["dense"]["residual"]), *rest)]


def statistics(tree, i=...):
    (block,) = tree["blocks"].values()
    norms = tree["input_norm"], block["inner_norm"], block["outer_norm"]
    return [[np.asarray(x[name][i], float)[0] for name in ("mean", "var")] for x in norms]


def after_step(before, slopes):
    """Parameters after a step of gradient descent, and the projections."""
    new = [x - RATE * slope for x, slope in zip(before, slopes, strict=True)]
    for i in KERNELS:
        new[i] = new[i] / np.linalg.norm(new[i], axis=0)
    for i in NORMS:
        new[i] = np.sqrt(new[i].shape[-1]) * new[i] / np.sqrt(np.sum(new[i] ** 2))
    return new


@pytest.fixture(scope="module")
def step():
    """One `train_step` by gradient descent, with the copies before and after it, and the batch."""
    agent = flash_sac(optimizer=optax.sgd(RATE), policy_delay=1, reward_scale=2.0, tau=0.25)
    copies = agent.init(KEY).copies
    critics, actor = other_statistics(copies.critics, KEY), other_statistics(copies.actor, jax.random.key(1))
    critics, actor = other_weights(critics, jax.random.key(2)), other_weights(actor, jax.random.key(3))
    temperature = dataclasses.replace(copies.temperature, log_alpha=jnp.log(jnp.float32(0.2)))
    copies = dataclasses.replace(copies, critics=critics, actor=actor, temperature=temperature)
    rows = batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]), weight=jnp.array([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
    train = jax.jit(partial(agent.train_step, env_steps=StepCount.of(0), axis_name=None))
    return agent, copies, rows, *train(copies, rows, KEY, jnp.array(True))


def test_a_gradient_step_of_the_critics_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, action, reward, discount, next_obs, weight = arrays_of(rows)
    key = jax.random.split(jax.random.split(KEY, 3)[0], 3)[0]
    draw, _ = agent.draw_actions(copies.actor.online, rows.next_obs, None, key)
    online = copies.actor.online
    policy, stats = actor_arrays(online.params), statistics(online.stats["actor"]["dense"]["residual"])
    next_action, log_prob = act(policy, next_obs, noise_of(policy, next_obs, draw.action, stats), stats)
    np.testing.assert_allclose(log_prob, draw.log_prob, rtol=1e-3, atol=1e-3)
    joint = np.r_[obs, next_obs], np.r_[action, next_action]
    next_probs = np.stack([probs_of(critic_arrays(copies.critics.target.params, i), *joint)[6:] for i in range(2)], axis=1)
    lowest = np.argmin(next_probs @ ATOMS, axis=1)
    values = 2.0 * reward[:, None] + discount[:, None] * (ATOMS - 0.2 * log_prob[:, None])
    wanted = project(values, next_probs[np.arange(6), lowest])
    losses = []
    for i in range(2):
        before = critic_arrays(copies.critics.online.params, i)
        loss_of = lambda p: -weight @ np.sum(wanted * np.log(probs_of(p, *joint)[:6]), axis=1)  # noqa: E731
        losses.append(loss_of(before))
        found = critic_arrays(after.critics.online.params, i)
        for x, y in zip(found, after_step(before, gradient(loss_of, before)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        target = critic_arrays(copies.critics.target.params, i)
        for x, y, z in zip(critic_arrays(after.critics.target.params, i), target, found, strict=True):
            np.testing.assert_allclose(x, 0.75 * y + 0.25 * z, rtol=1e-4, atol=1e-5)
        old, new = (statistics(variables.online.stats["layers"][0], i)[0] for variables in (copies.critics, after.critics))
        x = np.c_[joint]
        np.testing.assert_allclose(new, 0.99 * np.asarray(old) + 0.01 * np.array([x.mean(0), x.var(0)]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log.terms["critic_loss"], sum(losses), rtol=1e-4)


def test_a_gradient_step_of_the_actor_is_that_of_a_slow_version(step):
    agent, copies, rows, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    draw, _ = agent.draw_actions(copies.actor.online, rows.obs, None, jax.random.split(KEY, 3)[1], train=True)
    before, online = actor_arrays(copies.actor.online.params), after.critics.online
    noise = noise_of(before, obs, draw.action)
    critics = [(critic_arrays(online.params, i), statistics(online.stats["layers"][0], i)) for i in range(2)]

    def loss_of(params):
        action, log_prob = act(params, obs, noise)
        q = np.stack([probs_of(arrays, obs, action, stats) @ ATOMS for arrays, stats in critics], axis=1).min(1)
        return np.sum(weight * (0.2 * log_prob - q))

    np.testing.assert_allclose(log.terms["actor_loss"], loss_of(before), rtol=1e-3, atol=1e-4)
    for x, y in zip(actor_arrays(after.actor.online.params), after_step(before, gradient(loss_of, before)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_the_actor_starts_at_log_std_and_stays_in_its_range():
    actor = polyak.Actor((4,), squash_log_std=True, log_std=-4.0)
    spec = make().spec
    variables = actor.init(KEY, spec)
    np.testing.assert_allclose(actor.apply(variables, jnp.ones((2, 3)))[0][0]["log_scale"], -4.0, rtol=1e-6)
    wide = dataclasses.replace(variables, params=jax.tree.map(lambda x: 100.0 * (x + 1.0), variables.params))
    np.testing.assert_allclose(actor.apply(wide, jnp.ones((2, 3)))[0][0]["log_scale"], 2.0)
    for settings, message in (
        ({"log_std": 2.0}, r"Actor: log_std must lie between -10 and 2 with squash_log_std=True, got 2\.0"),
        ({**BLOCKS, "orthogonal": True, "log_std": 0.0}, "Actor: orthogonal must be False with residual='inverted', got True"),
        ({**BLOCKS, "norm": "batch"}, "Actor: norm must be None with residual='inverted', got 'batch'"),
    ):
        with pytest.raises(ValueError, match=message):
            polyak.Actor((4,), squash_log_std=True, **settings)


def test_the_squashed_log_std_leaves_the_mean_and_other_stds_as_they_are():
    spec, obs = make().spec, jax.random.normal(KEY, (2, 3))

    def params_of(**settings):
        actor = polyak.Actor((4,), **settings)
        return actor.apply(actor.init(KEY, spec), obs)[0][0]

    for std in ("free", "fixed", "sde"):
        with pytest.warns(UserWarning, match="squash_log_std=True has no effect"):
            found = params_of(std=std, log_std=-3.0, squash_log_std=True)
        jax.tree.map(np.testing.assert_array_equal, found, params_of(std=std, log_std=-3.0))
    squashed = params_of(squash_log_std=True, squash_mean=True)
    np.testing.assert_array_equal(squashed["loc"], params_of(squash_mean=True)["loc"])


def test_scales_and_biases_together_have_the_norm_of_the_number_of_features():
    params = {"unit_affine": jnp.array([[[3.0, 0.0], [0.0, 4.0]], [[2.0, 0.0], [0.0, 0.0]]]), "bias": jnp.array([7.0])}
    found = normalize_weights(params, make()._dense_kernels("critics"))
    wanted = [[[0.6 * 2**0.5, 0.0], [0.0, 0.8 * 2**0.5]], [[2**0.5, 0.0], [0.0, 0.0]]]
    np.testing.assert_allclose(found["unit_affine"], wanted, rtol=1e-6)
    assert found["bias"] == 7.0


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = flash_sac(
        env.spec, width=16, learning_starts=512, batch_size=32, num_steps=1, learning_rate=3e-3, alpha=0.05, num_atoms=41,
        replay=polyak.UniformReplay(16_000),
    )  # fmt: skip
    check_action_and_values(agent, env, env_steps=2_000)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    agent_for = partial(flash_sac, learning_starts=32, normalize_reward="return", max_return=2.0)
    check_resuming(agent_for, "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")

"""FastTD3: a gradient step of all networks against a slow version in NumPy, its noise, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.core.spaces import Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.ops.schedules import StepCount
from polyak.policies.noise import MixedNoise
from tests.agents.resuming import check_resuming
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated
from tests.agents.test_crossq import Aim, arrays_of, gradient
from tests.agents.test_xqc import ATOMS, RATE, SMALL, project

KEY = jax.random.key(0)


def make(spec=SPEC, **settings):
    networks = {"actor": polyak.Actor((6,), std="fixed"), "critics": polyak.Critics((8,))}
    support = {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0}
    return polyak.FastTD3(spec, **{**SMALL, **networks, **support, **settings})


# A slow version in NumPy. Parameters are lists of arrays, float64; gradients are differences.


def probs_of(params, obs, action):
    """The distribution of one critic."""
    kernel, bias, head, head_bias = params
    logits = np.maximum(np.c_[obs, action] @ kernel + bias, 0) @ head + head_bias
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return exps / exps.sum(1, keepdims=True)


def act(params, obs):
    kernel, bias, head, head_bias = params
    return np.tanh(np.maximum(obs @ kernel + bias, 0) @ head + head_bias)


def critic_arrays(params, i):
    parts = params["layers"][0]["linear"], params["head"]
    return [np.asarray(x[name][i], float) for x in parts for name in ("kernel", "bias")]


def actor_arrays(params):
    (layer,) = params["actor"]["dense"]["layers"].values()
    return [np.asarray(x[name], float) for x in (layer, params["policy"]["linear"]) for name in ("kernel", "bias")]


def after_step(before, slopes):
    return [x - RATE * slope for x, slope in zip(before, slopes, strict=True)]


@pytest.fixture(scope="module")
def step():
    """One `train_step` by gradient descent, with the copies before and after it, and the batch."""
    agent = make(optimizer=optax.sgd(RATE), policy_delay=1, reward_scale=2.0, tau=0.25, target_noise=0.3, target_noise_clip=0.2)
    copies = agent.init(KEY).copies
    target = jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(1), x.shape), copies.critics.target.params)
    target = dataclasses.replace(copies.critics.target, params=target)
    copies = dataclasses.replace(copies, critics=dataclasses.replace(copies.critics, target=target))
    rows = batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]), weight=jnp.array([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
    rows = dataclasses.replace(rows, reward=jnp.linspace(-1.2, 1.2, 6))
    train = jax.jit(partial(agent.train_step, env_steps=StepCount.of(0), axis_name=None))
    return agent, copies, rows, *train(copies, rows, KEY, jnp.array(True))


def test_a_gradient_step_of_the_critics_is_that_of_a_slow_version(step):
    _, copies, rows, after, log = step
    obs, action, reward, discount, next_obs, weight = arrays_of(rows)
    noise_key = jax.random.split(jax.random.split(KEY)[0])[0]
    noise = 0.3 * np.asarray(jax.random.normal(jax.random.split(noise_key, 1)[0], (6, 2)), float)
    assert np.any(np.abs(noise) > 0.2)
    # The online actor: there is no target actor.
    next_action = act(actor_arrays(copies.actor.online.params), next_obs) + np.clip(noise, -0.2, 0.2)
    next_action = np.clip(next_action, -1, 1)
    values = 2.0 * reward[:, None] + discount[:, None] * ATOMS
    assert np.any(np.abs(values) > 2), "some values are clipped"
    targets = [critic_arrays(copies.critics.target.params, i) for i in range(2)]
    projected = np.stack([project(values, probs_of(params, next_obs, next_action)) for params in targets], axis=1)
    lowest = np.argmin(projected @ ATOMS, axis=1)
    assert set(lowest) == {0, 1}, "each critic has the lower value somewhere"
    wanted = projected[np.arange(6), lowest]
    losses, entropies = [], []
    for i in range(2):
        before = critic_arrays(copies.critics.online.params, i)
        loss_of = lambda p: -weight @ np.sum(wanted * np.log(probs_of(p, obs, action)), axis=1)  # noqa: E731
        losses.append(loss_of(before))
        entropies.append(-np.sum(wanted * np.log(probs_of(before, obs, action)), axis=1))
        found = critic_arrays(after.critics.online.params, i)
        for x, y in zip(found, after_step(before, gradient(loss_of, before)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        for x, y, z in zip(critic_arrays(after.critics.target.params, i), targets[i], found, strict=True):
            np.testing.assert_allclose(x, 0.75 * y + 0.25 * z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log.terms["critic_loss"], sum(losses), rtol=1e-5)
    own = -np.sum(wanted * np.log(np.where(wanted > 0, wanted, 1)), axis=1)
    np.testing.assert_allclose(log.terms["priority"], np.mean(entropies, axis=0) - own, rtol=1e-4, atol=1e-5)


def test_the_actor_follows_the_lower_mean_of_the_new_critics(step):
    _, copies, rows, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    before = actor_arrays(copies.actor.online.params)
    critics = [critic_arrays(after.critics.online.params, i) for i in range(2)]
    loss_of = lambda p: -weight @ np.min([probs_of(c, obs, act(p, obs)) @ ATOMS for c in critics], axis=0)  # noqa: E731
    np.testing.assert_allclose(log.terms["actor_loss"], loss_of(before), rtol=1e-5, atol=1e-6)
    for x, y in zip(actor_arrays(after.actor.online.params), after_step(before, gradient(loss_of, before)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert copies.actor.target is None and after.actor.target is None


def test_environments_collect_with_noise_of_their_own_scale():
    agent = make(min_exploration_noise=0.1, max_exploration_noise=0.5, learning_starts=7)
    policy = agent.collect_policy(agent.init(KEY))
    assert policy.steps == 7 and isinstance(policy.policy, MixedNoise)
    assert (policy.policy.low, policy.policy.high) == (0.1, 0.5) and policy.policy.policy.is_deterministic


def test_rows_that_are_not_learned_from_reach_no_network():
    agent = make(batch_size=64, num_steps=8, updates_per_step=0.25)

    def after(ignored):
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored, rollout.actions)
        copies = updated(agent, [dataclasses.replace(rollout, actions=actions)] * 2)[0].copies
        assert int(copies.critics.steps) > 0
        return copies.critics.online, copies.actor.online

    assert equal(after(0.9), after(jnp.nan))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, r"FastTD3: actions must be Boxes, got Discrete\(n=2\)"),
        ({"critics": polyak.Critics(num_atoms=7)}, "FastTD3: num_atoms=5 of the agent must equal the number of its critics"),
        ({"v_min": 2.0}, r"FastTD3: v_min=2.0 must be below v_max=2.0"),
        (
            {"min_exploration_noise": 0.5},
            r"FastTD3: min_exploration_noise=0.5 must be at most max_exploration_noise=0.4",
        ),
        ({"actor": polyak.Actor(std="sde")}, "FastTD3: has no state-dependent exploration"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = make(
        env.spec, actor=polyak.Actor((32,), std="fixed"), critics=polyak.Critics((64,)), learning_starts=512, batch_size=32,
        num_steps=1, learning_rate=3e-3, num_atoms=41, replay=polyak.UniformReplay(16_000),
    )  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=2_500, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.2)
    seen, atoms = state.normalizers.obs.normalize(jnp.asarray(obs)), np.linspace(-2, 2, 41)
    critics = state.copies.critics.online
    best, worse = (jax.nn.softmax(agent.q_values(critics, seen, x)) @ atoms for x in (action, -action))
    np.testing.assert_allclose(best, np.zeros((2, 2)), atol=0.2)
    np.testing.assert_allclose(worse, np.full((2, 2), -1.0), atol=0.5)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(tmp_path):
    check_resuming(partial(make, learning_starts=32), "Pendulum-v1", "compiled", 2, tmp_path, action_scaling="rescale")

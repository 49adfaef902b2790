"""BRO: a gradient step of all networks against a slow version in NumPy, exploration by the optimistic actor, and learning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.networks.optimistic import OptimisticActor, bounded_exp, inverse_bounded_exp, join_actors, kl_of_shift
from polyak.ops.schedules import StepCount
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import SPEC, batch, equal, first_steps, random_rollout, updated
from tests.agents.test_crossq import Aim, arrays_of, gradient
from tests.agents.test_fast_td3 import after_step, critic_arrays

KEY = jax.random.key(0)
SMALL = {
    "actor": polyak.Actor((6,)), "critics": polyak.Critics((8,)), "num_quantiles": 3, "batch_size": 16, "learning_starts": 0,
    "num_steps": 4, "updates_per_step": 0.5, "replay": polyak.UniformReplay(512),
}  # fmt: skip
LONGER = {"num_steps": 8, "updates_per_step": 0.25, "reset_period": 5}
SPHERES = polyak.Actor((6,), residual="hypersphere")
ALPHA, BETA, WEIGHT, RATE = 0.2, 2.0, 0.5, 0.1


def make(spec=SPEC, **settings):
    return polyak.BRO(spec, **{**SMALL, **settings})


# A slow version in NumPy. Parameters are lists of arrays, float64; gradients are differences.


def quantiles_of(params, obs, action):
    """The quantiles of one critic."""
    kernel, bias, head, head_bias = params
    return np.maximum(np.c_[obs, action] @ kernel + bias, 0) @ head + head_bias


def means_of(params, x):
    kernel, bias, head, head_bias = params[:4]
    return np.maximum(x @ kernel + bias, 0) @ head + head_bias


def stds_of(params, x):
    kernel, bias, _, _, scale, scale_bias = params
    return np.exp(np.maximum(x @ kernel + bias, 0) @ scale + scale_bias)


def actor_arrays(params):
    (layer,), policy = params["actor"]["dense"]["layers"].values(), params["policy"]
    layers = layer, policy["linear"], *policy.get("scales", {}).values()
    return [np.asarray(x[name], float) for x in layers for name in ("kernel", "bias")]


def quantile_loss(quantiles, targets):
    """Σ_m of the mean over targets, entry by entry."""
    losses = np.zeros(len(quantiles))
    for row, (of_row, wanted) in enumerate(zip(quantiles, targets, strict=True)):
        for m, theta in enumerate(of_row):
            for y in wanted:
                u, tau = y - theta, (2 * m + 1) / 6
                huber = 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5
                losses[row] += abs(tau - (u < 0)) * huber / len(wanted)
    return losses


def perturb(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, [x + 0.4 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


@pytest.fixture(scope="module")
def step():
    """One `train_step` by gradient descent, with the copies before and after it, and the batch."""
    agent = make(
        optimizer=optax.sgd(RATE), reward_scale=2.0, tau=0.25, initial_alpha=ALPHA, initial_optimism=BETA, std_scale=0.6,
        initial_kl_weight=WEIGHT, kl_target=0.02, optimism_learning_rate=0.01,
    )  # fmt: skip
    copies = agent.init(KEY).copies
    target = dataclasses.replace(copies.critics.target, params=perturb(copies.critics.target.params, 1))
    actor = dataclasses.replace(copies.actor.online, params=perturb(copies.actor.online.params, 2))
    shift = dataclasses.replace(copies.optimistic_actor.online, params=perturb(copies.optimistic_actor.online.params, 3))
    copies = dataclasses.replace(
        copies,
        critics=dataclasses.replace(copies.critics, target=target),
        actor=dataclasses.replace(copies.actor, online=actor),
        optimistic_actor=dataclasses.replace(copies.optimistic_actor, online=shift),
    )
    rows = batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]), weight=jnp.array([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
    train = jax.jit(partial(agent.train_step, env_steps=StepCount.of(0), axis_name=None))
    return agent, copies, rows, train, *train(copies, rows, KEY, jnp.array(True))


def keys_of_step():
    """The keys of the critics' target, of the actor's loss, and of the actions of the optimistic actor."""
    key, optimistic_key = jax.random.split(KEY)
    critic_key, actor_key, _ = jax.random.split(key, 3)
    return jax.random.split(jax.random.split(critic_key)[0])[0], actor_key, jax.random.split(optimistic_key, 3)[0]


def test_a_gradient_step_of_the_critics_is_that_of_a_slow_version(step):
    agent, copies, rows, _, after, log = step
    obs, action, reward, discount, next_obs, weight = arrays_of(rows)
    draw, _ = agent.draw_actions(copies.actor.online, rows.next_obs, None, keys_of_step()[0])
    next_action, log_prob = np.asarray(draw.action, float), np.asarray(draw.log_prob, float)
    targets = [critic_arrays(copies.critics.target.params, i) for i in range(2)]
    # The mean of the critics, quantile by quantile: neither the lower one nor all quantiles together.
    mean = sum(quantiles_of(params, next_obs, next_action) for params in targets) / 2
    y = 2.0 * reward[:, None] + discount[:, None] * (mean - ALPHA * log_prob[:, None])
    before = [critic_arrays(copies.critics.online.params, i) for i in range(2)]
    errors = [y.mean(1) - quantiles_of(params, obs, action).mean(1) for params in before]
    np.testing.assert_allclose(log.terms["priority"], np.abs(errors).mean(0), rtol=1e-4)
    losses = []
    for i in range(2):
        loss_of = lambda p: weight @ quantile_loss(quantiles_of(p, obs, action), y)  # noqa: E731
        losses.append(loss_of(before[i]))
        found = critic_arrays(after.critics.online.params, i)
        for x, z in zip(found, after_step(before[i], gradient(loss_of, before[i])), strict=True):
            np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-4)
        for x, z, new in zip(critic_arrays(after.critics.target.params, i), targets[i], found, strict=True):
            np.testing.assert_allclose(x, 0.75 * z + 0.25 * new, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log.terms["critic_loss"], sum(losses), rtol=1e-4)


def test_the_actor_maximizes_the_mean_of_all_quantiles_of_the_new_critics(step):
    agent, copies, rows, _, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    draw, _ = agent.draw_actions(copies.actor.online, rows.obs, None, keys_of_step()[1], train=True)
    critics = [critic_arrays(after.critics.online.params, i) for i in range(2)]
    q = np.mean([quantiles_of(params, obs, np.asarray(draw.action, float)) for params in critics], axis=(0, 2))
    loss = weight @ (ALPHA * np.asarray(draw.log_prob, float) - q)
    np.testing.assert_allclose(log.terms["actor_loss"], loss, rtol=1e-4)
    np.testing.assert_array_equal(agent.default_target_entropy(None), [-1.0])


def test_a_gradient_step_of_the_optimistic_actor_and_its_weights_is_that_of_a_slow_version(step):
    _, copies, rows, _, after, log = step
    obs, _, _, _, _, weight = arrays_of(rows)
    noise = np.asarray(jax.random.normal(keys_of_step()[2], (6, 2)), float)
    actor = actor_arrays(after.actor.online.params)
    mean, std = means_of(actor, obs), stds_of(actor, obs)
    critics = [critic_arrays(after.critics.online.params, i) for i in range(2)]

    def divergence(params):
        return np.sum((means_of(params, np.c_[obs, mean]) / std) ** 2 / 2, axis=1)

    def loss_of(params):
        action = np.tanh(mean + means_of(params, np.c_[obs, mean]) + 0.6 * std * noise)
        one, other = (quantiles_of(critic, obs, action) for critic in critics)
        upper_bound = (one + other) / 2 + BETA * np.abs(one - other) / 2
        return weight @ (WEIGHT * divergence(params) - upper_bound.mean(1))

    before = actor_arrays(copies.optimistic_actor.online.params)
    assert len(before) == 4, "it has no standard deviation of its own"
    np.testing.assert_allclose(log.terms["optimistic_actor_loss"], loss_of(before), rtol=1e-4)
    found = actor_arrays(after.optimistic_actor.online.params)
    for x, y in zip(found, after_step(before, gradient(loss_of, before)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    kl = weight @ divergence(before) / 2
    np.testing.assert_allclose(log.terms["optimistic_kl"], kl, rtol=1e-4)
    assert kl > 0.02 and log.applied.tolist() == [True] * 5
    np.testing.assert_allclose(log.terms["optimism_weights_loss"], (BETA - WEIGHT) * (kl - 0.02), rtol=1e-3)
    # The first step of Adam has the size of the learning rate.
    change = {name: float(after.weights.params[name] - copies.weights.params[name]) for name in after.weights.params}
    assert change == pytest.approx({"optimism": -0.01, "kl_weight": 0.01}, rel=1e-3)
    assert after.weights.values["optimism"] < BETA and after.weights.values["kl_weight"] > WEIGHT


def test_the_weights_follow_the_gradient_of_their_loss():
    agent, x = make(kl_target=0.05), np.array([0.3, -0.1])
    params = dict(zip(("optimism", "kl_weight"), jnp.asarray(x, jnp.float32), strict=True))
    value = np.exp(-10 + 8.75 * (1 + np.tanh(x)))
    np.testing.assert_allclose(bounded_exp(jnp.asarray(x, jnp.float32)), value, rtol=1e-5)
    np.testing.assert_allclose([inverse_bounded_exp(float(y)) for y in value], x, rtol=1e-4)
    found = jax.grad(agent.weights_loss)(params, jnp.float32(0.02))
    slope = value * 8.75 / np.cosh(x) ** 2 * (0.02 - 0.05)
    np.testing.assert_allclose([found["optimism"], found["kl_weight"]], slope * [1, -1], rtol=1e-4)
    assert agent.weights_loss(params, jnp.float32(0.05)) == 0.0


def test_optimism_and_the_weight_of_the_divergence_move_as_in_the_authors_code():
    agent = make(kl_target=0.05, optimism_learning_rate=0.03)
    weights, optimizer = agent.create_copies(KEY).weights, agent._optimism_optimizer()

    def follow(carry, divergence):
        params, state = carry
        updates, state = optimizer.update(jax.grad(agent.weights_loss)(params, divergence), state, params)
        return (optax.apply_updates(params, updates), state), None

    divergences = jnp.asarray(np.random.default_rng(0).uniform(0, 0.12, 50), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        (params, _), _ = jax.lax.scan(follow, (weights.params, weights.optimizer_state), divergences)
    found = [float(bounded_exp(params[name])) for name in ("optimism", "kl_weight")]
    # Of update_optimism and update_regularizer, github.com/naumix/BiggerRegularizedOptimistic at 5870a13.
    np.testing.assert_allclose(found, [0.1106259, 71.635056], rtol=1e-4)


def test_what_a_row_without_weight_holds_changes_no_bit_and_nan_of_another_skips_all_networks(step):
    _, copies, rows, train, _, _ = step
    rows = dataclasses.replace(rows, weight=rows.weight.at[2].set(0.0))
    junk = {name: getattr(rows, name).at[2].set(-7.0) for name in ("obs", "action", "next_obs", "reward", "discount")}
    found, wanted = (train(copies, x, KEY, jnp.array(True))[0] for x in (dataclasses.replace(rows, **junk), rows))
    assert equal(found, wanted)
    bad, log = train(copies, dataclasses.replace(rows, obs=rows.obs.at[0].set(jnp.nan)), KEY, jnp.array(True))
    assert log.skipped[0] and not log.applied.any()
    for name in ("actor", "critics", "optimistic_actor"):
        assert equal(getattr(bad, name).online, getattr(copies, name).online), name
    assert equal(bad.weights, copies.weights)


def test_a_step_of_the_weights_that_is_too_large_is_skipped_and_counted(step):
    _, copies, rows, train, _, _ = step
    online = copies.optimistic_actor.online
    far = dataclasses.replace(online, params=jax.tree.map(lambda x: 1e5 * x, online.params))
    copies = dataclasses.replace(copies, optimistic_actor=dataclasses.replace(copies.optimistic_actor, online=far))
    found, log = train(copies, rows, KEY, jnp.array(True))
    assert log.applied.tolist() == [True] * 4 + [False] and log.skipped.tolist() == [False] * 4 + [True]
    assert equal(found.weights, copies.weights) and log.bad.any()


def test_it_collects_with_the_optimistic_actor_and_is_greedy_with_the_other(step):
    agent, copies, rows, *_ = step
    state = dataclasses.replace(agent.init(KEY), copies=copies)
    obs = np.asarray(rows.obs, float)
    actor, shift = (actor_arrays(x.online.params) for x in (copies.actor, copies.optimistic_actor))
    mean, std = means_of(actor, obs), stds_of(actor, obs)
    np.testing.assert_allclose(agent.policy(state).predict(rows.obs)[0], np.tanh(mean), rtol=1e-4, atol=1e-5)
    policy, noise_key = agent.collect_policy(state), jax.random.split(KEY)[1]
    found = policy.action(first_steps(rows.obs), policy.initial_state(6), KEY).action
    noise = np.asarray(jax.random.normal(noise_key, (6, 2)), float)
    wanted = np.tanh(mean + means_of(shift, np.c_[obs, mean]) + 0.6 * std * noise)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_actions_that_are_a_tree_have_one_divergence_and_a_shift_of_each_part():
    spec = EnvSpec(SPEC.obs, Dict({"a": Box([-1.0] * 2, [1.0] * 2), "b": Box([-1.0], [1.0])}))
    params = {name: {"loc": jnp.zeros((4, n)), "log_scale": jnp.full((4, n), np.log(0.5))} for name, n in (("a", 2), ("b", 1))}
    shift = {"a": jnp.full((4, 2), 0.1), "b": jnp.full((4, 1), -0.3)}
    np.testing.assert_allclose(kl_of_shift(spec, params, shift), (0.01 + 0.01 + 0.09) / (2 * 0.25), rtol=1e-5)
    agent = make(spec)
    network = OptimisticActor(agent.actor, agent._optimistic_actor, spec)
    variables = network.init(KEY, spec)
    (found, value), _, _ = network.apply(variables, jnp.ones((4, 3)))
    actor, step, _ = variables.params
    (plain, _), _, _ = agent.actor.apply(actor, jnp.ones((4, 3)))
    (of_step, _), _, _ = agent._optimistic_actor.apply(step, (jnp.ones((4, 3)), {k: v["loc"] for k, v in plain.items()}))
    for name in ("a", "b"):
        np.testing.assert_allclose(found[name]["loc"], plain[name]["loc"] + of_step[name]["loc"], rtol=1e-6)
        np.testing.assert_array_equal(found[name]["log_scale"], plain[name]["log_scale"])
    narrow, _, _ = network.apply(join_actors(actor, step, 0.5), jnp.ones((4, 3)))
    np.testing.assert_allclose(narrow[0]["a"]["log_scale"], found["a"]["log_scale"] + np.log(0.5), rtol=1e-5)
    assert value is None


def test_the_defaults_are_those_of_the_authors_code():
    agent = polyak.BRO(SPEC)
    layers = {"residual": "post_norm", "orthogonal": True}
    assert agent.actor == polyak.Actor((256,), **layers, squash_log_std=True, log_std=-4.0)
    assert agent._optimistic_actor == polyak.Actor((256,), **layers, std="fixed")
    assert agent.critics == polyak.Critics((512, 512), residual="post_norm", num_quantiles=100)
    assert (agent.learning_rate, agent.batch_size, agent.updates_per_step, agent.learning_starts) == (3e-4, 128, 10.0, 2_500)
    assert (agent.gamma, agent.tau, agent.initial_alpha, agent.alpha_loss) == (0.99, 0.005, 1.0, "alpha")
    assert (agent.kl_target, agent.std_scale, agent.optimism_learning_rate) == (0.05, 0.75, 3e-5)
    assert (agent.initial_optimism, agent.initial_kl_weight, agent.weight_decay) == (1.0, 0.25, 1e-4)


def test_weights_decay_as_by_adamw():
    agent = make(weight_decay=0.1, learning_rate=0.01)
    params, gradient = ({"w": jnp.asarray(x)} for x in ([2.0, -3.0], [0.5, 0.0]))
    with jax.numpy_dtype_promotion("standard"):
        found, wanted = (
            optimizer.update(gradient, optimizer.init(params), params)[0]["w"]
            for optimizer in (agent.optimizer_at(), optax.adamw(0.01, weight_decay=0.1))
        )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, r"BRO: actions must be Boxes, got Discrete\(n=2\); SAC, DQN and PPO"),
        (
            {"critics": polyak.Critics(num_quantiles=7)},
            "BRO: num_quantiles=3 of the agent must equal the number of its critics",
        ),
        ({"critics": polyak.Critics(num_critics=1)}, "BRO: num_critics of critics must be at least 2, as"),
        ({"sde_sample_freq": 4}, "BRO: sde_sample_freq must be None, as the features of state-dependent noise"),
        (
            {"optimizer": optax.sgd(0.1), "weight_decay": 0.1},
            "BRO: weight_decay has no effect with optimizer=...; leave it out",
        ),
        ({"optimistic_actor": polyak.Critics()}, r"BRO: optimistic_actor must return \(action_params, value\), such as Actor"),
        ({"actor": polyak.LSTM(head=polyak.Actor((6,)))}, "BRO: actor must not be recurrent"),
        ({"optimistic_actor": SPHERES, "weight_norm": True}, "BRO: optimistic_actor must not have residual='hypersphere'"),
        ({"actor": SPHERES, "weight_norm": True}, "weight_norm is not for it; give BRO an optimistic_actor with other blocks"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def test_an_actor_of_unit_weights_goes_with_an_optimistic_actor_of_other_blocks():
    agent = make(actor=SPHERES, weight_norm=True, optimistic_actor=polyak.Actor((6,), residual="inverted", std="fixed"))
    assert (agent.actor.residual, agent._optimistic_actor.residual) == ("hypersphere", "inverted")


def test_a_reset_renews_the_optimistic_actor_and_its_weights():
    agent = make(**LONGER, optimism_learning_rate=0.1, kl_target=10.0)
    states = [agent.init(KEY)]
    for number in range(3):
        states.append(updated(agent, [random_rollout(agent, seed=number)], states[-1])[0])
    assert [int(state.copies.optimistic_actor.steps) for state in states] == [0, 4, 8, 4]
    params = [float(state.copies.weights.params["optimism"]) for state in states]
    first, second, after = (x - params[0] for x in params[1:])
    assert 0.3 < first < 0.6 < second and after == pytest.approx(first, rel=1e-3)


def test_rows_that_are_not_learned_from_reach_no_network():
    agent = make(**LONGER)

    def after(ignored):
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored, rollout.actions)
        copies = updated(agent, [dataclasses.replace(rollout, actions=actions)] * 2)[0].copies
        assert int(copies.optimistic_actor.steps) == 8
        return copies

    assert equal(after(0.9), after(jnp.nan))


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = make(
        env.spec, actor=polyak.Actor((32,)), critics=polyak.Critics((64,)), num_steps=1, learning_starts=512,
        batch_size=64, learning_rate=3e-3, alpha=0.05, num_quantiles=11, replay=polyak.UniformReplay(16_000),
    )  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=4_000, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.2)
    critics = state.copies.critics.online
    best, worse = (agent.q_values(critics, jnp.asarray(obs), x).mean(2) for x in (action, -action))
    np.testing.assert_allclose(best, np.zeros((2, 2)), atol=0.2)
    np.testing.assert_allclose(worse, np.full((2, 2), -1.0), atol=0.5)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    agent_for = partial(make, learning_starts=32, reset_period=48)
    check_resuming(agent_for, "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")

"""BC, TD3+BC, IQL and CQL, and some of FQL: their losses against slow versions, and what they learn from data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from polyak.envs.autoreset import AutoReset
from polyak.ops.schedules import StepCount
from polyak.replay.replay import Transition
from tests.agents.maze import DEAD_END, GOAL, Maze, recorded

KEY = jax.random.key(0)
OBS = Box([-9.0] * 3, [9.0] * 3)
BOX = EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2))
DISCRETE = EnvSpec(OBS, Discrete(4))
REPLAY = polyak.UniformReplay(64)
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def make_batch(spec, n=8, seed=0):
    rng = np.random.default_rng(seed)
    action = rng.integers(4, size=n) if spec is DISCRETE else np.tanh(rng.normal(size=(n, 2)))
    arrays = {"obs": rng.normal(size=(n, 3)), "next_obs": rng.normal(size=(n, 3)), "reward": rng.normal(size=n)}
    arrays |= {"discount": 0.9 * (rng.random(n) < 0.7), "weight": np.full(n, 1 / n)}
    fields = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    action = jnp.asarray(action, jnp.int32 if spec is DISCRETE else jnp.float32)
    return Transition(action=action, action_mask=None, next_action_mask=None, index=jnp.arange(n, dtype=jnp.int32), **fields)


def small_bc(spec, **settings):
    return polyak.BC(spec, polyak.MLP((5,)), replay=REPLAY, **settings)


def small_iql(spec):
    return polyak.IQL(spec, critics=polyak.Critics((5,)), value=polyak.MLP((5,)), replay=REPLAY)


def small_cql(**settings):
    return polyak.CQL(BOX, polyak.Actor((5,)), polyak.Critics((5,)), replay=REPLAY, num_action_samples=3, **settings)


def small_fql(**settings):
    return polyak.FQL(BOX, polyak.Actor((5,), std="fixed"), polyak.Critics((5,)), replay=REPLAY, flow_steps=3, **settings)


def small_td3_bc():
    return polyak.TD3BC(BOX, polyak.Actor((5,), std="fixed"), polyak.Critics((5,)), replay=REPLAY, policy_delay=1)


# BC


def test_the_loss_of_bc_is_the_negative_log_likelihood():
    agent, batch = small_bc(BOX), make_batch(BOX)
    params = agent.init(KEY).copies.online.params
    params["policy"]["log_std"]["all"] = jnp.array([0.3, -0.7])
    loss, aux = agent.loss(params, batch, online=agent.init(KEY).copies.online)
    tree = jax.tree.map(np.float64, params)
    hidden = np.tanh(
        np.asarray(batch.obs) @ tree["actor"]["dense"]["layers"][0]["kernel"] + tree["actor"]["dense"]["layers"][0]["bias"]
    )
    mean = hidden @ tree["policy"]["linear"]["kernel"] + tree["policy"]["linear"]["bias"]
    log_std = tree["policy"]["log_std"]["all"]
    log_prob = -0.5 * ((np.asarray(batch.action) - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(loss, -log_prob.sum(axis=1).mean(), **NEAR)
    np.testing.assert_allclose(aux.terms["entropy"], (0.5 * np.log(2 * np.pi * np.e) + log_std).sum(), **NEAR)


def test_the_loss_of_bc_of_discrete_actions_is_the_cross_entropy():
    agent, batch = small_bc(DISCRETE), make_batch(DISCRETE)
    online = agent.init(KEY).copies.online
    (params, _), _, _ = agent.network.apply(online, batch.obs)
    logits = np.float64(jax.tree.leaves(params)[0])
    wanted = np.mean([np.log(np.exp(row).sum()) - row[a] for row, a in zip(logits, batch.action, strict=True)])
    np.testing.assert_allclose(agent.loss(online.params, batch, online=online)[0], wanted, **NEAR)


def test_bc_does_not_clone_its_own_actions():
    with pytest.raises(
        ValueError,
        match=r"BC: learns from recorded actions alone; use polyak\.train\.offline, or .* bc --data DATA --gradient-steps",
    ):
        polyak.train.run("bc", "jax/CartPole-v1", env_steps=100, progress=False)


def test_bc_has_no_use_for_priorities():
    with pytest.raises(ValueError, match="BC: replay must draw uniformly, as there is no TD error"):
        polyak.BC(BOX, replay=polyak.PrioritizedReplay(64))


ACTIONS = {
    "MultiDiscrete": MultiDiscrete([2, 3]),
    "MultiBinary": MultiBinary((3,)),
    "tree": Dict({"steer": Box([-1.0], [1.0]), "gear": Discrete(3)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIONS)
def test_bc_clones_every_kind_of_action(name):
    """The action is a function of the sign of the observation, and so is the greedy action of the clone."""
    spec = EnvSpec(Box([-1.0], [1.0]), ACTIONS[name])
    sign = np.arange(200) % 2
    actions = {
        "MultiDiscrete": np.stack([sign, 2 * sign], axis=1),
        "MultiBinary": np.stack([sign, 1 - sign, sign], axis=1),
        "tree": {"steer": (sign - 0.5)[:, None], "gear": 2 * sign},
    }[name]
    data = polyak.data.load(
        {
            "observations": np.float32(2 * sign - 1)[:, None],
            "actions": actions,
            "rewards": np.zeros(200),
            "terminations": np.ones(200),
        },
        spec=spec,
    )
    agent = polyak.BC(dataclasses.replace(spec, action_scaling="rescale"), polyak.MLP((16,)), batch_size=64, learning_rate=1e-2)
    result = polyak.train.offline(agent, data, gradient_steps=300, progress=False)
    for wanted in (0, 1):
        got, _ = result.policy.predict(np.float32([2 * wanted - 1]))
        want = jax.tree.map(lambda x, wanted=wanted: np.asarray(x)[wanted], actions)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.1), got, want)


@pytest.mark.slow
def test_bc_with_a_recurrent_network_remembers():
    """The action at every later step is the first observation, which is not seen again."""
    length, count = 5, 60
    sign = np.arange(count) % 2
    obs = np.zeros((count, length, 1), np.float32)
    obs[:, 0, 0] = 2 * sign - 1
    ends = np.tile(np.arange(length) == length - 1, count)
    arrays = {"observations": obs.reshape(-1, 1), "actions": np.repeat(sign, length), "rewards": np.zeros(count * length)}
    spec = EnvSpec(Box([-1.0], [1.0]), Discrete(2))
    data = polyak.data.load(arrays | {"terminations": ends}, spec=spec)
    replay = polyak.SequenceReplay(1_000, sequence_length=10)
    agent = polyak.BC(spec, polyak.GRU(16), replay=replay, batch_size=16, learning_rate=1e-2)
    result = polyak.train.offline(agent, data, gradient_steps=400, progress=False)
    for wanted in (0, 1):
        carry, actions = None, []
        for step in range(length):
            action, carry = result.policy.predict(np.float32([2 * wanted - 1 if step == 0 else 0]), carry)
            actions.append(int(action))
        assert actions == [wanted] * length


# TD3+BC


def test_the_actors_loss_with_the_settings_of_rebrac_is_rebracs():
    """β |π - a|² - λ min Q of actions of 2 dimensions, divided by β dim A (arXiv:2305.09836)."""
    beta, agent, batch = 0.1, small_td3_bc(), make_batch(BOX)
    agent = dataclasses.replace(agent, q_weight=1 / (beta * 2), actor_q="min")
    copies = agent.init(KEY).copies
    actor, critics = copies.actor.online, copies.critics.online
    # Values of both signs: of one sign alone, mean Q / mean |Q| is 1.
    critics.params["head"]["kernel"] *= 5.0
    critics.params["head"]["bias"] *= 0.0
    action = np.float64(agent.deterministic_action(actor, batch.obs))
    q = np.float64(agent.q_values(critics, batch.obs, jnp.asarray(action, jnp.float32))).min(axis=1)
    assert q.min() < -0.1 < 0.1 < q.max()
    distance = np.sum((action - np.float64(batch.action)) ** 2, axis=1)
    wanted = np.mean(beta * distance - q / np.abs(q).mean())
    loss, _ = agent.actor_loss(actor.params, batch, actor=actor, critics=critics)
    np.testing.assert_allclose(beta * 2 * loss, wanted, **NEAR)
    first, _ = dataclasses.replace(agent, actor_q="first").actor_loss(actor.params, batch, actor=actor, critics=critics)
    assert abs(first - loss) > 1e-3


def test_the_target_with_the_penalty_of_rebrac_is_rebracs():
    """r + γ (min Q(s', a') - β |a' - â'|²), in NumPy; without a penalty where the data have no next action."""
    rng = np.random.default_rng(3)
    agent = dataclasses.replace(small_td3_bc(), critic_penalty=0.3, target_noise=0.5, target_noise_clip=0.4)
    next_action = np.tanh(rng.normal(size=(8, 2))).astype(np.float32)
    has_next = np.arange(8) % 3 > 0
    batch = dataclasses.replace(make_batch(BOX), next_action=jnp.asarray(next_action), has_next_action=jnp.asarray(has_next))
    copies, key = agent.init(KEY).copies, jax.random.key(5)
    variables = {"target": copies.critics.online, "target_actor": copies.actor.online}
    noise_key, _ = jax.random.split(key)
    noise = np.clip(0.5 * np.asarray(jax.random.normal(jax.random.split(noise_key, 1)[0], (8, 2))), -0.4, 0.4)
    action = np.clip(np.float64(agent.deterministic_action(copies.actor.online, batch.next_obs)) + noise, -1, 1)
    q = np.float64(agent.q_values(copies.critics.online, batch.next_obs, jnp.asarray(action, jnp.float32))).min(axis=1)
    penalty = np.where(has_next, 0.3 * ((action - next_action) ** 2).sum(axis=1), 0)
    wanted = np.float64(batch.reward) + np.float64(batch.discount) * (q - penalty)
    np.testing.assert_allclose(agent.td_target(batch, key=key, **variables), wanted, **NEAR)
    assert penalty.max() > 0.1
    plain = dataclasses.replace(agent, critic_penalty=None).td_target(batch, key=key, **variables)
    np.testing.assert_allclose(plain, np.float64(batch.reward) + np.float64(batch.discount) * q, **NEAR)
    with pytest.raises(ValueError, match="TD3BC: critic_penalty must be None for a replay whose transitions have no next_act"):
        agent.td_target(make_batch(BOX), key=key, **variables)


def test_values_are_normalized_over_all_devices():
    agent, batch = small_td3_bc(), make_batch(BOX)
    copies = agent.init(KEY).copies
    arguments = {"actor": copies.actor.online, "critics": copies.critics.online}
    whole, _ = agent.actor_loss(copies.actor.online.params, batch, **arguments)

    def of_device(part):
        return agent.actor_loss(copies.actor.online.params, part, axis_name="devices", **arguments)[0]

    halves = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    np.testing.assert_allclose(jnp.sum(jax.vmap(of_device, axis_name="devices")(halves)), whole, **NEAR)


# IQL


def test_the_losses_of_iql_with_discrete_actions_are_sums_over_the_data():
    agent, batch = small_iql(DISCRETE), make_batch(DISCRETE)
    copies = agent.init(KEY).copies
    other = agent.init(jax.random.key(1)).copies
    rows = np.arange(8)
    q, target = (np.float64(agent.q_values(x.critics.online, batch.obs, None))[rows, :, batch.action] for x in (copies, other))
    v, next_v = (np.float64(agent.value.apply(copies.value.online, x)[0][1]) for x in (batch.obs, batch.next_obs))
    u = target.min(axis=1) - v
    arguments = {"value": copies.value.online, "target": other.critics.online}
    loss, _ = agent.value_loss(copies.value.online.params, batch, **arguments)
    np.testing.assert_allclose(loss, np.mean(np.where(u < 0, 0.3, 0.7) * u**2), **NEAR)
    y = np.float64(batch.reward) + np.float64(batch.discount) * next_v
    critics = copies.critics.online
    loss, _ = agent.critic_loss(critics.params, batch, critics=critics, value=copies.value.online, key=KEY)
    np.testing.assert_allclose(loss, np.mean(((y[:, None] - q) ** 2).sum(axis=1)), **NEAR)
    logits = np.float64(jax.tree.leaves(agent.actor.apply(copies.actor.online, batch.obs)[0][0])[0])
    log_prob = logits[rows, batch.action] - np.log(np.exp(logits).sum(axis=1))
    loss, _ = agent.actor_loss(copies.actor.online.params, batch, actor=copies.actor.online, critics=critics, **arguments)
    np.testing.assert_allclose(loss, -np.mean(np.minimum(np.exp(3 * u), 100) * log_prob), **NEAR)


# CQL


def test_the_critics_loss_of_cql_is_that_of_a_slow_version():
    """With the actions a_k and their densities given, in NumPy and float64."""
    agent, batch = small_cql(cql_weight=2.0, entropy_in_target=True), make_batch(BOX)
    copies, target = agent.init(KEY).copies, agent.init(jax.random.key(1)).copies.critics.online
    critics, actor = copies.critics.online, copies.actor.online
    loss, aux = agent.critic_loss(
        critics.params, batch, critics=critics, target=target, actor=actor, alpha=jnp.float32(0.2), key=KEY
    )
    target_key, _, sample_key = jax.random.split(KEY, 3)
    actions, log_density = agent.sample_actions(actor, batch, sample_key)
    assert actions.shape == (9, 8, 2) and np.abs(actions).max() <= 1
    np.testing.assert_allclose(log_density[6:], -2 * np.log(2), rtol=1e-6)  # uniform in [-1, 1]²
    draw, _ = agent.draw_actions(actor, batch.next_obs, None, jax.random.split(target_key)[0])

    def q_of(variables, obs, action):
        return np.float64(agent.q_values(variables, obs, jnp.asarray(action)))

    soft = q_of(target, batch.next_obs, draw.action).min(axis=1) - 0.2 * np.float64(draw.log_prob)
    y = np.float64(batch.reward) + np.float64(batch.discount) * soft
    total = 0.0
    for row in range(8):
        for critic in range(2):
            q = q_of(critics, batch.obs, batch.action)[row, critic]
            samples = [np.exp(q_of(critics, batch.obs, actions[k])[row, critic] - float(log_density[k, row])) for k in range(9)]
            total += 0.5 * (q - y[row]) ** 2 + 2.0 * (np.log(np.mean(samples)) - q)
    np.testing.assert_allclose(loss, total / 8, rtol=1e-4)
    assert aux.terms["priority"].shape == (8,)


def test_the_cloning_loss_of_cql_is_that_of_a_slow_version():
    """α log π(ã|s) - log π(a|s) of a normal that tanh squashes, in float64 and with the drawn ã."""
    agent, batch = small_cql(num_bc_steps=1), make_batch(BOX)
    copies = agent.init(KEY).copies
    actor, critics = copies.actor.online, copies.critics.online
    params = jax.tree.map(lambda x: x + 0.05, actor.params)
    loss, aux = agent.bc_loss(params, batch, actor=actor, critics=critics, alpha=jnp.float32(0.2), key=KEY)
    moved = dataclasses.replace(actor, params=params)
    (head, _), _, _ = agent.actor.apply(moved, batch.obs)
    loc, scale = np.float64(head["loc"]), np.exp(np.float64(head["log_scale"]))
    draw, _ = agent.draw_actions(moved, batch.obs, None, KEY)

    def log_prob(action):
        action = np.float64(action)
        normal = -0.5 * ((np.arctanh(action) - loc) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
        return (normal - np.log(1 - action**2)).sum(axis=1)

    np.testing.assert_allclose(loss, np.mean(0.2 * log_prob(draw.action) - log_prob(batch.action)), rtol=1e-4)
    np.testing.assert_allclose(aux.terms["entropy"], -np.mean(log_prob(draw.action)), rtol=1e-4)


def test_cql_clones_in_its_first_steps_alone():
    cloning, plain = small_cql(num_bc_steps=2), small_cql()
    batch, copies = make_batch(BOX), plain.init(KEY).copies
    other = dataclasses.replace(copies, critics=plain.init(jax.random.key(9)).copies.critics)
    step = jax.jit(
        lambda agent, copies, at: agent.train_step(copies, batch, KEY, jnp.array(True), env_steps=at, axis_name=None)[0]
    )

    def actor_after(agent, copies, at):
        return jax.tree.leaves(step(agent, copies, StepCount.of(at)).actor.online.params)

    for at, is_cloning in ((0, True), (1, True), (2, False)):
        # Cloning is independent of the critics.
        same = zip(actor_after(cloning, copies, at), actor_after(cloning, other, at), strict=True)
        assert all(np.array_equal(x, y) for x, y in same) is is_cloning
        same = zip(actor_after(cloning, copies, at), actor_after(plain, copies, at), strict=True)
        assert all(np.allclose(x, y, **NEAR) for x, y in same) is not is_cloning


@pytest.mark.parametrize("obs", [OBS, Box(0, 255, (36, 36, 1), "uint8")])
def test_the_samples_of_cql_have_the_values_of_one_action_after_another(obs):
    spec = EnvSpec(obs, BOX.action)
    agent = polyak.CQL(spec, polyak.Actor((5,)), polyak.Critics((5,)), replay=REPLAY)
    critics = agent.init(KEY).copies.critics.online
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.integers(0, 9, (4, *obs.shape)), obs.dtype)
    actions, density = jnp.asarray(np.tanh(rng.normal(size=(6, 4, 2))), jnp.float32), jnp.asarray(rng.normal(size=(6, 4)))
    q = jnp.stack([agent.q_values(critics, batch, action) for action in actions])
    expected = jnp.log(jnp.mean(jnp.exp(q - density[..., None]), axis=0))
    np.testing.assert_allclose(agent.log_mean_exp(critics, batch, actions, density), expected, **NEAR)


@pytest.mark.parametrize(("target_gap", "sign"), [(-100.0, 1), (100.0, -1)])
def test_a_learned_weight_of_cql_grows_while_the_gap_is_larger_than_its_target(target_gap, sign):
    learned = small_cql(target_gap=target_gap, cql_weight=2.0, cql_learning_rate=0.01)
    fixed, batch = small_cql(cql_weight=2.0), make_batch(BOX)
    step = {"env_steps": StepCount.of(0), "axis_name": None}
    copies, log = learned.train_step(learned.init(KEY).copies, batch, KEY, jnp.array(True), **step)
    same, _ = fixed.train_step(fixed.init(KEY).copies, batch, KEY, jnp.array(True), **step)
    # The first step of Adam is its learning rate.
    np.testing.assert_allclose(copies.weight.log_alpha, np.log(2.0) + sign * 0.01, **NEAR)
    for x, y in zip(*(jax.tree.leaves(one.critics.online.params) for one in (copies, same)), strict=True):
        np.testing.assert_allclose(x, y, **NEAR)
    assert same.weight is None and jnp.isfinite(log.terms["cql_gap"])
    waiting, _ = learned.train_step(copies, batch, KEY, jnp.array(False), **step)
    jax.tree.map(np.testing.assert_array_equal, waiting, copies)
    with pytest.raises(ValueError, match="cql_weight must be above 0 where target_gap learns it, got 0"):
        small_cql(target_gap=1.0, cql_weight=0.0)


def test_a_step_of_the_weight_of_cql_that_is_too_large_is_skipped_and_counted():
    agent = small_cql(target_gap=1e30)  # The square of its gradient overflows in Adam.
    copies = agent.init(KEY).copies
    step = {"env_steps": StepCount.of(0), "axis_name": None}
    found, log = agent.train_step(copies, make_batch(BOX), KEY, jnp.array(True), **step)
    assert log.applied.tolist() == [True] * 3 + [False] and log.skipped.tolist() == [False] * 3 + [True]
    assert log.bad.any() and found.weight.log_alpha == copies.weight.log_alpha


def test_the_samples_estimate_the_integral_over_actions():
    """log ∫ exp Q da of a critic that does not see the action is Q + dim A log 2."""
    agent, batch = small_cql(), make_batch(BOX)
    copies = agent.init(KEY).copies
    critics = copies.critics.online
    kernel = critics.params["layers"][0]["linear"]["kernel"].at[:, 3:].set(0.0)
    critics.params["layers"][0]["linear"]["kernel"] = kernel
    many = dataclasses.replace(agent, num_action_samples=4_000)
    samples = many.sample_actions(copies.actor.online, batch, KEY)
    got = many.log_mean_exp(critics, batch.obs, *samples)
    q = agent.q_values(critics, batch.obs, batch.action)
    np.testing.assert_allclose(got, q + 2 * np.log(2), atol=0.05)


def test_discrete_cql_leaves_out_actions_that_are_not_allowed():
    spec = dataclasses.replace(DISCRETE, has_action_mask=True)
    agent = polyak.DQN(spec, polyak.MLP((5,)), replay=REPLAY, double=False, cql_weight=1.0)
    online, batch = agent.init(KEY).copies.online, make_batch(DISCRETE)
    mask = jnp.zeros((8, 4), bool).at[jnp.arange(8), batch.action].set(True)
    masked = dataclasses.replace(batch, action_mask=mask, next_action_mask=mask)
    _, aux = agent.loss(online.params, masked, online=online, target=online)
    np.testing.assert_allclose(aux.terms["cql_gap"], 0.0, atol=1e-6)  # the data's action alone is allowed


# All of them

AGENTS = {
    "bc": lambda: (small_bc(BOX), BOX),
    "td3_bc": lambda: (small_td3_bc(), BOX),
    "iql": lambda: (small_iql(BOX), BOX),
    "bc_flow": lambda: (small_bc(BOX, flow_steps=3), BOX),
    "fql": lambda: (small_fql(normalize_q=True), BOX),
    "iql_discrete": lambda: (small_iql(DISCRETE), DISCRETE),
    "cql": lambda: (small_cql(), BOX),
    "cql_cloning": lambda: (small_cql(num_bc_steps=9), BOX),
    "discrete_cql": lambda: (polyak.DQN(DISCRETE, polyak.MLP((5,)), replay=REPLAY, cql_weight=1.0), DISCRETE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_samples_without_weight_change_no_bit(name):
    agent, spec = AGENTS[name]()
    batch, copies = make_batch(spec), agent.init(KEY).copies
    weight = jnp.where(jnp.arange(8) < 6, 1 / 6, 0.0)
    batch = dataclasses.replace(batch, weight=weight)

    def changed(x):
        return x.at[6:].set(0) if x.dtype == jnp.int32 else x.at[6:].set(0.5)

    names = ("obs", "next_obs", "reward", "discount", "action")
    other = dataclasses.replace(batch, **{name: changed(getattr(batch, name)) for name in names})
    step = jax.jit(
        lambda copies, batch: agent.train_step(copies, batch, KEY, jnp.array(True), env_steps=StepCount.of(0), axis_name=None)
    )
    (one, log), (two, _) = step(copies, batch), step(copies, other)
    assert np.asarray(log.applied).all()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one), jax.tree.leaves(two))


# What they learn

CRITICS = polyak.Critics((32,))
# Before the critics fit, the actor would follow their first slope to the bound, where tanh is flat.
SLOW_ACTOR = {"actor_learning_rate": 5e-4}


def train(agent, data, steps, settings, env=None):
    settings = {"batch_size": 64, **settings}
    return polyak.train.offline(
        agent, data, gradient_steps=steps, settings=settings, env=env, eval_episodes=2 if env else None, progress=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "solves"), [("bc", False), ("iql", True), ("discrete_cql", True)])
def test_parts_of_episodes_are_joined(agent, solves):
    """No episode of the data leads from the start to the goal."""
    data = recorded()
    begins = [tuple(episode.obs[0] + 1) for episode in data.episodes]
    ends = [tuple(episode.obs[-1] + 1) for episode in data.episodes]
    assert set(zip(begins, ends, strict=True)) == {((0.0, 1.0), DEAD_END), ((2.0, 0.0), GOAL)}
    settings = {"learning_rate": 3e-3, "gamma": 0.9}
    small = {"critics": CRITICS, "actor": polyak.Actor((32,)), "value": polyak.MLP((32,))}
    settings |= small | {"expectile": 0.9, "inverse_temperature": 10.0} if agent == "iql" else {"network": polyak.MLP((32,))}
    settings |= {"cql_weight": 0.1, "target_period": 50} if agent == "discrete_cql" else {}
    result = train(agent, data, 1_500, settings, env=AutoReset(Maze(), num_envs=2))
    assert (result.evaluation.mean_return == 1.0) is solves


@pytest.fixture(scope="module")
def bandit():
    """Episodes of one step; the reward is highest at the action 0.5, and the data are uniform around 0."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, size=(2_000, 1))
    arrays = {"observations": rng.normal(size=(2_000, 2)), "actions": actions, "terminations": np.ones(2_000)}
    return polyak.data.load(arrays | {"rewards": 2 - 8 * (actions[:, 0] - 0.5) ** 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "settings", "low", "high"),
    [
        ("bc", {"network": polyak.MLP((32,))}, -0.15, 0.15),
        ("td3_bc", {"q_weight": 5.0, "actor": polyak.Actor((32,), std="fixed"), "critics": CRITICS} | SLOW_ACTOR, 0.3, 0.7),
        ("iql", {"expectile": 0.9, "value": polyak.MLP((32,)), "critics": CRITICS}, 0.3, 0.7),
        ("cql", {"cql_weight": 0.1, "num_action_samples": 3, "actor": polyak.Actor((32,)), "critics": CRITICS}, 0.3, 0.7),
    ],
)
def test_agents_improve_on_the_actions_of_the_data(agent, settings, low, high, bandit):
    result = train(agent, bandit, 1_000, settings | {"learning_rate": 3e-3})
    actions = [result.policy.predict(obs)[0].item() for obs in bandit.obs[:20]]
    assert low < np.mean(actions) < high

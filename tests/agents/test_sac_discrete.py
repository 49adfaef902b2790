"""SAC with Discrete actions: expectations over all actions that are allowed, against a slow NumPy version."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops, train
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from tests.agents.test_actor_critics import Probe, first_steps
from tests.agents.test_value_family import rollout_of, transitions
from tests.probe_envs import probe

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
MASKED = dataclasses.replace(SPEC, has_action_mask=True)
ALPHA = 0.3
SMALL = {"replay": polyak.UniformReplay(512), "batch_size": 16, "learning_starts": 0, "num_steps": 4, "updates_per_step": 0.5}


def make(spec=SPEC, **settings):
    networks = {"actor": polyak.Actor((8,)), "critics": polyak.Critics((8,))}
    return polyak.SAC(spec, **{**networks, **SMALL, **settings})


def networks(agent):
    """An actor whose probabilities differ, critics, and target critics that are others."""
    copies = agent.init(KEY).copies
    actor, critics = copies.actor.online, copies.critics.online
    scaled = [dataclasses.replace(x, params=jax.tree.map(lambda p: 4.0 * p, x.params)) for x in (actor, critics)]
    return scaled[0], critics, scaled[1]


def slow_policy(agent, actor, obs, mask):
    """π(a|s) over the allowed actions, and log π, 0 elsewhere."""
    (logits, _), _, _ = agent.actor.apply(actor, obs)
    logits = np.asarray(logits, np.float64)
    allowed = np.ones_like(logits, bool) if mask is None else np.asarray(mask)
    weights = np.where(allowed, np.exp(logits), 0.0)
    probs = weights / weights.sum(1, keepdims=True)
    return probs, np.log(np.where(allowed, probs, 1.0)), allowed


def slow_q(agent, critics, obs):
    (q, _), _, _ = agent.critics.apply(critics, (obs, None))
    return np.asarray(q, np.float64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alpha_loss", ["log_alpha", "alpha"])
def test_targets_and_losses_equal_the_slow_version(masked, alpha_loss):
    agent = make(MASKED if masked else SPEC, alpha_loss=alpha_loss)
    actor, critics, target = networks(agent)
    rows = transitions(masked=masked, weight=jnp.array([0.3, 0.1, 0.0, 0.2, 0.15, 0.25]))
    weight, alpha = np.asarray(rows.weight), jnp.array(ALPHA)
    probs, log_probs, _ = slow_policy(agent, actor, rows.next_obs, rows.next_action_mask)
    value = np.sum(probs * (slow_q(agent, target, rows.next_obs).min(1) - ALPHA * log_probs), axis=1)
    wanted = rows.reward + rows.discount * value
    found = agent.td_target(rows, target=target, actor=actor, alpha=alpha, key=KEY)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

    loss, aux = agent.critic_loss(critics.params, rows, critics=critics, target=target, actor=actor, alpha=alpha, key=KEY)
    chosen = np.stack([slow_q(agent, critics, rows.obs)[i, :, int(a)] for i, a in enumerate(rows.action)])
    error = np.asarray(wanted)[:, None] - chosen
    np.testing.assert_allclose(loss, np.sum(weight * np.sum(0.5 * error**2, axis=1)), rtol=1e-5)
    np.testing.assert_allclose(aux.terms["priority"], np.abs(error).mean(1), rtol=1e-4, atol=1e-6)

    probs, log_probs, allowed = slow_policy(agent, actor, rows.obs, rows.action_mask)
    wanted = np.sum(weight * np.sum(probs * (ALPHA * log_probs - slow_q(agent, critics, rows.obs).min(1)), axis=1))
    loss, aux = agent.actor_loss(actor.params, rows, actor=actor, critics=critics, alpha=alpha, key=KEY)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    entropy = -np.sum(probs * log_probs, axis=1)
    np.testing.assert_allclose(aux.terms["entropy"], np.sum(weight * entropy), rtol=1e-5)

    log_alpha = jnp.log(alpha)
    loss, _ = agent.temperature_loss(log_alpha, rows, actor=actor, key=KEY)
    excess = np.sum(weight * (0.98 * np.log(allowed.sum(1)) - entropy))
    np.testing.assert_allclose(loss, -(float(log_alpha) if alpha_loss == "log_alpha" else ALPHA) * excess, rtol=1e-5)


def test_a_value_of_known_numbers():
    q = jnp.array([[1.0, 2.0, 3.0], [1.5, 1.0, 4.0]])
    critics = Probe(lambda obs, action, train: jnp.tile(q[None], (len(obs), 1, 1)))

    class Known(polyak.Actor):
        def apply(self, variables, obs, carry=(), *, train=False, key=None):
            return (jnp.tile(jnp.log(jnp.array([[0.7, 0.2, 0.1]])), (len(obs), 1)), None), carry, {}

    agent = make(EnvSpec(SPEC.obs, Discrete(3)), critics=critics, actor=Known((8,)), alpha=0.5)
    copies = agent.init(KEY).copies
    rows = transitions(reward=jnp.zeros(6), discount=jnp.ones(6))
    rows = dataclasses.replace(rows, action=jnp.zeros(6, jnp.int32))
    target, actor = copies.critics.variables("target"), copies.actor.online
    found = agent.td_target(rows, target=target, actor=actor, alpha=jnp.array(0.5), key=KEY)
    np.testing.assert_allclose(found, 1.600909, rtol=1e-6)


def test_actions_that_are_not_allowed_count_nowhere():
    """Their values may be anything, and their logits get no gradient."""
    agent = make(MASKED)
    actor, _, _ = networks(agent)
    rows = transitions(masked=True, discount=jnp.ones(6))
    forbidden = ~rows.next_action_mask

    def losses(bonus):
        values = Probe(lambda obs, action, train: jnp.where(forbidden, bonus, 1.0)[:, None] * jnp.ones((1, 2, 1)))
        tricked = make(MASKED, critics=values)
        online = Variables({"none": jnp.zeros(())}, {})
        loss = lambda params: tricked.actor_loss(params, rows, actor=actor, critics=online, alpha=jnp.array(0.2), key=KEY)[0]  # noqa: E731
        return (
            tricked.td_target(rows, target=online, actor=actor, alpha=jnp.array(0.2), key=KEY),
            *jax.value_and_grad(loss)(actor.params),
        )

    for a, b in zip(jax.tree.leaves(losses(1e6)), jax.tree.leaves(losses(-7.0)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert bool(jnp.isfinite(a).all())


def test_losses_are_finite_where_probabilities_underflow():
    """rejax takes the logarithm of probabilities that are 0 in float32: 0 · -inf."""
    agent = make()
    actor, critics, _ = networks(agent)
    bias = jnp.array([200.0, 0.0, -200.0, -400.0])
    head = actor.params["policy"]["linear"]
    params = actor.params | {"policy": {**actor.params["policy"], "linear": {**head, "bias": bias}}}
    rows = transitions()

    def loss(params):
        return agent.actor_loss(params, rows, actor=actor, critics=critics, alpha=jnp.array(0.2), key=KEY)[0]

    value, gradient = jax.value_and_grad(loss)(params)
    assert bool(jnp.isfinite(value)) and all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))
    target = agent.td_target(
        rows, target=critics, actor=dataclasses.replace(actor, params=params), alpha=jnp.array(0.2), key=KEY
    )
    assert bool(jnp.isfinite(target).all())


def test_a_target_entropy_has_an_upper_bound_only():
    spec = EnvSpec(Box([-1.0], [1.0]), Discrete(3))
    with pytest.raises(ValueError, match=r"SAC: target_entropy must be at most log 3 = 1\.099, .* got 1\.2$"):
        polyak.SAC(spec, target_entropy=1.2)
    for target in (np.float32(np.log(3.0)), -1.0):
        assert polyak.SAC(spec, target_entropy=target).target_entropy == target


def test_the_target_entropy_counts_the_actions_that_are_allowed():
    mask = jnp.array([[True] * 4, [True, False, True, False], [False, True, False, False]])
    found = make(MASKED).default_target_entropy(mask)
    np.testing.assert_allclose(found, 0.98 * np.log([4.0, 2.0, 1.0]), rtol=1e-6)
    np.testing.assert_allclose(make().default_target_entropy(None), [0.98 * np.log(4.0)], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("learning_starts", [0, 1000])
def test_forbidden_actions_are_never_taken(learning_starts):
    agent = make(MASKED, learning_starts=learning_starts)
    state, _ = jax.jit(agent.update)(agent.init(KEY), rollout_of(agent), KEY)
    mask = jnp.tile(jnp.array([[False, True, False, True]]), (500, 1))
    steps = dataclasses.replace(first_steps(jnp.ones((500, 3))), action_mask=mask)
    for policy in (agent.policy(state), agent.collect_policy(state)):
        actions = np.asarray(policy.action(steps, policy.initial_state(500), KEY).action)
        assert set(actions) <= {1, 3}
    assert set(actions) == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"replay": polyak.PrioritizedReplay(512)}, {"critics": polyak.Critics((8,), num_critics=4), "num_target_critics": 2}],
)
def test_a_gradient_step_with_masks_trains_all_networks(settings):
    agent = make(MASKED, **settings)
    start = agent.init(KEY)
    state, metrics = jax.jit(agent.update)(agent.init(KEY), rollout_of(agent), KEY)
    assert int(state.updates) == 4 and int(metrics["train/skipped_steps"]) == 0
    for name in ("actor", "critics"):
        pairs = zip(*(jax.tree.leaves(getattr(s.copies, name).online.params) for s in (start, state)), strict=True)
        assert any(not np.array_equal(a, b) for a, b in pairs)
    assert float(state.copies.temperature.log_alpha) != 0.0


@pytest.mark.slow
def test_the_better_action_of_each_state_is_learned():
    env = probe(8, sees="sign", pays="agreement", length=1)
    agent = polyak.SAC(
        env.spec,
        actor=polyak.Actor((16,)),
        critics=polyak.Critics((16,)),
        replay=polyak.UniformReplay(4096),
        batch_size=64,
        learning_starts=256,
        learning_rate=3e-3,
        target_entropy=0.1,
        num_steps=4,
        updates_per_step=0.25,
    )
    result = loops.compiled(agent, env, env_steps=4_096, key=KEY)
    policy = agent.policy(result.state)
    actions = policy.action(first_steps(jnp.array([[-1.0], [1.0]])), policy.initial_state(2), KEY).action
    assert actions.tolist() == [0, 1]


@pytest.mark.slow
def test_cartpole_is_learned():
    small = {"actor": polyak.Actor((64, 64)), "critics": polyak.Critics((64, 64)), "batch_size": 64, "updates_per_step": 0.5}
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = polyak.SAC(
        env.spec,
        **small,
        replay=polyak.UniformReplay(20_000),
        learning_rate=1e-3,
        tau=0.01,
        gamma=0.98,
        target_entropy=0.1,
        learning_starts=1_000,
    )
    result = loops.compiled(agent, env, env_steps=10_000, key=KEY)
    # Random actions keep the pole up for 22 steps.
    assert train.evaluate(agent.policy(result.state), env, episodes=20, key=KEY).mean_return >= 66


@pytest.mark.slow
def test_a_discrete_agent_by_name_acts_exports_and_loads(tmp_path):
    settings = {
        "replay": polyak.UniformReplay(256),
        "learning_starts": 16,
        "actor": polyak.Actor((8,)),
        "critics": polyak.Critics((8,)),
    }
    result = train.run("sac", "CartPole-v1", env_steps=64, seed=0, progress=False, settings=settings)
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    actions = result.policy.predict(obs)[0]
    result.export(tmp_path / "policy.npz", format="numpy")
    np.testing.assert_array_equal(polyak.load_policy(tmp_path / "policy.npz").predict(obs)[0], actions)


def test_two_parts_of_discrete_actions_are_rejected():
    tree = polyak.core.spaces.Dict({"a": Discrete(2), "b": Discrete(2)})
    with pytest.raises(ValueError, match=r"actions must be Boxes or one Discrete, got .*at action 'a'; PPO takes every space"):
        polyak.SAC(EnvSpec(SPEC.obs, tree))

"""TQC against a slow NumPy version: pooled, sorted and truncated quantiles, their loss, and the actor's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Discrete, EnvSpec
from polyak.core.types import Variables
from tests.agents.test_actor_critics import KEY, SPEC, Probe, batch, equal, random_rollout

N, M, D, ALPHA = 3, 5, 2, 0.3
update = jax.jit(lambda agent, state, rollout, key: agent.update(state, rollout, key))


def make(spec=SPEC, **settings):
    small = {"actor": polyak.Actor((8,)), "critics": polyak.Critics((8,), num_critics=N), "num_quantiles": M}
    small |= {
        "replay": polyak.UniformReplay(512),
        "batch_size": 16,
        "learning_starts": 0,
        "num_steps": 4,
        "updates_per_step": 0.5,
    }
    return polyak.TQC(spec, **{**small, "dropped_quantiles": D, **settings})


def networks(agent):
    copies = agent.init(KEY).copies
    return copies.actor.online, copies.critics.online


def quantiles(agent, critics, obs, action):
    (found, _), _, _ = agent.critics.apply(critics, (obs, action))
    return np.asarray(found, np.float64)


def actions(agent, actor, obs, key):
    (params, _), _, _ = agent.actor.apply(actor, obs)
    distribution = polyak.ops.distributions.for_space(agent.spec.action, params, squash=True)
    return distribution.sample_and_log_prob(seed=key)


def slow_targets(agent, rows, target, actor, action_key):
    """Pool the quantiles of all critics, sort, drop the D · N largest, add the entropy, discount."""
    action, log_prob = actions(agent, actor, rows.next_obs, action_key)
    found = quantiles(agent, target, rows.next_obs, action)
    every = []
    for row in range(len(found)):
        pool = sorted(value for critic in found[row] for value in critic)[: N * (M - D)]
        soft = [value - ALPHA * float(log_prob[row]) for value in pool]
        every.append([float(rows.reward[row]) + float(rows.discount[row]) * value for value in soft])
    return np.array(every)


def slow_loss(found, targets, weight, delta):
    """Σ_i mean_m mean_k of the quantile Huber loss, weighted over rows."""
    total = 0.0
    for row in range(len(found)):
        for critic in found[row]:
            terms = []
            for m, theta in enumerate(critic):
                for y in targets[row]:
                    u = y - theta
                    huber = 0.5 * u * u if abs(u) <= delta else delta * (abs(u) - 0.5 * delta)
                    terms.append(abs((2 * m + 1) / (2 * M) - (u < 0)) * huber / delta)
            total += float(weight[row]) * np.mean(terms)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1.0, 0.05])
def test_critic_and_actor_loss_equal_the_slow_version(delta):
    agent = make(huber_delta=delta)
    actor, critics = networks(agent)
    target = dataclasses.replace(critics, params=jax.tree.map(lambda x: 1.5 * x, critics.params))
    weight = jnp.array([0.3, 0.1, 0.0, 0.2, 0.15, 0.25])
    rows = batch(weight=weight, discount=jnp.array([0.9, 0.0, 0.9, 0.81, 0.9, 0.9]))
    alpha, key = jnp.array(ALPHA), jax.random.key(3)
    target_key, _ = jax.random.split(key)
    targets = slow_targets(agent, rows, target, actor, jax.random.split(target_key)[0])
    found = agent.td_target(rows, target=target, actor=actor, alpha=alpha, key=target_key)
    assert found.shape == (6, N * (M - D))
    np.testing.assert_allclose(found, targets, rtol=1e-5, atol=1e-6)
    loss, aux = agent.critic_loss(critics.params, rows, critics=critics, target=target, actor=actor, alpha=alpha, key=key)
    online = quantiles(agent, critics, rows.obs, rows.action)
    np.testing.assert_allclose(loss, slow_loss(online, targets, weight, delta), rtol=1e-5)
    surprise = np.abs(targets.mean(1, keepdims=True) - online.mean(2)).mean(1)
    np.testing.assert_allclose(aux.terms["priority"], surprise, rtol=1e-4)
    action, log_prob = actions(agent, actor, rows.obs, key)
    wanted = np.sum(weight * (ALPHA * log_prob - quantiles(agent, critics, rows.obs, action).mean((1, 2))))
    loss, _ = agent.actor_loss(actor.params, rows, actor=actor, critics=critics, alpha=alpha, key=key)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def test_dropped_atoms_of_known_numbers():
    """(5, 1, 3) and (2, 9, 4) with one dropped a critic are 1, 2, 3, 4."""
    atoms = jnp.array([[5.0, 1.0, 3.0], [2.0, 9.0, 4.0]])
    known = Probe(lambda obs, action, train: jnp.tile(atoms[None], (obs.shape[0], 1, 1)))
    agent = make(critics=known, num_quantiles=3, dropped_quantiles=1, alpha=0.0)
    actor, critics = networks(agent)
    rows = batch(reward=jnp.zeros(6), discount=jnp.ones(6))
    targets = agent.td_target(rows, target=critics, actor=actor, alpha=jnp.array(0.0), key=KEY)
    np.testing.assert_array_equal(targets, np.tile([1.0, 2.0, 3.0, 4.0], (6, 1)))


def test_rewards_are_scaled():
    agent = make(alpha=0.0)
    actor, critics = networks(agent)
    rows, args = batch(), {"target": critics, "actor": actor, "alpha": jnp.array(0.0), "key": KEY}
    plain, scaled = (a.td_target(rows, **args) for a in (agent, dataclasses.replace(agent, reward_scale=3.0)))
    np.testing.assert_allclose(scaled - plain, np.broadcast_to(2.0 * rows.reward[:, None], plain.shape), rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_step_trains_all_networks_and_nothing_of_nan():
    agent = make()
    before = agent.init(KEY)
    clean, metrics = update(agent, agent.init(KEY), random_rollout(agent), KEY)
    for name in ("actor", "critics"):
        assert not equal(getattr(clean.copies, name).online.params, getattr(before.copies, name).online.params)
    assert float(clean.copies.temperature.log_alpha) != 0.0
    assert {"train/critic_loss", "train/actor_loss", "train/alpha", "train/entropy"} <= set(metrics)
    broken = random_rollout(agent, reward=lambda x: x.at[1].set(jnp.nan))
    state, metrics = update(agent, agent.init(KEY), broken, KEY)
    assert int(metrics["train/skipped_steps"]) == 0 and int(state.updates) == 4
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.copies) if jnp.issubdtype(x.dtype, jnp.floating))


class WithoutQuantiles:
    """Critics of a user that return one number each."""

    def init(self, key, spec):
        return Variables({"none": jnp.zeros(())}, {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        return (jnp.zeros((len(obs[0]), 2)), None), carry, {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropped_quantiles": M}, r"TQC: dropped_quantiles=5 must be less than num_quantiles=5"),
        ({"num_quantiles": 0}, "TQC: num_quantiles must be"),
        ({"critics": polyak.Critics(num_quantiles=50)}, r"TQC: num_quantiles=5 of the agent .*got Critics\(num_quantiles=50"),
        ({"critics": WithoutQuantiles()}, r"q of B = 97 observations must have shape \[B, N, 5\], got \[97, 2\]"),
        (
            {"spec": EnvSpec(SPEC.obs, Discrete(2))},
            r"actions must be Boxes, got Discrete\(n=2\); SAC, DQN and PPO take Discrete",
        ),
        ({"alpha": 0.1, "initial_alpha": 0.5}, "initial_alpha has no effect with a fixed alpha"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def test_the_default_is_the_papers():
    agent = polyak.TQC(SPEC)
    assert agent.critics == polyak.Critics(num_critics=5, num_quantiles=25) and agent.dropped_quantiles == 2

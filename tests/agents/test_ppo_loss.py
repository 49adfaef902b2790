"""PPO's loss, put together by hand on three actions of one state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.learning.rollout_batch import Batch
from tests.agents.rollouts import ppo

SPEC = EnvSpec(Box([-1.0], [1.0]), Discrete(3))
OLD, NEW = np.array([0.4, 0.2, 0.4]), np.array([0.3, 0.4, 0.3])
ACTION = np.array([0, 1, 2, 1])
ADVANTAGE = np.array([1.0, -1.0, 2.0, 3.0])
VALUE, OLD_VALUE, GOAL = 0.5, np.zeros(4), np.array([1.0, 0.0, 0.5, 2.0])
WEIGHT = np.array([1.0, 1.0, 0.0, 2.0])
KL = float(np.sum(OLD * np.log(OLD / NEW)))


@dataclasses.dataclass(frozen=True)
class Table:
    """The same logits and value whatever is seen."""

    def init(self, key, spec):
        return Variables({"logits": jnp.log(jnp.asarray(NEW, jnp.float32))[None], "value": jnp.full((1, 1), VALUE)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        rows, params = obs.shape[0], variables.params
        return (jnp.broadcast_to(params["logits"], (rows, 3)), jnp.broadcast_to(params["value"][0], (rows,))), carry, ()


def batch(index=range(4)):
    """A minibatch of these samples, with weights that sum to 1."""
    weight = np.zeros(4)
    weight[list(index)] = WEIGHT[list(index)] / WEIGHT[list(index)].sum()
    data = (OLD_VALUE, ADVANTAGE, GOAL, weight)
    value, advantage, goal, weight = (jnp.asarray(x, jnp.float32) for x in data)
    old = jnp.log(jnp.tile(jnp.asarray(OLD, jnp.float32), (4, 1)))
    action = jnp.asarray(ACTION, jnp.int32)
    log_prob = jnp.log(jnp.asarray(OLD, jnp.float32)[action])
    return Batch(jnp.zeros((4, 1)), action, None, old, log_prob, value, advantage, goal, weight, None, ())


def loss_of(index=range(4), *, kl_beta=None, **settings):
    """Gradient, as one vector, and terms of a minibatch."""
    penalty = {} if kl_beta is None else {"kl_beta": kl_beta}
    agent = ppo(SPEC, network=Table(), **penalty, **settings)
    state = agent.init(jax.random.key(0))

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            value, aux = agent.loss(params, batch, state)
            return value, aux.terms | {"loss": value}

        return jax.grad(loss, has_aux=True)(params)

    tree, terms = gradient(state.copies.online.params, batch(index))
    return np.append(tree["logits"], tree["value"]), terms


def mean(x):
    return np.average(x, weights=WEIGHT)


def test_loss_terms_equal_hand_computed_numbers():
    _, terms = loss_of(ent_coef=0.1, vf_coef=0.25)
    # Ratios 3/4, 2, 3/4, 2; within 1 ± 0.2: 0.8, 1.2, 0.8, 1.2.
    wanted = {
        "policy_gradient_loss": -mean([0.75, -2.0, 1.5, 3.6]),
        "value_loss": mean((VALUE - GOAL) ** 2),
        "entropy_loss": np.sum(NEW * np.log(NEW)),
        "ratio": mean([0.75, 2.0, 0.75, 2.0]),
        "clip_fraction": 1.0,
        "approx_kl": mean(np.array([0.75, 2, 0.75, 2]) - 1 - np.log([0.75, 2, 0.75, 2])),
    }
    wanted["loss"] = wanted["policy_gradient_loss"] + 0.25 * wanted["value_loss"] + 0.1 * wanted["entropy_loss"]
    assert set(terms) == set(wanted)
    for name, number in wanted.items():
        assert float(terms[name]) == pytest.approx(number, rel=1e-5), name


PENALTIES = {"kl_target": 0.01, "kl_cutoff_coef": 100.0, "kl_cutoff_factor": 2.0, "l2_policy": 2.0, "l2_value": 3.0}


def test_penalties_equal_hand_computed_numbers():
    gradient, terms = loss_of(kl_beta=0.5, **PENALTIES)
    gradient_of_plain, terms_of_plain = loss_of()
    policy, value = 2 * np.sum(np.log(NEW) ** 2), 3 * VALUE**2
    wanted = {"kl_penalty_loss": 0.5 * KL, "kl_cutoff_loss": 100 * (KL - 0.02) ** 2, "l2_loss": policy + value}
    assert pytest.approx(0.09151624, abs=5e-8) == KL
    for name, number in (wanted | {"l2_policy_loss": policy, "l2_value_loss": value}).items():
        assert float(terms[name]) == pytest.approx(number, rel=1e-5), name
    assert float(terms["loss"]) == pytest.approx(float(terms_of_plain["loss"]) + sum(wanted.values()), rel=1e-5)
    # The divergence's gradient by the logits is π - π_old.
    slope = np.append((0.5 + 200 * (KL - 0.02)) * (NEW - OLD), 0.0)
    slope += 2 * np.array([2.0, 2.0, 2.0, 3.0]) * np.append(np.log(NEW), VALUE)
    np.testing.assert_allclose(gradient - gradient_of_plain, slope, rtol=1e-4, atol=1e-6)


def test_without_clipping_it_is_the_importance_weighted_policy_gradient():
    _, terms = loss_of(clip_range=None)
    assert float(terms["policy_gradient_loss"]) == pytest.approx(-mean([0.75, -2.0, 1.5, 6.0]), rel=1e-5)
    assert "clip_fraction" not in terms


def test_a_clipped_log_probability_has_no_gradient():
    gradient, terms = loss_of(clip_range=None, clip_log_prob=1.0, vf_coef=0.0)
    # log 0.3 is clipped to -1, log 0.4 at -0.916 is free.
    ratio = np.array([np.exp(-1) / 0.4, 2.0, np.exp(-1) / 0.4, 2.0])
    assert float(terms["policy_gradient_loss"]) == pytest.approx(-mean(ratio * ADVANTAGE), rel=1e-5)
    free = np.array([0.0, 1.0, 0.0, 1.0]) * ratio * ADVANTAGE
    wanted = -mean(free) * (np.array([0.0, 1.0, 0.0]) - NEW)
    np.testing.assert_allclose(gradient[:3], wanted, rtol=1e-5, atol=1e-7)


def test_clipped_value_loss_equals_hand_computed_number():
    _, terms = loss_of(clip_range_vf=0.2)
    wanted = mean(np.maximum((VALUE - GOAL) ** 2, (0.2 - GOAL) ** 2))
    assert float(terms["value_loss"]) == pytest.approx(wanted, rel=1e-5)


def test_gradients_and_terms_of_parts_add_up_to_those_of_the_whole():
    settings = {"ent_coef": 0.1, "kl_target": 0.01, "l2_policy": 2.0, "l2_value": 3.0}
    agent = ppo(SPEC, network=Table(), kl_beta=0.5, **settings)
    state = agent.init(jax.random.key(0))

    @jax.jit
    def part(params, samples):
        return jax.grad(agent.loss, has_aux=True)(params, samples, state)

    halves = [part(state.copies.online.params, batch().at(jnp.array(index))) for index in ([0, 1], [2, 3])]
    tree, aux = jax.tree.map(jnp.add, *halves)
    whole_gradient, whole = loss_of(kl_beta=0.5, **settings)
    np.testing.assert_allclose(np.append(tree["logits"], tree["value"]), whole_gradient, rtol=1e-5, atol=1e-7)
    for name, term in aux.terms.items():
        np.testing.assert_allclose(term, whole[name], rtol=1e-5, err_msg=name)


def test_the_divergence_of_the_whole_batch_is_exact():
    agent = PPO(SPEC, network=Table())
    variables = agent.network.init(jax.random.key(0), SPEC)
    mean_kl = jax.jit(lambda variables, batch: agent._mean_kl(variables, batch, None))
    assert float(mean_kl(variables, batch())) == pytest.approx(KL, rel=1e-5)


@pytest.mark.parametrize(("target", "kl", "stops"), [(0.02, 0.029, False), (0.02, 0.031, True)])
def test_an_update_stops_at_one_and_a_half_times_the_target_kl(target, kl, stops):
    agent = PPO(SPEC, network=Table(), target_kl=target)
    assert bool(agent._early_stop({"approx_kl": jnp.float32(kl)})) == stops

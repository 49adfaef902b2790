"""PPO's loss, put together by hand on three actions of one state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.learning.batch import Rows
from polyak.learning.surrogate import Surrogate, SurrogateSettings

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
        return Variables({"logits": jnp.log(jnp.asarray(NEW, jnp.float32)), "value": jnp.float32(VALUE)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        rows, params = obs.shape[0], variables.params
        return (jnp.broadcast_to(params["logits"], (rows, 3)), jnp.broadcast_to(params["value"], (rows,))), carry, ()


def rows():
    data = (OLD_VALUE, ADVANTAGE, GOAL, WEIGHT)
    value, advantage, goal, weight = (jnp.asarray(x, jnp.float32) for x in data)
    old = jnp.log(jnp.tile(jnp.asarray(OLD, jnp.float32), (4, 1)))
    action = jnp.asarray(ACTION, jnp.int32)
    log_prob = jnp.log(jnp.asarray(OLD, jnp.float32)[action])
    return Rows(jnp.zeros((4, 1)), action, None, old, log_prob, value, advantage, goal, weight, None, ())


def make(clip_range=0.2, kl_beta=None, squares=None, **settings):
    agent = PPO(SPEC, network=Table(), kl_beta=1.0, kl_target=0.01, **settings)
    variables = agent.init(jax.random.key(0))
    params, unravel = ravel_pytree(variables.variables.params)
    limit, beta = (None if x is None else jnp.float32(x) for x in (clip_range, kl_beta))
    surrogate = Surrogate(agent, agent._model, variables.variables, unravel, lambda _: rows(), limit, beta, squares, None)
    return surrogate, params


def loss_of(surrogate, params, index=range(4)):
    """Loss and terms of a minibatch, in one share."""
    total = jnp.float32(WEIGHT[list(index)].sum())

    @jax.jit
    def whole(params, rows, index):
        known = surrogate.known(params, rows, index, total)
        gradient, terms = jax.grad(surrogate.share, has_aux=True)(params, rows.at(index), total, known)
        return surrogate.whole(params, gradient, terms, known)

    return whole(params, rows(), jnp.array(list(index)))


def mean(x):
    return np.average(x, weights=WEIGHT)


def test_every_term_by_hand():
    surrogate, params = make(ent_coef=0.1, vf_coef=0.25)
    assert isinstance(surrogate.settings, SurrogateSettings)
    _, terms = loss_of(surrogate, params)
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


def test_the_penalties_by_hand():
    squares, of_policy = jnp.array([0.0, 2.0, 0.0, 3.0]), np.array([True, True, True, False])
    penalised, params = make(
        kl_beta=0.5,
        kl_cutoff_coef=100.0,
        kl_cutoff_factor=2.0,
        squares={"policy": jnp.where(of_policy, squares, 0.0), "value": jnp.where(of_policy, 0.0, squares)},
    )
    plain, _ = make()
    gradient, terms = loss_of(penalised, params)
    gradient_of_plain, terms_of_plain = loss_of(plain, params)
    wanted = {
        "kl_penalty_loss": 0.5 * KL,
        "kl_cutoff_loss": 100 * (KL - 0.02) ** 2,
        "l2_loss": 2 * np.log(NEW[1]) ** 2 + 3 * VALUE**2,
    }
    assert pytest.approx(0.09151624, abs=5e-8) == KL
    for name, number in (wanted | {"l2_policy_loss": 2 * np.log(NEW[1]) ** 2, "l2_value_loss": 3 * VALUE**2}).items():
        assert float(terms[name]) == pytest.approx(number, rel=1e-5), name
    assert float(terms["loss"]) == pytest.approx(float(terms_of_plain["loss"]) + sum(wanted.values()), rel=1e-5)
    # The divergence's gradient by the logits is π - π_old.
    slope = np.append((0.5 + 200 * (KL - 0.02)) * (NEW - OLD), 0.0)
    slope += 2 * np.asarray(squares) * np.append(np.log(NEW), VALUE)
    np.testing.assert_allclose(gradient - gradient_of_plain, slope, rtol=1e-4, atol=1e-6)


def test_without_clipping_it_is_the_importance_weighted_policy_gradient():
    surrogate, params = make(clip_range=None)
    _, terms = loss_of(surrogate, params)
    assert float(terms["policy_gradient_loss"]) == pytest.approx(-mean([0.75, -2.0, 1.5, 6.0]), rel=1e-5)
    assert "clip_fraction" not in terms


def test_a_clipped_log_probability_is_held_and_has_no_gradient():
    surrogate, params = make(clip_range=None, clip_log_prob=1.0, vf_coef=0.0)
    gradient, terms = loss_of(surrogate, params)
    # log 0.3 is held at -1, log 0.4 at -0.916 is free.
    ratio = np.array([np.exp(-1) / 0.4, 2.0, np.exp(-1) / 0.4, 2.0])
    assert float(terms["policy_gradient_loss"]) == pytest.approx(-mean(ratio * ADVANTAGE), rel=1e-5)
    free = np.array([0.0, 1.0, 0.0, 1.0]) * ratio * ADVANTAGE
    wanted = -mean(free) * (np.array([0.0, 1.0, 0.0]) - NEW)
    np.testing.assert_allclose(gradient[:3], wanted, rtol=1e-5, atol=1e-7)


def test_a_clipped_value_by_hand():
    surrogate, params = make(clip_range_vf=0.2)
    _, terms = loss_of(surrogate, params)
    wanted = mean(np.maximum((VALUE - GOAL) ** 2, (0.2 - GOAL) ** 2))
    assert float(terms["value_loss"]) == pytest.approx(wanted, rel=1e-5)


def test_shares_add_up_to_the_whole():
    surrogate, params = make(kl_beta=0.5, kl_cutoff_coef=100.0, kl_cutoff_factor=2.0, ent_coef=0.1)
    total = jnp.float32(WEIGHT.sum())

    @jax.jit
    def added(params, rows):
        known = surrogate.known(params, rows, jnp.arange(4), total)
        share = jax.grad(surrogate.share, has_aux=True)
        gradient, terms = jax.tree.map(
            jnp.add, *(share(params, rows.at(jnp.array(part)), total, known) for part in ([0, 1], [2, 3]))
        )
        return gradient, surrogate.whole(params, gradient, terms, known)[1]

    gradient, terms = added(params, rows())
    whole_gradient, whole = loss_of(surrogate, params)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-5, atol=1e-7)
    for name, term in terms.items():
        np.testing.assert_allclose(term, whole[name], rtol=1e-5, err_msg=name)


def test_the_divergence_of_all_rows_is_exact():
    surrogate, params = make()
    assert float(jax.jit(surrogate.kl_of_all)(params, rows())) == pytest.approx(KL, rel=1e-5)


@pytest.mark.parametrize(("most", "kl", "stops"), [(None, 1e9, False), (0.02, 0.029, False), (0.02, 0.031, True)])
def test_an_update_ends_at_one_and_a_half_times_the_divergence_allowed(most, kl, stops):
    surrogate, _ = make(target_kl=most)
    assert bool(surrogate.stops({"approx_kl": jnp.float32(kl)})) == stops

"""The gradient step against Optax's, and against numbers that overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.ops.optimizer import Adam, global_norm
from tests.agents.rollouts import same_bits

KEEP = jnp.array(True)


def gradients(count, scale=1.0):
    rng = np.random.default_rng(0)
    return [jnp.asarray(scale * rng.normal(size=7), jnp.float32) for _ in range(count)]


def step(adam, params, state, gradient, *, learning_rate=1e-2, keep=KEEP):
    return adam.step(params, state, gradient, global_norm(gradient), learning_rate, keep)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 100.0])
def test_it_is_optaxs_clip_and_adam(max_grad_norm):
    adam = Adam(max_grad_norm=max_grad_norm, eps=1e-5)
    params = theirs = jnp.linspace(-1.0, 1.0, 7)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    oracle = optax.chain(clip, optax.adam(3e-2, eps=1e-5))
    state, oracle_state = adam.init(params), oracle.init(params)
    for gradient in gradients(20):
        params, state = step(adam, params, state, gradient, learning_rate=3e-2)
        with jax.numpy_dtype_promotion("standard"):
            updates, oracle_state = oracle.update(gradient, oracle_state)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(params, theirs, atol=2e-6)


def test_what_is_not_kept_changes_no_bit():
    adam = Adam(max_grad_norm=0.5)
    params, state = step(adam, jnp.ones(7), adam.init(jnp.ones(7)), gradients(1)[0])
    for gradient in (gradients(1)[0], jnp.full(7, jnp.nan), jnp.full(7, jnp.inf)):
        after = step(adam, params, state, gradient, keep=jnp.array(False))
        assert same_bits(after, (params, state))


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e37])
def test_U15_the_norm_does_not_overflow(scale):
    gradient = gradients(1)[0]
    expected = np.linalg.norm(np.asarray(gradient, np.float64)) * scale
    assert float(global_norm(gradient * scale)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("bad", "norm"), [(np.nan, np.nan), (np.inf, np.nan), (-np.inf, np.nan)])
def test_the_norm_of_what_is_not_finite_is_not_finite(bad, norm):
    assert not np.isfinite(float(global_norm(jnp.array([1.0, bad, 2.0]))))
    assert float(global_norm(jnp.zeros(3))) == 0.0


def test_U15_a_huge_gradient_is_scaled_down_to_its_direction():
    adam, params = Adam(max_grad_norm=0.5), jnp.zeros(7)
    huge, usual = (step(adam, params, adam.init(params), g) for g in (gradients(1, 1e30)[0], gradients(1, 1e2)[0]))
    np.testing.assert_allclose(huge[0], usual[0], rtol=1e-5)
    np.testing.assert_allclose(global_norm(huge[1].mu), 0.1 * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("max_grad_norm", "norm", "accepted"),
    [
        (0.5, 1e30, True),
        (None, 1e30, False),
        (None, 1e18, True),
        (0.5, np.nan, False),
        (0.5, np.inf, False),
        (None, np.nan, False),
    ],
)
def test_a_norm_is_accepted_when_the_moments_stay_finite(max_grad_norm, norm, accepted):
    assert bool(Adam(max_grad_norm=max_grad_norm).accepts(jnp.float32(norm))) == accepted


def test_its_settings_may_be_traced():
    adam, params = Adam(max_grad_norm=0.5), jnp.ones(7)
    moved = jax.jit(lambda adam, g: step(adam, params, adam.init(params), g)[0])
    moved(adam, gradients(1)[0]), moved(Adam(max_grad_norm=0.1, eps=1e-8), gradients(1)[0])
    assert moved._cache_size() == 1

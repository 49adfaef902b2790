import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.ops.distributions.continuous import Normal, TanhNormal

jit_all = jax.jit(lambda d, other, x: (d.log_prob(x), d.entropy(), d.kl_divergence(other)))
jit_entropy = jax.jit(lambda d: d.entropy())
jit_log_prob = jax.jit(lambda d, x: d.log_prob(x))
jit_sample = jax.jit(lambda d, key: d.sample(seed=key))
jit_sample_and_log_prob = jax.jit(lambda d, key: d.sample_and_log_prob(seed=key))


def random_normal(seed, kind=Normal, shape=(4, 3)):
    rng = np.random.default_rng(seed)
    loc, scale = rng.normal(size=shape), np.exp(rng.normal(size=shape))
    return kind(jnp.asarray(loc, jnp.float32), jnp.asarray(scale, jnp.float32), 1)


def exact(d):
    return scipy.stats.norm(np.asarray(d.loc, np.float64), np.asarray(d.scale, np.float64))


def expectation(f, loc, scale):
    """E[f(u)], u ~ N(loc, scale²), on a fine grid in float64."""
    z = np.linspace(-10, 10, 20_001)
    values = f(np.asarray(loc, np.float64)[..., None] + np.asarray(scale, np.float64)[..., None] * z)
    return (values * scipy.stats.norm.pdf(z)).sum(-1) * (z[1] - z[0])


def log_slope(u):
    return 2 * (np.log(2) - np.abs(u) - np.log1p(np.exp(-2 * np.abs(u))))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_normal_against_scipy(seed):
    d, other = random_normal(seed), random_normal(seed + 1)
    x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    log_prob, entropy, kl = jit_all(d, other, jnp.asarray(x))
    p, q = exact(d), exact(other)
    np.testing.assert_allclose(log_prob, p.logpdf(x).sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, p.entropy().sum(-1), rtol=1e-5, atol=1e-5)
    wanted = np.log(q.std() / p.std()) + (p.var() + (p.mean() - q.mean()) ** 2) / (2 * q.var()) - 0.5
    np.testing.assert_allclose(kl, wanted.sum(-1), rtol=1e-5, atol=1e-5)


def test_divergence_between_near_normals_does_not_cancel():
    d = Normal(jnp.float32(100.0), jnp.float32(1.0))
    assert d.kl_divergence(d) == 0
    near = Normal(jnp.float32(100.0), jnp.float32(1.001))
    ratio = float(d.scale) / float(near.scale)
    np.testing.assert_allclose(d.kl_divergence(near), -np.log(ratio) + ratio**2 / 2 - 0.5, rtol=1e-3)


def test_event_dimensions_are_summed_and_batch_dimensions_remain():
    d = Normal(jnp.zeros((5, 2, 3)), jnp.ones((5, 2, 3)), event_ndims=2)
    assert d.log_prob(jnp.zeros((5, 2, 3))).shape == d.entropy().shape == d.kl_divergence(d).shape == (5,)
    assert Normal(jnp.zeros(5), jnp.ones(5)).log_prob(jnp.zeros(5)).shape == (5,)
    assert Normal(jnp.zeros(5), jnp.ones(5), 1).log_prob(jnp.zeros(5)).shape == ()


@pytest.mark.parametrize("kind", [Normal, TanhNormal])
def test_samples_have_the_right_distribution_and_carry_gradients(kind):
    d = kind(jnp.full((20_000,), 0.3), jnp.full((20_000,), 0.7))
    sample = np.asarray(jit_sample(d, jax.random.key(0)), np.float64)
    u = np.arctanh(sample) if kind is TanhNormal else sample
    assert scipy.stats.kstest(u, scipy.stats.norm(0.3, 0.7).cdf).pvalue > 0.01
    draw = jax.jit(jax.value_and_grad(lambda loc: kind(loc, jnp.float32(0.7)).sample(seed=jax.random.key(1))))
    drawn, slope = draw(jnp.float32(0.3))
    np.testing.assert_allclose(slope, 1 - drawn**2 if kind is TanhNormal else 1, rtol=1e-5)


def test_scale_must_have_the_shape_of_loc():
    for kind in (Normal, TanhNormal):
        with pytest.raises(
            ValueError, match=rf"{kind.__name__}: loc and scale must have one shape, got loc \(2, 3\), scale \(3,\)"
        ):
            kind(jnp.zeros((2, 3)), jnp.ones(3))


# TanhNormal


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_tanh_normal_density_against_the_change_of_variables(seed):
    d, other = random_normal(seed, TanhNormal), random_normal(seed + 1, TanhNormal)
    a = np.random.default_rng(seed).uniform(-0.99, 0.99, size=(4, 3)).astype(np.float32)
    u = np.arctanh(a.astype(np.float64))
    log_prob, _, kl = jit_all(d, other, jnp.asarray(a))
    np.testing.assert_allclose(
        log_prob, (exact(d).logpdf(u) - np.log(1 - a.astype(np.float64) ** 2)).sum(-1), rtol=1e-4, atol=1e-4
    )
    normals = [Normal(x.loc, x.scale, 1) for x in (d, other)]
    np.testing.assert_allclose(kl, jit_all(*normals, jnp.asarray(a))[2], rtol=1e-6)


def test_tanh_normal_density_integrates_to_one():
    d = TanhNormal(jnp.full((20_001,), 0.4), jnp.full((20_001,), 0.6))
    a = jnp.linspace(-1, 1, 20_001)
    np.testing.assert_allclose(np.trapezoid(np.exp(np.asarray(jit_log_prob(d, a), np.float64)), a), 1, rtol=1e-4)


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def density_and_gradients(loc, scale, action):
    return TanhNormal(loc, scale).log_prob(action)


def exact_density_and_gradients(loc, scale, action):
    """In float64: u = artanh a as half the log of (1 + a) / (1 - a), whose parts are exact."""
    action = np.float64(action)
    u = 0.5 * (np.log1p(action) - np.log1p(-action))
    z = (u - loc) / scale
    value = -0.5 * z**2 - np.log(scale * np.sqrt(2 * np.pi)) - np.log1p(-action) - np.log1p(action)
    by_action = (2 * action - z / scale) / ((1 - action) * (1 + action))
    return value, z / scale, (z**2 - 1) / scale, by_action


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("loc", "scale"), [(0.5, 0.5), (-8.0, 2.0), (8.5, 0.1)])
def test_the_density_and_its_gradients_are_right_up_to_the_boundary(loc, scale, sign):
    loc, scale = np.float32(loc), np.float32(scale)
    for power in (2, 6, 10, 14, 18, 22, 23, 24):
        action = np.float32(sign * (1 - 2.0**-power))
        assert abs(action) < 1
        value, gradients = density_and_gradients(loc, scale, action)
        wanted, *wanted_gradients = exact_density_and_gradients(np.float64(loc), np.float64(scale), action)
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradients, wanted_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("action", [1.0, -1.0, 1.5])
def test_an_action_on_the_boundary_has_a_finite_density_and_gradient(action):
    value, gradients = density_and_gradients(np.float32(0.5), np.float32(0.5), np.float32(action))
    assert jnp.isfinite(value) and all(jnp.isfinite(g) for g in gradients)
    assert np.sign(gradients[0]) == np.sign(action)


@pytest.mark.parametrize("kind", [Normal, TanhNormal])
@pytest.mark.parametrize("log_scale", [-20.0, -16.0, -5.0])
def test_a_sample_that_rounds_to_loc_has_the_density_of_its_noise(kind, log_scale):
    d = kind(jnp.ones(1000), jnp.full(1000, jnp.exp(log_scale)))
    key = jax.random.key(1)
    value, log_prob = d.sample_and_log_prob(seed=key)
    np.testing.assert_array_equal(value, d.sample(seed=key))
    noise = np.asarray(jax.random.normal(key, (1000,)), np.float64)
    expected = -(noise**2) / 2 - log_scale - np.log(2 * np.pi) / 2
    expected -= log_slope(1.0 + np.exp(log_scale) * noise) if kind is TanhNormal else 0.0
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loc", [0.0, 3.0, 30.0, -1e4])
def test_a_saturated_sample_knows_its_density(loc):
    d = TanhNormal(jnp.full((1000,), loc), jnp.full((1000,), 0.5))
    sample, log_prob = jit_sample_and_log_prob(d, jax.random.key(0))
    np.testing.assert_array_equal(sample, jit_sample(d, jax.random.key(0)))
    u = np.asarray(jit_sample(Normal(d.loc, d.scale), jax.random.key(0)), np.float64)
    np.testing.assert_allclose(log_prob, scipy.stats.norm(loc, 0.5).logpdf(u) - log_slope(u), rtol=1e-4, atol=1e-4)
    assert np.abs(sample).max() <= 1
    if loc == 0:
        np.testing.assert_allclose(jit_log_prob(d, sample), log_prob, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loc", [0.0, 3.0, -8.5, 9.2, 30.0])
def test_the_density_of_a_sample_has_the_gradients_of_its_closed_form(loc):
    """log p = -ε²/2 - log σ - log(1 - tanh² u) + c with u = μ + σ ε: 2 tanh u by μ, and 2 ε tanh u - 1/σ by σ."""
    means, scales = jnp.full(200, loc), jnp.full(200, 0.5)

    def total(loc, scale):
        return jnp.sum(TanhNormal(loc, scale).sample_and_log_prob(seed=jax.random.key(1))[1])

    by_loc, by_scale = jax.jit(jax.grad(total, (0, 1)))(means, scales)
    noise = np.asarray(jax.random.normal(jax.random.key(1), (200,)), np.float64)
    slope = 2 * np.tanh(loc + 0.5 * noise)
    np.testing.assert_allclose(by_loc, slope, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_scale, slope * noise - 2.0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "error"), [(0.01, 1e-5), (0.3, 1e-5), (1.0, 1e-5), (2.0, 1e-4), (5.0, 0.02)])
def test_entropy_by_quadrature(scale, error):
    loc = jnp.linspace(-4, 4, 9)
    d = TanhNormal(loc, jnp.full(9, scale))
    wanted = scipy.stats.norm(0, scale).entropy() + expectation(log_slope, loc, d.scale)
    np.testing.assert_allclose(jit_entropy(d), wanted, atol=error + 1e-6 * abs(wanted).max())


def test_the_entropy_of_a_tanh_normal_has_the_right_gradient():
    def entropy(loc, scale):
        return TanhNormal(loc, scale).entropy()

    by_loc, by_scale = jax.jit(jax.grad(entropy, argnums=(0, 1)))(jnp.float32(0.7), jnp.float32(0.8))
    h = 1e-4

    def exact_entropy(loc, scale):
        return scipy.stats.norm(0, scale).entropy() + expectation(log_slope, loc, scale)

    np.testing.assert_allclose(by_loc, (exact_entropy(0.7 + h, 0.8) - exact_entropy(0.7 - h, 0.8)) / (2 * h), rtol=1e-4)
    np.testing.assert_allclose(by_scale, (exact_entropy(0.7, 0.8 + h) - exact_entropy(0.7, 0.8 - h)) / (2 * h), rtol=1e-4)


def test_the_mode_of_a_tanh_normal_is_the_tanh_of_loc():
    np.testing.assert_array_equal(TanhNormal(jnp.array([-2.0, 0.5]), jnp.ones(2)).mode(), jnp.tanh(jnp.array([-2.0, 0.5])))

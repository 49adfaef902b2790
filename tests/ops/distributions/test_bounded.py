"""Distributions between bounds, against SciPy, sums over many samples, and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from polyak.ops.distributions import Distribution, TanhNormal
from polyak.ops.distributions.bounded import Affine, ClippedNormal, Uniform

KEY = jax.random.key(3)
INF = np.inf
# loc, scale, low, high: bounds far, near, on one side, at infinity, equal, and the mean beyond them.
CASES = np.array(
    [
        [0.2, 0.5, -3.0, 3.0],
        [0.2, 0.5, 0.0, 0.5],
        [0.9, 0.3, -1.0, 1.0],
        [-4.0, 1.0, -1.0, 1.0],
        [0.1, 2.0, -INF, 0.5],
        [0.1, 2.0, -INF, INF],
        [0.3, 0.7, 0.4, 0.4],
    ],
    np.float32,
)
LOC, SCALE, LOW, HIGH = (jnp.asarray(column) for column in CASES.T)
CLIPPED = ClippedNormal(LOC, SCALE, LOW, HIGH)


log_prob = jax.jit(lambda distribution, value: distribution.log_prob(value))
divergence_of = jax.jit(lambda p, q: p.kl_divergence(q))
samples = jax.jit(lambda distribution, keys: jax.vmap(lambda key: distribution.sample(seed=key))(keys))


@jax.jit
def entropy_and_mode(distribution):
    return distribution.entropy(), distribution.mode()


def integral(case, f, points=200_001):
    """∫ f(x, log p(x)) p(x) dx + Σ on the bounds, in double precision."""
    loc, scale, low, high = map(float, case)
    if low == high:
        return float(f(np.array(low), np.array(0.0)))
    normal = stats.norm(loc, scale)
    x = np.linspace(max(low, loc - 12 * scale), min(high, loc + 12 * scale), points)
    total = np.trapezoid(f(x, normal.logpdf(x)) * normal.pdf(x), x)
    for bound, mass, log_mass in ((low, normal.cdf(low), normal.logcdf(low)), (high, normal.sf(high), normal.logsf(high))):
        if np.isfinite(bound):
            total += float(f(np.array(bound), np.array(log_mass)) * mass)
    return float(total)


def test_bounded_distributions_are_pytrees_that_meet_the_protocol():
    affine = Affine(TanhNormal(LOC[:, None], SCALE[:, None], 1), LOC[:, None], SCALE[:, None], 1)
    for each in (CLIPPED, Uniform(-SCALE, SCALE), affine):
        assert isinstance(each, Distribution)
        assert jax.tree.structure(jax.tree.map(lambda x: x, each)) == jax.tree.structure(each)


def test_a_clipped_normal_has_the_density_between_its_bounds_and_the_rest_on_them():
    for values, inside in (([0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4], True), (LOW, False), (HIGH, False)):
        got = np.asarray(log_prob(CLIPPED, jnp.asarray(values, jnp.float32)))
        for row, (loc, scale, low, high) in enumerate(CASES.astype(float)):
            normal = stats.norm(loc, scale)
            if low == high:
                wanted = 0.0
            elif inside:
                wanted = normal.logpdf(0.3)
            else:
                wanted = normal.logcdf(low) if values is LOW else normal.logsf(high)
            np.testing.assert_allclose(got[row], wanted, rtol=2e-5, atol=1e-5)


def test_the_entropy_and_divergence_of_a_clipped_normal_are_the_integrals():
    its_entropy, _ = entropy_and_mode(CLIPPED)
    np.testing.assert_allclose(its_entropy, [integral(case, lambda x, log_p: -log_p) for case in CASES], atol=2e-5)
    other = ClippedNormal(LOC + 0.3, 1.5 * SCALE, LOW, HIGH)

    def divergence(case):
        loc, scale, low, high = map(float, case)
        if low == high:
            return 0.0
        q = stats.norm(float(np.float32(loc) + np.float32(0.3)), 1.5 * scale)

        def log_q(x):
            return np.where(x <= low, q.logcdf(low), np.where(x >= high, q.logsf(high), q.logpdf(x)))

        p = stats.norm(loc, scale)
        # The ends of the grid are inside, the bounds are not.
        x = np.linspace(max(low, loc - 12 * scale), min(high, loc + 12 * scale), 200_001)
        total = np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
        ends = ((low, p.cdf(low), p.logcdf(low)), (high, p.sf(high), p.logsf(high)))
        return total + sum(mass * (log_p - log_q(bound)) for bound, mass, log_p in ends if np.isfinite(bound))

    np.testing.assert_allclose(divergence_of(CLIPPED, other), [divergence(case) for case in CASES], atol=5e-5)
    np.testing.assert_allclose(divergence_of(CLIPPED, CLIPPED), np.zeros(len(CASES)), atol=1e-5)


def test_samples_of_a_clipped_normal_match_its_distribution():
    drawn = np.asarray(samples(CLIPPED, jax.random.split(KEY, 20_000)))
    mean, (_, mode) = [integral(case, lambda x, _: x) for case in CASES], entropy_and_mode(CLIPPED)
    assert np.all((drawn >= np.asarray(LOW)) & (drawn <= np.asarray(HIGH)))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.06)
    on_high = np.exp(log_prob(CLIPPED, HIGH))[2]
    assert abs(np.mean(drawn[:, 2] == HIGH[2]) - on_high) < 4 * np.sqrt(on_high / 20_000)
    np.testing.assert_array_equal(mode, np.clip(LOC, LOW, HIGH))


def test_a_clipped_sample_that_rounds_to_loc_has_the_density_of_its_noise():
    loc, scale = jnp.ones(1000), jnp.full(1000, 1e-7)
    value, density = ClippedNormal(loc, scale, loc - 1.0, loc + 1.0).sample_and_log_prob(seed=KEY)
    noise = np.asarray(jax.random.normal(KEY, (1000,)), np.float64)
    np.testing.assert_allclose(value, 1.0, atol=1e-6)
    np.testing.assert_allclose(density, stats.norm.logpdf(noise) - np.log(1e-7), rtol=1e-5)
    # All of the mass of the lower bound is on it.
    low, density = ClippedNormal(loc, scale, loc + 1.0, loc + 2.0).sample_and_log_prob(seed=KEY)
    np.testing.assert_array_equal(low, 2.0)
    np.testing.assert_array_equal(density, 0.0)


def test_without_a_deviation_there_is_only_the_mode():
    still = ClippedNormal(LOC[:4], jnp.zeros(4), LOW[:4], HIGH[:4])
    drawn, mode = samples(still, KEY[None])[0], entropy_and_mode(still)[1]
    density = log_prob(still, mode)
    np.testing.assert_array_equal(drawn, mode)
    assert np.all(np.isfinite(density)) and np.all(density >= 0)


def test_log_prob_of_an_event_is_the_sum_over_its_elements():
    wide = ClippedNormal(*(jnp.asarray(column[:4].reshape(2, 2)) for column in CASES.T), 1)
    alone = np.asarray(log_prob(CLIPPED, jnp.zeros(7)))[:4].reshape(2, 2)
    np.testing.assert_allclose(log_prob(wide, jnp.zeros((2, 2))), alone.sum(1), rtol=1e-6)


def test_a_uniform_distribution_is_numpys():
    low, high = jnp.array([[-1.0, 2.0], [0.0, 3.0]]), jnp.array([[1.0, 2.5], [0.0, 3e38]])
    each = Uniform(low, high, 1)
    entropy, mode = entropy_and_mode(each)
    np.testing.assert_allclose(entropy, [np.log(2 * 0.5), np.log(3e38)], rtol=1e-6)
    np.testing.assert_allclose(log_prob(each, mode), -entropy, rtol=1e-6)
    assert np.array_equal(log_prob(each, jnp.array([[0.0, 2.6], [0.1, 5.0]])), [-INF, -INF])
    drawn = np.asarray(samples(each, jax.random.split(KEY, 4000)))
    assert np.all((drawn >= np.asarray(low)) & (drawn <= np.asarray(high))) and np.all(np.isfinite(drawn))
    assert stats.kstest(drawn[:, 0, 0], stats.uniform(-1, 2).cdf).pvalue > 1e-3
    wider = Uniform(low - 1.0, high + 1.0, 1)
    np.testing.assert_allclose(divergence_of(each, wider)[0], np.log(4 / 2) + np.log(2.5 / 0.5), rtol=1e-6)
    assert divergence_of(wider, each)[0] == INF


def test_affine_distribution_is_the_change_of_variables():
    inner = TanhNormal(jnp.array([[0.3, -0.4]]), jnp.array([[0.5, 0.8]]), 1)
    shift, scale = jnp.array([[1.0, -2.0]]), jnp.array([[0.5, 3.0]])
    each = Affine(inner, shift, scale, 1)
    value, its_log_prob = jax.jit(lambda each: each.sample_and_log_prob(seed=KEY))(each)
    inside = jax.jit(lambda inner: inner.sample(seed=KEY))(inner)
    np.testing.assert_allclose(value, shift + scale * inside, rtol=1e-6)
    np.testing.assert_allclose(its_log_prob, log_prob(inner, (value - shift) / scale) - np.log(0.5 * 3.0), rtol=1e-4)
    np.testing.assert_allclose(log_prob(each, value), its_log_prob, rtol=1e-4)
    (entropy, mode), moved = entropy_and_mode(inner), entropy_and_mode(each)
    np.testing.assert_allclose(moved[0], entropy + np.log(1.5), rtol=1e-5)
    np.testing.assert_allclose(moved[1], shift + scale * mode, rtol=1e-6)
    other = Affine(TanhNormal(jnp.zeros((1, 2)), jnp.ones((1, 2)), 1), shift, scale, 1)
    np.testing.assert_allclose(divergence_of(each, other), divergence_of(inner, other.inner), rtol=1e-6)


@pytest.mark.parametrize("pair", [(CLIPPED, Uniform(-SCALE, SCALE)), (Uniform(-SCALE, SCALE), CLIPPED)])
def test_a_divergence_is_between_two_of_a_kind(pair, unchecked):
    with pytest.raises(TypeError, match="kl_divergence: both must be"):
        pair[0].kl_divergence(pair[1])


def test_affine_bound_is_included_within_a_few_roundings():
    # Its last bit is what the compiler makes of it; the last of these has no room between its bounds.
    low, high, shift = (jnp.array([x]) for x in ([-1.7, 0.3, 0.5], [2.3, 4.0, 0.5], [0.51, -90.0, 0.1]))
    scale = jnp.full((1, 3), 0.3)

    @jax.jit
    def got(inner, at):
        for _ in range(2):
            inner, at = inner.affine(shift, scale), shift + scale * at
        beside = [jnp.nextafter(at, jnp.full_like(at, towards)) for towards in (-INF, INF)]
        return jnp.stack([inner.log_prob(x) for x in beside])

    clipped, box = ClippedNormal(jnp.ones((1, 3)), jnp.ones((1, 3)), low, high), Uniform(low, high)
    for at in (low, high):
        np.testing.assert_allclose(got(clipped, at), np.stack([log_prob(clipped, at)] * 2), rtol=1e-4)
        wanted = log_prob(box, at) - np.where(np.asarray(low < high), np.float32(2 * np.log(0.3)), np.float32(0))
        np.testing.assert_allclose(got(box, at), np.stack([wanted] * 2), rtol=1e-4)

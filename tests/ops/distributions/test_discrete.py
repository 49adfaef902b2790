import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.ops.distributions.discrete import Bernoulli, Categorical, MultiCategorical, _inverse_cdf

SMALLEST, LARGEST = 0.0, 1 - 2.0**-24  # of the float32 in [0, 1)


def random_categorical(seed, shape, *, masked=True, scale=1.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=shape)).astype(np.float32)
    mask = rng.random(shape) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    return Categorical(jnp.asarray(logits), jnp.asarray(mask) if masked else None)


def exact_probs(distribution):
    logits = np.asarray(distribution.logits, np.float64)
    if distribution.mask is not None:
        logits = np.where(distribution.mask, logits, -np.inf)
    return scipy.special.softmax(logits, axis=-1)


# Categorical: formulae

jit_all = jax.jit(lambda d, other, a: (d.probs(), d.log_prob(a), d.entropy(), d.mode(), d.kl_divergence(other)))
jit_entropy = jax.jit(lambda d: (d.log_probs(), d.entropy()))
jit_kl = jax.jit(Categorical.kl_divergence)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([1e-2, 1.0, 30.0]))
def test_categorical_against_scipy(seed, masked, scale):
    d = random_categorical(seed, (4, 5), masked=masked, scale=scale)
    other = Categorical(-d.logits, d.mask)
    action = np.random.default_rng(seed).integers(0, 5, 4)
    probs, log_prob, entropy, mode, kl = jit_all(d, other, jnp.asarray(action, jnp.int32))
    p, q = exact_probs(d), exact_probs(other)
    np.testing.assert_allclose(probs, p, rtol=1e-5, atol=1e-30)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(log_prob, np.log(p[np.arange(4), action]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy, scipy.stats.entropy(p, axis=-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(kl, scipy.special.rel_entr(p, q).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(mode, p.argmax(-1))


def test_kl_equals_published_numbers():
    def kl(p, q):
        return jit_kl(*(Categorical(jnp.asarray(np.log(np.array(x, np.float32)))) for x in (p, q)))

    np.testing.assert_allclose(kl([0.4, 0.2, 0.4], [0.3, 0.4, 0.3]), 0.09151624, rtol=1e-6)
    np.testing.assert_allclose(kl([0.4, 0.2, 0.4], [0.2, 0.6, 0.2]), 0.33479536, rtol=1e-6)


@jax.jit
def jit_gradients(d, other, action):
    """Of entropy, KL(d ‖ other), KL(other ‖ d) and log_prob, with respect to the logits of d."""

    def of(f):
        return jax.grad(lambda logits: f(Categorical(logits, d.mask)))(d.logits)

    return (
        of(lambda c: c.entropy()),
        of(lambda c: c.kl_divergence(other)),
        of(lambda c: other.kl_divergence(c)),
        of(lambda c: c.log_prob(action)),
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_gradients_are_those_of_the_formulae_and_zero_for_a_forbidden_logit(seed, masked):
    d = random_categorical(seed, (6,), masked=masked)
    other = Categorical(-d.logits, d.mask)
    p, q = exact_probs(d), exact_probs(other)
    allowed = p > 0
    log_p, log_q = (np.log(x, where=allowed, out=np.zeros(6)) for x in (p, q))
    entropy, kl = -(p * log_p).sum(), (p * (log_p - log_q)).sum()
    first = int(np.argmax(allowed))
    by_entropy, by_kl, by_other, by_log_prob = jit_gradients(d, other, jnp.int32(first))
    np.testing.assert_allclose(by_entropy, -p * (log_p + entropy), atol=1e-5)
    np.testing.assert_allclose(by_kl, p * (log_p - log_q - kl), atol=1e-5)
    np.testing.assert_allclose(by_other, p - q, atol=1e-5)
    np.testing.assert_allclose(by_log_prob, np.eye(6)[first] - p, atol=1e-5)
    for gradient in (by_entropy, by_kl, by_other, by_log_prob):
        np.testing.assert_array_equal(np.asarray(gradient)[~allowed], 0)


def test_a_forbidden_action_has_no_probability_and_finite_gradients():
    mask = jnp.array([True, False, True])
    d = Categorical(jnp.array([1.0, 50.0, 1.0]), mask)
    probs, log_prob, entropy, *_ = jit_all(d, d, jnp.int32(1))
    np.testing.assert_array_equal(probs, [0.5, 0, 0.5])
    assert log_prob == -jnp.inf
    np.testing.assert_allclose(entropy, np.log(2), rtol=1e-6)
    *_, gradient = jit_gradients(d, d, jnp.int32(1))
    assert np.isfinite(gradient).all() and gradient[1] == 0


def test_a_logit_of_minus_infinity_forbids_as_a_mask_does():
    logits = jnp.array([0.3, -jnp.inf, -1.0])
    d, same = Categorical(logits), Categorical(jnp.array([0.3, 9.0, -1.0]), jnp.array([True, False, True]))
    np.testing.assert_array_equal(jit_entropy(d)[0], jit_entropy(same)[0])
    np.testing.assert_array_equal(jit_entropy(d)[1], jit_entropy(same)[1])
    gradient = jax.jit(jax.grad(lambda x: Categorical(x).entropy()))(logits)
    assert jnp.all(jnp.isfinite(gradient)) and gradient[1] == 0


@pytest.mark.parametrize("action", [-1, 3, 100])
def test_action_out_of_range_has_probability_zero(action):
    assert Categorical(jnp.zeros(3)).log_prob(jnp.int32(action)) == -jnp.inf


def test_divergence_is_infinite_where_the_other_forbids_what_happens():
    d, narrow = Categorical(jnp.zeros(3)), Categorical(jnp.zeros(3), jnp.array([True, True, False]))
    assert d.kl_divergence(narrow) == jnp.inf
    np.testing.assert_allclose(narrow.kl_divergence(d), np.log(3 / 2), rtol=1e-6)


def test_mask_that_forbids_all_raises_with_the_row():
    mask = np.ones((2, 3), bool)
    mask[1] = False
    for array in (mask, jnp.asarray(mask)):
        with pytest.raises(
            ValueError, match=r"Categorical: mask must allow at least one action in every row, got none in row \[1\]"
        ):
            Categorical(jnp.zeros((2, 3)), array)
    with pytest.raises(ValueError, match="MultiCategorical: mask must allow at least one action"):
        MultiCategorical(jnp.zeros(5), (2, 3), jnp.array([False, False, True, True, True]))


def test_under_jit_a_mask_that_forbids_all_is_ignored():
    @jax.jit
    def everything(logits, mask):
        d = Categorical(logits, mask)
        action = d.sample(seed=jax.random.key(0))
        return d.probs(), d.entropy(), d.mode(), d.log_prob(action), jax.grad(lambda x: Categorical(x, mask).entropy())(logits)

    logits = jnp.array([0.1, 0.2, 0.3])
    for got, wanted in zip(everything(logits, jnp.zeros(3, bool)), everything(logits, jnp.ones(3, bool)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_mask_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"mask must have the shape of logits, got mask \(3,\), logits \(2, 3\)"):
        Categorical(jnp.zeros((2, 3)), jnp.ones(3, bool))


# Categorical: sampling


@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_samples_have_the_right_frequencies(n):
    d = random_categorical(n, (n,), masked=n > 2)
    p = exact_probs(d)
    many = jax.tree.map(lambda x: np.tile(x, (50_000, 1)), d)
    samples = jax.jit(lambda d: d.sample(seed=jax.random.key(3)))(many)
    assert samples.dtype == jnp.int32
    counts = np.bincount(np.asarray(samples), minlength=n)
    assert counts[p == 0].sum() == 0
    if (p > 0).sum() > 1:
        assert scipy.stats.chisquare(counts[p > 0], 50_000 * p[p > 0]).pvalue > 0.01


jit_inverse_cdf = jax.jit(lambda d, uniform: _inverse_cdf(d._allowed_logits(), uniform))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 32, 150]), st.sampled_from([1e-3, 1.0, 30.0, 300.0]))
def test_no_forbidden_action_is_drawn_even_at_the_ends_of_the_random_numbers(seed, n, scale):
    d = random_categorical(seed, (8, n), scale=scale)
    edges = np.array([SMALLEST, 2.0**-23, 0.5, LARGEST, LARGEST, LARGEST, 1 - 2.0**-22, SMALLEST], np.float32)
    action = np.asarray(jit_inverse_cdf(d, jnp.asarray(edges)))
    assert ((action >= 0) & (action < n)).all()
    assert np.asarray(d.mask)[np.arange(8), action].all()


@pytest.mark.parametrize("n", [5, 50])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_logit_still_draws_an_allowed_action(n, broken):
    mask = np.zeros((64, n), bool)
    mask[:, [2, 4]] = True
    logits = np.zeros((64, n), np.float32)
    logits[:, 4] = broken
    sample = jax.jit(lambda logits, mask: Categorical(logits, mask).sample(seed=jax.random.key(0)))
    action = sample(logits, mask)
    assert set(np.asarray(action).tolist()) <= {2, 4}


def test_the_inverse_cdf_is_the_inverse_of_the_cdf():
    logits = np.log(np.array([[0.25, 0.5, 0.25]] * 5, np.float32))
    uniform = jnp.array([0.0, 0.2, 0.3, 0.7, 0.8])
    np.testing.assert_array_equal(jit_inverse_cdf(Categorical(jnp.asarray(logits)), uniform), [0, 0, 1, 1, 2])


def test_sample_and_log_prob_agree():
    d = random_categorical(0, (100, 4))
    key = jax.random.key(1)
    both = jax.jit(lambda d: (*d.sample_and_log_prob(seed=key), d.sample(seed=key), d.log_prob(d.sample(seed=key))))
    action, log_prob, sample, log_prob_of_sample = both(d)
    np.testing.assert_array_equal(action, sample)
    np.testing.assert_array_equal(log_prob, log_prob_of_sample)


# MultiCategorical


def test_multi_categorical_is_independent_categoricals():
    rng = np.random.default_rng(0)
    nvec, logits, mask = (2, 3, 40), jnp.asarray(rng.normal(size=(6, 45)), jnp.float32), rng.random((6, 45)) < 0.6
    mask[:, [0, 2, 5]] = True

    def everything(d, other, action):
        return d.log_prob(action), d.entropy(), d.kl_divergence(other)

    @jax.jit
    def both_ways(logits, mask):
        d, other = MultiCategorical(logits, nvec, mask), MultiCategorical(-logits, nvec, mask)
        action, log_prob = d.sample_and_log_prob(seed=jax.random.key(0))
        parts = [Categorical(logits[:, a:b], mask[:, a:b]) for a, b in ((0, 2), (2, 5), (5, 45))]
        each = [everything(p, Categorical(-p.logits, p.mask), action[:, i]) for i, p in enumerate(parts)]
        by_hand = jax.tree.map(lambda *terms: sum(terms), *each)
        modes = d.mode(), jnp.stack([p.mode() for p in parts], -1)
        return action, log_prob, everything(d, other, action), by_hand, modes

    action, log_prob, got, by_hand, modes = both_ways(logits, jnp.asarray(mask))
    assert action.shape == (6, 3) and action.dtype == jnp.int32
    assert np.isfinite(log_prob).all()
    for x, y in zip(got, by_hand, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    np.testing.assert_allclose(log_prob, got[0], rtol=1e-6)
    np.testing.assert_array_equal(*modes)


def test_the_choices_of_a_multi_categorical_are_drawn_independently():
    sample = jax.jit(lambda logits: MultiCategorical(logits, (2, 2)).sample(seed=jax.random.key(0)))
    action = sample(jnp.zeros((20_000, 4)))
    counts = np.bincount(np.asarray(action[:, 0] * 2 + action[:, 1]), minlength=4)
    assert scipy.stats.chisquare(counts).pvalue > 0.01


def test_logits_of_the_wrong_width_raise():
    with pytest.raises(ValueError, match=r"logits must be 5 wide for nvec \(2, 3\), got \(4,\)"):
        MultiCategorical(jnp.zeros(4), (2, 3))


# Bernoulli

jit_bernoulli = jax.jit(lambda d, other, x: (d.log_prob(x), d.entropy(), d.kl_divergence(other), d.mode()))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 3.0, 60.0]))
def test_bernoulli_against_scipy(seed, scale):
    rng = np.random.default_rng(seed)
    logits, others = ((scale * rng.normal(size=(4, 3))).astype(np.float32) for _ in range(2))
    value = rng.integers(0, 2, (4, 3)).astype(np.int8)
    log_prob, entropy, kl, mode = jit_bernoulli(Bernoulli(jnp.asarray(logits), 1), Bernoulli(jnp.asarray(others), 1), value)
    p, log_p, log_not = (
        scipy.special.expit(logits.astype(np.float64)),
        *map(scipy.special.log_expit, (logits * 1.0, -logits * 1.0)),
    )
    np.testing.assert_allclose(log_prob, np.where(value, log_p, log_not).sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy, -(p * log_p + (1 - p) * log_not).sum(-1), rtol=1e-4, atol=1e-5)
    one = p * (log_p - scipy.special.log_expit(others)) + (1 - p) * (log_not - scipy.special.log_expit(-others))
    np.testing.assert_allclose(kl, one.sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(mode, logits > 0)


def test_bernoulli_samples_are_int8_with_the_right_frequencies():
    d = Bernoulli(jnp.tile(jnp.array([-100.0, -1.0, 0.0, 100.0]), (20_000, 1)), 1)
    sample, log_prob = jax.jit(lambda d: d.sample_and_log_prob(seed=jax.random.key(0)))(d)
    assert sample.dtype == d.mode().dtype == jnp.int8 and log_prob.shape == (20_000,)
    ones = np.asarray(sample, int).sum(0)
    assert ones[0] == 0 and ones[3] == 20_000
    for i in (1, 2):
        assert scipy.stats.binomtest(int(ones[i]), 20_000, float(d.mean()[0, i])).pvalue > 0.01


def test_concrete_mask_is_checked_under_jit_too():
    some, none = jnp.array([[True, False], [True, True]]), jnp.array([[True, False], [False, False]])
    entropy = jax.jit(lambda logits: Categorical(logits, some).entropy())(jnp.ones((2, 2)))
    np.testing.assert_allclose(entropy, [0.0, np.log(2)], rtol=1e-6)
    with pytest.raises(ValueError, match="got none in row"):
        jax.jit(lambda logits: Categorical(logits, none).entropy())(jnp.ones((2, 2)))

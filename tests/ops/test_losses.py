import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from polyak.ops import losses
from polyak.ops.distributions import Categorical


def numbers(*values):
    return jnp.array(np.array(values, np.float32))


# Compiled, as they are used; and one compilation is quicker than one for each operation.
weighted, mean_and_variance = jax.jit(losses.weighted_sum), jax.jit(losses.masked_mean_and_variance)
explained_variance = jax.jit(losses.explained_variance)


# masked means


def test_the_mean_is_over_the_entries_that_count():
    x, weight = numbers(1, 2, 30, 4), numbers(1, 1, 0, 2)
    assert mean_and_variance(x, weight)[0] == (1 + 2 + 2 * 4) / 4
    assert mean_and_variance(x, weight > 0)[0] == 7 / 3
    assert weighted(x, weight) == 1 + 2 + 2 * 4


@pytest.mark.parametrize("junk", [1e9, np.inf, np.nan])
def test_masked_entry_changes_no_bit_of_mean_variance_or_gradient(junk):
    weight = jnp.array([True, False, True, True])
    clean, dirty = numbers(0.1, 0.2, 0.3, 0.7), numbers(0.1, junk, 0.3, 0.7)

    def everything(x):
        mean, variance = mean_and_variance(x, weight)
        return weighted(x, weight.astype(jnp.float32)) + 2 * mean + 3 * variance

    for f in (jax.jit(everything), jax.jit(jax.grad(everything))):
        np.testing.assert_array_equal(f(dirty), f(clean))


def test_empty_mask_gives_zero_and_zero_gradient():
    none = jnp.zeros(3)
    x = numbers(1, np.nan, np.inf)
    assert weighted(x, none) == 0
    assert mean_and_variance(x, none) == (0, 0)
    np.testing.assert_array_equal(jax.jit(jax.grad(losses.weighted_sum))(x, none), jnp.zeros(3))
    empty = jnp.zeros((0,))
    assert mean_and_variance(empty, empty) == (0, 0)


def test_negative_or_nan_weight_counts_as_zero():
    assert mean_and_variance(numbers(1, 2, 4), numbers(-5, 1, np.nan))[0] == 2
    assert weighted(numbers(1, 2, 4), numbers(-5, 1, np.nan)) == 2


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (), (4,)])
def test_weight_of_another_shape_raises(shape):
    for f in (losses.weighted_sum, losses.masked_mean_and_variance):
        with pytest.raises(ValueError, match=r"weight must have the shape of x, got weight \(.*\), x \(3,\)"):
            inspect.unwrap(inspect.unwrap(f))(jnp.ones(3), jnp.ones(shape))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 1e4]))
def test_mean_and_variance_against_float64(seed, centre):
    rng = np.random.default_rng(seed)
    x = (centre + rng.normal(size=(40, 3))).astype(np.float32)
    weight = (rng.random((40, 3)) * (rng.random((40, 3)) < 0.7)).astype(np.float32)
    mean, variance = mean_and_variance(x, weight)
    wanted = np.average(x.astype(np.float64), weights=weight)
    np.testing.assert_allclose(mean, wanted, rtol=3e-7)
    np.testing.assert_allclose(variance, np.average((x - wanted) ** 2, weights=weight), rtol=1e-5)


def test_equal_entries_have_zero_variance():
    for constant in (0.1, 1e4 / 3, -7e-5):
        mean, variance = mean_and_variance(np.full(1000, constant, np.float32), np.ones(1000, np.float32))
        assert mean == np.float32(constant)
        assert variance <= (1e-9 * constant) ** 2


def test_weighted_sums_of_microbatches_add_up_to_the_mean():
    x, weight = np.arange(8, dtype=np.float32), np.array([1, 0, 1, 1, 0, 0, 1, 1], np.float32)
    share = weight / weight.sum()
    parts = [losses.weighted_sum(jnp.asarray(x[i : i + 2]), jnp.asarray(share[i : i + 2])) for i in range(0, 8, 2)]
    np.testing.assert_allclose(sum(parts), mean_and_variance(x, weight)[0], rtol=1e-6)


def over_devices(f, devices, *rows):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))(*rows)


@pytest.mark.parametrize("devices", [2, 8])
def test_over_devices_mean_variance_and_explained_variance_are_those_of_the_whole(devices):
    rng = np.random.default_rng(0)
    value, value_target = (jnp.asarray(rng.normal(3, 1, size=64), jnp.float32) for _ in range(2))
    weight = jnp.asarray(np.arange(64) > 40)  # some devices have nothing that counts
    split = over_devices(lambda x, w: losses.masked_mean_and_variance(x, w, "data"), devices, value, weight)
    np.testing.assert_allclose(split, mean_and_variance(value, weight), rtol=1e-6)
    split = over_devices(lambda v, t, w: losses.explained_variance(v, t, w, "data"), devices, value, value_target, weight)
    np.testing.assert_allclose(split, explained_variance(value, value_target, weight), rtol=1e-5)


@jax.jit
@jax.value_and_grad
def weighted_sum(x, weight):
    return losses.weighted_sum(x, weight)


@pytest.mark.parametrize("junk", [1e9, np.inf, np.nan])
def test_a_weighted_sum_and_its_gradient_hide_what_has_no_weight(junk):
    weight = numbers(1, 0, 3, 0.5)
    value, gradient = weighted_sum(numbers(1, junk, 3, 4), weight)
    assert float(value) == 12.0
    np.testing.assert_array_equal(gradient, [1.0, 0.0, 3.0, 0.5])


def test_a_weighted_sum_of_nothing_is_zero_and_shapes_must_agree(unchecked):
    assert losses.weighted_sum(numbers(1, np.nan), numbers(0, -1)) == 0
    with pytest.raises(ValueError, match="weight must have the shape of x"):
        losses.weighted_sum(numbers(1, 2), numbers(1))


# PPO


def test_without_clipping_the_surrogate_is_ratio_times_advantage_with_the_policy_gradient_where_policies_agree():
    new, old, advantage = jnp.log(numbers(0.9, 0.8, 0.4)), jnp.log(numbers(0.6, 0.8, 0.8)), numbers(-2, 3, 1)
    np.testing.assert_allclose(losses.probability_ratio(new, old), [1.5, 1.0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(losses.surrogate(new, old, advantage), [3.0, -3.0, -0.5], rtol=1e-6)
    gradient = jax.grad(lambda x: losses.surrogate(x, old, advantage).sum())
    np.testing.assert_allclose(gradient(old), -advantage, rtol=1e-6)
    np.testing.assert_allclose(gradient(new), [3.0, -3.0, -0.5], rtol=1e-6)


@pytest.mark.parametrize(("new", "old", "log_ratio"), [(0, -200, 20), (-200, 0, -20), (0, -np.inf, 20), (-np.inf, -np.inf, 0)])
def test_log_ratio_is_clamped_with_zero_gradient_beyond_the_bounds(new, old, log_ratio):
    new, old = jnp.float32(new), jnp.float32(old)
    np.testing.assert_allclose(losses.probability_ratio(new, old), np.exp(log_ratio), rtol=1e-5)
    slope = jax.grad(lambda x: losses.surrogate(x, old, jnp.float32(2)))(new)
    assert slope == 0 if log_ratio else jnp.isfinite(slope)


def test_published_number_of_the_clipped_surrogate():
    new, old = jnp.log(numbers(0.9, 0.8, 0.4)), jnp.log(numbers(0.7, 0.8, 0.4))
    loss = losses.clipped_surrogate(new, old, numbers(-2, 2, 1), 0.2)
    np.testing.assert_allclose(loss.mean(), -0.142857, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.2, 0.5]))
def test_ppo_losses_against_float64(seed, epsilon):
    rng = np.random.default_rng(seed)
    new, old, advantage, value, old_value, value_target = rng.normal(size=(6, 20)).astype(np.float32)
    ratio = np.exp(new.astype(np.float64) - old)
    arrays = [jnp.asarray(x) for x in (new, old, advantage)]
    wanted = np.maximum(-ratio * advantage, -np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
    np.testing.assert_allclose(losses.clipped_surrogate(*arrays, epsilon), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(losses.approx_kl(*arrays[:2]), ratio - 1 - np.log(ratio), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(losses.clip_fraction(*arrays[:2], epsilon), np.abs(ratio - 1) > epsilon)
    values = [jnp.asarray(x) for x in (value, old_value, value_target)]
    near = old_value + np.clip(value - old_value, -epsilon, epsilon)
    wanted = np.maximum((value - value_target) ** 2, (near - value_target) ** 2)
    np.testing.assert_allclose(losses.clipped_value_loss(*values, epsilon), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses.value_loss(values[0], values[2]), (value - value_target) ** 2, rtol=1e-6)


def test_the_gradient_of_the_surrogate_is_that_of_the_ratio_until_it_is_clipped():
    def slope(log_ratio, advantage):
        return jax.grad(lambda x: losses.clipped_surrogate(x, jnp.zeros(()), jnp.float32(advantage), 0.2))(
            jnp.float32(log_ratio)
        )

    assert slope(0.0, 3.0) == -3.0  # in the first epoch, the policy gradient
    np.testing.assert_allclose(slope(0.1, 3.0), -3 * np.exp(0.1), rtol=1e-6)
    assert slope(0.3, 3.0) == 0  # better and already far: no more
    np.testing.assert_allclose(slope(0.3, -3.0), 3 * np.exp(0.3), rtol=1e-6)  # worse and far: back
    assert slope(-0.3, -3.0) == 0


@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize(("new", "old"), [(0, -200), (-200, 0), (0, -np.inf), (-np.inf, 0), (-np.inf, -np.inf), (80, -80)])
def test_overflowing_ratio_and_its_gradient_stay_finite(new, old, advantage):
    new, old = jnp.float32(new), jnp.float32(old)

    def loss(new):
        return losses.clipped_surrogate(new, old, jnp.float32(advantage), 0.2) + losses.approx_kl(new, old)

    value, gradient = jax.value_and_grad(loss)(new)
    assert jnp.isfinite(value) and jnp.isfinite(gradient)
    assert losses.approx_kl(new, old) >= 0
    assert losses.clip_fraction(new, old, 0.2) == float(new != old)


def test_a_nan_log_prob_is_not_hidden():
    assert jnp.isnan(losses.clipped_surrogate(jnp.float32(np.nan), jnp.float32(0), jnp.float32(1), 0.2))


def test_a_clipped_value_gains_nothing_by_moving_farther():
    def slope(value):
        return jax.grad(lambda v: losses.clipped_value_loss(v, jnp.float32(0), jnp.float32(10), 0.5))(jnp.float32(value))

    assert slope(0.25) == 2 * (0.25 - 10)
    assert slope(2.0) == 0
    assert slope(12.0) == 0  # the clipped error, 9.5, is the larger
    assert slope(30.0) == 2 * 20


def test_explained_variance():
    value_target, weight = numbers(1, 2, 3, 99), numbers(1, 1, 1, 0)
    assert explained_variance(value_target, value_target, weight) == 1
    assert explained_variance(jnp.zeros(4), value_target, weight) == 0
    np.testing.assert_allclose(explained_variance(-value_target, value_target, weight), -3, rtol=1e-6)
    dirty = value_target.at[3].set(np.nan)
    assert explained_variance(dirty, dirty, weight) == 1


def test_a_constant_target_leaves_nothing_to_explain_whatever_rounding_makes_of_its_variance():
    rng = np.random.default_rng(0)
    largest = 0.0
    for _ in range(100):
        value_target = jnp.full(1000, rng.normal(), jnp.float32)
        weight = jnp.asarray(rng.random(1000), jnp.float32)
        largest = max(largest, float(mean_and_variance(value_target, weight)[1]))
        assert explained_variance(jnp.arange(1000.0), value_target, weight) == 0
    assert 0 < largest < 1e-18  # the case occurs


# the KL penalty


KL_LIMIT = {"factor": 2.0, "target": 0.01, "coef": 1000.0}


def test_kl_cutoff_of_the_published_divergence():
    old, new = (Categorical(jnp.log(jnp.array(p))) for p in ((0.4, 0.2, 0.4), (0.3, 0.4, 0.3)))
    kl = old.kl_divergence(new)
    assert float(kl) == pytest.approx(0.09151624, abs=1e-7)
    assert float(losses.kl_cutoff(kl, **KL_LIMIT)) == pytest.approx(1000 * (0.09151624 - 0.02) ** 2, rel=1e-5)


@pytest.mark.parametrize(("kl", "value", "slope"), [(0.0, 0.0, 0.0), (0.02, 0.0, 0.0), (0.03, 0.1, 20.0), (0.12, 10.0, 200.0)])
def test_kl_cutoff_is_quadratic_beyond_its_limit(kl, value, slope):
    assert float(losses.kl_cutoff(jnp.float32(kl), **KL_LIMIT)) == pytest.approx(value, abs=1e-6)
    assert float(jax.grad(lambda x: losses.kl_cutoff(x, **KL_LIMIT))(jnp.float32(kl))) == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize(
    ("beta", "kl", "after"),
    [
        (1.0, 0.016, 1.5),
        (1.0, 0.0149, 1.0),
        (1.0, 0.01, 1.0),
        (1.0, 0.0051, 1.0),
        (1.0, 0.004, 1 / 1.5),
        (3.0, 0.0, 2.0),
        (losses.LARGEST_KL_BETA, 1.0, losses.LARGEST_KL_BETA),
        (losses.SMALLEST_KL_BETA, 0.0, losses.SMALLEST_KL_BETA),
        (2.0, np.nan, 2.0),
        (2.0, np.inf, 2.0),
    ],
)
def test_kl_beta_changes_by_half_outside_the_tolerance_and_stays_bounded(beta, kl, after):
    new_beta = losses.adapt_kl_beta(jnp.float32(beta), jnp.float32(kl), target=0.01, tolerance=0.5)
    assert float(new_beta) == pytest.approx(after, rel=1e-6)


def test_kl_beta_leaves_its_bounds_again():
    assert (
        float(losses.adapt_kl_beta(jnp.float32(losses.LARGEST_KL_BETA), jnp.float32(0), target=0.01, tolerance=0.5))
        < losses.LARGEST_KL_BETA
    )
    assert (
        float(losses.adapt_kl_beta(jnp.float32(losses.SMALLEST_KL_BETA), jnp.float32(1), target=0.01, tolerance=0.5))
        > losses.SMALLEST_KL_BETA
    )


def test_sum_over_one_device_is_the_array_itself():
    x = jnp.arange(3.0)
    assert losses.sum_over_devices(x, None) is x


@pytest.mark.slow
def test_sum_over_several_devices():
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    add = jax.shard_map(lambda x: losses.sum_over_devices(x, "rows"), mesh=mesh, in_specs=P("rows"), out_specs=P())
    assert float(jax.jit(add)(jnp.arange(4.0))[0]) == 6.0


def test_rows_without_weight_hold_the_row_before_them_or_the_first_that_has_some():
    rows = {"x": jnp.arange(6)[:, None], "n": jnp.arange(6)}
    filled = losses.fill_rows(rows, jnp.array([0.0, 0.0, 0.5, 0.0, 1.0, 0.0]))
    assert filled["n"].tolist() == [2, 2, 2, 2, 4, 4] == filled["x"][:, 0].tolist()
    assert losses.fill_rows(rows, jnp.ones(6))["n"].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_mean_of_squares_is_over_all_numbers_of_the_action():
    x = {"a": jnp.ones((2, 2)), "b": jnp.zeros((2, 1, 2))}
    y = {"a": jnp.zeros((2, 2)), "b": jnp.full((2, 1, 2), 3.0)}
    np.testing.assert_allclose(losses.mean_square(x, y), (1 + 1 + 9 + 9) / 4)

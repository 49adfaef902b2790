"""Losses per step, unreduced, and `masked_mean`, the one reduction that turns them into a number."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from polyak.core.types import Scalar
from polyak.ops.trees import sum_over_devices

MAX_LOG_RATIO = 20.0
"""Probability ratios are held within e^±20 (about 5e8): beyond, they say that the data is not this policy's, and no more."""

LARGEST_LOG_PROB = 1e30
"""Stands for infinity in a log-probability, so that the difference of two infinite ones is a number."""


def masked_mean(x: Float[Array, "*shape"], weight: Float[Array, "*shape"] | Bool[Array, "*shape"]) -> Float[Array, ""]:
    """The mean over the entries that count, Σ w x / Σ w over w > 0; 0 if there are none.

    A value under a weight of 0 (or below, or NaN) reaches neither the result nor its gradient with respect to `x`. A NaN that
    went *into* `x` still comes back from its own function's derivative, since 0 · NaN = NaN: mask a network's inputs too.

    Args:
        weight: one for each entry of x; bool, or numbers.

    Raises:
        ValueError: `x` and `weight` differ in shape.

    >>> masked_mean(jnp.array([1.0, jnp.nan, 5.0]), jnp.array([True, False, True]))
    Array(3., dtype=float32)
    """
    weight = _positive(x, weight)
    return jnp.sum(_weighted(x, weight)) / _at_least_tiny(jnp.sum(weight))


def weighted_sum(x: Float[Array, "*shape"], weight: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Σ w x over w > 0: where the weights sum to 1, the weighted mean; those of parts of a batch add up to that of the whole.

    Raises:
        ValueError: `x` and `weight` differ in shape.
    """
    return jnp.sum(_weighted(x, _positive(x, weight)))


def masked_mean_and_variance(
    x: Float[Array, "*shape"],
    weight: Float[Array, "*shape"] | Bool[Array, "*shape"],
    axis_name: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and variance over the entries that count, m = Σ w x / Σ w and Σ w (x - m)² / Σ w; 0 and 0 where none does.

    In two passes, since E[x²] - m² cancels; the second also takes the rounding error out of the mean of the first, so that
    equal entries have variance 0 up to the rounding of a rounding. The variance is the population's: one entry has variance 0.

    Args:
        weight: one for each entry of x; bool, or numbers.
        axis_name: the mesh axis that the entries are spread over; the result is that of all of them.

    Raises:
        ValueError: `x` and `weight` differ in shape.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance" (the corrected two-pass).
    """
    weight = _positive(x, weight)
    sum_of_x, total = _sums(_weighted(x, weight), weight, axis_name)
    total = _at_least_tiny(total)
    # Hidden before it is squared: the derivative of a square knows its argument, and 0 · NaN = NaN.
    rest = jnp.where(weight > 0, x - sum_of_x / total, 0.0)
    sum_of_rest, sum_of_squares = _sums(rest * weight, jnp.square(rest) * weight, axis_name)
    mean_of_rest, mean_square = sum_of_rest / total, sum_of_squares / total
    return sum_of_x / total + mean_of_rest, jnp.maximum(mean_square - jnp.square(mean_of_rest), 0.0)


def clipped_surrogate(
    log_prob: Float[Array, "*shape"],
    old_log_prob: Float[Array, "*shape"],
    advantage: Float[Array, "*shape"],
    clip_range: Scalar,
) -> Float[Array, "*shape"]:
    """PPO's loss for the policy, -min(ρ A, clip(ρ, 1-ε, 1+ε) A) with ρ = π(a|s) / π_old(a|s), to be minimised.

    The ratio stays within e^±20, and there its gradient is 0, so that actions which one of the policies (all but) excludes
    give a finite loss.

    Args:
        log_prob: log π(a|s), that learns.
        old_log_prob: log π_old(a|s), of the policy that acted.
        advantage: A(s, a).
        clip_range: ε.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.

    >>> log, new, old = jnp.log, jnp.array([0.9, 0.8, 0.4]), jnp.array([0.7, 0.8, 0.4])
    >>> round(float(clipped_surrogate(log(new), log(old), jnp.array([-2.0, 2.0, 1.0]), 0.2).mean()), 6)
    -0.142857
    """
    ratio = probability_ratio(log_prob, old_log_prob)
    unclipped, clipped = ratio * advantage, _clip(ratio, 1.0 - clip_range, 1.0 + clip_range) * advantage
    return -jnp.where(unclipped <= clipped, unclipped, clipped)


def surrogate(
    log_prob: Float[Array, "*shape"], old_log_prob: Float[Array, "*shape"], advantage: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The policy gradient's loss -ρ A with ρ = π(a|s) / π_old(a|s), unclipped, to be minimised.

    Where the policies are equal its gradient is that of -log π(a|s) A. The ratio stays within e^±20.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
    """
    return -probability_ratio(log_prob, old_log_prob) * advantage


def probability_ratio(log_prob: Float[Array, "*shape"], old_log_prob: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """ρ = π(a|s) / π_old(a|s), within e^±20."""
    return jnp.exp(_log_ratio(log_prob, old_log_prob))


def value_loss(value: Float[Array, "*shape"], value_target: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The squared error (V - V_target)², without a factor of 1/2."""
    return jnp.square(value - value_target)


def clipped_value_loss(
    value: Float[Array, "*shape"],
    old_value: Float[Array, "*shape"],
    value_target: Float[Array, "*shape"],
    clip_range_vf: Scalar,
) -> Float[Array, "*shape"]:
    """The squared error of a value that gains nothing by moving far, without a factor of 1/2.

        max((V - V_target)², (V_old + clip(V - V_old, -ε, ε) - V_target)²)

    Args:
        value: V, that learns.
        old_value: V when the data was collected.
        value_target: what V should be.
        clip_range_vf: ε, in the units of the value.

    Source: Dhariwal et al. 2017, OpenAI Baselines, ppo2.
    """
    clipped = old_value + jnp.clip(value - old_value, -clip_range_vf, clip_range_vf)
    return jnp.maximum(jnp.square(value - value_target), jnp.square(clipped - value_target))


def approx_kl(log_prob: Float[Array, "*shape"], old_log_prob: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """An unbiased estimate of KL(π_old ‖ π) that is never negative, (ρ - 1) - log ρ with ρ = π(a|s) / π_old(a|s).

    Source: Schulman 2020, "Approximating KL divergence", k3.

    >>> approx_kl(jnp.zeros(()), jnp.ones(()))
    Array(0.36787945, dtype=float32)
    """
    log_ratio = _log_ratio(log_prob, old_log_prob)
    return jnp.expm1(log_ratio) - log_ratio


def clip_fraction(
    log_prob: Float[Array, "*shape"], old_log_prob: Float[Array, "*shape"], clip_range: Scalar
) -> Float[Array, "*shape"]:
    """1 where the ratio π(a|s) / π_old(a|s) is farther than `clip_range` from 1, else 0."""
    return (jnp.abs(jnp.expm1(_log_ratio(log_prob, old_log_prob))) > clip_range).astype(log_prob.dtype)


def explained_variance(
    value: Float[Array, "*shape"],
    value_target: Float[Array, "*shape"],
    weight: Float[Array, "*shape"] | Bool[Array, "*shape"],
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """The share of the target's variance that the value explains, 1 - Var(V_target - V) / Var(V_target).

    1 is perfect, 0 no better than a constant; below, worse than one. Where the target is constant there is nothing to
    explain, and the answer is 0.

    Args:
        weight: one for each entry; those of weight 0 do not count.
        axis_name: the mesh axis that the entries are spread over.
    """
    both = jnp.stack([value_target - value, value_target])
    (_, mean), (unexplained, variance) = jax.vmap(lambda x: masked_mean_and_variance(x, weight, axis_name))(both)
    varies = variance > jnp.square(float(np.finfo(np.float32).eps) * mean)
    return jnp.where(varies, 1.0 - unexplained / _at_least_tiny(variance), 0.0)


def _log_ratio(log_prob: Array, old_log_prob: Array) -> Array:
    """The log ratio within ±MAX_LOG_RATIO; two log-probabilities of -inf make it 0, and infinities pass no gradient."""
    new, old = (_clip(x, -LARGEST_LOG_PROB, LARGEST_LOG_PROB) for x in (log_prob, old_log_prob))
    return _clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip(x: Array, low: Scalar, high: Scalar) -> Array:
    """As `jnp.clip`, but with a derivative of 0 at the bounds, not of a half, which takes XLA a kernel more."""
    return jax.lax.clamp(jnp.asarray(low, x.dtype), x, jnp.asarray(high, x.dtype))


def _positive(x: Array, weight: Array) -> Array:
    """The weights as x's dtype, 0 where they are not above 0."""
    if x.shape != weight.shape:
        raise ValueError(f"masked mean: weight must have the shape of x, got weight {weight.shape}, x {x.shape}")
    weight = weight.astype(x.dtype)
    return jnp.where(weight > 0, weight, 0.0)


def _weighted(x: Array, weight: Array) -> Array:
    """The product w x, and 0 where w is 0, whatever x is there."""
    return jnp.where(weight > 0, x, 0.0) * weight


def _sums(x: Array, y: Array, axis_name: str | None) -> Array:
    """The sums of two arrays of one shape over all devices, `[2]`, in one reduction."""
    return sum_over_devices(jnp.stack([x.ravel(), y.ravel()]).sum(axis=1), axis_name)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, float(np.finfo(np.float32).tiny))

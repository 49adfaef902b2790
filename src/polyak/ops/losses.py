"""Per-step losses without reduction, weighted sums and means, action values, and masks of steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from polyak.core.types import PyTree, Scalar
from polyak.ops.distributions.discrete import where_allowed

MAX_LOG_RATIO = 20.0
"""Probability ratios are clipped to e^±20 (about 5e8)."""

LARGEST_LOG_PROB = 1e30
"""Replaces infinity in a log-probability, so that the difference of two infinite ones is finite."""

KL_BETA_FACTOR = 1.5
"""Factor by which the coefficient of a KL penalty changes after an update."""

SMALLEST_KL_BETA, LARGEST_KL_BETA = 1e-6, 1e6


def weighted_sum(x: Float[Array, "*shape"], weight: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Σ w x over w > 0; with weights that sum to 1, the weighted mean. Sums over microbatches add up to the batch's sum.

    An entry with a weight of 0 (or negative, or NaN) affects neither the result nor its gradient with respect to `x`. A NaN in
    the inputs of the function that computed `x` still enters that function's gradient, since 0 · NaN = NaN: mask a network's
    inputs too.

    Args:
        weight: one per entry of x.

    Raises:
        ValueError: `x` and `weight` differ in shape.

    >>> weighted_sum(jnp.array([1.0, jnp.nan, 5.0]), jnp.array([0.5, 0.0, 0.5]))
    Array(3., dtype=float32)
    """
    return jnp.sum(_weighted(x, _positive_weight(x, weight)))


def masked_mean_and_variance(
    x: Float[Array, "*shape"], weight: Float[Array, "*shape"] | Bool[Array, "*shape"], axis_name: str | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted mean m = Σ w x / Σ w and variance Σ w (x - m)² / Σ w over the entries with w > 0; 0 and 0 if there are none.

    Computed in two passes, since E[x²] - m² cancels; the second pass also corrects the rounding error of the mean, so that
    equal entries have variance 0 up to second-order rounding. It is the population variance: one entry has variance 0.

    Args:
        weight: one per entry of x; bool or numbers.
        axis_name: the mesh axis over which the entries are sharded; the result covers all devices.

    Raises:
        ValueError: `x` and `weight` differ in shape.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance" (the corrected two-pass).
    """
    weight = _positive_weight(x, weight)
    sum_of_x, total = _sums(_weighted(x, weight), weight, axis_name)
    total = _at_least_tiny(total)
    # Masked before squaring: the derivative of a square contains its argument, and 0 · NaN = NaN.
    rest = jnp.where(weight > 0, x - sum_of_x / total, 0.0)
    sum_of_rest, sum_of_squares = _sums(rest * weight, jnp.square(rest) * weight, axis_name)
    mean_of_rest, mean_of_squares = sum_of_rest / total, sum_of_squares / total
    return sum_of_x / total + mean_of_rest, jnp.maximum(mean_of_squares - jnp.square(mean_of_rest), 0.0)


def clipped_surrogate(
    log_prob: Float[Array, "*shape"],
    old_log_prob: Float[Array, "*shape"],
    advantage: Float[Array, "*shape"],
    clip_range: Scalar,
) -> Float[Array, "*shape"]:
    """PPO's clipped policy loss -min(ρ A, clip(ρ, 1-ε, 1+ε) A) with ρ = π(a|s) / π_old(a|s), to be minimized.

    The ratio is clipped to e^±20, with gradient 0 at the bounds, so that actions to which one of the policies assigns
    (almost) no probability give a finite loss.

    Args:
        log_prob: log π(a|s) of the current policy.
        old_log_prob: log π_old(a|s) of the policy that collected the data.
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
    """The unclipped policy gradient loss -ρ A with ρ = π(a|s) / π_old(a|s), to be minimized.

    If the policies are equal, its gradient equals the gradient of -log π(a|s) A. The ratio is clipped to e^±20.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
    """
    return -probability_ratio(log_prob, old_log_prob) * advantage


def probability_ratio(log_prob: Float[Array, "*shape"], old_log_prob: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """ρ = π(a|s) / π_old(a|s), clipped to e^±20."""
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
    """The clipped value loss, without a factor of 1/2.

        max((V - V_target)², (V_old + clip(V - V_old, -ε, ε) - V_target)²)

    Args:
        value: V of the current network.
        old_value: V when the data was collected.
        value_target: V_target, the regression target.
        clip_range_vf: ε, in the units of the value.

    Source: Dhariwal et al. 2017, OpenAI Baselines, ppo2.
    """
    clipped = old_value + jnp.clip(value - old_value, -clip_range_vf, clip_range_vf)
    return jnp.maximum(jnp.square(value - value_target), jnp.square(clipped - value_target))


def huber(error: Float[Array, "*shape"], delta: Scalar | None) -> Float[Array, "*shape"]:
    """½ δ² for errors up to κ, and κ (|δ| - ½ κ) beyond; the squared error δ² if κ is None.

    Args:
        error: δ.
        delta: κ.

    Source: Huber 1964, doi:10.1214/aoms/1177703732.

    >>> huber(jnp.array([0.5, -3.0]), 1.0)
    Array([0.125, 2.5  ], dtype=float32)
    """
    if delta is None:
        return jnp.square(error)
    size = jnp.abs(error)
    return jnp.where(size <= delta, 0.5 * jnp.square(error), delta * (size - 0.5 * delta))


def mean_square(x: PyTree, y: PyTree) -> Float[Array, " B"]:
    """|x - y|² / dim A of each sample, over all parts of the action."""
    errors = jax.tree.map(lambda x, y: jnp.square(x - y).reshape(x.shape[0], -1), x, y)
    return jnp.mean(jnp.concatenate(jax.tree.leaves(errors), axis=1), axis=1)


def best_action(q: Float[Array, "rows n"], mask: Bool[Array, "rows n"] | None) -> Int32[Array, " rows"]:
    """argmax_a q_a over the allowed actions, or over all actions if none is allowed; the first of equal maxima.

    >>> best_action(jnp.array([[1.0, 3.0, 2.0]]), jnp.array([[True, False, True]]))
    Array([2], dtype=int32)
    >>> best_action(jnp.array([[1.0, 3.0, 2.0]]), jnp.array([[False, False, False]]))
    Array([1], dtype=int32)
    """
    return jnp.argmax(where_allowed(q, mask), axis=1).astype(jnp.int32)


def of_action(values: Float[Array, "rows n *each"], action: Int32[Array, " rows"]) -> Float[Array, "..."]:
    """The values of one action in each row.

    >>> of_action(jnp.array([[1.0, 3.0], [5.0, 4.0]]), jnp.array([1, 0]))
    Array([3., 5.], dtype=float32)
    """
    index = action.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


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
    """The fraction of the variance of the target explained by the value, 1 - Var(V_target - V) / Var(V_target).

    1 is perfect, 0 no better than a constant, negative worse than a constant. If the target is constant, it is 0.

    Args:
        weight: one per entry; entries of weight 0 are excluded.
        axis_name: the mesh axis over which the entries are sharded.
    """
    both = jnp.stack([value_target - value, value_target])
    (_, mean), (unexplained, variance) = jax.vmap(lambda x: masked_mean_and_variance(x, weight, axis_name))(both)
    has_variance = variance > jnp.square(float(np.finfo(np.float32).eps) * mean)
    return jnp.where(has_variance, 1.0 - unexplained / _at_least_tiny(variance), 0.0)


def kl_cutoff(mean_kl: Float[Array, ""], *, factor: Scalar, target: Scalar, coef: Scalar) -> Float[Array, ""]:
    """The cutoff penalty coef · max(KL - factor · target, 0)²; 0 up to the limit factor · target.

    Source: Schulman et al. 2017, the authors' code of TRPO and PPO for continuous control; TF-Agents `kl_cutoff_loss`.

    >>> float(kl_cutoff(jnp.float32(0.5), factor=2.0, target=0.125, coef=8.0))
    0.5
    """
    return coef * jnp.square(jnp.maximum(mean_kl - factor * target, 0.0))


def adapt_kl_beta(beta: Float[Array, ""], mean_kl: Float[Array, ""], *, target: Scalar, tolerance: Scalar) -> Float[Array, ""]:
    """The coefficient β of the penalty β · KL for the next update.

        β ← β · 1.5   if KL > (1 + tolerance) · target
        β ← β / 1.5   if KL < (1 - tolerance) · target

    β is clipped to [10⁻⁶, 10⁶]; if KL is NaN or infinite, β is unchanged.

    Source: Schulman et al. 2017, arXiv:1707.06347, section 4 (there with a factor of 2, and 1.5 as the tolerance).
    """
    larger = jnp.where(mean_kl > (1.0 + tolerance) * target, beta * KL_BETA_FACTOR, beta)
    new_beta = jnp.where(mean_kl < (1.0 - tolerance) * target, beta / KL_BETA_FACTOR, larger)
    return jnp.where(jnp.isfinite(mean_kl), jnp.clip(new_beta, SMALLEST_KL_BETA, LARGEST_KL_BETA), beta)


def sum_over_devices(x: Shaped[Array, "*S"], axis_name: str | None) -> Shaped[Array, "*S"]:
    """`jax.lax.psum` over the mesh axis (inside `jax.shard_map`), or `x` if `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def _log_ratio(log_prob: Array, old_log_prob: Array) -> Array:
    """The log ratio, clipped to ±MAX_LOG_RATIO; 0 for two log-probabilities of -inf; infinities have gradient 0."""
    new, old = (_clip(x, -LARGEST_LOG_PROB, LARGEST_LOG_PROB) for x in (log_prob, old_log_prob))
    return _clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip(x: Array, low: Scalar, high: Scalar) -> Array:
    """`jnp.clip` with derivative 0 at the bounds instead of 1/2, which needs an extra XLA kernel."""
    return jax.lax.clamp(jnp.asarray(low, x.dtype), x, jnp.asarray(high, x.dtype))


def _positive_weight(x: Array, weight: Array) -> Array:
    """The weights in the dtype of x, 0 where not positive."""
    if x.shape != weight.shape:
        raise ValueError(f"masked mean: weight must have the shape of x, got weight {weight.shape}, x {x.shape}")
    weight = weight.astype(x.dtype)
    return jnp.where(weight > 0, weight, 0.0)


def _weighted(x: Array, weight: Array) -> Array:
    """The product w x; 0 where w is 0, even if x is NaN or infinite there."""
    return jnp.where(weight > 0, x, 0.0) * weight


def _sums(x: Array, y: Array, axis_name: str | None) -> Array:
    """The sums `[2]` of two arrays of equal shape over all devices, in one reduction."""
    return sum_over_devices(jnp.stack([x.ravel(), y.ravel()]).sum(axis=1), axis_name)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, float(np.finfo(np.float32).tiny))


def finite_rows(tree: PyTree, ndim: int) -> Bool[Array, "..."]:
    """True at each index of the first `ndim` axes where no leaf has NaN or infinity; a scalar True if no leaf is a float."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = [jnp.isfinite(leaf).all(axis=tuple(range(ndim, leaf.ndim))) for leaf in floats]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))


def mask_invalid(tree: PyTree, valid: Bool[Array, "*B"]) -> PyTree:
    """Leaves `[*B, ...]` with zeros where `valid` is False."""

    def mask(x: Array) -> Array:
        return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim)), x, jnp.zeros((), x.dtype))

    return jax.tree.map(mask, tree)


def fill_rows(tree: PyTree, weight: Float[Array, " N"]) -> PyTree:
    """Replace rows without weight by the last row with weight before them, or by the first row with weight.

    For networks with batch normalization, so that rows that are not learned from do not enter the statistics of the batch.
    """
    row, has_weight = jnp.arange(len(weight), dtype=jnp.int32), weight > 0
    row = jax.lax.cummax(jnp.where(has_weight, row, jnp.argmax(has_weight).astype(jnp.int32)))
    return jax.tree.map(lambda x: x[row], tree)


def flatten_steps(x: Shaped[Array, "T B ..."]) -> Shaped[Array, "..."]:
    """`[T * B, ...]` of `[T, B, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def swap_leading_axes(x: Shaped[Array, "T B ..."]) -> Shaped[Array, "B T ..."]:
    """`[B, T, ...]` of `[T, B, ...]`, and back."""
    return jnp.swapaxes(x, 0, 1)

"""Histograms of an update: its batch, the parameters and the gradient."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Num

from polyak.core.types import Histogram, PyTree
from polyak.learning.rollout_batch import Batch
from polyak.ops.gradient_step import LossFn, accumulate
from polyak.ops.losses import sum_over_devices

BINS = 30
# The range of large numbers overflows, and its reciprocal underflows; scaling by a power of two is exact.
RANGE_SCALE = 1 / 16


def update_histograms(
    loss_fn: LossFn, batch: Batch, before: PyTree, after: PyTree, num_microbatches: int, axis_name: str | None
) -> dict[str, Histogram]:
    """Histograms of actions, advantages, values, value targets (valid samples only), parameters and gradient.

    Actions have one histogram per leaf. The gradient is the gradient of the batch's loss before the first epoch.

    Args:
        batch: with weights that sum to 1.
        before: the parameters before the update.
        after: the parameters after the update.
    """
    arrays = {"advantages": batch.advantage, "values": batch.value, "value_targets": batch.value_target}
    for path, action in jax.tree_util.tree_leaves_with_path(batch.action):
        arrays["/".join(["actions", *jax.tree_util.keystr(path, simple=True, separator="/").split()])] = action
    histograms = {name: histogram(array, batch.weight > 0, axis_name) for name, array in arrays.items()}

    def gradient_of(part: Batch) -> tuple[PyTree, tuple[()]]:
        return jax.grad(lambda p: loss_fn(p, part)[0])(before), ()

    gradient, _ = accumulate(gradient_of, batch, num_microbatches, axis_name)
    # Parameters are replicated over devices, so there is no sum over devices.
    histograms |= {name: histogram(ravel_pytree(tree)[0]) for name, tree in (("weights", after), ("gradients", gradient))}
    return {f"histogram/{name}": value for name, value in histograms.items()}


def histogram(x: Num[Array, "..."], mask: Bool[Array, "..."] | None = None, axis_name: str | None = None) -> Histogram:
    """The histogram of the entries of an array.

    Args:
        x: NaN and infinity are excluded.
        mask: the entries to include, by leading axes of `x`; None for all.
        axis_name: inside `shard_map`, the mesh axis over which the array is sharded.

    >>> histogram(jnp.array([0.0, 1.0, 1.0])).counts[jnp.array([0, -1])]
    Array([1., 2.], dtype=float32)
    """
    values = x.astype(jnp.float32)
    included = jnp.isfinite(values)
    if mask is not None:
        included = included & mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
    infinity, zero = jnp.float32(jnp.inf), jnp.float32(0.0)
    low, high = jnp.min(jnp.where(included, values, infinity)), jnp.max(jnp.where(included, values, -infinity))
    if axis_name is not None:
        low, high = jax.lax.pmin(low, axis_name), jax.lax.pmax(high, axis_name)
    # Without included entries, the bounds are 0.
    low, high = (jnp.where(low <= high, bound, zero) for bound in (low, high))
    values = jnp.where(included, values, low)
    width = RANGE_SCALE * high - RANGE_SCALE * low
    fractions = (RANGE_SCALE * values - RANGE_SCALE * low) / jnp.where(width > 0, width, jnp.float32(1.0))
    bins = jnp.clip(jnp.floor(fractions * BINS), 0, BINS - 1).astype(jnp.int32)
    sums = jnp.zeros(BINS).at[bins].add(included.astype(jnp.float32))
    finite = jnp.where(included, values, zero)
    return Histogram(
        low=low,
        high=high,
        counts=sum_over_devices(sums, axis_name),
        total=sum_over_devices(finite.sum(), axis_name),
        squares=sum_over_devices(jnp.square(finite).sum(), axis_name),
    )

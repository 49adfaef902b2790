"""Histograms of what an update learned from and of what it changed."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Num

from polyak.core.types import Histogram, PyTree
from polyak.learning.batch import Batch
from polyak.ops.gradient_step import LossFn, accumulate
from polyak.ops.trees import sum_over_devices

BINS = 30
# The range of large numbers overflows, and one over it, by which XLA multiplies, underflows; a power of two loses nothing.
SMALLER = 1 / 16


def update_histograms(
    loss_fn: LossFn, batch: Batch, before: PyTree, after: PyTree, num_microbatches: int, axis_name: str | None
) -> dict[str, Histogram]:
    """Of actions, advantages, values and value targets (of valid samples), of the parameters, and of the gradient.

    Actions have one histogram for each leaf of their tree. The gradient is that of the loss of the whole batch, before the
    first epoch.

    Args:
        batch: with weights that sum to 1.
        before: the parameters before the update.
        after: those after it.
    """
    arrays = {"advantages": batch.advantage, "values": batch.value, "value_targets": batch.value_target}
    for path, action in jax.tree_util.tree_leaves_with_path(batch.action):
        arrays["/".join(["actions", *jax.tree_util.keystr(path, simple=True, separator="/").split()])] = action
    found = {name: histogram(array, batch.weight > 0, axis_name) for name, array in arrays.items()}
    gradient = accumulate(lambda part: jax.grad(lambda p: loss_fn(p, part)[0])(before), batch, num_microbatches, axis_name)
    # Parameters are the same on every device: nothing to add up.
    found |= {name: histogram(ravel_pytree(tree)[0]) for name, tree in (("weights", after), ("gradients", gradient))}
    return {f"histogram/{name}": it for name, it in found.items()}


def histogram(x: Num[Array, "..."], keep: Bool[Array, "..."] | None = None, axis_name: str | None = None) -> Histogram:
    """How the entries of an array are spread.

    Args:
        x: what is not finite is left out.
        keep: the entries that count, by leading axes of `x`; None for all.
        axis_name: inside `shard_map`, the mesh axis that the array is spread over.

    >>> histogram(jnp.array([0.0, 1.0, 1.0])).counts[jnp.array([0, -1])]
    Array([1., 2.], dtype=float32)
    """
    values = x.astype(jnp.float32)
    counts = jnp.isfinite(values)
    if keep is not None:
        counts = counts & keep.reshape(*keep.shape, *(1,) * (x.ndim - keep.ndim))
    infinity, zero = jnp.float32(jnp.inf), jnp.float32(0.0)
    low, high = jnp.min(jnp.where(counts, values, infinity)), jnp.max(jnp.where(counts, values, -infinity))
    if axis_name is not None:
        low, high = jax.lax.pmin(low, axis_name), jax.lax.pmax(high, axis_name)
    # Where nothing counts, all is 0.
    low, high = (jnp.where(low <= high, bound, zero) for bound in (low, high))
    values = jnp.where(counts, values, low)
    width = SMALLER * high - SMALLER * low
    shares = (SMALLER * values - SMALLER * low) / jnp.where(width > 0, width, jnp.float32(1.0))
    bins = jnp.clip(jnp.floor(shares * BINS), 0, BINS - 1).astype(jnp.int32)
    sums = jnp.zeros(BINS).at[bins].add(counts.astype(jnp.float32))
    kept = jnp.where(counts, values, zero)
    return Histogram(
        low=low,
        high=high,
        counts=sum_over_devices(sums, axis_name),
        total=sum_over_devices(kept.sum(), axis_name),
        squares=sum_over_devices(jnp.square(kept).sum(), axis_name),
    )

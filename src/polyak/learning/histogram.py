"""Histograms of arrays, also of arrays that are spread over devices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from polyak.core.types import Histogram
from polyak.ops.devices import sum_over_devices

BINS = 30
# The range of large numbers overflows, and one over it, by which XLA multiplies, underflows; a power of two loses nothing.
SMALLER = 1 / 16


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

"""Reductions over the devices that share a batch; on one device they do nothing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped


def sum_over_devices(x: Shaped[Array, "*S"], axis_name: str | None) -> Shaped[Array, "*S"]:
    """Σ over the mesh axis (inside `jax.shard_map`), or `x` itself where `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def any_over_devices(x: Bool[Array, "*S"], axis_name: str | None) -> Bool[Array, "*S"]:
    """True where it is true on some device."""
    return sum_over_devices(x.astype(jnp.int32), axis_name) > 0


def device_count(axis_name: str | None) -> int:
    """How many devices share the batch."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def device_index(axis_name: str | None) -> int | Array:
    """Which of them this is."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name)

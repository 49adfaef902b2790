"""Bounded Box actions as numbers in [-1, 1], the units of flows and critics."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from polyak.core.spaces import Box, EnvSpec, Leaf, map_space
from polyak.core.types import PyTree
from polyak.networks.policy_head import range_of_means


def to_unit(spec: EnvSpec, action: PyTree) -> PyTree:
    """An agent's actions `[B, ...]`, NumPy or JAX arrays, with bounded Boxes scaled to [-1, 1]; the rest is unchanged."""

    def scale(leaf: Leaf, a: Any) -> Any:
        if not isinstance(leaf, Box) or not leaf.bounded:
            return a
        middle, half_range = range_of_means(spec, leaf)
        return (a - middle) / np.where(half_range > 0, half_range, np.float32(1))

    return map_space(scale, spec.action, action)


def from_unit(spec: EnvSpec, x: PyTree) -> PyTree:
    """The inverse of `to_unit` for bounded Boxes, clipped to the bounds of the action."""

    def scale(leaf: Box, x: Array) -> Array:
        middle, half_range = range_of_means(spec, leaf)
        low, high = (bound[None] for bound in spec.action_bounds(leaf))
        return jnp.clip(middle + half_range * x, low, high)

    return map_space(scale, spec.action, x)

"""Weight vectors of dense layers on the unit sphere, where an optimizer keeps them."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from polyak.core.types import PyTree


@dataclass(frozen=True)
class DenseKernels:
    """The kernels of a network's dense layers whose weight vectors have norm 1: arrays named `kernel` of `axes` axes.

    Attributes:
        axes: 2, `[inputs, outputs]`, or 3, `[N, inputs, outputs]`, the kernels of N networks. Kernels of convolutions and of
            attention have three axes or more too, so 3 is for networks without these.
        without: names of layers that are left out.
    """

    axes: int = 2
    without: tuple[str, ...] = ()

    def has(self, path: tuple[Any, ...], x: Array) -> bool:
        """True if the array at this path of the parameters is one of the kernels."""
        names = [getattr(entry, "key", None) for entry in path]
        is_kernel = bool(names) and names[-1] == "kernel" and jnp.ndim(x) == self.axes
        return is_kernel and not any(name in names for name in self.without)


def normalize_weights(params: PyTree, kernels: DenseKernels) -> PyTree:
    """The parameters with weight vectors of norm 1, W_·j / ‖W_·j‖ for each output j of these kernels.

    Arrays named `unit_affine`, the scales and biases of the d features of a normalization, get norm √d. All else is unchanged,
    and so is a vector of 0.

    Source: Palenicek et al. 2025, arXiv:2509.25174, section 4; Kim et al. 2026, arXiv:2604.04539 (`unit_affine`).

    >>> params = {"kernel": jnp.array([[3.0, 0.0], [4.0, 2.0]]), "bias": jnp.array([7.0])}
    >>> normalize_weights(params, DenseKernels())["kernel"]
    Array([[0.6, 0. ],
           [0.8, 1. ]], dtype=float32)
    """

    def leaf(path: tuple[Any, ...], x: Array) -> Array:
        if kernels.has(path, x):
            return _unit(x, axis=-2)
        is_affine = bool(path) and getattr(path[-1], "key", None) == "unit_affine"
        return math.sqrt(x.shape[-1]) * _unit(x, axis=(-2, -1)) if is_affine else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def on_unit_spheres(optimizer: optax.GradientTransformation, kernels: DenseKernels) -> optax.GradientTransformation:
    """The optimizer, with the same state, with `normalize_weights` of the parameters after each of its steps.

    θ ← normalize_weights(θ + optimizer(gradient))
    """

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        assert params is not None, "apply_gradient passes them"
        updates, state = optimizer.update(updates, state, params)
        new_params = normalize_weights(optax.apply_updates(params, updates), kernels)
        return jax.tree.map(jnp.subtract, new_params, params), state

    return optax.GradientTransformation(optimizer.init, update)


def _unit(x: Array, axis: int | tuple[int, int]) -> Array:
    norm = jnp.linalg.norm(x, axis=axis, keepdims=True)
    return x / jnp.where(norm > 0, norm, 1.0)

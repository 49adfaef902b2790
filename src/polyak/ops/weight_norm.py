"""Weight vectors of dense layers on the unit sphere, where an optimizer keeps them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from polyak.core.types import PyTree

DENSE_AXES = (2, 3)
"""Axes of a dense layer's kernel, `[inputs, outputs]`, or of several networks' kernels, `[N, inputs, outputs]`."""


def normalize_weights(params: PyTree) -> PyTree:
    """The parameters with weight vectors of norm 1, W_·j / ‖W_·j‖ for each output j of a dense layer.

    Dense layers are the arrays of two or three axes that are named `kernel`, without convolutions and the layer of a policy's
    standard deviation, which starts at 0. All else is unchanged, and so is a vector of 0.

    Source: Palenicek et al. 2025, arXiv:2509.25174, section 4.

    >>> normalize_weights({"kernel": jnp.array([[3.0, 0.0], [4.0, 2.0]]), "bias": jnp.array([7.0])})["kernel"]
    Array([[0.6, 0. ],
           [0.8, 1. ]], dtype=float32)
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _unit_columns(x) if is_dense_kernel(path, x) else x, params)


def is_dense_kernel(path: tuple[Any, ...], x: Array) -> bool:
    """True for the kernel of a dense layer, of whose vectors `normalize_weights` makes unit vectors."""
    names = [getattr(entry, "key", None) for entry in path]
    return bool(names) and names[-1] == "kernel" and jnp.ndim(x) in DENSE_AXES and "scales" not in names


def on_unit_spheres(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with `normalize_weights` of the parameters after each of its steps.

    θ ← normalize_weights(θ + optimizer(gradient))
    """

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        assert params is not None, "apply_gradient passes them"
        new_params = normalize_weights(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, new_params, params), state

    return optax.chain(optimizer, optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def _unit_columns(kernel: Array) -> Array:
    norm = jnp.linalg.norm(kernel, axis=-2, keepdims=True)
    return kernel / jnp.where(norm > 0, norm, 1.0)

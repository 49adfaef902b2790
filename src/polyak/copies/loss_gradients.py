"""Outputs of a network, and gradients of a loss of them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.struct import struct
from polyak.core.types import Network, PyTree, Variables
from polyak.ops.gradient_step import global_norm
from polyak.ops.trees import all_finite, in_float32

Loss: TypeAlias = Callable[[PyTree, PyTree], tuple[dict[str, Array], PyTree]]
"""`(outputs, targets)` to the parts of the loss, each one number a row `[B]`, and anything else that shall be returned."""


@struct
class Trained:
    """What a training step found.

    Attributes:
        loss: the sum of the parts, before the step.
        parts: each part's mean over the rows, weighted.
        gradient_norm: before clipping.
        extras: whatever else the loss function returned.
        applied: the step was taken; False where the loss, the gradient or the result was not finite.
    """

    loss: Float[Array, ""]
    parts: dict[str, Float[Array, ""]]
    gradient_norm: Float[Array, ""]
    extras: PyTree
    applied: Bool[Array, ""]


def loss_gradients(
    network: Network,
    variables: Variables,
    loss_fn: Loss,
    inputs: PyTree,
    targets: PyTree,
    weights: Float[Array, " B"] | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Trained, PyTree, PyTree]:
    """What a training step found, its float32 gradients, and the statistics after it, all before anything is applied.

    It is the half of `NetworkCopies.train_and_sync` that a worker does, before it pushes the other two. `applied` says for
    now that nothing found is NaN or infinite.

    Raises:
        ValueError: a part of the loss is not one number a row.
    """

    def loss(params: PyTree) -> tuple[Array, tuple[dict[str, Array], PyTree, PyTree]]:
        out, _, stats = network.apply(dataclasses.replace(variables, params=params), inputs, train=True, key=key)
        parts, extras = loss_fn(out, targets)
        means = {part: _mean(part, rows, weights) for part, rows in parts.items()}
        return jnp.sum(jnp.stack(list(means.values()))), (means, extras, stats)

    (value, (parts, extras, stats)), gradients = jax.value_and_grad(loss, has_aux=True)(variables.params)
    gradients = in_float32(gradients)
    norm = global_norm(gradients)
    finite = jnp.isfinite(value) & jnp.isfinite(norm) & all_finite(stats)
    return Trained(value, parts, norm, extras, finite), gradients, stats


@partial(jax.jit, static_argnums=(0, 1, 2))
def predict_all(
    network: Network,
    names: tuple[str, ...],
    train: bool,
    copies: dict[str, Variables],
    inputs: list[PyTree],
    key: PRNGKeyArray | None,
) -> list[PyTree]:
    """The outputs of the named copies for their inputs; a target is never in training phase."""
    outputs = []
    for number, (name, obs) in enumerate(zip(names, inputs, strict=True)):
        own_key = None if key is None else jax.random.fold_in(key, number)
        out, _, _ = network.apply(copies[name], obs, train=train and name != "target", key=own_key)
        outputs.append(out)
    return outputs


def _mean(part: str, rows: Array, weights: Array | None) -> Float[Array, ""]:
    if rows.ndim != 1 or (weights is not None and rows.shape != weights.shape):
        wanted = "[B]" if weights is None else f"{list(weights.shape)}, as importance_weights"
        raise ValueError(
            f"train_and_sync: part {part!r} of the loss must be one number a row, {wanted}; got {list(rows.shape)}"
        )
    rows = rows.astype(jnp.float32)
    return jnp.mean(rows if weights is None else rows * weights)

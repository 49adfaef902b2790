"""Gradients of a loss of a network's outputs, and batched predictions."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.copies.arguments import check_loss_result
from polyak.core.struct import struct
from polyak.core.types import Network, PyTree, Variables
from polyak.ops.gradient_step import all_finite, global_norm, in_float32

Loss: TypeAlias = Callable[[PyTree, PyTree], tuple[dict[str, Array], PyTree]]
"""Maps `(outputs, targets)` to the loss terms, each one value per sample `[B]`, and any auxiliary output."""


@struct
class TrainStepResult:
    """Loss and gradient norm of a training step.

    Attributes:
        loss: the sum of the parts, before the step.
        parts: each part's (weighted) mean over the batch.
        gradient_norm: before clipping.
        extras: the auxiliary output of the loss function.
        applied: True if the step was applied; False if the loss, the gradient or the result held NaN or infinity.
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
) -> tuple[TrainStepResult, PyTree, PyTree]:
    """Compute the loss, its float32 gradients and the new statistics, without applying them.

    The first half of `NetworkCopies.train_and_sync`: a worker calls it, then pushes the gradients and statistics. `applied`
    is True if loss, gradients and statistics are all finite.

    Raises:
        TypeError: `loss_fn` returns something else than parts and extras.
        ValueError: a part of the loss is not one value per sample, or there is none.
    """

    def loss(params: PyTree) -> tuple[Array, tuple[dict[str, Array], PyTree, PyTree]]:
        out, _, stats = network.apply(dataclasses.replace(variables, params=params), inputs, train=True, key=key)
        parts, extras = check_loss_result(loss_fn(out, targets))
        means = {name: _mean(name, part, weights) for name, part in parts.items()}
        return jnp.sum(jnp.stack(list(means.values()))), (means, extras, stats)

    (value, (parts, extras, stats)), gradients = jax.value_and_grad(loss, has_aux=True)(variables.params)
    gradients = in_float32(gradients)
    norm = global_norm(gradients)
    is_finite = jnp.isfinite(value) & jnp.isfinite(norm) & all_finite(stats)
    return TrainStepResult(value, parts, norm, extras, is_finite), gradients, stats


@partial(jax.jit, static_argnums=(0, 1, 2))
def predict_all(
    network: Network,
    names: tuple[str, ...],
    train: bool,
    copies: dict[str, Variables],
    inputs: list[PyTree],
    key: PRNGKeyArray | None,
) -> list[PyTree]:
    """The outputs of the named copies for their inputs; a target always runs in inference mode."""
    outputs = []
    for number, (name, obs) in enumerate(zip(names, inputs, strict=True)):
        own_key = None if key is None else jax.random.fold_in(key, number)
        out, _, _ = network.apply(copies[name], obs, train=train and name != "target", key=own_key)
        outputs.append(out)
    return outputs


def _mean(name: str, part: Array, weights: Array | None) -> Float[Array, ""]:
    if part.ndim != 1 or (weights is not None and part.shape != weights.shape):
        expected = "[B]" if weights is None else f"{list(weights.shape)} (that of importance_weights)"
        raise ValueError(
            f"train_and_sync: loss part {name!r} must have one value per sample, shape {expected}, got {list(part.shape)}"
        )
    part = part.astype(jnp.float32)
    return jnp.mean(part if weights is None else part * weights)

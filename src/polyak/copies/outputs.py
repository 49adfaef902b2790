"""Losses of a network's outputs, and predictions of several copies."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.printing import text_of
from polyak.core.types import Network, PyTree, Terms, Variables
from polyak.ops.gradient_step import Aux, LossFn

OutputLoss: TypeAlias = Callable[[PyTree, PyTree], tuple[Mapping[str, Array], Mapping[str, Array]]]
"""`(outputs, targets)` to `(parts, others)`: the parts of the loss, each one value per sample `[B]`, and other arrays by name,
such as TD errors, for the log."""


def loss_of_outputs(loss_fn: OutputLoss, network: Network, variables: Variables, key: PRNGKeyArray | None = None) -> LossFn:
    """The loss Σ_parts mean_B(w · part) of a network's outputs in training mode, of batches `(inputs, targets, weights)`.

    Weights may be None: all are 1. The terms are the mean of each part, and the other arrays.
    """

    def loss(params: PyTree, batch: tuple[PyTree, PyTree, Float[Array, " B"] | None]) -> tuple[Float[Array, ""], Aux]:
        inputs, targets, weights = batch
        outputs, stats = _apply("online", network, dataclasses.replace(variables, params=params), inputs, True, key)
        match result := loss_fn(outputs, targets):
            case (Mapping() as parts, Mapping() as others) if parts:
                means: Terms = {name: _mean(name, part, weights) for name, part in parts.items()}
                return jnp.sum(jnp.stack(list(means.values()))), Aux({**others, **means}, stats)
        raise TypeError(f"loss_fn must return (parts, others), dicts of arrays, of parts [B], got {type(result).__name__}")

    return loss


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
        outputs.append(_apply(name, network, copies[name], obs, train and name != "target", own_key)[0])
    return outputs


def _apply(
    copy: str, network: Network, variables: Variables, inputs: PyTree, train: bool, key: PRNGKeyArray | None
) -> tuple[PyTree, PyTree]:
    """The outputs of a copy, and its statistics.

    Raises:
        ValueError: the network cannot take this tree of inputs.
    """
    try:
        result = network.apply(variables, inputs, train=train, key=key)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(inputs, Array):
            raise  # JAX names the shapes, or the entry that an array does not have.
        wanted = "must have the tree and the shapes of the observations that the network was created for"
        got = f"{text_of(inputs)} ({type(error).__name__}: {error})"
        raise ValueError(f"inputs of {copy!r} {wanted}, got {got}") from error
    outputs, _, stats = result
    return outputs, stats


def _mean(name: str, part: Array, weights: Array | None) -> Float[Array, ""]:
    if part.ndim != 1 or (weights is not None and part.shape != weights.shape):
        expected = "[B]" if weights is None else f"{list(weights.shape)} (the shape of importance_weights)"
        raise ValueError(f"loss part {name!r} must have one value per sample, shape {expected}, got {list(part.shape)}")
    part = part.astype(jnp.float32)
    return jnp.mean(part if weights is None else part * weights)

"""Checks of the arguments of `NetworkCopies` and its methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from polyak.copies.follow import Follow
from polyak.core.types import Network, PyTree

LOSS_RESULT = "loss_fn must return (parts, others): a dict of the parts of the loss, each [B], and a dict of other arrays"


def check_create(name: str, network: Any, optimizer: Any, target: Any, online: Any, shared: Any) -> None:
    """Check the arguments of `NetworkCopies.create`.

    Raises:
        TypeError: an argument has another type, such as a function or module instead of a network.
        ValueError: `online` is set without `shared=True`.
    """
    if not isinstance(name, str):
        raise TypeError(f"NetworkCopies.create: name must be a string, got {name!r:.80}")
    if isinstance(network, type) or not isinstance(network, Network):
        raise TypeError(f"{name}: network must be a Network, such as FlaxNNX(make), got {network!r:.80}")
    if not isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps | None):
        raise TypeError(f"{name}: optimizer must be an optax.GradientTransformation or None, got {optimizer!r:.80}")
    for argument, value in (("target", target), ("online", online)):
        if not isinstance(value, Follow | None):
            raise TypeError(f"{name}: {argument} must be a Follow, such as Follow(tau=0.005), or None, got {value!r:.80}")
    if not isinstance(shared, bool):
        raise TypeError(f"{name}: shared must be True or False, got {shared!r:.80}; pass its rule as online=Follow(...)")
    if online is not None and not shared:
        raise ValueError(f"{name}: online can only follow a shared copy; pass shared=True")


def split_requests(requests: Any) -> tuple[tuple[str, ...], list[PyTree]]:
    """The names and the inputs of the requests of `predict`.

    Raises:
        TypeError: the requests are no pairs.
    """
    is_sequence = isinstance(requests, Sequence) and not isinstance(requests, str)
    if not is_sequence or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in requests):
        raise TypeError(f"predict: requests must be pairs (copy, inputs), such as [('online', obs)], got {_kinds(requests)}")
    return tuple(name for name, _ in requests), [inputs for _, inputs in requests]


def check_loss_result(result: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The parts and the other arrays that a loss function has returned.

    Raises:
        TypeError: the loss function has returned something else, such as a scalar.
        ValueError: the loss has no part.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and all(isinstance(arrays, Mapping) for arrays in result)):
        raise TypeError(f"{LOSS_RESULT}, got {_kinds(result)}")
    parts, others = result
    if not parts:
        raise ValueError(f"{LOSS_RESULT}, got no part")
    return dict(parts), dict(others)


def _kinds(value: Any) -> str:
    """Describe a value, or the elements of a tuple, for an error."""
    if isinstance(value, tuple | list):
        return f"({', '.join(_kinds(x) for x in value)})"
    return f"an array {list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__

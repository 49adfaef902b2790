"""What distributions share: sums over the dimensions of one event, and comparing like with like."""

import functools
import operator
from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array


def sum_event(x: Array, event_ndims: int) -> Array:
    """The sum over the last `event_ndims` dimensions."""
    return jnp.sum(x, axis=tuple(range(-event_ndims, 0)))


def add(terms: Iterable[Array]) -> Array:
    """The sum of one array or more, of one shape."""
    return functools.reduce(operator.add, terms)


def check_same_kind(p: object, q: object) -> None:
    """A divergence is taken between distributions of one kind.

    Raises:
        TypeError: they are of two.
    """
    if type(p) is not type(q):
        raise TypeError(f"kl_divergence: both must be {type(p).__name__}, got {type(q).__name__}")

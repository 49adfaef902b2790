"""Helpers of distributions: sums over event dimensions, `sample_and_log_prob`, and the type check of divergences."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


def sum_event(x: Array, event_ndims: int) -> Array:
    """The sum over the last `event_ndims` dimensions."""
    return jnp.sum(x, axis=tuple(range(-event_ndims, 0)))


def add(terms: Iterable[Array]) -> Array:
    """The sum of one or more arrays of equal shape."""
    return functools.reduce(operator.add, terms)


def sample_and_log_prob(distribution: Any, *, seed: PRNGKeyArray) -> tuple[Any, Array]:
    """A sample and its log-probability; the default method of distributions without a cheaper or more exact one."""
    value = distribution.sample(seed=seed)
    return value, distribution.log_prob(value)


def check_same_kind(p: object, q: object) -> None:
    """Check that two distributions have the same type.

    Raises:
        TypeError: they have different types.
    """
    if type(p) is not type(q):
        raise TypeError(f"kl_divergence: both must be {type(p).__name__}, got {type(q).__name__}")

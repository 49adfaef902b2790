"""Metrics of the updates between two reports: means add up; of anything else the last value counts."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from polyak.core.struct import static, struct
from polyak.core.types import Histogram, Mean, Metrics


def add_metrics(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of two periods, the second of which is later."""
    return {name: before[name] + x if isinstance(x, Mean) and name in before else x for name, x in after.items()}


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers and means as Python floats, without means of nothing, and without histograms."""
    has_value = {name: x for name, x in metrics.items() if not isinstance(x, Histogram) and not is_empty(x)}
    return {name: float(value) for name, value in has_value.items()}


def convert_numbers(metrics: dict[str, Any], owner: str) -> None:
    """Make the numbers that a callback added Python's, in place; those of NumPy and JAX cannot be written to JSON.

    Args:
        owner: the callback, for errors.

    Raises:
        TypeError: a value is no number, or its name is no string.
    """
    for name, value in metrics.items():
        if type(value) in (float, int, bool, NoneType) and type(name) is str:
            continue
        if not (isinstance(name, str) and is_number(value)):
            raise TypeError(f"train: {owner}: a metric must be a number with a string as its name, got {name!r}: {value!r:.80}")
        metrics[name] = value.item() if isinstance(value, np.ndarray | np.generic | jax.Array) else value


def is_number(value: Any) -> bool:
    """Whether a value is one real number, of Python, NumPy or JAX."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return isinstance(value, float | int)
    return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def is_empty(metric: Any) -> bool:
    """Whether a metric is a mean of nothing."""
    return isinstance(metric, Mean) and not metric.count


@struct
class PackedMetrics:
    """Metrics whose means are one array: a compiled call takes and returns fewer arguments.

    Attributes:
        last: those that are no means.
        means: `[M, 2]`, the total and the count of each mean.
        names: of the means.
    """

    last: Metrics
    means: Float[Array, "M 2"]
    names: tuple[str, ...] = static(default=())

    @classmethod
    def pack(cls, metrics: Metrics, before: Float[Array, "M 2"] | float = 0.0) -> "PackedMetrics":
        """The metrics, with means that are added to those before."""
        means = {name: x for name, x in metrics.items() if isinstance(x, Mean)}
        last = {name: x for name, x in metrics.items() if name not in means}
        rows = [jnp.stack([mean.total, mean.count]) for mean in means.values()]
        return cls(last, before + (jnp.stack(rows) if rows else jnp.zeros((0, 2))), tuple(means))

    def unpack(self) -> Metrics:
        """The metrics by tag."""
        means = np.asarray(self.means)  # Rows of a JAX array would be taken by two compiled programs.
        return {**self.last, **{name: Mean(*row) for name, row in zip(self.names, means, strict=True)}}

"""Metrics of the updates between two reports: means are accumulated; other metrics keep their last value."""

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from polyak.core.struct import static, struct
from polyak.core.types import Histogram, Mean, Metrics
from polyak.loops.episodes import add_with_rounding


def add_metrics(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the metrics of two consecutive periods."""
    return {name: before[name] + x if isinstance(x, Mean) and name in before else x for name, x in after.items()}


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers and means as Python floats, without empty means and histograms."""
    has_value = {name: x for name, x in metrics.items() if not isinstance(x, Histogram) and not is_empty(x)}
    return {name: float(value) for name, value in has_value.items()}


def convert_numbers(metrics: dict[str, Any], owner: str) -> None:
    """Convert metrics that a callback added to Python numbers, in place: JSON cannot hold numbers of NumPy and JAX.

    Args:
        owner: name of the callback, for errors.

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
    """Return True if a value is one real number, of Python, NumPy or JAX."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return isinstance(value, float | int)
    return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def is_empty(metric: Any) -> bool:
    """Return True if a metric is a mean of no values."""
    return isinstance(metric, Mean) and not metric.count


@struct
class PackedMetrics:
    """Metrics with all means in one array, so that a compiled call takes and returns fewer arguments.

    Attributes:
        last: the metrics that are no means.
        means: `[M, 2, 2]`: the total and the count of each mean, both as a sum and its rounding (see `add_with_rounding`).
        names: tags of the means.
    """

    last: Metrics
    means: Float[Array, "*N M 2 2"]
    names: tuple[str, ...] = static(default=())

    @classmethod
    def pack(cls, metrics: Metrics) -> "PackedMetrics":
        """Pack the metrics of an update."""
        means = {name: x for name, x in metrics.items() if isinstance(x, Mean)}
        last = {name: x for name, x in metrics.items() if name not in means}
        rows = [jnp.stack([mean.total, mean.count]) for mean in means.values()]
        sums = jnp.stack(rows) if rows else jnp.zeros((0, 2))
        return cls(last, jnp.stack([sums, jnp.zeros_like(sums)], axis=-1), tuple(means))

    def after(self, means: Float[Array, "*N M 2 2"]) -> "PackedMetrics":
        """Add the means of earlier updates."""
        sums = add_with_rounding(means[..., 0], means[..., 1], self.means[..., 0])
        return dataclasses.replace(self, means=jnp.stack(sums, axis=-1))

    def without_means(self) -> "PackedMetrics":
        """Return the last metrics, with empty means."""
        return dataclasses.replace(self, means=np.zeros_like(self.means))  # type: ignore[arg-type]

    def unpack(self) -> Metrics:
        """Return the metrics by tag."""
        means = np.asarray(self.means, np.float64).sum(axis=-1)
        return {**self.last, **{name: Mean(*row) for name, row in zip(self.names, means, strict=True)}}

"""Schedules: settings that change while training, as named objects that can be written to a file."""

import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from polyak.core.checks import check_number
from polyak.core.struct import check_settings, number, struct
from polyak.core.types import Scalar

MAX_COUNT = 2**32 - 1
"""The largest number of uint32."""
MAX_STEPS = 2**63
"""The largest step count of schedules."""


@struct
class StepCount:
    """A count of environment steps, high · 2³² + low, since a GPU makes 2³² steps in an hour; `int` returns a Python number.

    >>> int(StepCount.of(4_294_967_295) + jnp.uint32(5))
    4294967300
    """

    low: UInt32[Array, "*B"]
    high: UInt32[Array, "*B"]

    @classmethod
    def of(cls, count: Any) -> "StepCount":
        """The count of a number or an array of integers or floats; a `StepCount` itself."""
        if isinstance(count, StepCount):
            return count
        if isinstance(count, int | float | np.integer | np.floating):
            high, low = divmod(min(int(count), MAX_STEPS), 2**32)
            return cls(jnp.uint32(low), jnp.uint32(high))
        if isinstance(count, np.ndarray) and count.dtype.kind in "iu" and count.dtype.itemsize == 8:
            return cls(jnp.asarray(count % 2**32, jnp.uint32), jnp.asarray(count // 2**32, jnp.uint32))
        array = jnp.asarray(count)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return cls(array.astype(jnp.uint32), jnp.zeros(array.shape, jnp.uint32))
        upper = jnp.floor(array / 2.0**32)  # Exact, as is the rest: a power of two divides.
        return cls((array - upper * 2.0**32).astype(jnp.uint32), upper.astype(jnp.uint32))

    def __add__(self, more: UInt32[Array, ""]) -> "StepCount":
        low = self.low + more
        return StepCount(low, self.high + (low < more).astype(jnp.uint32))

    def __eq__(self, other: Any) -> Any:
        other = StepCount.of(other)
        return (self.high == other.high) & (self.low == other.low)

    def __ge__(self, other: "StepCount") -> Bool[Array, "*B"]:
        return (self.high > other.high) | ((self.high == other.high) & (self.low >= other.low))

    def since(self, start: "StepCount") -> "StepCount":
        """The difference, where it is at least 0."""
        return StepCount(self.low - start.low, self.high - start.high - (self.low < start.low).astype(jnp.uint32))

    def __int__(self) -> int:
        return int(self.high) * 2**32 + int(self.low)

    def as_float(self) -> Float[Array, "*B"]:
        """The nearest float32."""
        return self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)


Count: TypeAlias = int | np.uint32 | UInt32[Array, ""] | StepCount


@struct
class Constant:
    """A constant value; equivalent to a plain number.

    Raises:
        ValueError: the value is not finite.
    """

    value: Scalar = number()

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value."""
        return jnp.asarray(self.value, jnp.float32)


@struct
class Linear:
    """Linear from `start` to `end` over `env_steps`, constant afterwards.

        value(s) = start + (end - start) · min(s / env_steps, 1)

    Raises:
        ValueError: `env_steps` is not positive.

    >>> float(Linear(3e-4, env_steps=100)(50))
    0.0001500000071246177
    """

    start: Scalar = number()
    end: Scalar = number(default=0.0)
    env_steps: Scalar = number(default=1_000_000.0, above=0)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "env_steps", _as_leaf(self.env_steps))

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after `env_steps` environment steps."""
        count = StepCount.of(env_steps).as_float()
        value = self.start + (self.end - self.start) * (count / self.env_steps)
        # A separate case: start + (end - start) differs from end in the last bit.
        return jnp.where(count >= self.env_steps, jnp.asarray(self.end, jnp.float32), value)


@struct
class Exponential:
    """Exponential decay: `start`, multiplied by `factor` every `env_steps`, with the lower bound `end`.

        value(s) = max(start · factor^(s / env_steps), end)

    Raises:
        ValueError: `start` is not positive, `factor` not in (0, 1], `env_steps` not positive, `end` negative or above `start`.

    >>> float(Exponential(1.0, factor=0.5, env_steps=100, end=0.1)(200))
    0.25
    """

    start: Scalar = number(above=0)
    factor: Scalar = number(default=0.5, above=0, at_most=1)
    env_steps: Scalar = number(default=1_000_000.0, above=0)
    end: Scalar = number(default=0.0, at_least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "env_steps", _as_leaf(self.env_steps))
        if not any(isinstance(x, jax.core.Tracer) for x in (self.start, self.end)) and np.any(self.end > self.start):
            raise ValueError(f"Exponential: end must be at most start={self.start}, got {self.end}")

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after `env_steps` environment steps."""
        periods = StepCount.of(env_steps).as_float() / self.env_steps
        return jnp.maximum(self.start * jnp.power(self.factor, periods), self.end)


@struct
class Piecewise:
    """A sequence of schedules: each starts at its boundary and counts its steps from there.

        value(s) = schedules[i](s - boundaries[i - 1])  for  boundaries[i - 1] <= s < boundaries[i]

    Attributes:
        schedules: numbers or schedules.
        boundaries: env_steps at which the second and later schedules start; increasing, one fewer than schedules.

    Raises:
        ValueError: there is no schedule, the number of boundaries is wrong, or boundaries do not increase.
        TypeError: a schedule is neither a number nor a schedule, or `schedules` or `boundaries` is not a tuple.

    >>> rate = Piecewise((1e-3, Linear(1e-3, 0.0, env_steps=100)), boundaries=(500,))
    >>> [round(float(rate(s)), 6) for s in (0, 499, 550, 600)]
    [0.001, 0.001, 0.0005, 0.0]
    """

    schedules: tuple[Any, ...]
    boundaries: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("schedules", self.schedules), ("boundaries", self.boundaries)):
            if not isinstance(value, tuple):
                raise TypeError(f"Piecewise: {name} must be a tuple, got {value!r}")
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"Piecewise: schedules must be one more than boundaries, got {len(self.schedules)} and {len(self.boundaries)}"
            )
        for i, schedule in enumerate(self.schedules):
            if not isinstance(schedule, SCHEDULES):
                check_number("Piecewise", f"schedules[{i}]", schedule, or_else="a schedule")
        for i, boundary in enumerate(self.boundaries):
            check_number("Piecewise", f"boundaries[{i}]", boundary, above=0, at_most=MAX_STEPS)
        concrete = [b for b in self.boundaries if not isinstance(b, jax.core.Tracer)]
        if not all(np.all(np.asarray(a) < np.asarray(b)) for a, b in itertools.pairwise(concrete)):
            raise ValueError(f"Piecewise: boundaries must rise, got {self.boundaries}")
        object.__setattr__(self, "boundaries", tuple(_as_leaf(boundary) for boundary in self.boundaries))

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after `env_steps` environment steps."""
        count = StepCount.of(env_steps)
        value = value_at(self.schedules[0], count)
        for schedule, boundary in zip(self.schedules[1:], self.boundaries, strict=True):
            start = StepCount.of(boundary)
            value = jnp.where(count >= start, value_at(schedule, count.since(start)), value)
        return value


SCHEDULES = (Constant, Linear, Exponential, Piecewise)
"""The schedule classes."""

Schedule: TypeAlias = Scalar | Constant | Linear | Exponential | Piecewise


def value_at(schedule: Schedule, env_steps: Count) -> Float[Array, ""]:
    """The value of a schedule; a plain number is constant."""
    return schedule(env_steps) if isinstance(schedule, SCHEDULES) else jnp.asarray(schedule, jnp.float32)


def saturating_add(count: UInt32[Array, ""], more: UInt32[Array, ""] | Bool[Array, ""]) -> UInt32[Array, ""]:
    """`count + more`, saturating at 2³² - 1."""
    more = more.astype(jnp.uint32)
    total = count + more
    return jnp.where(total < more, jnp.uint32(MAX_COUNT), total)


def check_schedule(
    owner: str,
    name: str,
    schedule: object,
    *,
    optional: bool = False,
    above: float = 0.0,
    at_least: float = -np.inf,
    at_most: float = np.inf,
) -> None:
    """Check a positive setting: a number above 0, or a schedule that starts above 0 and is never negative.

    A schedule may reach 0, as `Linear` does at its end; only the first part of a `Piecewise` must start above 0.

    Args:
        optional: allow None.
        above: exclusive lower bound; inclusive after the start of a schedule.
        at_least: inclusive lower bound.
        at_most: inclusive upper bound.

    Raises:
        TypeError, ValueError: the setting is invalid; the message contains owner and name.
    """
    bounds: dict[str, Any] = {"above": above, "at_least": at_least, "at_most": at_most}
    later_bounds: dict[str, Any] = {"at_least": max(above, at_least), "at_most": at_most}
    match schedule:
        case Constant():
            check_number(owner, f"{name}.value", schedule.value, **bounds)
        case Linear() | Exponential():
            check_number(owner, f"{name}.start", schedule.start, **bounds)
            check_number(owner, f"{name}.end", schedule.end, **later_bounds)
        case Piecewise():
            first, *later = schedule.schedules
            check_schedule(owner, f"{name}.schedules[0]", first, **bounds)
            for i, part in enumerate(later, 1):
                check_schedule(owner, f"{name}.schedules[{i}]", part, above=-np.inf, **later_bounds)
        case _:
            or_else = "a schedule such as Linear"
            if callable(schedule):
                or_else = "a schedule such as polyak.Linear(start, end, env_steps) (a function cannot be stored)"
            check_number(owner, name, schedule, optional=optional, or_else=or_else, **bounds)


def _as_leaf(env_steps: Any) -> Any:
    # `jit` rejects a Python int of more than 31 bits as a leaf.
    return float(env_steps) if isinstance(env_steps, int) else env_steps

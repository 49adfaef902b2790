"""Schedules: settings that change while training, as named objects that can be written to a file."""

import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from polyak.core.checks import check_number
from polyak.core.struct import struct
from polyak.core.types import Scalar

Count: TypeAlias = int | np.uint32 | UInt32[Array, ""]

MOST = 2**32 - 1
"""The largest count that schedules follow."""


@struct
class Constant:
    """One value for ever: what a plain number means, as an object.

    Raises:
        ValueError: it is not finite.
    """

    value: Scalar

    def __post_init__(self) -> None:
        check_number("Constant", "value", self.value)

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value."""
        return jnp.asarray(self.value, jnp.float32)


@struct
class Linear:
    """From `start` in a straight line to `end`, reached after `env_steps` and kept from there.

        value(s) = start + (end - start) · min(s / env_steps, 1)

    Raises:
        ValueError: `env_steps` is not positive.

    >>> float(Linear(3e-4, env_steps=100)(50))
    0.0001500000071246177
    """

    start: Scalar
    end: Scalar = 0.0
    env_steps: Scalar = 1_000_000.0

    def __post_init__(self) -> None:
        check_number("Linear", "start", self.start)
        check_number("Linear", "end", self.end)
        check_number("Linear", "env_steps", self.env_steps, above=0)
        object.__setattr__(self, "env_steps", _as_leaf(self.env_steps))

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after so many environment steps."""
        count = _count(env_steps).astype(jnp.float32)
        value = self.start + (self.end - self.start) * (count / self.env_steps)
        # Of its own: start + (end - start) is not end in the last bit.
        return jnp.where(count >= self.env_steps, jnp.asarray(self.end, jnp.float32), value)


@struct
class Exponential:
    """From `start`, times `factor` with every `env_steps`, and never below `end`.

        value(s) = max(start · factor^(s / env_steps), end)

    Raises:
        ValueError: `start` is not positive, `factor` not in (0, 1], `env_steps` not positive, `end` negative or above `start`.

    >>> float(Exponential(1.0, factor=0.5, env_steps=100, end=0.1)(200))
    0.25
    """

    start: Scalar
    factor: Scalar = 0.5
    env_steps: Scalar = 1_000_000.0
    end: Scalar = 0.0

    def __post_init__(self) -> None:
        check_number("Exponential", "start", self.start, above=0)
        check_number("Exponential", "factor", self.factor, above=0, at_most=1)
        check_number("Exponential", "env_steps", self.env_steps, above=0)
        object.__setattr__(self, "env_steps", _as_leaf(self.env_steps))
        check_number("Exponential", "end", self.end, at_least=0)
        if not any(isinstance(x, jax.core.Tracer) for x in (self.start, self.end)) and np.any(self.end > self.start):
            raise ValueError(f"Exponential: end must be at most start={self.start}, got {self.end}")

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after so many environment steps."""
        periods = _count(env_steps).astype(jnp.float32) / self.env_steps
        return jnp.maximum(self.start * jnp.power(self.factor, periods), self.end)


@struct
class Piecewise:
    """One schedule after the other: the next begins where its boundary is reached, and counts from there.

        value(s) = schedules[i](s - boundaries[i - 1])  for  boundaries[i - 1] <= s < boundaries[i]

    Attributes:
        schedules: numbers or schedules.
        boundaries: env_steps at which the second and all later ones begin; rising, one fewer than schedules.

    Raises:
        ValueError: no schedule, too many or too few boundaries, or boundaries that do not rise.
        TypeError: a schedule is none, or `schedules` or `boundaries` is no tuple.

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
            if not isinstance(schedule, OBJECTS):
                check_number("Piecewise", f"schedules[{i}]", schedule, or_else="a schedule")
        for i, boundary in enumerate(self.boundaries):
            check_number("Piecewise", f"boundaries[{i}]", boundary, above=0, at_most=MOST)
        known = [b for b in self.boundaries if not isinstance(b, jax.core.Tracer)]
        if not all(np.all(np.asarray(a) < np.asarray(b)) for a, b in itertools.pairwise(known)):
            raise ValueError(f"Piecewise: boundaries must rise, got {self.boundaries}")
        object.__setattr__(self, "boundaries", tuple(_as_leaf(boundary) for boundary in self.boundaries))

    def __call__(self, env_steps: Count) -> Float[Array, ""]:
        """The value after so many environment steps."""
        count = _count(env_steps)
        value = value_at(self.schedules[0], count)
        for schedule, boundary in zip(self.schedules[1:], self.boundaries, strict=True):
            begin = _count(boundary)
            value = jnp.where(count >= begin, value_at(schedule, count - jnp.minimum(begin, count)), value)
        return value


OBJECTS = (Constant, Linear, Exponential, Piecewise)
"""The schedules that are more than a number."""

Schedule: TypeAlias = Scalar | Constant | Linear | Exponential | Piecewise


def value_at(schedule: Schedule, env_steps: Count) -> Float[Array, ""]:
    """The schedule's value; a plain number is constant."""
    return schedule(env_steps) if isinstance(schedule, OBJECTS) else jnp.asarray(schedule, jnp.float32)


def counted_on(count: UInt32[Array, ""], more: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A count that schedules follow, after `more`. It stays at 2³² - 1: from 0 again it would take them to their start."""
    total = count + more
    return jnp.where(total < more, jnp.uint32(MOST), total)


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
    """A setting that stays positive: a number above 0, or a schedule that starts above 0 and does not fall below.

    So a schedule may reach 0, as `Linear` does at its end; of a `Piecewise` only the first part must start above it.

    Args:
        optional: None is allowed too.
        above: another bound that is itself not allowed, except after a schedule's start.
        at_least: another bound that is allowed.
        at_most: likewise from above.

    Raises:
        TypeError, ValueError: it is not, naming owner and setting.
    """
    lowest = max(above, at_least)
    match schedule:
        case Constant():
            check_number(owner, f"{name}.value", schedule.value, above=above, at_least=at_least, at_most=at_most)
        case Linear() | Exponential():
            check_number(owner, f"{name}.start", schedule.start, above=above, at_least=at_least, at_most=at_most)
            check_number(owner, f"{name}.end", schedule.end, at_least=lowest, at_most=at_most)
        case Piecewise():
            first, *later = schedule.schedules
            check_schedule(owner, f"{name}.schedules[0]", first, above=above, at_least=at_least, at_most=at_most)
            for i, part in enumerate(later, 1):
                check_schedule(owner, f"{name}.schedules[{i}]", part, above=-np.inf, at_least=lowest, at_most=at_most)
        case _:
            check_number(
                owner,
                name,
                schedule,
                above=above,
                at_least=at_least,
                at_most=at_most,
                optional=optional,
                or_else="a schedule such as Linear",
            )


def _as_leaf(env_steps: Any) -> Any:
    # As a leaf, a Python int of more than 31 bits is refused by `jit`.
    return float(env_steps) if isinstance(env_steps, int) else env_steps


def _count(env_steps: Any) -> Array:
    """As uint32, whatever kind of number counts; a Python int may lie beyond what int32 holds."""
    if isinstance(env_steps, int | float):
        return jnp.uint32(min(int(env_steps), MOST))
    return jnp.asarray(env_steps).astype(jnp.uint32)

"""Schedules: settings that change while training, as named objects that can be written to a file."""

from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from polyak.core.checks import check_number
from polyak.core.struct import struct
from polyak.core.types import Scalar


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

    def __call__(self, env_steps: int | UInt32[Array, ""]) -> Float[Array, ""]:
        """The value after so many environment steps."""
        progress = jnp.minimum(jnp.asarray(env_steps).astype(jnp.float32) / self.env_steps, 1.0)
        return self.start + (self.end - self.start) * progress


Schedule: TypeAlias = Scalar | Linear


def value_at(schedule: Schedule, env_steps: int | UInt32[Array, ""]) -> Float[Array, ""]:
    """The schedule's value; a plain number is constant."""
    return schedule(env_steps) if isinstance(schedule, Linear) else jnp.asarray(schedule, jnp.float32)


def counted_on(count: UInt32[Array, ""], more: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A count that schedules follow, after `more`. It stays at 2³² - 1: from 0 again it would take them to their start."""
    total = count + more
    return jnp.where(total < more, jnp.uint32(2**32 - 1), total)


def check_schedule(owner: str, name: str, schedule: object, *, optional: bool = False) -> None:
    """A setting that stays positive: a number above 0, or a `Linear` that starts above 0 and does not fall below.

    Args:
        optional: None is allowed too.

    Raises:
        TypeError, ValueError: it is not, naming owner and setting.
    """
    if isinstance(schedule, Linear):
        check_number(owner, f"{name}.start", schedule.start, above=0)
        check_number(owner, f"{name}.end", schedule.end, at_least=0)
    else:
        check_number(owner, name, schedule, above=0, optional=optional, or_else="a Linear")

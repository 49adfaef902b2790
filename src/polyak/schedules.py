"""The public name of all schedules: `polyak.schedules.Exponential(1.0, 0.5, env_steps=100_000)`."""

from polyak.ops.schedules import Constant, Exponential, Linear, Piecewise, Schedule, value_at

__all__ = ["Constant", "Exponential", "Linear", "Piecewise", "Schedule", "value_at"]

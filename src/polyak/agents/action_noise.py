"""Settings of the noise that agents without a stochastic policy add to Box actions when they collect."""

from functools import partial
from typing import Literal

from polyak.core.checks import check_unset
from polyak.core.struct import choice, number, setting, struct
from polyak.core.types import Scalar
from polyak.ops.schedules import Schedule, StepCount, check_schedule, value_at
from polyak.policies.noise import GaussianNoise, OUNoise
from polyak.policies.predict import PolicyWithSpec


@struct(kw_only=True)
class ActionNoiseSettings:
    """The noise on collected actions.

    Attributes:
        exploration: noise on actions that are collected: `"ou"` (Ornstein-Uhlenbeck) or `"gaussian"`.
        exploration_noise: standard deviation of the noise in one step, a number or a schedule; 0 disables the noise.
        theta: rate at which Ornstein-Uhlenbeck noise returns to 0.
    """

    exploration: Literal["ou", "gaussian"] = choice(default="ou", choices=("ou", "gaussian"))
    exploration_noise: Schedule = setting(default=0.2, check=partial(check_schedule, above=-1.0, at_least=0))
    theta: Scalar = number(default=0.15, above=0, at_most=1)

    def add_noise(self, policy: PolicyWithSpec, env_steps: StepCount) -> OUNoise | GaussianNoise:
        """The policy with noise on its actions."""
        # As a number, so that workers evaluate no schedule.
        scale = value_at(self.exploration_noise, env_steps)
        return OUNoise(policy, scale, self.theta) if self.exploration == "ou" else GaussianNoise(policy, scale)

    def check_noise(self) -> None:
        """Check that `theta` is not set without Ornstein-Uhlenbeck noise; called by `__post_init__`.

        Raises:
            ValueError: it is.
        """
        if self.exploration == "gaussian":
            check_unset(self, ("theta",), "has no effect with exploration='gaussian'; leave it out")

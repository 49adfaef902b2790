"""Settings of the noise by which agents without a stochastic policy explore Box actions: on actions, or on parameters."""

from collections.abc import Iterable
from functools import partial
from typing import Literal

from polyak.core.checks import check_unset
from polyak.core.struct import choice, number, setting, struct
from polyak.core.types import Network, RecurrentNetwork, Scalar
from polyak.networks.actor import Actor
from polyak.ops.schedules import Schedule, StepCount, check_schedule, value_at
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.noise import GaussianNoise, OUNoise
from polyak.policies.parameter_noise import ParameterNoise
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
        """Check that `theta` is not set without Ornstein-Uhlenbeck noise; called by `check_together`.

        Raises:
            ValueError: it is.
        """
        if self.exploration == "gaussian":
            check_unset(self, ("theta",), "has no effect with exploration='gaussian'; leave it out")


@struct(kw_only=True)
class ParameterNoiseSettings:
    """Noise on the actor's parameters, in place of noise on actions.

    Attributes:
        parameter_noise: δ, the root mean square of the change of actions by the noise (Plappert et al. 2018, arXiv:1706.01905,
            who have 0.2), which adapts to it. The default actor has layer normalization then. None has noise on actions.
    """

    parameter_noise: Scalar | None = number(default=None, above=0, at_most=1, optional=True)

    def default_actor(self) -> Actor:
        """A deterministic actor, whose layers are normalized if its parameters get noise."""
        return Actor(std="fixed") if self.parameter_noise is None else Actor(std="fixed", norm="layer")

    def add_parameter_noise(self, policy: NetworkPolicy) -> ParameterNoise | None:
        """The policy with noise on its parameters; None without `parameter_noise`."""
        return None if self.parameter_noise is None else ParameterNoise(policy, self.parameter_noise)

    def check_parameter_noise(self, actor: Network | None, others: Iterable[str]) -> None:
        """Check that, with `parameter_noise`, no other noise is set and the actor is not recurrent; called by `check_together`.

        Raises:
            ValueError: a setting of other noise has another value than its default, or the actor is recurrent.
        """
        if self.parameter_noise is not None:
            check_unset(self, others, "has no effect with parameter_noise; leave it out")
            if isinstance(actor, RecurrentNetwork):
                raise ValueError(f"{type(self).__name__}: parameter_noise must be None with a recurrent actor, got {actor!r}")

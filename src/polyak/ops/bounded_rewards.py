"""Reward scaling that keeps discounted returns within a bound, for critics of the distribution of returns on fixed atoms."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.struct import static, struct
from polyak.core.types import Rollout, Scalar
from polyak.ops.normalize import RewardScaler
from polyak.ops.returns import running_return


@struct(kw_only=True)
class BoundedRewardScaler(RewardScaler):
    """Reward scaling by max(σ, max |R| / bound), with R the discounted returns so far and σ their standard deviation.

    Attributes:
        largest: max |R|.
        bound: the largest magnitude of R after scaling.

    Source: Lee et al. 2025, arXiv:2502.15280, section 4.3.
    """

    largest: Float[Array, ""]
    bound: float = static()

    def update(
        self, rollout: Rollout, weight: Float[Array, "T B"], gamma: Scalar, axis_name: str | None = None
    ) -> "BoundedRewardScaler":
        """The statistics after a rollout whose carry is a carry of `DiscountedReturn`."""
        scaler = super().update(rollout, weight, gamma, axis_name)
        steps, (_, before) = rollout.time_steps, rollout.carry
        size = jnp.abs(running_return(steps.reward, steps.first, before, gamma=gamma)[1:])
        counts = (weight > 0) & jnp.isfinite(jnp.square(size))  # else it would stay the largest for ever
        largest = jnp.maximum(self.largest, jnp.max(jnp.where(counts, size, 0.0)))
        return dataclasses.replace(
            self, stats=scaler.stats, largest=largest if axis_name is None else jax.lax.pmax(largest, axis_name)
        )

    def divisor(self) -> Float[Array, ""]:
        """max(σ, max |R| / bound)."""
        return jnp.maximum(self.stats.stddev(), self.largest / self.bound)

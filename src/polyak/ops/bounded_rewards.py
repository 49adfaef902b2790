"""Reward scaling that keeps discounted returns within a bound, for critics of the distribution of returns on fixed atoms."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.struct import static, struct
from polyak.ops.normalize import RewardScaler, Weights


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

    def add(self, samples: Float[Array, "T B"], weight: Weights, axis_name: str | None) -> "BoundedRewardScaler":
        """The statistics after discounted returns."""
        size = jnp.abs(samples)
        counts = (weight > 0) & jnp.isfinite(jnp.square(size))  # else it would stay the largest for ever
        largest = jnp.maximum(self.largest, jnp.max(jnp.where(counts, size, 0.0)))
        largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
        return dataclasses.replace(self, stats=self.stats.update(samples, weight, axis_name), largest=largest)

    def divisor(self) -> Float[Array, ""]:
        """max(σ, max |R| / bound)."""
        return jnp.maximum(self.stats.stddev(), self.largest / self.bound)

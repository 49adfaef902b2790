"""Normalization of observations and rewards by running statistics."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32, Shaped, UInt32

from polyak.core.spaces import Box, Leaf, Space, leaf_spaces, map_space
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.losses import sum_over_devices
from polyak.ops.returns import running_return

Numbers: TypeAlias = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]
Weights: TypeAlias = Float[Array, "*batch"] | Bool[Array, "*batch"] | Float[np.ndarray, "*batch"] | Bool[np.ndarray, "*batch"]

# The computed variance of equal numbers can be this fraction of their square: float32 rounds to 2⁻²⁴.
ROUNDING = 2.0**-48


@struct
class RunningStats:
    """Elementwise count, mean and variance of all entries so far, equally weighted.

    Stores the variance instead of the sum of squares m2 = count · variance: in float32, m2 of 10⁸ samples no longer changes
    when eight more are added while the count does, so the variance would decay to 0.

    For a nested observation, use a tree of these and map over it:
    `jax.tree.map(lambda s, x: s.update(x, weight), stats, obs, is_leaf=lambda s: isinstance(s, RunningStats))`.

    Attributes:
        count: number of entries; an integer, since float32 stops counting at 2²⁴. It saturates at 2³² - 1; from then on
            old entries decay.
        mean: mean of the entries, 0 before the first entry.
        mean_rest: compensation term of the mean (as in Kahan summation): float32 resolves a mean of 10⁴ to 10⁻³ only.
        variance: population variance, 0 before the second entry.
    """

    count: UInt32[Array, ""]
    mean: Float32[Array, "*S"]
    mean_rest: Float32[Array, "*S"]
    variance: Float32[Array, "*S"]

    @classmethod
    def init(cls, shape: tuple[int, ...]) -> "RunningStats":
        """Empty statistics for entries of this shape; `normalize` then only clips."""
        return cls(jnp.zeros((), jnp.uint32), *(jnp.zeros(shape, jnp.float32) for _ in range(3)))

    def update(self, x: Numbers, weight: Weights, axis_name: str | None = None) -> "RunningStats":
        """The statistics after a batch of entries.

        If an entry of positive weight, or its square, is not finite, the statistics are unchanged: one NaN would stay in the
        mean forever. Entries of weight 0 are ignored.

        Args:
            x: `[*batch, *S]`, of any number type, or bool.
            weight: `[*batch]`; an entry is included if it is True or above 0.
            axis_name: inside `shard_map`, the mesh axis over which the batch is sharded; every device gets the statistics of
                the whole batch.

        Raises:
            ValueError: `x` is not `[*weight.shape, *S]`.

        Source: the corrected two-pass algorithm, Chan, Golub and LeVeque 1983; merged as by Chan et al. 1979.
        """
        shape = self.mean.shape
        if x.shape != weight.shape + shape:
            raise ValueError(f"RunningStats: x must have shape {weight.shape + shape} (weight's, then {shape}), got {x.shape}")
        batch = tuple(range(weight.ndim))
        included = jnp.asarray(weight.astype(np.float32) > 0)
        mask = included.reshape(included.shape + (1,) * len(shape))
        count = sum_over_devices(jnp.sum(included, dtype=jnp.uint32), axis_name)
        divisor = jnp.maximum(count, 1).astype(jnp.float32)

        def mean_over_batch(values: Float[Array, "..."]) -> Float[Array, "*S"]:
            return sum_over_devices(jnp.sum(jnp.where(mask, values, 0.0), axis=batch), axis_name) / divisor

        # Differences from the old mean are small, so they lose less to rounding than the numbers themselves.
        distance = self._center(x)
        rough = mean_over_batch(distance)
        rest = distance - _expand_dims(rough, distance.ndim)
        correction = mean_over_batch(rest)
        variance = jnp.maximum(mean_over_batch(jnp.square(rest)) - jnp.square(correction), 0.0)
        return self._merge(count, rough + correction, variance)

    def empty(self) -> "RunningStats":
        """Without entries, but with the mean, near which new entries lose less to rounding."""
        return RunningStats(jnp.zeros_like(self.count), self.mean, self.mean_rest, jnp.zeros_like(self.variance))

    def merge(self, other: "RunningStats") -> "RunningStats":
        """The statistics of the union of both data sets. Source: Chan et al. 1979."""
        distance = (other.mean - self.mean) + (other.mean_rest - self.mean_rest)
        return self._merge(other.count, distance, other.variance)

    def normalize(self, x: Numbers, *, clip: Scalar = 10.0, epsilon: Scalar = 1e-8) -> Float32[Array, "..."]:
        """(x - mean) / √(variance + ε), clipped to ±`clip`; float32 whatever x is.

        Elements that have been constant so far become 0. Before the first entry the mean is 0.

        Args:
            x: `[..., *S]`.
        """
        std = _expand_dims(self.stddev(epsilon), x.ndim)
        return jnp.clip(self._center(x) / std, -clip, clip)

    def stddev(self, epsilon: Scalar = 1e-8) -> Float32[Array, "*S"]:
        """√(variance + ε), where a variance within float32 rounding of 0, as before the first entry, counts as 1.

        A constant reward is thus unchanged by division by its standard deviation.
        """
        has_variance = self.variance > ROUNDING * jnp.square(self.mean)
        return jnp.sqrt(jnp.where(has_variance, self.variance, 1.0) + epsilon)

    def _center(self, x: Numbers) -> Float32[Array, "..."]:
        mean, rest = (_expand_dims(part, x.ndim) for part in (self.mean, self.mean_rest))
        return (jnp.asarray(x).astype(jnp.float32) - mean) - rest

    def _merge(self, count: Array, distance: Array, variance: Array) -> "RunningStats":
        """Merge with `count` entries whose mean differs from this one by `distance`."""
        total = self.count + count
        total = jnp.where(total < count, jnp.uint32(2**32 - 1), total)
        fraction = count.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
        step = fraction * distance + self.mean_rest
        mean = self.mean + step
        merged = RunningStats(
            count=total,
            mean=mean,
            mean_rest=step - (mean - self.mean),
            variance=self.variance + fraction * (variance - self.variance + (1.0 - fraction) * jnp.square(distance)),
        )
        accept = (count > 0) & jnp.all(jnp.isfinite(merged.mean) & jnp.isfinite(merged.variance))
        return optax.tree.where(accept, merged, self)


def is_normalized(space: Leaf) -> bool:
    """True for a Box of floats or of integers other than uint8."""
    return isinstance(space, Box) and space.dtype.kind in "fiu" and space.dtype != np.uint8


def can_normalize(space: Space) -> bool:
    """True if at least one leaf of the space can be normalized."""
    return any(is_normalized(leaf) for _, leaf in leaf_spaces(space))


@struct
class ObsNormalizer:
    """Running statistics of the Boxes of an observation; uint8 Boxes (which networks scale) and other spaces pass unchanged.

    Attributes:
        stats: `RunningStats` in the tree of the space, None where a leaf is not normalized.
        space: the observation space.
        clip: clip normalized values to ± this value; None disables clipping.
    """

    stats: PyTree
    space: Space = static()
    clip: float | None = static(default=10.0)

    @classmethod
    def init(cls, space: Space, clip: float | None = 10.0) -> "ObsNormalizer":
        """Empty statistics: the first observations are only clipped."""
        return cls(map_space(lambda leaf: RunningStats.init(leaf.shape) if is_normalized(leaf) else None, space), space, clip)

    def select_space(self, space: Space) -> "ObsNormalizer":
        """The statistics of the entries of a space that has a part of this one's."""
        if space == self.space:
            return self
        return ObsNormalizer(map_space(lambda _, stats: stats, space, self.stats), space, self.clip)

    def normalize(self, obs: PyTree) -> PyTree:
        """(x - mean) / std, clipped; leaves may have any leading dimensions. Entries that are not in the space are left out."""

        def leaf(_: Leaf, stats: RunningStats | None, x: Numbers) -> Numbers:
            return x if stats is None else stats.normalize(x, clip=math.inf if self.clip is None else self.clip)

        return map_space(leaf, self.space, self.stats, obs)

    def update(self, obs: PyTree, weight: Weights, axis_name: str | None = None) -> "ObsNormalizer":
        """The statistics after a batch of observations; observations of weight 0 are ignored."""
        return self._map(lambda stats, x: stats.update(x, weight, axis_name), obs)

    def empty(self) -> "ObsNormalizer":
        """Without observations; see `RunningStats.empty`."""
        return self._map(RunningStats.empty)

    def merge(self, other: "ObsNormalizer") -> "ObsNormalizer":
        """The statistics of the observations of both."""
        return self._map(RunningStats.merge, other.stats)

    def _map(self, function: Callable[..., RunningStats], *values: PyTree) -> "ObsNormalizer":
        """Replace the statistics of each leaf by `function(stats, *leaf_values)`."""

        def leaf(_: Leaf, stats: RunningStats | None, *x: Any) -> RunningStats | None:
            return None if stats is None else function(stats, *x)

        return ObsNormalizer(map_space(leaf, self.space, self.stats, *values), self.space, self.clip)


@struct
class RewardScaler:
    """Reward scaling by the running standard deviation; the mean is not subtracted, so signs are preserved.

    Attributes:
        stats: statistics of the running discounted return, or of the reward.
        of: the quantity of the statistics.
    """

    stats: RunningStats
    of: Literal["return", "reward"] = static(default="return")

    @classmethod
    def init(cls, of: Literal["return", "reward"]) -> "RewardScaler":
        """Empty statistics: the first rewards are only clipped."""
        return cls(RunningStats.init(()), of)

    def scale(self, reward: Float[Array, "T B"], clip: Scalar | None) -> Float[Array, "T B"]:
        """Reward / std, clipped to ±`clip`."""
        scaled = reward / self.divisor()
        return scaled if clip is None else jnp.clip(scaled, -clip, clip)

    def divisor(self) -> Float[Array, ""]:
        """The standard deviation."""
        return self.stats.stddev()

    def update(self, rollout: Rollout, weight: Weights, gamma: Scalar, axis_name: str | None = None) -> "RewardScaler":
        """The statistics after a rollout; for returns, `rollout.carry` must be a carry of `DiscountedReturn`."""
        samples = rollout.reward
        if self.of == "return":
            samples = running_return(rollout.time_steps.reward, rollout.time_steps.first, rollout.carry[1], gamma=gamma)[1:]
        return self.add(samples, weight, axis_name)

    def add(self, samples: Float[Array, "T B"], weight: Weights, axis_name: str | None) -> "RewardScaler":
        """The statistics after samples of their quantity."""
        return RewardScaler(self.stats.update(samples, weight, axis_name), self.of)

    def empty(self) -> "RewardScaler":
        """Without rewards; see `RunningStats.empty`."""
        return RewardScaler(self.stats.empty(), self.of)

    def merge(self, other: "RewardScaler") -> "RewardScaler":
        """The statistics of the rewards of both."""
        return RewardScaler(self.stats.merge(other.stats), self.of)


def _expand_dims(x: Array, ndim: int) -> Array:
    """Add leading axes of length 1, up to `ndim`."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)

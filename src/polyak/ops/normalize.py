"""Normalisation of observations and rewards by running statistics."""

import math
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Shaped, UInt32

from polyak.core.spaces import Box, Leaf, Space, leaf_spaces, map_space
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.returns import running_return
from polyak.ops.trees import sum_over_devices

Numbers: TypeAlias = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]
Weights: TypeAlias = Float[Array, "*batch"] | Bool[Array, "*batch"] | Float[np.ndarray, "*batch"] | Bool[np.ndarray, "*batch"]

# The variance of equal numbers may come out as this share of their square: float32 rounds to 2⁻²⁴.
ROUNDING = 2.0**-48


@struct
class RunningStats:
    """Count, mean and variance of the entries seen so far, elementwise, each entry counting once.

    It keeps the variance, not the sum of squares m2 = count · variance: m2 of 10⁸ samples has no digits left for eight more,
    and while the count goes on and m2 does not, the variance would fall to 0. A variance that no longer moves is only slow.

    For a nested observation, hold a tree of these and map over it:
    `jax.tree.map(lambda s, x: s.update(x, weight), stats, obs, is_leaf=lambda s: isinstance(s, RunningStats))`.

    Attributes:
        count: entries seen; an integer, since float32 stops counting at 2²⁴. It stays at 2³² - 1 once there, and from then
            on old entries fade.
        mean: of the entries, 0 before the first.
        mean_rest: what of the mean does not fit into `mean`: a mean of 10⁴ has a resolution of 10⁻³, larger than its steps.
        variance: the population's, 0 before the second entry.
    """

    count: UInt32[Array, ""]
    mean: Float32[Array, "*S"]
    mean_rest: Float32[Array, "*S"]
    variance: Float32[Array, "*S"]

    @classmethod
    def init(cls, shape: tuple[int, ...]) -> "RunningStats":
        """Nothing seen of entries of this shape; `normalize` then leaves numbers as they are."""
        mean, rest, variance = (jnp.zeros(shape, jnp.float32) for _ in range(3))
        return cls(jnp.zeros((), jnp.uint32), mean, rest, variance)

    def update(self, x: Numbers, weight: Weights, axis_name: str | None = None) -> "RunningStats":
        """The statistics after a batch of entries.

        If a number that counts is not finite, or so large that its square is not, nothing changes: one broken entry would
        stay in the mean for ever. What does not count is not looked at.

        Args:
            x: `[*batch, *S]`, of any number type, or bool.
            weight: `[*batch]`; an entry counts where it is True or above 0.
            axis_name: inside `shard_map`, the mesh axis that the batch is split over; every device gets the statistics
                of the whole.

        Raises:
            ValueError: `x` is not `[*weight.shape, *S]`.

        Source: the corrected two-pass algorithm, Chan, Golub and LeVeque 1983; merged as by Chan et al. 1979.
        """
        shape = self.mean.shape
        if x.shape != weight.shape + shape:
            raise ValueError(f"RunningStats: x must have shape {weight.shape + shape} (weight's, then {shape}), got {x.shape}")
        batch = tuple(range(weight.ndim))
        counts = jnp.asarray(weight.astype(np.float32) > 0)
        mask = counts.reshape(counts.shape + (1,) * len(shape))
        count = sum_over_devices(jnp.sum(counts, dtype=jnp.uint32), axis_name)
        divisor = jnp.maximum(count, 1).astype(jnp.float32)

        def mean_over_batch(values: Float[Array, "..."]) -> Float[Array, "*S"]:
            return sum_over_devices(jnp.sum(jnp.where(mask, values, 0.0), axis=batch), axis_name) / divisor

        # Distances from the old mean, not the numbers themselves: they are small, so that little is rounded off.
        distance = self._centred(x)
        rough = mean_over_batch(distance)
        rest = distance - _as_rows(rough, distance.ndim)
        correction = mean_over_batch(rest)
        variance = jnp.maximum(mean_over_batch(jnp.square(rest)) - jnp.square(correction), 0.0)
        return self._moved(count, rough + correction, variance)

    def merge(self, other: "RunningStats") -> "RunningStats":
        """The statistics of all that either has seen. Source: Chan et al. 1979."""
        distance = (other.mean - self.mean) + (other.mean_rest - self.mean_rest)
        return self._moved(other.count, distance, other.variance)

    def normalize(self, x: Numbers, *, clip: Scalar = 10.0, epsilon: Scalar = 1e-8) -> Float32[Array, "..."]:
        """(x - mean) / √(variance + ε), clipped to ±`clip`; float32 whatever x is.

        Numbers that have never varied become 0. Before the first entry the mean counts as 0.

        Args:
            x: `[..., *S]`.
        """
        deviation = _as_rows(self.stddev(epsilon), x.ndim)
        return jnp.clip(self._centred(x) / deviation, -clip, clip)

    def stddev(self, epsilon: Scalar = 1e-8) -> Float32[Array, "*S"]:
        """√(variance + ε), of entries that vary by no more than float32 rounds; else, as before the first entry, the
        variance counts as 1: a reward that is always the same stays what it is. Dividing by it alone leaves signs.
        """
        varies = self.variance > ROUNDING * jnp.square(self.mean)
        return jnp.sqrt(jnp.where(varies, self.variance, 1.0) + epsilon)

    def _centred(self, x: Numbers) -> Float32[Array, "..."]:
        mean, rest = (_as_rows(part, x.ndim) for part in (self.mean, self.mean_rest))
        return (jnp.asarray(x).astype(jnp.float32) - mean) - rest

    def _moved(self, count: Array, distance: Array, variance: Array) -> "RunningStats":
        """Merged with `count` entries whose mean is `distance` from this one's."""
        total = self.count + count
        total = jnp.where(total < count, jnp.uint32(2**32 - 1), total)
        share = count.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
        step = share * distance + self.mean_rest
        mean = self.mean + step
        moved = RunningStats(
            count=total,
            mean=mean,
            mean_rest=step - (mean - self.mean),
            variance=self.variance + share * (variance - self.variance + (1.0 - share) * jnp.square(distance)),
        )
        accept = (count > 0) & jnp.all(jnp.isfinite(moved.mean) & jnp.isfinite(moved.variance))
        return RunningStats(*(jnp.where(accept, new, old) for new, old in zip(moved._parts(), self._parts(), strict=True)))

    def _parts(self) -> tuple[Array, Array, Array, Array]:
        return self.count, self.mean, self.mean_rest, self.variance


def is_normalized(space: Leaf) -> bool:
    """The space is a Box of floats or integers other than uint8."""
    return isinstance(space, Box) and space.dtype.kind in "fiu" and space.dtype != np.uint8


def can_normalize(space: Space) -> bool:
    """Some leaf of the space is such a Box."""
    return any(is_normalized(leaf) for _, leaf in leaf_spaces(space))


def check_statistics(
    normalizer: "ObsNormalizer | None",
    rewards: "RewardScaler | None",
    normalize_obs: bool,
    clip_obs: float | None,
    normalize_reward: Literal["return", "reward"] | None,
) -> None:
    """Check that a state was created with these settings: its statistics would be used, not the settings.

    Raises:
        ValueError: naming the setting.
    """
    of = None if rewards is None else rewards.of
    settings: dict[str, tuple[Any, Any]] = {
        "normalize_obs": (normalizer is not None, normalize_obs),
        "normalize_reward": (of, normalize_reward),
    }
    if normalizer is not None:
        settings["clip_obs"] = (normalizer.clip, clip_obs)
    for name, (got, wanted) in settings.items():
        if got != wanted:
            raise ValueError(
                f"update: this state was created with {name}={got!r} but the agent sets {name}={wanted!r}; create it with "
                f"agent.init(key)"
            )


@struct
class ObsNormalizer:
    """Running statistics of the Boxes of an observation; uint8 Boxes (which networks scale) and other spaces pass unchanged.

    Attributes:
        stats: `RunningStats` in the tree of the space, None where a leaf is not normalised.
        space: the observation space.
        clip: clips normalised values to ± this; None disables clipping.
    """

    stats: PyTree
    space: Space = static()
    clip: float | None = static(default=10.0)

    @classmethod
    def init(cls, space: Space, clip: float | None = 10.0) -> "ObsNormalizer":
        """No observation seen: the first ones are clipped, nothing else."""
        return cls(map_space(lambda leaf: RunningStats.init(leaf.shape) if is_normalized(leaf) else None, space), space, clip)

    def normalize(self, obs: PyTree) -> PyTree:
        """(x - mean) / std, clipped, for leaves with any leading dimensions."""

        def leaf(_: Leaf, stats: RunningStats | None, x: Numbers) -> Numbers:
            return x if stats is None else stats.normalize(x, clip=math.inf if self.clip is None else self.clip)

        return map_space(leaf, self.space, self.stats, obs)

    def update(self, obs: PyTree, weight: Weights, axis_name: str | None = None) -> "ObsNormalizer":
        """The statistics after more observations; those of weight 0 do not count."""

        def leaf(_: Leaf, stats: RunningStats | None, x: Numbers) -> RunningStats | None:
            return None if stats is None else stats.update(x, weight, axis_name=axis_name)

        return ObsNormalizer(map_space(leaf, self.space, self.stats, obs), self.space, self.clip)


@struct
class RewardScaler:
    """Running statistics whose standard deviation divides rewards; their sign and their zero stay.

    Attributes:
        stats: of the running discounted return, or of the reward.
        of: which of the two.
    """

    stats: RunningStats
    of: Literal["return", "reward"] = static(default="return")

    @classmethod
    def init(cls, of: Literal["return", "reward"]) -> "RewardScaler":
        """No reward seen: the first ones are clipped, nothing else."""
        return cls(RunningStats.init(()), of)

    def scale(self, reward: Float[Array, "T B"], clip: Scalar | None) -> Float[Array, "T B"]:
        """Reward / std, clipped to ± `clip`."""
        scaled = reward / self.stats.stddev()
        return scaled if clip is None else jnp.clip(scaled, -clip, clip)

    def update(
        self, rollout: Rollout, weight: Float[Array, "T B"], gamma: Scalar, axis_name: str | None = None
    ) -> "RewardScaler":
        """The statistics after a rollout, whose carry is that of `DiscountedReturn` for statistics of returns."""
        seen = rollout.reward
        if self.of == "return":
            _, before = rollout.carry
            seen = running_return(rollout.time_steps.reward, rollout.time_steps.first, before, gamma=gamma)[1:]
        return RewardScaler(self.stats.update(seen, weight, axis_name), self.of)


def _as_rows(x: Array, ndim: int) -> Array:
    """With leading axes of length 1, up to `ndim`."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)

"""Normalisation by running statistics: of observations, over a tree of spaces, and of rewards."""

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from polyak.core.spaces import Box, Leaf, Space, leaf_spaces, map_space
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.normalize import Numbers, RunningStats, Weights
from polyak.ops.returns import discounted_so_far


def is_normalized(space: Leaf) -> bool:
    """A Box of floats or of integers, but not of bytes."""
    return isinstance(space, Box) and space.dtype.kind in "fiu" and space.dtype != np.uint8


def can_normalize(space: Space) -> bool:
    """Some part of the space is such a Box."""
    return any(is_normalized(leaf) for _, leaf in leaf_spaces(space))


def check_statistics(
    normalizer: "ObsNormalizer | None",
    rewards: "RewardScaler | None",
    normalize_obs: bool,
    clip_obs: float | None,
    normalize_reward: Literal["return", "reward"] | None,
) -> None:
    """Refuse a state whose statistics are those of other settings, which would be followed instead of these.

    Raises:
        ValueError: by the setting's name.
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
            raise ValueError(f"update: state must be one of init with {name}={wanted!r}, got one of {name}={got!r}")


@struct
class ObsNormalizer:
    """Running statistics of an observation's Boxes; bytes (which networks scale), Discrete parts and bits pass unchanged.

    Attributes:
        stats: `RunningStats` in the tree of the space, None where a part is not normalised.
        space: the observation space.
        clip: normalised values are kept within ± this; None leaves them.
    """

    stats: PyTree
    space: Space = static()
    clip: float | None = static(default=10.0)

    @classmethod
    def fresh(cls, space: Space, clip: float | None = 10.0) -> "ObsNormalizer":
        """No observation seen: the first ones pass as they are, but for clipping."""
        return cls(map_space(lambda leaf: RunningStats.init(leaf.shape) if is_normalized(leaf) else None, space), space, clip)

    def normalize(self, obs: PyTree) -> PyTree:
        """(x - mean) / deviation, clipped, for leaves with any leading dimensions."""

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
    """Running statistics by whose deviation rewards are divided; their sign and their zero stay.

    Attributes:
        stats: of the discounted return so far, or of the reward.
        of: which of the two.
    """

    stats: RunningStats
    of: Literal["return", "reward"] = static(default="return")

    @classmethod
    def fresh(cls, of: Literal["return", "reward"]) -> "RewardScaler":
        """No reward seen: the first ones pass as they are, but for clipping."""
        return cls(RunningStats.init(()), of)

    def scale(self, reward: Float[Array, "T B"], clip: Scalar | None) -> Float[Array, "T B"]:
        """Reward / deviation, within ± `clip`."""
        scaled = reward / self.stats.stddev()
        return scaled if clip is None else jnp.clip(scaled, -clip, clip)

    def update(
        self, rollout: Rollout, weight: Float[Array, "T B"], gamma: Scalar, axis_name: str | None = None
    ) -> "RewardScaler":
        """The statistics after a rollout, whose carry is that of `DiscountedReturn` where returns are counted."""
        seen = rollout.reward
        if self.of == "return":
            _, before = rollout.carry
            seen = discounted_so_far(rollout.time_steps.reward, rollout.time_steps.first, before, gamma=gamma)[1:]
        return RewardScaler(self.stats.update(seen, weight, axis_name), self.of)

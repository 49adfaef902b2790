"""Running statistics that agents normalize transitions with when they are drawn from a replay, and observations when acting.

The replay stores unnormalized transitions: each batch is normalized with the current statistics.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from polyak.core.checks import check_created_with
from polyak.core.struct import struct
from polyak.core.types import Rollout, Scalar
from polyak.learning.check_rollout import check_returns
from polyak.ops.losses import finite_rows
from polyak.ops.normalize import ObsNormalizer, RewardScaler, can_normalize


@struct
class Normalizers:
    """Statistics of all valid transitions that an agent has seen.

    Attributes:
        obs: statistics of observations, or None.
        reward: statistics whose standard deviation divides rewards, or None.
    """

    obs: ObsNormalizer | None = None
    reward: RewardScaler | None = None

    def update(self, rollout: Rollout, gamma: Scalar, axis_name: str | None = None) -> "Normalizers":
        """The statistics after a rollout, without rows that only reset the environment and rows with NaN or infinity.

        Raises:
            ValueError: rewards are scaled by the standard deviation of returns, and the rollout is not from `collect_policy`.
        """
        obs, reward = self.obs, self.reward
        if obs is not None:
            obs = obs.update(rollout.obs, rollout.valid & finite_rows(rollout.obs, 2), axis_name)
        if reward is not None:
            if reward.of == "return":
                check_returns(rollout)
            included = rollout.valid & jnp.isfinite(rollout.reward)
            reward = reward.update(rollout, included.astype(jnp.float32), gamma, axis_name)
        return Normalizers(obs, reward)


def create_normalizers(settings: Any) -> Normalizers:
    """Empty statistics of the quantities that the settings normalize."""
    obs = ObsNormalizer.init(settings.spec.obs, settings.clip_obs) if settings.normalize_obs else None
    return Normalizers(obs, None if settings.normalize_reward is None else RewardScaler.init(settings.normalize_reward))


def settings_of(settings: Any, obs: ObsNormalizer | None) -> dict[str, Any]:
    """The settings of observation normalization of a state with these statistics; see `check_created_with`."""
    return {"normalize_obs": obs is not None, "clip_obs": settings.clip_obs if obs is None else obs.clip}


def check_created_normalizers(settings: Any, normalizers: Normalizers) -> None:
    """Check that a state was created with the agent's settings of normalization; the state's would silently replace them.

    Raises:
        ValueError: the state was created with other settings.
    """
    scaler = normalizers.reward
    equal = settings_of(settings, normalizers.obs) | {"normalize_reward": None if scaler is None else scaler.of}
    check_created_with(settings, equal=equal, present={})


def without_returns(settings: Any, rollout: Rollout) -> Rollout:
    """The rollout with only the recurrent state as its carry, without the returns that `DiscountedReturn` adds.

    Raises:
        ValueError: rewards are scaled by the standard deviation of returns, and the rollout is not from `collect_policy`.
    """
    if settings.normalize_reward != "return":
        return rollout
    check_returns(rollout)
    return dataclasses.replace(rollout, carry=rollout.carry[0])


def check_normalizers(settings: Any) -> None:
    """Check that there are observations to normalize.

    Raises:
        ValueError: the spec has no observations that can be normalized.
    """
    owner, space = type(settings).__name__, settings.spec.obs
    if settings.normalize_obs and not can_normalize(space):
        raise ValueError(f"{owner}: normalize_obs must be False for observations without a Box other than uint8, got {space}")

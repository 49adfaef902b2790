"""One Gymnasium environment with next-step autoreset, whose return values are checked.

No JAX here: this also runs in worker processes.
"""

import functools
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics

from polyak.core.gymnasium_spaces import from_gymnasium
from polyak.core.space_check import ArraySpec
from polyak.core.spaces import Space
from polyak.core.tags import RETURN
from polyak.core.warn import add_note
from polyak.envs import snapshots
from polyak.envs.env_options import (
    EnvOptions,
    UnreadableMask,
    adapt,
    layers_of,
    warn_of_running_statistics,
    warn_of_unused_masks,
)
from polyak.envs.info_reader import read_info
from polyak.envs.libraries import conversion
from polyak.envs.masks import Flags, check_maskable, read_masks
from polyak.envs.obs_reader import obs_leaves, read_obs

FRAME_SKIPS = {"AtariPreprocessing": "frame_skip", "MaxAndSkipObservation": "_skip"}
"""Gymnasium's wrappers that repeat actions, and the attributes with the number of repetitions."""

ATARI_FPS = 60
"""Emulator frames in a second."""

SingleStep: TypeAlias = tuple[list[Any], float, bool, bool, list[Flags] | None, dict[str, float]]
"""Observation leaves, reward, terminated, truncated, action masks, values of `info` by tag."""


class SingleEnv:
    """One environment of a batch.

    An exception that the environment raises is passed on with a note: index, step, seed and action.

    Raises:
        TypeError: `env` is not a `gymnasium.Env`, or returns a value of the wrong type.
        ValueError: `env` returns an array of the wrong shape, or an invalid action mask.

    Args:
        env: a `gymnasium.Env`; its spaces must be supported.
        name: name of the environment in errors.
        index: index in the batch.
        options: see `EnvOptions`.
    """

    def __init__(self, env: Any, name: str, index: int, options: EnvOptions) -> None:
        if not isinstance(env, gymnasium.Env):
            is_vector = isinstance(env, gymnasium.vector.VectorEnv)
            advice = "; pass the vector environment itself to make" if is_vector else conversion(env)
            raise TypeError(f"{name}: env {index} must be a gymnasium.Env, got {type(env).__name__}{advice}")
        for space in ("observation_space", "action_space"):
            if getattr(env, space, None) is None:
                raise TypeError(f"{name}: env {index} has no {space}; set it to a gymnasium.spaces.Space")
        self.env = adapt(env, options, name, warns=index == 0)
        self.name = name
        self.index = index
        self.info_metrics = options.info_metrics
        self._recorder = next((layer for layer in layers_of(self.env) if isinstance(layer, RecordEpisodeStatistics)), None)
        self.has_mask = False
        self._report_state = snapshots.StateWarning(name, is_due=index == 0)
        self.steps = 0
        self.seed: int | None = None

    @functools.cached_property
    def leaves(self) -> list[ArraySpec]:
        """The arrays of an observation; valid only for supported spaces."""
        return obs_leaves(self.env.observation_space)

    def location(self) -> str:
        """Return environment and step, the prefix of errors."""
        return f"{self.name}: env {self.index}, step {self.steps}"

    def set_index(self, index: int) -> None:
        """Set the index in a batch that is split over processes, for errors."""
        self.index = index

    def probe(self) -> bool:
        """Reset once and return whether the environment has action masks.

        Raises:
            ValueError: the reset has changed a space.
        """
        spaces = self._spaces()
        self.has_mask = "action_mask" in self._reset(0)[1]
        for name, space in self._spaces().items():
            if space != spaces[name]:
                raise ValueError(f"{self.name}: reset() must not change {name}, got {space}, expected {spaces[name]}")
        check_maskable(self.has_mask, self.env.action_space, self.name)
        if not self.has_mask and self.index == 0:
            warn_of_unused_masks(self.env, self.name)
        if self.index == 0:
            warn_of_running_statistics(self.env, self.name)
            self.save()  # warns of an unusable `get_state()` before training begins
        return self.has_mask

    def reset(self, seed: int | None) -> SingleStep:
        """Start an episode; with a seed, also count steps from 0."""
        if seed is not None:
            self.seed, self.steps = seed, 0
        obs, info = self._reset(seed)
        return read_obs(self.leaves, obs, self.location), 0.0, False, False, self._mask(info, False), {}

    def step(self, action: Any, should_reset: bool) -> SingleStep:
        """Step the environment, or reset it if its episode ended on the last step."""
        self.steps += 1
        if should_reset:
            return self.reset(None)
        try:
            result = self.env.step(action)
        except UnreadableMask as error:
            raise ValueError(f"{self.location()}: {error}") from None
        except Exception as error:
            add_note(error, f"{self.location()}: raised in step(); seed {self.seed}, last action {action!r}")
            raise
        if type(result) is not tuple or len(result) != 5:
            got = f"{len(result)} values" if isinstance(result, tuple | list) else repr(result)
            raise TypeError(f"{self.location()}: step() must return (obs, reward, terminated, truncated, info), got {got}")
        obs, reward, terminated, truncated, info = result
        if type(reward) is not float and type(reward) is not np.float64:
            reward = self._reward(reward)
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if type(info) is not dict:
            self._check_info("step", info)
        is_last = terminated or truncated
        mask = self._mask(info, is_last)
        values = read_info(info, self.info_metrics, is_last, self.location) if is_last or self.info_metrics else {}
        if truncated and not terminated and self._recorder is not None:
            # The recorder puts nothing into `info` where a wrapper outside of it, such as TimeLimit, ends the episode.
            values.setdefault(RETURN, float(self._recorder.episode_returns))
        return read_obs(self.leaves, obs, self.location), reward, terminated, truncated, mask, values

    def render(self) -> Any:
        """Return the environment's image, and its frames per second or None.

        Raises:
            ValueError: the environment was not created to return images, or has no method `render`.
        """
        mode = self.env.render_mode
        if mode != "rgb_array":
            raise ValueError(f"{self.name} draws no images: its render_mode must be 'rgb_array', got {mode!r}")
        try:
            return self.env.render(), frames_per_second(self.env)
        except NotImplementedError as error:
            raise ValueError(f"{self.name} draws no images: its render() is not implemented") from error

    def save(self) -> dict[str, Any] | None:
        """Return a snapshot as plain data, or None if the environment's state cannot be read."""
        state = snapshots.save(self.env, self._report_state)
        if state is None:
            return None
        return {"env": state, "steps": self.steps, "seed": -1 if self.seed is None else self.seed}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot."""
        snapshots.load(self.env, snapshot["env"])
        self.steps = int(snapshot["steps"])
        self.seed = None if snapshot["seed"] < 0 else int(snapshot["seed"])

    def close(self) -> None:
        """Close the environment."""
        try:
            self.env.close()
        except Exception as error:
            add_note(error, f"{self.location()}: raised in close()")
            raise

    def _reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        try:
            result = self.env.reset(seed=seed)
        except UnreadableMask as error:
            raise ValueError(f"{self.location()}: {error}") from None
        except Exception as error:
            add_note(error, f"{self.location()}: raised in reset(seed={seed})")
            raise
        if type(result) is not tuple or len(result) != 2:
            raise TypeError(f"{self.location()}: reset() must return (obs, info), got {type(result).__name__} {result!r:.80}")
        self._check_info("reset", result[1])
        return result

    def _check_info(self, method: str, info: Any) -> None:
        if not isinstance(info, dict):
            raise TypeError(f"{self.location()}: the info of {method}() must be a dict, got {info!r:.80}")

    def _spaces(self) -> dict[str, Space]:
        names = "observation_space", "action_space"
        return {name: from_gymnasium(getattr(self.env, name), is_action=name == "action_space") for name in names}

    def _reward(self, reward: Any) -> float:
        array = np.asarray(reward) if not isinstance(reward, str) else None
        if array is None or array.dtype.kind not in "fiub" or array.shape != () or isinstance(reward, np.ma.MaskedArray):
            wrapper = "; mo_gymnasium.wrappers.LinearReward weights the parts of a vector, SuperSuit splits several agents"
            value = "a masked array" if isinstance(reward, np.ma.MaskedArray) else f"{type(reward).__name__} {reward!r:.80}"
            got = f"got {value}{wrapper if np.size(reward) > 1 else ''}"
            raise TypeError(f"{self.location()}: the reward must be one number, {got}")
        return float(array)

    def _flag(self, name: str, flag: Any) -> bool:
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{self.location()}: {name} must be a bool, got {type(flag).__name__} {flag!r:.80}")
        return bool(flag)

    def _mask(self, info: dict[str, Any], is_last: bool) -> list[Flags] | None:
        if not self.has_mask:
            if "action_mask" in info:
                raise ValueError(f"{self.location()}: info must not have an action_mask, as the first reset returned none")
            return None
        mask = info.get("action_mask")
        # No action is chosen after the last step of an episode.
        if mask is None and not is_last:
            raise ValueError(f"{self.location()}: info must have an action_mask, as the first reset returned one; got none")
        return read_masks(self.env.action_space, mask, self.location(), is_last=is_last)


def frames_per_second(env: Any) -> float | None:
    """Return the number of steps in a second of an environment's real time; None if its metadata does not say it."""
    fps = (env.metadata or {}).get("render_fps")
    if type(env.unwrapped).__name__ == "AtariEnv":
        # The ALE's metadata say 30, however many frames a step has.
        fps = ATARI_FPS / np.mean(env.unwrapped._frameskip)
    if fps is None:
        return None
    for layer in layers_of(env):
        if (name := FRAME_SKIPS.get(type(layer).__name__)) is not None:
            fps = fps / getattr(layer, name)
    return float(fps)

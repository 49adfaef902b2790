"""Removes the parts of Dict observations whose spaces are not supported.

No JAX here: worker processes use this.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import gymnasium.spaces as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from polyak.core.warn import warn

SUPPORTED = (gym.Box, gym.Discrete, gym.MultiDiscrete, gym.MultiBinary)


def drop_obs(env: Any, name: str, *, text_only: bool, warns: bool) -> Any:
    """Remove the unsupported parts of an environment's Dict observation, or only its texts.

    Nested Dicts are searched too; a Tuple is kept or dropped completely, as its entries have no names. Texts are all spaces of
    strings, including spaces that are no `gymnasium.spaces.Text`, such as MiniGrid's. An environment that would have no
    observation left is not changed.
    """
    space = obs_space(env)
    if not isinstance(space, gym.Dict):
        return env
    dropped: dict[str, Any] = {}
    rest = _prune(space, _is_text if text_only else _is_unsupported, "", dropped)
    if rest is None or not dropped:
        return env
    # Unsupported parts were dropped on request, but a dropped Tuple may have supported entries.
    reported = [path for path, part in dropped.items() if text_only or isinstance(part, gym.Tuple)]
    if warns and reported:
        what = "text" if text_only else "Tuple"
        warn(f"make: dropped the {what} {', '.join(map(repr, reported))} from the observation of {name}")
    if isinstance(env, VectorEnv):
        return VectorObsFilter(env, rest)
    if len(rest.spaces) < len(space.spaces):
        # A separate wrapper, as snapshots contain the class names of wrappers.
        env = gymnasium.wrappers.FilterObservation(env, list(rest.spaces))
    if env.observation_space == rest:
        return env
    return gymnasium.wrappers.TransformObservation(env, lambda obs: _take(rest, obs), rest)


class VectorObsFilter(VectorWrapper):  # without type arguments, which Gymnasium 1.3 does not take
    """A vector environment with a part of its observation; Gymnasium's `FilterObservation` rejects SAME_STEP."""

    def __init__(self, env: Any, space: Any) -> None:
        super().__init__(env)
        self.single_observation_space = space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset; invalid return values are passed on."""
        return self._filter(self.env.reset(seed=seed, options=options))

    def step(self, actions: Any) -> Any:
        """Step; invalid return values are passed on."""
        return self._filter(self.env.step(actions))

    def _filter(self, result: Any) -> Any:
        if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[-1], dict):
            return result  # The caller's error names the step.
        space = self.single_observation_space
        return _take(space, result[0]), *result[1:-1], with_final_obs(result[-1], lambda final: _take(space, final))


def with_final_obs(info: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply `change` to `final_obs` of a vector environment's `info`: a dict of batches, or a list of entries or None."""
    final = info.get("final_obs")
    if final is None:
        return info
    changed = change(final) if isinstance(final, dict) else [None if each is None else change(each) for each in final]
    return info | {"final_obs": changed}


def obs_space(env: Any) -> Any:
    """Return the observation space of one environment."""
    return env.single_observation_space if isinstance(env, VectorEnv) else env.observation_space


def _prune(space: Any, is_dropped: Callable[[Any], bool], path: str, dropped: dict[str, Any]) -> Any:
    """Return the space without dropped parts, or None if nothing is left; adds dropped parts by path to `dropped`."""
    if not isinstance(space, gym.Dict):
        if is_dropped(space):
            dropped[path] = space
            return None
        return space
    parts = {
        key: _prune(part, is_dropped, f"{path}/{key}" if path else str(key), dropped) for key, part in space.spaces.items()
    }
    rest = {key: part for key, part in parts.items() if part is not None}
    return gym.Dict(rest) if rest else None


def _take(space: Any, obs: Any) -> Any:
    """Select the parts of an observation that a space has; the reader reports missing parts."""
    if not isinstance(space, gym.Dict) or not isinstance(obs, dict):
        return obs
    return {key: _take(part, obs[key]) for key, part in space.spaces.items() if key in obs}


def _is_text(space: Any) -> bool:
    dtype = getattr(space, "dtype", None)
    return isinstance(space, gym.Text) or (dtype is not None and np.dtype(dtype).kind == "U")


def _is_unsupported(space: Any) -> bool:
    if isinstance(space, gym.Dict | gym.Tuple):
        return any(map(_is_unsupported, space.spaces.values() if isinstance(space, gym.Dict) else space.spaces))
    return not isinstance(space, SUPPORTED)

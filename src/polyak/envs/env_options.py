"""Adapts Gymnasium environments for `make`: unsupported observations and action masks.

No JAX here: worker processes use this.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import gymnasium.spaces as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics
from gymnasium.wrappers import vector as on_vectors

from polyak.core.warn import add_note, warn
from polyak.envs.masks import mask_widths
from polyak.envs.obs_filter import drop_obs, obs_space, with_final_obs


@dataclass(frozen=True)
class EnvOptions:
    """The arguments of `make` for a single environment; see `make`.

    Raises:
        TypeError: `drop_unsupported_obs` is not True, False or None.
    """

    drop_unsupported_obs: bool | None = None
    action_mask_key: str | None = None
    info_metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.drop_unsupported_obs is not None and not isinstance(self.drop_unsupported_obs, bool):
            raise TypeError(f"make: drop_unsupported_obs must be True, False or None, got {self.drop_unsupported_obs!r:.80}")


class UnreadableMask(ValueError):
    """An environment's mask is not where `make` was told to read it."""


def adapt(env: Any, options: EnvOptions, name: str, *, warns: bool = True) -> Any:
    """Wrap an environment or vector environment, for supported observations and action masks in `info["action_mask"]`.

    Args:
        name: name of the environment in errors and warnings.
        warns: show warnings; False for all but the first of equal environments.

    Raises:
        ValueError: the observation has no entry `action_mask_key`.
    """
    if options.drop_unsupported_obs is not False:
        env = drop_obs(env, name, text_only=options.drop_unsupported_obs is None, warns=warns)
    method = next(filter(callable, map(_mask_attribute, layers_of(env))), None)
    is_vector = isinstance(env, VectorEnv)
    if method is not None and not mask_widths(env.single_action_space if is_vector else env.action_space):
        if warns:
            warn(f"make: action_masks() of {name} is not used: masks are supported for Discrete and MultiDiscrete actions")
        method = None
    key = options.action_mask_key
    if key is None and method is None:
        return env
    space = obs_space(env)
    if key is not None and not (isinstance(space, gym.Dict) and key in space.spaces and len(space.spaces) > 1):
        raise ValueError(f"make: action_mask_key={key!r} must be one of several entries of the Dict observation, got {space}")
    return (VectorMaskInInfo if is_vector else MaskInInfo)(env, key, method)


def warn_of_unused_masks(env: Any, name: str) -> None:
    """Warn if an environment without masks in `info` has an attribute `action_masks` that `adapt` cannot read.

    Such an attribute is no method, or belongs to the environments of Gymnasium's own vector environments, which can call it
    only for all environments, including environments whose episode is over, where the method may fail.
    """
    own = [attribute for attribute in map(_mask_attribute, layers_of(env)) if attribute is not None]
    if own and not callable(own[0]):
        warn(f"make: action_masks of {name} is not used: it must be a method, got {type(own[0]).__name__}")
    inner = env.unwrapped
    if _is_masked_vector(inner):
        advice = "return info['action_mask'], or pass the function that creates one environment, and num_envs"
        warn(f"make: action_masks of the environments in {type(inner).__name__} of {name} is not used; {advice}")


def warn_of_running_statistics(env: Any, name: str) -> None:
    """Warn of wrappers whose statistics an evaluation does not get from the training.

    A reward wrapper is no matter where `RecordEpisodeStatistics` records the returns inside of it.
    """
    layers, is_recorded = layers_of(env), False
    if isinstance(layers[-1], SyncVectorEnv):
        layers += layers_of(layers[-1].envs[0])
    for layer in reversed(layers):
        is_recorded |= isinstance(layer, RecordEpisodeStatistics | on_vectors.RecordEpisodeStatistics)
        if isinstance(layer, NormalizeObservation | on_vectors.NormalizeObservation):
            warn(
                f"make: NormalizeObservation of {name} starts its statistics anew in every environment that is made, so in "
                "evaluations the policy gets other inputs than in training; set normalize_obs=True of the agent instead"
            )
        if isinstance(layer, NormalizeReward | on_vectors.NormalizeReward) and not is_recorded:
            warn(
                f"make: NormalizeReward of {name} changes its scale as it runs, so returns of evaluations cannot be compared; "
                "put RecordEpisodeStatistics inside of it, or set normalize_reward='return' of the agent instead"
            )


class MaskInInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts action masks from the observation's entry `key`, or from a method, into `info["action_mask"]`.

    Existing masks in `info` are kept. At the end of an episode the method is not called. Invalid return values are passed on:
    the caller's error names environment and step.
    """

    def __init__(self, env: Any, key: str | None, method: Any) -> None:
        super().__init__(env)
        self._key, self._method = key, method
        if key is not None:
            self.observation_space = _without(env.observation_space, key)

    def reset(self, **options: Any) -> Any:
        """Reset, with the mask in `info`."""
        result = self.env.reset(seed=options.get("seed"), options=options.get("options"))
        return self._move(*result, is_last=False) if isinstance(result, tuple) and len(result) == 2 else result

    def step(self, action: Any) -> Any:
        """Step, with the mask in `info`."""
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            return result
        obs, reward, terminated, truncated, info = result
        obs, info = self._move(obs, info, is_last=bool(terminated or truncated))
        return obs, reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return an empty state; with `set_state` it makes snapshots of the environment possible."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def _move(self, obs: Any, info: Any, *, is_last: bool) -> tuple[Any, Any]:
        if not isinstance(info, dict):
            return obs, info
        if self._key is not None:
            rest, mask = _split(obs, self._key)
            return rest, {"action_mask": mask} | info
        return obs, info if is_last or "action_mask" in info else info | {"action_mask": _call(self._method)}


class VectorMaskInInfo(VectorWrapper):  # without type arguments, which Gymnasium 1.3 does not take
    """`MaskInInfo` for a vector environment; the method returns one mask for each environment."""

    def __init__(self, env: Any, key: str | None, method: Any) -> None:
        super().__init__(env)
        self._key, self._method = key, method
        if key is not None:
            self.single_observation_space = _without(env.single_observation_space, key)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset, with the masks in `info`."""
        result = self.env.reset(seed=seed, options=options)
        return self._move(*result) if isinstance(result, tuple) and len(result) == 2 else result

    def step(self, actions: Any) -> Any:
        """Step, with the masks in `info`."""
        result = self.env.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            return result
        obs, info = self._move(result[0], result[4])
        return obs, *result[1:4], info

    def _move(self, obs: Any, info: Any) -> tuple[Any, Any]:
        key = self._key
        if not isinstance(info, dict):
            return obs, info
        if key is None:
            return obs, info if "action_mask" in info else info | {"action_mask": _call(self._method)}
        rest, mask = _split(obs, key)
        return rest, {"action_mask": mask} | with_final_obs(info, lambda final: _split(final, key)[0])


def _call(method: Callable[[], Any]) -> Any:
    try:
        mask = method()
    except Exception as error:
        add_note(error, "raised in action_masks()")
        raise
    if mask is None:
        raise UnreadableMask("action_masks() must return an action mask, got None")
    return mask


def _split(obs: Any, key: str) -> tuple[dict[Any, Any], Any]:
    """Return an observation without its action mask, and the mask."""
    if not isinstance(obs, dict) or key not in obs:
        got = f"a dict with keys {sorted(map(str, obs))}" if isinstance(obs, dict) else type(obs).__name__
        raise UnreadableMask(f"the observation must be a dict with the action mask {key!r}, as action_mask_key says, got {got}")
    return {name: part for name, part in obs.items() if name != key}, _as_flags(obs[key])


def layers_of(env: Any) -> list[Any]:
    """Return all layers, from the outermost wrapper to the innermost environment, which may not be `env.unwrapped`."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper | VectorWrapper):
        layers.append(layers[-1].env)
    return layers


def _is_masked_vector(env: Any) -> bool:
    """Return True if environments in one of Gymnasium's vector environments have `action_masks`."""
    if isinstance(env, SyncVectorEnv):
        return any(_mask_attribute(layer) is not None for one in env.envs for layer in layers_of(one))
    if isinstance(env, AsyncVectorEnv):
        # This evaluates a property in the worker, which may fail.
        with contextlib.suppress(Exception):
            return any(env.call("has_wrapper_attr", "action_masks"))
    return False


def _mask_attribute(layer: Any) -> Any:
    """Return the attribute `action_masks` of a layer, or None; properties, which may fail before a reset, are not evaluated."""
    static = inspect.getattr_static(layer, "action_masks", None)
    return static if isinstance(static, property) else getattr(layer, "action_masks", None)


def _without(space: Any, key: str) -> Any:
    return gym.Dict({name: part for name, part in space.spaces.items() if name != key})


def _as_flags(mask: Any) -> Any:
    """Convert masks of floats 0 and 1, as in RLlib's environments, to bools; the reader checks all other values."""
    array = np.asarray(mask)
    return array.astype(bool) if array.dtype.kind == "f" and np.isin(array, (0.0, 1.0)).all() else mask

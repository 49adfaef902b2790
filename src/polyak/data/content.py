"""Checks the content of a data set: shapes, kinds of numbers, ranges; an error names the array, and the first bad value."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.resolution import LEAST, find_changes
from polyak.core.space_check import FLOAT32_MAX, ArraySpec, obs_specs, range_error, read_leaves, to_array
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Leaf, MultiDiscrete, Space, Tuple, leaf_keys, map_space, unflatten
from polyak.core.types import PyTree
from polyak.core.warn import warn
from polyak.data.data_set import DataSet, same_spaces

# Of actions that were computed in float32, relative to the bound where that is above 1.
ROUNDING = 1e-5


def create_data_set(
    owner: str,
    spec: EnvSpec,
    *,
    obs: PyTree,
    action: PyTree,
    reward: Any,
    lengths: npt.NDArray[np.int64],
    terminated: npt.NDArray[np.bool_],
    name: str,
) -> DataSet:
    """Check all values, and create the data set; an episode that did not terminate was truncated.

    Args:
        owner: the function that has read the values, for errors.
        spec: the environment's spaces.
        obs, action, reward: the values, see `DataSet`; arrays of the spaces' dtypes are not copied.
        lengths: the length of each episode.
        terminated: the episode reached a terminal state.
        name: the source.

    Raises:
        TypeError: an array has another kind of values, such as text.
        ValueError: a shape differs, a value is NaN, infinite or outside of its space, or the environment has action masks.
    """
    check_no_masks(owner, spec)
    count = int(lengths.sum())
    if not count:
        raise ValueError(f"{owner}: {name} has no transition")
    return new_data_set(
        spec,
        obs=read_obs(f"{owner}: observations", spec, obs, count + len(lengths)),
        action=read_action(f"{owner}: actions", spec, action, count),
        reward=read_reward(f"{owner}: rewards", reward, count),
        lengths=lengths,
        terminated=terminated,
        name=name,
    )


def new_data_set(
    spec: EnvSpec,
    *,
    obs: PyTree,
    action: PyTree,
    reward: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    terminated: npt.NDArray[np.bool_],
    name: str,
    has_spaces: bool = True,
    log_prob: npt.NDArray[Any] | None = None,
) -> DataSet:
    """The data set of values that `read_obs` and its like have checked, in the dtypes of the spaces."""
    return DataSet(
        spec=dataclasses.replace(spec, action_scaling="clip"),
        obs=map_space(lambda leaf, x: np.asarray(x, leaf.dtype), spec.obs, obs),
        action=map_space(lambda leaf, x: np.asarray(x, leaf.dtype), spec.action, action),
        reward=np.asarray(reward, np.float32),
        lengths=np.array(lengths, np.int64),
        terminated=np.array(terminated, bool),
        name=name,
        has_spaces=has_spaces,
        log_prob=None if log_prob is None else np.asarray(log_prob, np.float32),
    )


def check_no_masks(owner: str, spec: EnvSpec) -> None:
    """Check that the environment has no action masks.

    Raises:
        ValueError: it has.
    """
    if spec.has_action_mask:
        raise ValueError(f"{owner}: {spec.id or 'the environment'} has action masks, which data sets lack")


def read_obs(name: str, spec: EnvSpec, value: Any, length: int) -> PyTree:
    """Observations `[length, ...]`, after a check of shapes, kinds of numbers and ranges; not yet in the dtypes of the space.

    Raises:
        TypeError, ValueError: an array differs.
    """
    return unflatten(spec.obs, _read_arrays(name, obs_specs(spec.obs), value, length))


def warn_of_lost_changes(name: str, spec: EnvSpec, obs: PyTree) -> None:
    """Warn of observations `[N, ...]` whose changes float32 does not resolve, as environments do; see `ResolutionCheck`."""
    for leaf, array in zip(obs_specs(spec.obs), read_leaves(name, obs_specs(spec.obs), obs), strict=True):
        if leaf.dtype != np.float32 or np.can_cast(array.dtype, np.float32):
            continue
        if max(array.max(initial=0), -array.min(initial=0)) < LEAST:
            continue
        changed, lost = (x.sum(axis=0) for x in find_changes(array[:-1], array[1:]))
        if (found := 10 * lost > changed).any():
            index = np.argwhere(found)[0].tolist()
            place = f" at {index}" if index else ""
            warn(
                f"{leaf.name(name)}{place} reach {np.abs(array[:, *index]).max()}, near which float32 does not resolve their "
                "changes; subtract an offset from the data and in the environment, as normalize_obs comes too late"
            )


def read_action(name: str, spec: EnvSpec, value: Any, length: int) -> PyTree:
    """Actions in the environment's units, see `read_obs`; those that rounding has moved out of the bounds are moved back."""
    advice = "; clip them to the bounds, as the environment does"
    return unflatten(spec.action, _read_arrays(name, native_action_specs(spec), value, length, advice))


def read_reward(name: str, value: Any, length: int) -> npt.NDArray[Any]:
    """Rewards, see `read_obs`."""
    (reward,) = _read_arrays(name, (ArraySpec((), (), np.dtype(np.float32), -FLOAT32_MAX, FLOAT32_MAX),), value, length)
    return reward


def read_log_prob(name: str, spec: EnvSpec, value: Any, length: int) -> npt.NDArray[Any]:
    """Log-probabilities, see `read_obs`; at most 0 unless they are densities of a Box."""
    is_density = any(isinstance(leaf, Box) for _, leaf in leaf_keys(spec.action))
    high = FLOAT32_MAX if is_density else 0.0
    specs = (ArraySpec((), (), np.dtype(np.float32), -FLOAT32_MAX, high),)
    (log_prob,) = _read_arrays(name, specs, value, length, "; they are logarithms of probabilities")
    return log_prob


def _read_arrays(name: str, specs: Sequence[ArraySpec], value: Any, length: int, advice: str = "") -> list[npt.NDArray[Any]]:
    arrays = []
    for spec, leaf in zip(specs, read_leaves(name, specs, value), strict=True):
        array = to_array(spec.name(name), leaf, (length, *spec.shape), spec.dtype)
        arrays.append(array if spec.low is None else _in_range(spec.name(name), array, spec, advice))
    return arrays


def _in_range(name: str, array: npt.NDArray[Any], spec: ArraySpec, advice: str) -> npt.NDArray[Any]:
    """The array, with values that rounding has moved out of the bounds moved back; errors of finite numbers have the advice.

    Raises:
        ValueError: a value is outside.
    """
    message = range_error(name, array, spec.low, spec.high)
    if message and array.dtype.kind == "f":
        array = array.astype(np.float64)
        inside = np.clip(array, spec.low, spec.high)
        array = np.where(np.abs(array - inside) <= ROUNDING * np.maximum(np.abs(inside), 1), inside, array)
        message = range_error(name, array, spec.low, spec.high)
        if message and np.isfinite(array).all():
            message += advice
    if message:
        raise ValueError(message)
    return array


def native_action_specs(spec: EnvSpec) -> tuple[ArraySpec, ...]:
    """The arrays of an action as the environment counts: Discrete from its `start`, a Box within its bounds."""
    return tuple(_native_action_spec(keys, leaf) for keys, leaf in leaf_keys(spec.action))


def _native_action_spec(keys: tuple[Any, ...], space: Leaf) -> ArraySpec:
    match space:
        case Discrete():
            return ArraySpec(keys, (), space.dtype, space.start, space.start + space.n - 1)
        case MultiDiscrete():
            low = np.array(space.start)
            return ArraySpec(keys, space.shape, space.dtype, low, low + np.array(space.nvec) - 1)
        case Box():
            low, high = np.maximum(space.low, -FLOAT32_MAX), np.minimum(space.high, FLOAT32_MAX)
            return ArraySpec(keys, space.shape, space.dtype, low, high)
        case _:
            return ArraySpec(keys, space.shape, space.dtype, 0, 1)


def check_spaces(owner: str, data: DataSet, spec: EnvSpec) -> DataSet:
    """The data set with the spaces of an environment or an agent, after a check of all its values.

    Raises:
        TypeError, ValueError: the data are of another environment; the message has the first difference.
    """
    source = f"{owner}: the data set {data.name!r}"
    checked = create_data_set(
        source,
        same_spaces(owner, data.spec, spec, data.name) if data.has_spaces else spec,
        obs=data.obs,
        action=data.action,
        reward=data.reward,
        lengths=data.lengths,
        terminated=data.terminated,
        name=data.name,
    )
    log_prob = data.log_prob
    if log_prob is not None:
        log_prob = read_log_prob(f"{source}: log_probs", spec, log_prob, len(data.reward)).astype(np.float32, copy=False)
    return dataclasses.replace(checked, log_prob=log_prob, has_beginning=data.has_beginning)


def infer_spec(owner: str, obs: Mapping[str, Any] | Any, action: Any, name: str) -> EnvSpec:
    """The spaces that arrays seem to have: floats a Box, integers from 0 a Discrete, uint8 images a Box of 0 to 255.

    Raises:
        TypeError, ValueError: the spaces do not follow from the arrays; the message asks for `spec`.
    """
    obs_space = _infer(f"{owner}: observations", obs, is_action=False)
    return EnvSpec(obs_space, _infer(f"{owner}: actions", action, is_action=True), id=name)


def _infer(name: str, value: Any, *, is_action: bool) -> Space:
    if isinstance(value, Mapping):
        return Dict({key: _infer(f"{name} {key!r}", part, is_action=is_action) for key, part in value.items()})
    if isinstance(value, tuple):
        return Tuple(tuple(_infer(f"{name} {i}", part, is_action=is_action) for i, part in enumerate(value)))
    array = np.asarray(value)
    advice = "pass spec=env.spec"
    if array.dtype.kind == "f" and not is_action:
        return Box(-np.inf, np.inf, array.shape[1:], np.float32)
    if array.dtype.kind == "f":
        largest = float(np.abs(array).max(initial=0.0))
        if largest > 1 + ROUNDING:
            raise ValueError(f"{name} reach {largest:g}, and their bounds are unknown; {advice}")
        return Box(-1.0, 1.0, array.shape[1:], np.float32)
    if array.dtype == np.uint8 and array.ndim > 2:
        return Box(0, 255, array.shape[1:], np.uint8)
    if array.dtype.kind in "iu" and array.ndim == 1:
        low, high = int(array.min(initial=0)), int(array.max(initial=0))
        if low < 0 or high > 65_535:
            raise ValueError(f"{name} are integers from {low} to {high}, whose space is unknown; {advice}")
        return Discrete(high + 1)
    raise TypeError(f"{name} are {array.dtype} of shape {array.shape}, whose space is unknown; {advice}")

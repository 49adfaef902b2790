"""Checks the content of a data set: shapes, kinds of numbers, ranges; an error names the array, and the first bad value."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import ArraySpec, check_range, obs_specs, range_error, read_leaves, to_array
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Leaf, MultiDiscrete, Space, Tuple, leaf_keys, unflatten
from polyak.core.spec_difference import difference
from polyak.core.types import PyTree
from polyak.data.data_set import DataSet

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
    has_spaces: bool = True,
) -> DataSet:
    """Check all values, and create the data set; an episode that did not terminate was truncated.

    Args:
        owner: the function that has read the values, for errors.
        spec: the environment's spaces.
        obs, action, reward: the values, see `DataSet`.
        lengths: the length of each episode.
        terminated: the episode reached a terminal state.
        name: the source.
        has_spaces: see `DataSet`.

    Raises:
        TypeError: an array has another kind of values, such as text.
        ValueError: a shape differs, a value is NaN, infinite or outside of its space, or the environment has action masks.
    """
    if spec.has_action_mask:
        raise ValueError(f"{owner}: {spec.id or 'the environment'} has action masks, which data sets lack")
    count = int(lengths.sum())
    if not count:
        raise ValueError(f"{owner}: {name} has no transition")
    spec = dataclasses.replace(spec, action_scaling="clip")
    reward = to_array(f"{owner}: rewards", reward, (count,), np.dtype(np.float32))
    reward = _in_range(f"{owner}: rewards", reward, ArraySpec((), (), np.dtype(np.float32), -3e38, 3e38))
    obs_arrays = read_arrays(f"{owner}: observations", obs_specs(spec.obs), obs, count + len(lengths))
    actions = read_arrays(f"{owner}: actions", native_action_specs(spec), action, count)
    return DataSet(
        spec=spec,
        obs=unflatten(spec.obs, obs_arrays),
        action=unflatten(spec.action, actions),
        reward=reward,
        lengths=np.array(lengths, np.int64),
        terminated=np.array(terminated, bool),
        truncated=~np.array(terminated, bool),
        name=name,
        has_spaces=has_spaces,
    )


def read_arrays(name: str, specs: Sequence[ArraySpec], value: Any, length: int, *, checked: bool = True) -> list[Any]:
    """The arrays of a tree, with a leading axis of this length, in the dtypes of the space.

    Args:
        checked: also check that the values are in the space.
    """
    arrays = []
    for spec, leaf in zip(specs, read_leaves(name, specs, value), strict=True):
        array = to_array(spec.name(name), leaf, (length, *spec.shape), spec.dtype)
        arrays.append(_in_range(spec.name(name), array, spec) if checked else array)
    return arrays


def _in_range(name: str, array: npt.NDArray[Any], spec: ArraySpec) -> npt.NDArray[Any]:
    """A copy of an array in the space's dtype, with values that rounding has moved out of the bounds moved back.

    Raises:
        ValueError: a value is outside.
    """
    if spec.low is None:
        return np.array(array, spec.dtype)
    if array.dtype.kind != "f":
        check_range(name, array, spec.low, spec.high)
        return np.array(array, spec.dtype)
    inside = np.clip(array, spec.low, spec.high)
    is_rounded = np.abs(array - inside) <= ROUNDING * np.maximum(np.abs(inside), 1)
    if message := range_error(name, np.where(is_rounded, inside, array), spec.low, spec.high):
        is_finite = np.isfinite(array).all()
        raise ValueError(message + ("; clip them to the bounds, as the environment does" if is_finite else ""))
    return np.array(inside, spec.dtype)


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
            largest = np.finfo(np.float32).max
            return ArraySpec(keys, space.shape, space.dtype, np.maximum(space.low, -largest), np.minimum(space.high, largest))
        case _:
            return ArraySpec(keys, space.shape, space.dtype, 0, 1)


def check_spaces(owner: str, data: DataSet, spec: EnvSpec) -> DataSet:
    """The data set with the spaces of an environment or an agent, after a check that the data are of such an environment.

    Bounds of observations may differ, as libraries state them differently.

    Raises:
        TypeError, ValueError: the data are of another environment; the message has the first difference.
    """
    if data.has_spaces:
        wanted, got = (
            dataclasses.replace(x, obs=_without_bounds(x.obs), action_scaling="clip", id="") for x in (spec, data.spec)
        )
        if found := difference(wanted, got):
            raise ValueError(
                f"{owner}: the data set {data.name!r} is of another environment: {found[0]} is {found[2]}, of "
                f"{spec.id or 'the spec'} {found[1]}"
            )
    return create_data_set(
        f"{owner}: the data set {data.name!r}",
        spec,
        obs=data.obs,
        action=data.action,
        reward=data.reward,
        lengths=data.lengths,
        terminated=data.terminated,
        name=data.name,
    )


def _without_bounds(space: Space) -> Space:
    match space:
        case Dict():
            return Dict({name: _without_bounds(part) for name, part in space.spaces.items()})
        case Tuple():
            return Tuple(tuple(map(_without_bounds, space.spaces)))
        case Box() if space.dtype.kind == "f":
            return Box(-np.inf, np.inf, space.shape, np.float32)
        case _:
            return space


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


def join_trees(trees: Sequence[PyTree]) -> PyTree:
    """Arrays of several episodes, one after another."""
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)

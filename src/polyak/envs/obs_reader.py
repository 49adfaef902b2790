"""Reads the arrays of an observation of a Gymnasium environment, and the requirements of its space.

No JAX here: worker processes use this.
"""

from collections.abc import Callable
from typing import Any

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import FLOAT32_MAX, ArraySpec, InvalidValue, check_no_others, check_range, read_leaves, to_array


def obs_leaves(space: Any, keys: tuple[Any, ...] = ()) -> list[ArraySpec]:
    """Return the arrays of a supported Gymnasium space, with its dtypes, in the order of polyak's spaces: dicts by sorted keys.

    Infinite bounds become the largest float32, so that NaN and infinity are out of bounds.
    """
    if isinstance(space, gym.Dict | gym.Tuple):
        return [leaf for key in space_keys(space) for leaf in obs_leaves(space.spaces[key], (*keys, key))]
    low, high = _bounds(space)
    return [ArraySpec(keys, tuple(space.shape), np.dtype(space.dtype), low, high)]


def space_keys(space: Any) -> list[Any]:
    """Return the keys of a Gymnasium Dict, or the indices of a Tuple, in the order of polyak's spaces."""
    return sorted(space.spaces, key=str) if isinstance(space, gym.Dict) else list(range(len(space.spaces)))


def _bounds(space: Any) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    dtype = np.dtype(space.dtype)
    if isinstance(space, gym.Discrete):
        return np.array(space.start, dtype), np.array(int(space.start) + int(space.n) - 1, dtype)
    if isinstance(space, gym.MultiDiscrete):
        return np.asarray(space.start, dtype), np.asarray(space.start + space.nvec - 1, dtype)
    if isinstance(space, gym.MultiBinary):
        return np.zeros(space.shape, dtype), np.ones(space.shape, dtype)
    if dtype.kind == "f":
        limit = min(FLOAT32_MAX, float(np.finfo(dtype).max))
        return np.maximum(space.low, dtype.type(-limit)), np.minimum(space.high, dtype.type(limit))
    if dtype.itemsize == 8:
        # Agents get integers of 32 bits.
        narrow = np.iinfo(np.int32 if dtype.kind == "i" else np.uint32)
        return np.maximum(space.low, dtype.type(narrow.min)), np.minimum(space.high, dtype.type(narrow.max))
    info: Any = np.iinfo(dtype) if dtype.kind in "iu" else None
    if info is None or (np.all(space.low == info.min) and np.all(space.high == info.max)):
        return None, None
    return space.low, space.high


def read_obs(leaves: list[ArraySpec], obs: Any, location: Callable[[], str]) -> list[Any]:
    """Return copies of the arrays of one observation, with the shape and dtype of each leaf.

    An environment may write the next observation into the same array, and so may another environment.
    Numbers of another width are cast (float64 to float32, a Python int to int64, an integer to a float).

    Args:
        location: returns environment and step, for errors.

    Raises:
        TypeError: a leaf is not an array of numbers, or holds floats where integers are expected.
        InvalidValue: a leaf is missing, not in the space or partly masked, its shape is wrong, or an integer does not fit into
            the dtype.
    """
    try:
        values = [obs]
        if leaves[0].keys:
            name = f"{location()}: the observation"
            values = read_leaves(name, leaves, obs)
            check_no_others(name, leaves, obs)
        return [
            value.copy()
            if type(value) is np.ndarray and value.shape == leaf.shape and value.dtype == leaf.dtype
            else _cast(value, leaf, f"{location()}: {leaf.name('the observation')}")
            for leaf, value in zip(leaves, values, strict=True)
        ]
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def _cast(value: Any, leaf: ArraySpec, name: str) -> npt.NDArray[Any]:
    array = to_array(name, value, leaf.shape, leaf.dtype)
    if leaf.dtype.kind in "iu":
        # A narrowing cast of integers wraps around without an error: 300 would become the uint8 44.
        info = np.iinfo(leaf.dtype)
        check_range(name, array, info.min, info.max)
    with np.errstate(over="ignore"):
        return array.astype(leaf.dtype)

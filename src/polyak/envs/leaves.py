"""The leaves of a Gymnasium observation space: how an array is found in an observation, and what it must be.

No JAX here: worker processes read their environments with this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ObsLeaf:
    """One array of an observation.

    Attributes:
        path: its name in errors, `""` for an observation that is one array.
        keys: the way to it through dicts and tuples.
        low, high: the smallest and the largest value, in the leaf's dtype; None where every value of the dtype will do.
            A bound that is infinite stands here as the largest float32, so that NaN and infinity are out of bounds.
    """

    path: str
    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: npt.NDArray[Any] | None
    high: npt.NDArray[Any] | None


def obs_leaves(space: Any, keys: tuple[Any, ...] = ()) -> list[ObsLeaf]:
    """The leaves of a supported space, dicts in the order of their sorted keys, as polyak's own spaces keep them."""
    if isinstance(space, gym.Dict):
        parts = sorted(space.spaces.items(), key=lambda item: str(item[0]))
        return [leaf for key, part in parts for leaf in obs_leaves(part, (*keys, key))]
    if isinstance(space, gym.Tuple):
        return [leaf for i, part in enumerate(space.spaces) for leaf in obs_leaves(part, (*keys, i))]
    low, high = _bounds(space)
    return [ObsLeaf("/".join(map(str, keys)), keys, tuple(space.shape), np.dtype(space.dtype), low, high)]


def _bounds(space: Any) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    dtype = np.dtype(space.dtype)
    if isinstance(space, gym.Discrete):
        return np.array(space.start, dtype), np.array(space.start + space.n - 1, dtype)
    if isinstance(space, gym.MultiDiscrete):
        return np.asarray(space.start, dtype), np.asarray(space.start + space.nvec - 1, dtype)
    if isinstance(space, gym.MultiBinary):
        return np.zeros(space.shape, dtype), np.ones(space.shape, dtype)
    if dtype.kind == "f":
        limit = min(FLOAT32_MAX, float(np.finfo(dtype).max))
        return np.maximum(space.low, dtype.type(-limit)), np.minimum(space.high, dtype.type(limit))
    if dtype.itemsize == 8:
        # They go on in 32 bits.
        narrow = np.iinfo(np.int32 if dtype.kind == "i" else np.uint32)
        return np.maximum(space.low, dtype.type(narrow.min)), np.minimum(space.high, dtype.type(narrow.max))
    info: Any = np.iinfo(dtype) if dtype.kind in "iu" else None
    if info is None or (np.all(space.low == info.min) and np.all(space.high == info.max)):
        return None, None
    return space.low, space.high


def read_obs(leaves: list[ObsLeaf], obs: Any, where: Callable[[], str]) -> list[Any]:
    """The arrays of one observation, each of its leaf's shape and dtype.

    Numbers of another width are cast (float64 to float32, a Python int to int64, an integer to a float); whatever else does
    not fit is an error.

    Args:
        where: says which environment and step, for the error.

    Raises:
        TypeError: a leaf is no array of numbers, or floats where integers are due, or the tree is another one.
        ValueError: a shape is wrong, or an integer out of bounds.
    """
    arrays = []
    for leaf in leaves:
        value = obs
        for depth, key in enumerate(leaf.keys):
            value = _part(value, key, leaf, depth, where)
        if type(value) is not np.ndarray or value.shape != leaf.shape or value.dtype != leaf.dtype:
            value = _coerced(value, leaf, where)
        arrays.append(value)
    return arrays


def _part(value: Any, key: Any, leaf: ObsLeaf, depth: int, where: Callable[[], str]) -> Any:
    if isinstance(value, dict) and not isinstance(key, int) and key in value:
        return value[key]
    if isinstance(value, tuple | list) and isinstance(key, int) and key < len(value):
        return value[key]
    got = f"a dict with keys {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
    path = "/".join(map(str, leaf.keys[: depth + 1]))
    raise TypeError(f"{where()}: the observation has no {path!r}; got {got}")


def _coerced(value: Any, leaf: ObsLeaf, where: Callable[[], str]) -> npt.NDArray[Any]:
    name = f"observation {leaf.path!r}" if leaf.path else "observation"
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{where()}: the {name} is no array: {error}") from None
    kinds = "fiu" if leaf.dtype.kind == "f" else "iub"
    if array.dtype.kind not in kinds:
        got = f"{array.dtype} array" if isinstance(value, np.ndarray) else f"{type(value).__name__} {value!r:.80}"
        raise TypeError(f"{where()}: the {name} must be of dtype {leaf.dtype}, got {got}")
    if array.shape != leaf.shape:
        raise ValueError(f"{where()}: the {name} must have shape {leaf.shape}, got {array.shape}")
    info: Any = np.iinfo(leaf.dtype) if leaf.dtype.kind in "iu" else None
    # A narrowing cast of integers wraps around in silence: 300 would be the uint8 44.
    if info is not None and (np.any(array < info.min) or np.any(array > info.max)):
        raise ValueError(f"{where()}: the {name} must fit into {leaf.dtype}, got values up to {array.max()}")
    with np.errstate(over="ignore"):
        return array.astype(leaf.dtype)

"""Conversion of spaces from and to Gymnasium's."""

from typing import Any

import numpy as np

from polyak.core.space_check import FLOAT32_MAX
from polyak.core.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"


def from_gymnasium(space: Any, name: str = "space", *, is_action: bool = False) -> Space:
    """The polyak space of a Gymnasium space in dtypes that JAX has: float64 becomes float32, indices and int64 int32.

    Args:
        name: the space's name in errors, e.g. `"observation space of CartPole-v1"`.
        is_action: float64 stays float64, as `EnvSpec.native_action` returns the environment's dtype; agents compute in float32.

    Raises:
        TypeError: for Graph, Sequence, Text, OneOf and other spaces without a fixed shape.
        ValueError: for an empty Box, a MultiDiscrete that is not flat, or a Dict with a key that is not a string.
    """
    import gymnasium.spaces as gym

    if isinstance(space, gym.Dict):
        for key in space.spaces:
            if not isinstance(key, str):
                raise ValueError(f"{name}: the keys of a Dict must be strings, got {key!r}; rename it in the environment")
        return Dict({str(k): from_gymnasium(v, f"{name}[{k!r}]", is_action=is_action) for k, v in space.spaces.items()})
    if isinstance(space, gym.Tuple):
        return Tuple(tuple(from_gymnasium(v, f"{name}[{i}]", is_action=is_action) for i, v in enumerate(space.spaces)))
    try:
        if isinstance(space, gym.Box):
            return _box_from_gymnasium(space, is_action)
        if isinstance(space, gym.Discrete):
            return Discrete(int(space.n), int(space.start))
        if isinstance(space, gym.MultiDiscrete):
            if space.nvec.ndim != 1:
                raise ValueError(f"MultiDiscrete: nvec must be a flat vector, got shape {space.nvec.shape}")
            return MultiDiscrete(tuple(space.nvec.tolist()), tuple(space.start.tolist()))
        if isinstance(space, gym.MultiBinary):
            return MultiBinary(tuple(space.shape))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    raise TypeError(f"{name}: {type(space).__name__} is not supported; supported are {SUPPORTED}")


def _box_from_gymnasium(space: Any, is_action: bool) -> Box:
    dtype = np.dtype(space.dtype)
    if dtype == np.float64:
        # A bound beyond float32 is none.
        low, high = (np.where(np.abs(x) > FLOAT32_MAX, np.copysign(np.inf, x), x) for x in (space.low, space.high))
        return Box(low, high, dtype=np.float64 if is_action else np.float32)
    if dtype.itemsize == 8:
        # JAX has no 64-bit integers by default; bounds that do not fit become the largest 32-bit ones.
        narrow = np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
        info = np.iinfo(narrow)
        return Box(np.clip(space.low, info.min, info.max), np.clip(space.high, info.min, info.max), dtype=narrow)
    return Box(space.low, space.high, dtype=dtype)


def to_gymnasium(space: Space) -> Any:
    """The Gymnasium space of a polyak space."""
    import gymnasium.spaces as gym

    match space:
        case Dict():
            return gym.Dict({k: to_gymnasium(v) for k, v in space.spaces.items()})
        case Tuple():
            return gym.Tuple([to_gymnasium(v) for v in space.spaces])
        case Box():
            return gym.Box(space.low, space.high, dtype=space.dtype.type)
        case Discrete():
            return gym.Discrete(space.n, start=space.start)
        case MultiDiscrete():
            return gym.MultiDiscrete(np.array(space.nvec), start=np.array(space.start))
        case MultiBinary():
            return gym.MultiBinary(space.shape)

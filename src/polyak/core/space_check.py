"""Check arrays against a space: tree, dtype, shape and range; an error names the leaf, the expected and the received value.

No JAX here: worker processes check observations with this. Of a traced array only shape and dtype are read.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, Space, leaf_keys

FLOAT32_MAX = float(np.finfo(np.float32).max)

# Kinds of NumPy dtypes that are cast without an error, by the kind that they are cast to.
CASTS = {"f": "fiu", "i": "iub", "u": "iub", "b": "b"}
KIND_NAMES = {"f": "floats", "fiu": "floats or integers", "iub": "integers or bools", "b": "bools"}


class InvalidValue(ValueError):
    """An environment returned NaN, infinity, or an array of a wrong shape or range: an error of its values, not of its code."""


@dataclass(frozen=True)
class ArraySpec:
    """The expected path, shape, dtype and range of one array of a value.

    Attributes:
        keys: keys and indices of the array in dicts and tuples; `()` for a value that is one array.
        shape: shape without leading batch dimensions.
        dtype: the dtype that the array is cast to.
        low: the smallest value, a number or an array; None for no bounds.
        high: the largest value.
    """

    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: Any = None
    high: Any = None

    @property
    def path(self) -> str:
        """Its path as errors write it: `camera`, `pair/0`; `""` for a value that is one array."""
        return "/".join(map(str, self.keys))

    def name(self, value: str) -> str:
        """The array's name in errors, such as `obs 'camera'`."""
        return f"{value} {self.path!r}" if self.keys else value


@functools.lru_cache(maxsize=64)
def obs_specs(space: Space) -> tuple[ArraySpec, ...]:
    """The arrays of an observation as the environment counts: Discrete from its `start`; of a Box any finite float."""
    return tuple(_obs_spec(keys, leaf) for keys, leaf in leaf_keys(space))


def _obs_spec(keys: tuple[Any, ...], space: Leaf) -> ArraySpec:
    match space:
        case Discrete():
            return ArraySpec(keys, (), space.dtype, space.start, space.start + space.n - 1)
        case MultiDiscrete():
            low = np.array(space.start)
            return ArraySpec(keys, space.shape, space.dtype, low, low + np.array(space.nvec) - 1)
        case _ if space.dtype.kind == "f":
            return ArraySpec(keys, space.shape, space.dtype, -FLOAT32_MAX, FLOAT32_MAX)
        case _:
            return ArraySpec(keys, space.shape, space.dtype)


def action_specs(spec: EnvSpec) -> tuple[ArraySpec, ...]:
    """The arrays of an agent's action: integers from 0; a Box in float32, finite and within `spec.action_bounds`."""
    return tuple(_action_spec(spec, keys, leaf) for keys, leaf in leaf_keys(spec.action))


def _action_spec(spec: EnvSpec, keys: tuple[Any, ...], space: Leaf) -> ArraySpec:
    match space:
        case Discrete():
            return ArraySpec(keys, (), space.dtype, 0, space.n - 1)
        case MultiDiscrete():
            return ArraySpec(keys, space.shape, space.dtype, 0, np.array(space.nvec) - 1)
        case MultiBinary():
            return ArraySpec(keys, space.shape, space.dtype, 0, 1)
        case Box():
            low, high = (np.clip(bound, -FLOAT32_MAX, FLOAT32_MAX) for bound in spec.action_bounds(space))
            if np.all(low == low.flat[0]) and np.all(high == high.flat[0]):
                # Numbers are compared faster than arrays.
                low, high = float(low.flat[0]), float(high.flat[0])
            return ArraySpec(keys, space.shape, np.dtype(np.float32), low, high)


def read_leaves(name: str, specs: Sequence[ArraySpec], value: Any) -> list[Any]:
    """The leaves of a value, in the order of `specs`; other entries of its dicts are left out.

    Raises:
        ValueError: a leaf is missing.
    """
    leaves = []
    for spec in specs:
        leaf = value
        for depth, key in enumerate(spec.keys):
            try:
                leaf = leaf[key]
            except (KeyError, IndexError, TypeError):
                missing = ArraySpec(spec.keys[: depth + 1], (), spec.dtype).path
                paths = ", ".join(repr(spec.path) for spec in specs)
                got = f"a dict with keys {sorted(map(str, leaf))}" if isinstance(leaf, dict) else describe(leaf)
                raise ValueError(f"{name} must be a tree of {paths}; {missing!r} is missing, got {got}") from None
        leaves.append(leaf)
    return leaves


def check_no_others(name: str, specs: Sequence[ArraySpec], value: Any) -> None:
    """Check that the dicts and tuples of a value that `read_leaves` accepts have only the entries of `specs`.

    Raises:
        ValueError: with the first such entry.
    """
    _check_no_others(name, _tree_of(tuple([spec.keys for spec in specs])), value, ())


@functools.lru_cache(maxsize=64)
def _tree_of(paths: tuple[tuple[Any, ...], ...]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for keys in paths:
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
    return tree


def _check_no_others(name: str, tree: dict[Any, Any], value: Any, keys: tuple[Any, ...]) -> None:
    if tree and len(value) != len(tree):
        place = f" at {'/'.join(map(str, keys))!r}" if keys else ""
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a tuple of length {len(tree)}{place}, got length {len(value)}")
        unknown = next(key for key in value if key not in tree)
        raise ValueError(f"{name} must be a dict with keys {list(tree)}{place}; {unknown!r} is not in the space")
    for key, part in tree.items():
        if part:
            _check_no_others(name, part, value[key], (*keys, key))


def check_dtype(name: str, array: Any, dtype: np.dtype[Any], *, exact: bool = False) -> None:
    """Check that an array can be cast to `dtype`: integers to floats, and integers or bools to integers.

    Args:
        exact: integers are not cast to floats.

    Raises:
        TypeError: the array cannot be cast, or the value is not an array.
    """
    got = getattr(array, "dtype", None)
    if got == dtype:
        return
    # The floats of ml_dtypes, such as bfloat16, have a kind of their own.
    kind = "" if got is None else "f" if "float" in str(got) else getattr(got, "kind", "")
    kinds = "f" if exact and dtype.kind == "f" else CASTS.get(dtype.kind, "")
    if not kind or kind not in kinds:
        raise TypeError(
            f"{name} must have dtype {dtype} ({KIND_NAMES.get(kinds, 'nothing else')}), got {got or describe(array)}"
        )


def check_shape(name: str, array: Any, shape: tuple[int, ...], *, hint: str = "") -> None:
    """Check the shape of an array.

    Args:
        hint: appended to the error.

    Raises:
        ValueError: the shape is another.
    """
    if np.shape(array) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {np.shape(array)}{hint}")


def check_step_arrays(name: str, time_step: Any, shape: tuple[int, ...]) -> None:
    """Check that rewards of a `TimeStep` are floats and flags bools (~1 is -2), all of one shape.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    for part in ("reward", "terminated", "truncated", "first"):
        array = getattr(time_step, part)
        check_shape(f"{name}.{part}", array, shape)
        check_dtype(f"{name}.{part}", array, np.dtype(np.float32 if part == "reward" else bool), exact=True)


def to_array(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, exact: bool = False) -> npt.NDArray[Any]:
    """A value as a NumPy array of the shape, in a dtype that can be cast to `dtype` (see `check_dtype`).

    Raises:
        TypeError: the value is no array, or has another kind of number.
        ValueError: the shape is another, or values are masked.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} is not an array: {error}; got {describe(value)}") from None
    check_dtype(name, array if array.dtype.kind in "fiubc" else value, dtype, exact=exact)
    check_shape(name, array, shape)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(f"{name} must be complete, got {np.ma.count_masked(value)} masked values")
    return array


def check_range(name: str, array: npt.NDArray[Any], low: Any, high: Any, *, batched: bool = False) -> None:
    """Check that `low <= array <= high`, elementwise.

    Args:
        batched: the first axis counts environments.

    Raises:
        ValueError: with the first value that is outside, or NaN.
    """
    if message := range_error(name, array, low, high, batched=batched):
        raise ValueError(message)


def range_error(name: str, array: npt.NDArray[Any], low: Any, high: Any, *, batched: bool = False) -> str:
    """The message of `check_range`'s error; `""` where all values are inside."""
    # In float16 a bound of float32 is infinity.
    array = array.astype(np.float32) if array.dtype == np.float16 else array
    inside = (array >= low) & (array <= high)
    if inside.all():
        return ""
    index = tuple(np.argwhere(~inside)[0].tolist())
    low, high = (np.broadcast_to(bound, array.shape)[index] for bound in (low, high))
    expected = "finite" if low <= -FLOAT32_MAX and high >= FLOAT32_MAX else f"in [{low:g}, {high:g}]"
    return f"{name} must be {expected}, got {array[index]}{_position(index, batched)}"


def _position(index: tuple[int, ...], batched: bool) -> str:
    place = index[1:] if batched else index
    return (f" in environment {index[0]}" if batched else "") + (f" at {list(place)}" if place else "")


def describe(value: Any) -> str:
    """A value in few words, for an error."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{type(value).__name__} {value!r:.80}"

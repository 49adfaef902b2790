"""What Python answers, held against what was declared: structure, shape, kind of number, NaN, bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import (
    Box,
    Dict,
    Discrete,
    EnvSpec,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    leaf_spaces,
    map_space,
)
from polyak.core.types import PyTree

Numbers: TypeAlias = npt.NDArray[Any]

# What is cast without a word, by kind: floats of another width and integers to floats; integers of another width, where the
# value fits, and truth values to integers.
CASTS = {"f": "fiu", "i": "iub", "u": "iub", "b": "b"}
KINDS = {"f": "floats or integers", "i": "integers or bools", "u": "integers or bools", "b": "bools"}

# Of a signed integer: the unsigned one of its width, and its own greatest number.
UNSIGNED = {np.dtype(f"i{size}"): (np.dtype(f"u{size}"), np.iinfo(f"i{size}").max) for size in (1, 2, 4, 8)}
# So many numbers are looked at faster in Python than in NumPy.
FEW = 8


@runtime_checkable
class Declared(Protocol):
    """An array, or what describes one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one environment."""
        ...

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        ...


@dataclass(frozen=True)
class ArraySpec:
    """One array of an answer.

    Attributes:
        path: where it stands, or `""`.
        shape: without the batch.
        dtype: to be cast to.
        low: the least value, a number or an array.
        high: the greatest.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: Any
    high: Any

    @property
    def unbounded(self) -> bool:
        """Every number that the dtype holds."""
        return self.dtype.kind not in "fiu"


class OutputChecker:
    """Checks one part of an answer (`"action"`, `"carry"`, `"info"`) of one policy.

    Args:
        who: the policy, for messages.
        what: the part.
        tree: of `ArraySpec`.
        check: look at NaN and bounds too.
        clip: what is out of bounds is clipped and counted, not refused.
    """

    def __init__(self, who: str, what: str, tree: PyTree, *, check: bool = True, clip: bool = False) -> None:
        self._who, self._what, self._check, self._clip = who, what, check, clip
        self._wanted: list[ArraySpec]
        self.structure: Any  # jaxlib's stubs leave out how it flattens what is like it
        self._wanted, self.structure = jax.tree.flatten(tree)
        self._is_leaf = self.structure == jax.tree.structure(0)
        self.clipped = 0

    def shapes(self, batch_size: int) -> PyTree:
        """The tree that a batch has, as shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct((batch_size, *wanted.shape), wanted.dtype) for wanted in self._wanted]
        return jax.tree.unflatten(self.structure, leaves)

    def batch(self, value: Any, batch_size: int) -> PyTree:
        """A batched answer, in the declared dtypes: copies, for the policy may fill the same arrays again.

        Raises:
            TypeError, ValueError: the policy, the part, what was got, what is wanted.
        """
        if self._is_leaf:
            wanted = self._wanted[0]
            return self._bounded(wanted, self._array(wanted, value, (batch_size, *wanted.shape), ""))
        leaves = [
            self._bounded(wanted, self._array(wanted, leaf, (batch_size, *wanted.shape), ""))
            for wanted, leaf in zip(self._wanted, self._leaves(value, ""), strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def row(self, value: Any, i: int) -> list[Numbers]:
        """The answer for environment i alone, as copies for `stacked`.

        Raises:
            TypeError, ValueError: structure, shape or kind are wrong.
        """
        where = f" of environment {i}"
        leaves = zip(self._wanted, self._leaves(value, where), strict=True)
        return [self._array(wanted, leaf, wanted.shape, where).copy() for wanted, leaf in leaves]

    def stacked(self, rows: Sequence[list[Numbers]]) -> PyTree:
        """What `row` gave for each environment, as a batch.

        Raises:
            ValueError: as `batch`.
        """
        columns = zip(self._wanted, zip(*rows, strict=True), strict=True)
        leaves = [self._bounded(wanted, np.array(column)) for wanted, column in columns]
        return jax.tree.unflatten(self.structure, leaves)

    def _leaves(self, value: Any, where: str) -> list[Any]:
        if self._is_leaf:
            return [value]
        try:
            leaves: list[Any] = self.structure.flatten_up_to(value)
        except (ValueError, TypeError) as error:
            empty = not self._wanted
            wanted = "()" if empty else str(jax.tree.unflatten(self.structure, [_described(w) for w in self._wanted]))
            raise ValueError(
                f"{self._who}: {self._what}{where} has the wrong structure: got {_short(value)}, wanted {wanted} ({error})"
            ) from None
        return leaves

    def _array(self, wanted: ArraySpec, value: Any, shape: tuple[int, ...], where: str) -> Numbers:
        """As an array of the right shape and a kind that can be cast."""
        array = value if type(value) is np.ndarray else self._converted(wanted, value, where)
        if array.dtype != wanted.dtype and array.dtype.kind not in CASTS.get(wanted.dtype.kind, ""):
            kinds = KINDS.get(wanted.dtype.kind, "nothing else")
            raise TypeError(f"{self._name(wanted, where)} has dtype {array.dtype}, wanted {wanted.dtype} ({kinds})")
        if array.shape != shape:
            raise ValueError(f"{self._name(wanted, where)} has shape {array.shape}, wanted {shape} of {wanted.dtype}")
        return array

    def _converted(self, wanted: ArraySpec, value: Any, where: str) -> Numbers:
        # A tuple is structure, None is an answer forgotten: NumPy would make arrays of both.
        if value is None or isinstance(value, tuple | dict | str | bytes):
            raise TypeError(f"{self._name(wanted, where)} is {_short(value)}, wanted an array of {wanted.dtype}")
        try:
            return np.asarray(value)
        except (ValueError, TypeError) as error:
            raise TypeError(f"{self._name(wanted, where)} is no array: {error}; got {_short(value)}") from error

    def _bounded(self, wanted: ArraySpec, array: Numbers) -> Numbers:
        """Within bounds, or clipped; then cast, which copies."""
        dtype = wanted.dtype
        if dtype.kind == "f" and array.dtype != dtype:
            # What is beyond float32 becomes infinite, and is then out of bounds.
            with np.errstate(over="ignore"):
                cast = array.astype(dtype)
            if self._check and wanted.high is np.inf and (lost := np.isinf(cast) & ~np.isinf(array)).any():
                raise ValueError(f"{self._name(wanted)} holds what no {dtype} can{_rows(lost)}: {_short(array)}")
            array = cast
        if self._check and not wanted.unbounded and not _within(wanted, array):
            array = self._refused_or_clipped(wanted, array)
        return array.astype(dtype)

    def _refused_or_clipped(self, wanted: ArraySpec, array: Numbers) -> Numbers:
        low, high = wanted.low, wanted.high
        if np.isnan(array).any():
            raise ValueError(f"{self._name(wanted)} holds NaN{_rows(np.isnan(array))}: {_short(array)}")
        outside = (array < low) | (array > high)
        if not self._clip:
            raise ValueError(
                f"{self._name(wanted)} lies outside [{_short(low)}, {_short(high)}]{_rows(outside)}: {_short(array)}"
            )
        self.clipped += int(outside.sum())
        # Bounds that a narrow integer cannot hold are bounds all the same.
        return np.clip(array if array.dtype.kind == "f" else array.astype(np.int64), low, high)

    def _name(self, wanted: ArraySpec, where: str = "") -> str:
        path = f" at {wanted.path!r}" if wanted.path else ""
        return f"{self._who}: {self._what}{path}{where}"


def _within(wanted: ArraySpec, array: Numbers) -> bool:
    """False also where a value is NaN."""
    low, high = wanted.low, wanted.high
    if type(low) is np.ndarray or type(high) is np.ndarray:
        return bool(np.logical_and.reduce((array >= low) & (array <= high), axis=None))
    flat = array.reshape(-1)
    if len(flat) <= FEW:
        return all(low <= number <= high for number in flat.tolist())
    if low == 0 and array.dtype in UNSIGNED:
        unsigned, greatest = UNSIGNED[array.dtype]
        # Read without their sign, negative numbers are greater than all others: one look instead of two.
        return bool(np.maximum.reduce(flat.view(unsigned)) <= min(high, greatest))
    return bool(np.minimum.reduce(flat) >= low and np.maximum.reduce(flat) <= high)


def action_specs(spec: EnvSpec) -> PyTree:
    """Of an agent's actions: counted from 0, a Box within its bounds or, where it is rescaled, within [-1, 1]."""
    rescaled = spec.action_scaling == "rescale"

    def of_leaf(space: Leaf, path: str) -> ArraySpec:
        match space:
            case Discrete():
                return ArraySpec(path, (), space.dtype, 0, space.n - 1)
            case MultiDiscrete():
                return ArraySpec(path, space.shape, space.dtype, 0, np.array(space.nvec) - 1)
            case MultiBinary():
                return ArraySpec(path, space.shape, space.dtype, 0, 1)
            case Box():
                if rescaled:
                    return ArraySpec(path, space.shape, np.dtype(np.float32), -1.0, 1.0)
                return ArraySpec(path, space.shape, np.dtype(np.float32), *_finite_bounds(space))

    return _with_paths(of_leaf, spec.action)


def forbidden(spec: EnvSpec, action: PyTree, mask: PyTree) -> str:
    """Which actions of a batch, within bounds, their mask does not allow, in words; "" if all are allowed.

    A row in which nothing is allowed, as after the end of an episode, is not looked at.
    """
    parts: list[tuple[Any, ...]] = []
    map_space(lambda *part: parts.append(part), spec.action, action, mask)
    named = zip(leaf_spaces(spec.action), parts, strict=True)
    return "; ".join(text for (path, _), part in named if part[2] is not None and (text := _forbidden_in(path, *part)))


def _forbidden_in(path: str, space: Leaf, action: Numbers, mask: Any) -> str:
    if not isinstance(space, Discrete | MultiDiscrete):
        return ""
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    parts = np.split(np.asarray(mask), np.cumsum(sizes)[:-1], axis=1)
    columns = zip(parts, action.reshape(len(action), -1).T, strict=True)
    wrong = [~part[np.arange(len(part)), chosen] & part.any(axis=1) for part, chosen in columns]
    rows = np.flatnonzero(np.logical_or.reduce(wrong))
    return ", ".join(f"{f'{path!r}: ' if path else ''}{_short(action[i])} in environment {i}" for i in rows[:5])


def obs_specs(spec: EnvSpec) -> PyTree:
    """Of observations, whose bounds nobody keeps."""
    return _with_paths(lambda space, path: _any_number(path, space.shape, space.dtype), spec.obs)


def specs_like(tree: PyTree) -> PyTree:
    """Of a declared carry or info: a tree of spaces, shapes or arrays, each for one environment; bounds are not looked at.

    Raises:
        TypeError: a leaf is none of these.
    """

    def of_leaf(path: Any, leaf: Any) -> PyTree:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Dict | Tuple):
            return map_space(lambda space: _any_number(name, space.shape, space.dtype), leaf)
        if not isinstance(leaf, Declared):
            at = f" at {name!r}" if name else ""
            raise TypeError(f"must declare spaces, shapes with dtypes, or arrays{at}, e.g. np.int32(0), got {_short(leaf)}")
        # What JAX makes of 64 bits, unless it is told to keep them.
        return _any_number(name, tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def initial_carry_values(tree: PyTree, batch_size: int) -> PyTree:
    """What a declared carry begins with: a declared array's own values, else zeros; a row for each environment."""

    def zeros(shape: tuple[int, ...], dtype: Any) -> Numbers:
        return np.zeros((batch_size, *shape), dtype)

    def of_leaf(leaf: Any) -> PyTree:
        if isinstance(leaf, np.ndarray | np.generic | jax.Array):
            array = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
            return np.repeat(array[None], batch_size, axis=0)
        if isinstance(leaf, Dict | Tuple):
            return map_space(lambda space: zeros(space.shape, space.dtype), leaf)
        return zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(of_leaf, tree)


def _any_number(path: str, shape: tuple[int, ...], dtype: Any) -> ArraySpec:
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return ArraySpec(path, shape, dtype, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return ArraySpec(path, shape, dtype, -np.inf, np.inf)


def _finite_bounds(space: Box) -> tuple[Any, Any]:
    """As numbers where all are equal, which is checked faster; infinite ones as the largest float: no action is infinite."""
    largest = float(np.finfo(np.float32).max)
    low, high = (np.clip(bound.astype(np.float32), -largest, largest) for bound in (space.low, space.high))
    if np.all(low == low.flat[0]) and np.all(high == high.flat[0]):
        return float(low.flat[0]), float(high.flat[0])
    return low, high


def _with_paths(function: Callable[[Leaf, str], ArraySpec], space: Space, path: str = "") -> PyTree:
    if isinstance(space, Dict):
        return {name: _with_paths(function, part, f"{path}/{name}" if path else name) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_with_paths(function, part, f"{path}/{i}" if path else str(i)) for i, part in enumerate(space.spaces))
    return function(space, path)


def _rows(wrong: Numbers) -> str:
    """Which environments, of a batch in which something is wrong."""
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    return f" in environment {', '.join(map(str, rows[:5]))}" + (" and more" if len(rows) > 5 else "")


def _described(wanted: ArraySpec) -> str:
    return f"{wanted.dtype}[{','.join(map(str, wanted.shape))}]"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."

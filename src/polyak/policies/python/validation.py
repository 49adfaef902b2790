"""What Python answers, held against what was declared: structure, shape, kind of number, NaN, bounds."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import ArraySpec, check_range, to_array
from polyak.core.spaces import Dict, Discrete, EnvSpec, Leaf, MultiDiscrete, Tuple, leaf_spaces, map_space
from polyak.core.types import PyTree

Numbers: TypeAlias = npt.NDArray[Any]

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
        """As an array of the right shape and a dtype that can be cast."""
        if type(value) is np.ndarray and value.shape == shape and value.dtype == wanted.dtype:
            return value
        name = self._name(wanted, where)
        # A tuple is structure, None a forgotten return value: NumPy would make arrays of both.
        if value is None or isinstance(value, tuple | dict | str | bytes):
            raise TypeError(f"{name} must be an array of {wanted.dtype}, got {_short(value)}")
        return to_array(name, value, shape, wanted.dtype)

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
        if self._check and wanted.low is not None and not _within(wanted, array):
            array = self._refused_or_clipped(wanted, array)
        return array.astype(dtype)

    def _refused_or_clipped(self, wanted: ArraySpec, array: Numbers) -> Numbers:
        low, high = wanted.low, wanted.high
        # NaN cannot be clipped.
        wrong = np.where(np.isnan(array), array, low) if self._clip else array
        check_range(self._name(wanted), wrong, low, high, batched=True)
        outside = (array < low) | (array > high)
        self.clipped += int(outside.sum())
        # Bounds that a narrow integer cannot hold are bounds all the same.
        return np.clip(array if array.dtype.kind == "f" else array.astype(np.int64), low, high)

    def _name(self, wanted: ArraySpec, where: str = "") -> str:
        return f"{self._who}: {wanted.name(self._what)}{where}"


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
    dtype, keys = np.dtype(dtype), (path,) if path else ()
    if dtype.kind in "iu":
        return ArraySpec(keys, shape, dtype, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return ArraySpec(keys, shape, dtype, -np.inf, np.inf) if dtype.kind == "f" else ArraySpec(keys, shape, dtype)


def _rows(wrong: Numbers) -> str:
    """Which environments, of a batch in which something is wrong."""
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    return f" in environment {', '.join(map(str, rows[:5]))}" + (" and more" if len(rows) > 5 else "")


def _described(wanted: ArraySpec) -> str:
    return f"{wanted.dtype}[{','.join(map(str, wanted.shape))}]"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."

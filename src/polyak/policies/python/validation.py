"""Checks the outputs of Python policies against their declaration: structure, shape, dtype, NaN, bounds."""

from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import ArraySpec, check_range, to_array
from polyak.core.spaces import Dict, Discrete, EnvSpec, Leaf, MultiDiscrete, Tuple, leaf_spaces, map_space
from polyak.core.types import PolicyStep, PyTree

Numbers: TypeAlias = npt.NDArray[Any]

# Values that NumPy would make an array of, or hide inside one.
NOT_ARRAYS = (tuple, dict, str, bytes, np.ma.MaskedArray, PolicyStep, Coroutine, Generator)


class OutputChecker:
    """Checks one part (`"action"`, `"carry"`, `"info"`) of the output of a Python policy.

    Args:
        policy: name of the policy, for messages.
        part: the part.
        tree: a tree of `ArraySpec`.
        check: check NaN and bounds too.
        clip: numbers out of bounds are clipped and counted instead of rejected.
    """

    def __init__(self, policy: str, part: str, tree: PyTree, *, check: bool = True, clip: bool = False) -> None:
        self._policy, self._part, self._check, self._clip = policy, part, check, clip
        self._specs: list[ArraySpec]
        self.structure: Any  # jaxlib's stubs lack `flatten_up_to`
        self._specs, self.structure = jax.tree.flatten(tree)
        self._is_leaf = self.structure == jax.tree.structure(0)
        self.clipped = 0

    def shapes(self, batch_size: int) -> PyTree:
        """The tree of a batch, as shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct((batch_size, *spec.shape), spec.dtype) for spec in self._specs]
        return jax.tree.unflatten(self.structure, leaves)

    def batch(self, value: Any, batch_size: int) -> PyTree:
        """A batched output in the declared dtypes: copies, because the policy may fill the same arrays again.

        Raises:
            TypeError, ValueError: the message has the policy, the part, the returned value and the expected one.
        """
        leaves = [
            self._check_bounds(spec, self._array(spec, leaf, (batch_size, *spec.shape), ""))
            for spec, leaf in zip(self._specs, self._leaves(value, ""), strict=True)
        ]
        return leaves[0] if self._is_leaf else jax.tree.unflatten(self.structure, leaves)

    def row(self, value: Any, i: int) -> list[Numbers]:
        """The output for environment i alone, as copies for `stack`.

        Raises:
            TypeError, ValueError: structure, shape or kind are wrong.
        """
        where = f" of environment {i}"
        leaves = zip(self._specs, self._leaves(value, where), strict=True)
        return [self._array(spec, leaf, spec.shape, where).copy() for spec, leaf in leaves]

    def stack(self, rows: Sequence[list[Numbers]]) -> PyTree:
        """The `row`s of all environments as a batch.

        Raises:
            ValueError: as `batch`.
        """
        columns = zip(self._specs, zip(*rows, strict=True), strict=True)
        leaves = [self._check_bounds(spec, np.array(column)) for spec, column in columns]
        return jax.tree.unflatten(self.structure, leaves)

    def _leaves(self, value: Any, where: str) -> list[Any]:
        if self._is_leaf:
            return [value]
        try:
            leaves: list[Any] = self.structure.flatten_up_to(value)
        except (ValueError, TypeError) as error:
            empty = not self._specs
            wanted = "()" if empty else str(jax.tree.unflatten(self.structure, [_describe_spec(w) for w in self._specs]))
            raise ValueError(
                f"{self._policy}: {self._part}{where} has the wrong structure: got {_short(value)}, wanted {wanted} ({error})"
            ) from None
        return leaves

    def _array(self, spec: ArraySpec, value: Any, shape: tuple[int, ...], where: str) -> Numbers:
        """Convert to an array of the right shape and a dtype that can be cast."""
        if type(value) is np.ndarray and value.shape == shape and value.dtype == spec.dtype:
            return value
        name = self._name(spec, where)
        # A tuple is structure, None a forgotten return value: NumPy would make arrays of both.
        if value is None or isinstance(value, NOT_ARRAYS):
            raise TypeError(f"{name} must be an array of {spec.dtype}, got {_short(value)}")
        if self._part == "action" and spec.dtype.kind in "iu":
            value = _to_integers(value)
        return to_array(name, value, shape, spec.dtype)

    def _check_bounds(self, spec: ArraySpec, array: Numbers) -> Numbers:
        """Within bounds, or clipped; then cast, which copies."""
        dtype = spec.dtype
        if dtype.kind == "f" and array.dtype != dtype:
            # Numbers beyond float32 become infinite, and are then out of bounds.
            with np.errstate(over="ignore"):
                cast = array.astype(dtype)
            if self._check and spec.high is np.inf and (lost := np.isinf(cast) & ~np.isinf(array)).any():
                raise ValueError(f"{self._name(spec)} holds numbers beyond {dtype}{_rows(lost)}: {_short(array)}")
            array = cast
        # Negated so that NaN, which is no smaller and no larger, is outside.
        if self._check and spec.low is not None and np.count_nonzero((array >= spec.low) & (array <= spec.high)) < array.size:
            array = self._clip_or_raise(spec, array)
        return array.astype(dtype)

    def _clip_or_raise(self, spec: ArraySpec, array: Numbers) -> Numbers:
        low, high = spec.low, spec.high
        # NaN cannot be clipped.
        wrong = np.where(np.isnan(array), array, low) if self._clip else array
        check_range(self._name(spec), wrong, low, high, batched=True)
        outside = (array < low) | (array > high)
        self.clipped += int(outside.sum())
        # A narrow integer dtype may not hold the bounds.
        return np.clip(array if array.dtype.kind == "f" else array.astype(np.int64), low, high)

    def _name(self, spec: ArraySpec, where: str = "") -> str:
        return f"{self._policy}: {spec.name(self._part)}{where}"


def describe_masked_actions(spec: EnvSpec, action: PyTree, mask: PyTree) -> str:
    """The actions of a batch that their mask does not allow, for an error; "" if all are allowed.

    An environment in which nothing is allowed, as after the end of an episode, is skipped.
    """
    parts: list[tuple[Any, ...]] = []
    map_space(lambda *part: parts.append(part), spec.action, action, mask)
    named = zip(leaf_spaces(spec.action), parts, strict=True)
    return "; ".join(text for (path, _), part in named if part[2] is not None and (text := _describe_masked_part(path, *part)))


def _describe_masked_part(path: str, space: Leaf, action: Numbers, mask: Any) -> str:
    if not isinstance(space, Discrete | MultiDiscrete):
        return ""
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    parts = np.split(np.asarray(mask), np.cumsum(sizes)[:-1], axis=1)
    columns = zip(parts, action.reshape(len(action), -1).T, strict=True)
    wrong = [~part[np.arange(len(part)), choice] & part.any(axis=1) for part, choice in columns]
    rows = np.flatnonzero(np.logical_or.reduce(wrong))
    return ", ".join(f"{f'{path!r}: ' if path else ''}{_short(action[i])} in environment {i}" for i in rows[:5])


def specs_like(tree: PyTree) -> PyTree:
    """The specs of a declared carry or info: a tree of spaces, shapes or arrays, each for one environment; without bounds.

    Raises:
        TypeError: a leaf is none of these, or no number: a key or a text.
    """

    def of_leaf(path: Any, leaf: Any) -> PyTree:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Dict | Tuple):
            return map_space(lambda space: _any_number(name, space.shape, space.dtype), leaf)
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
            at, of = f" at {name!r}" if name else "", "spaces, shapes with dtypes, or arrays of numbers"
            raise TypeError(f"must declare {of}{at}, e.g. np.int32(0), got {_short(leaf)}")
        # In JAX 64 bits become 32, unless jax_enable_x64 is set.
        return _any_number(name, tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def initial_carry_values(tree: PyTree, batch_size: int) -> PyTree:
    """The first values of a declared carry: a declared array's own values, else zeros; for each environment."""

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
    """The environments in which something is wrong, for an error."""
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
    return f" in environment {', '.join(map(str, rows[:5]))}" + (" and more" if len(rows) > 5 else "")


def _describe_spec(spec: ArraySpec) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"


def _to_integers(value: Any) -> Any:
    """Floats without a fraction, such as the labels of a classifier, as integers; everything else unchanged."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return value
    if array.dtype.kind != "f":
        return value
    with np.errstate(invalid="ignore"):
        integers = array.astype(np.int64)
    return integers if np.array_equal(integers, array) else value


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."

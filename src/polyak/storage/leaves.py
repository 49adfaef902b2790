"""The leaves of a pytree: how a checkpoint names, stores and compares them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.types import copy_buffers
from polyak.storage.json import DTYPES

Kind = Literal["array", "key", "bool", "int", "float"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""The number of uint32 words of a key, by PRNG implementation."""

_SCALARS: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
_MOST_DIFFERENCES = 200

_PART = 2**20
"""Number of values that are checked for NaN at once."""


class CheckpointError(Exception):
    """A checkpoint cannot be saved, is damaged, or does not match."""


@dataclass(frozen=True)
class Leaf:
    """A leaf without its data.

    Attributes:
        path: path in the tree, as `jax.tree_util.keystr` writes it: `.agent['params'].kernel[0]`.
        kind: an array, typed PRNG keys, or a Python scalar.
        dtype: dtype of an array.
        shape: shape of an array, or of an array of keys.
        impl: name of the implementation of keys.
        value: value of a Python scalar.
        segments: names of the files with the data, if the data are not in the file of arrays.
    """

    path: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    impl: str = ""
    value: Any = None
    segments: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        """True if the leaf has data; a Python scalar is in the manifest."""
        return self.kind in ("array", "key")

    @property
    def in_file(self) -> bool:
        """True if the data are in the file of arrays."""
        return self.is_array and not self.segments

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the stored numbers: keys are rows of uint32 words."""
        return (*self.shape, KEY_WORDS[self.impl]) if self.kind == "key" else self.shape

    @property
    def data_dtype(self) -> np.dtype[Any]:
        """Dtype of the stored numbers."""
        return DTYPES["uint32" if self.kind == "key" else self.dtype]

    @property
    def data_nbytes(self) -> int:
        """Number of bytes of the data."""
        return prod(self.data_shape) * self.data_dtype.itemsize if self.is_array else 0

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file of arrays."""
        return self.data_nbytes if self.in_file else 0

    def __str__(self) -> str:
        if not self.is_array:
            return f"Python {self.kind}"
        name = self.dtype if self.kind == "array" else f"key<{self.impl}>"
        return f"{name}[{','.join(map(str, self.shape))}]"


def leaf_name(path: str) -> str:
    """Return the name of a leaf in errors; the only leaf of a tree has an empty path."""
    return path or "the tree"


def flatten(tree: Any, prefix: str = "", *, concrete: bool = False) -> tuple[list[tuple[Leaf, Any]], Any]:
    """Return each leaf of the tree (array, `ShapeDtypeStruct`, key, Python scalar) with its description, and the structure.

    Args:
        prefix: prefix of all paths.
        concrete: leaves must have values, so a `ShapeDtypeStruct` is rejected.

    Raises:
        CheckpointError: a leaf has another type, or two leaves have the same path.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [(prefix + jax.tree_util.keystr(path), value) for path, value in leaves]
    described = [(_describe(path, value, concrete), value) for path, value in named]
    if len({leaf.path for leaf, _ in described}) < len(described):
        paths = [leaf.path for leaf, _ in described]
        raise CheckpointError(f"two leaves have the same path {next(p for p in paths if paths.count(p) > 1)!r}")
    return described, structure


def _describe(path: str, value: Any, concrete: bool) -> Leaf:
    if not path.isprintable():
        raise CheckpointError(f"leaf {path!r}: a path must be printable")
    if type(value) in _SCALARS:
        return Leaf(path, _SCALARS[type(value)], value=value)
    known = isinstance(value, jax.Array | np.ndarray | np.generic) or (isinstance(value, jax.ShapeDtypeStruct) and not concrete)
    if not known:
        raise CheckpointError(
            f"{leaf_name(path)} must be an array, PRNG keys, or a bool, int or float, got a {type(value).__name__}"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Leaf(path, "key", shape=value.shape, impl=_implementation(path, value.dtype))
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise CheckpointError(f"{leaf_name(path)} is split over hosts; gather it first")
    if str(value.dtype) not in DTYPES:
        raise CheckpointError(f"{leaf_name(path)} must be a native number or bool, got dtype {value.dtype}")
    return Leaf(path, "array", dtype=str(value.dtype), shape=value.shape)


@cache
def _key_dtypes() -> dict[Any, str]:
    return {jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype: impl for impl in KEY_WORDS}


def _implementation(path: str, dtype: Any) -> str:
    try:
        return _key_dtypes()[dtype]
    except KeyError:
        raise CheckpointError(f"{leaf_name(path)} must be keys of {', '.join(KEY_WORDS)}, got {dtype}") from None


def to_host(value: Any) -> npt.NDArray[Any]:
    """Return the numbers of an array or of keys, contiguous in memory."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value, order="C")


def is_finite(array: npt.NDArray[Any]) -> bool:
    """Return True if an array has no NaN and no infinity; integers and bools are always finite."""
    if array.dtype.kind in "biu" or "int" in array.dtype.name:
        return True
    # In parts: the flags of a complete replay would take a quarter of its memory.
    flat = array.reshape(-1)
    return all(np.isfinite(flat[start : start + _PART]).all() for start in range(0, flat.size, _PART))


def from_host(leaf: Leaf, data: npt.NDArray[Any], like: Any) -> Any:
    """Convert stored numbers to a JAX array or keys, or to a NumPy array or scalar if `like` is one."""
    if leaf.kind == "key":
        bits: Any = copy_buffers(data)
        return jax.random.wrap_key_data(bits, impl=leaf.impl)
    if isinstance(like, np.ndarray):
        return data
    return data[()] if isinstance(like, np.generic) else copy_buffers(data)


def differences(saved: Iterable[Leaf], wanted: Iterable[tuple[Leaf, Any]]) -> list[str]:
    """Return one line for each leaf that is missing, extra, or has another kind, dtype or shape."""
    here, there = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf, _ in wanted}
    lines = [f"{leaf_name(p)}: expected {leaf}, missing in the checkpoint" for p, leaf in there.items() if p not in here]
    lines += [f"{leaf_name(p)}: {leaf} in the checkpoint, not expected" for p, leaf in here.items() if p not in there]
    for path, leaf in there.items():
        if path in here and str(here[path]) != str(leaf):
            lines.append(f"{leaf_name(path)}: {here[path]} in the checkpoint, expected {leaf}")
    lines += [
        f"{leaf_name(leaf.path)}: {leaf} needs 64 bits in JAX; set jax_enable_x64, or ask for a NumPy array"
        for leaf, like in wanted
        if leaf.kind == "array" and not _fits(leaf, like)
    ]
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], f"and {more} more"]


def _fits(leaf: Leaf, like: Any) -> bool:
    return isinstance(like, np.ndarray | np.generic) or jax.dtypes.canonicalize_dtype(leaf.dtype) == DTYPES[leaf.dtype]

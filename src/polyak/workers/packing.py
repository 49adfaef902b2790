"""Packs the leaves of a tree into one vector per dtype, which is sent to other processes faster than many small arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array


@dataclass(frozen=True)
class Packing:
    """The layout of a tree's leaves in the packed vectors; plain data.

    Attributes:
        shapes: shapes of the leaves; for a random key, the shape of its key data.
        dtypes: names of the dtypes of the leaves.
        key_impls: implementation of each leaf that is a random key, else None.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    key_impls: tuple[str | None, ...]

    @classmethod
    def of(cls, tree: Any) -> "Packing":
        """Create the layout for trees like this tree of arrays or `ShapeDtypeStruct`s."""
        leaves = [jax.eval_shape(_as_numbers, leaf) for leaf in jax.tree.leaves(tree)]
        impls = [str(jax.random.key_impl(leaf)) if _is_key(leaf) else None for leaf in jax.tree.leaves(tree)]
        return cls(tuple(x.shape for x in leaves), tuple(x.dtype.name for x in leaves), tuple(impls))

    def pack(self, tree: Any) -> dict[str, Array]:
        """Return one vector per dtype; traceable."""
        parts: dict[str, list[Array]] = {}
        for leaf, dtype in zip(jax.tree.leaves(tree), self.dtypes, strict=True):
            parts.setdefault(dtype, []).append(_as_numbers(leaf).ravel())
        return {dtype: jnp.concatenate(leaves) for dtype, leaves in parts.items()}

    def unpack(self, vectors: Mapping[str, npt.NDArray[Any]]) -> Sequence[Any]:
        """Return the leaves as views of the vectors; keys are wrapped by JAX.

        Raises:
            ValueError: the vectors have other names, dtypes or lengths.
        """
        sizes = dict.fromkeys(self.dtypes, 0)
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            sizes[dtype] += prod(shape)
        got = {dtype: f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for dtype, x in vectors.items()}
        wanted = {dtype: f"{dtype}[{size}]" for dtype, size in sizes.items()}
        if got != wanted:
            raise ValueError(f"Packing: vectors must be {wanted}, got {got}")
        leaves: list[Any] = []
        positions = dict.fromkeys(vectors, 0)
        for shape, dtype, impl in zip(self.shapes, self.dtypes, self.key_impls, strict=True):
            start, size = positions[dtype], prod(shape)
            positions[dtype] = start + size
            leaf = vectors[dtype][start : start + size].reshape(shape)
            leaves.append(leaf if impl is None else jax.random.wrap_key_data(jnp.asarray(leaf), impl=impl))
        return leaves


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _as_numbers(leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf

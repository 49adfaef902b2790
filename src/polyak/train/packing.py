"""A tree of arrays as one vector per dtype: a jitted call costs by the leaf, and acting calls once a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from polyak.core.types import PyTree


def packing(tree: PyTree) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]]:
    """`(pack, unpack)` for trees like `tree` (arrays or shapes); both are pure, and `unpack(pack(x))` is x to the bit.

    PRNG keys and leaves that stand alone in their dtype stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        groups.setdefault(f"key {i}" if is_key else str(leaf.dtype), []).append(i)

    def pack(tree: PyTree) -> PyTree:
        values = jax.tree.leaves(tree)
        return [
            values[members[0]] if len(members) == 1 else jnp.concatenate([jnp.ravel(jnp.asarray(values[i])) for i in members])
            for members in groups.values()
        ]

    def unpack(packed: PyTree) -> PyTree:
        values = list(leaves)
        for vector, members in zip(packed, groups.values(), strict=True):
            if len(members) == 1:
                values[members[0]] = vector
                continue
            end = 0
            for i in members:
                start, end = end, end + leaves[i].size
                values[i] = vector[start:end].reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, values)

    return pack, unpack

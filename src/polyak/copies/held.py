"""How copies of a network are held: each in buffers of its own, wide enough to move by small shares."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from polyak.copies.follow import Follow
from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables
from polyak.ops.gradients import in_float32


@struct
class Shared:
    """The copy that several workers train.

    Attributes:
        variables: the weights and statistics.
        optimizer_state: of the one optimiser, or `()` where each worker keeps its own.
        version: gradient steps taken.
        dropped: pushes refused because they were too stale.
    """

    variables: Variables
    optimizer_state: PyTree
    version: UInt32[Array, ""]
    dropped: UInt32[Array, ""]

    @classmethod
    def fresh(cls, variables: Variables, optimizer_state: PyTree) -> "Shared":
        """A real copy of these, with nothing counted."""
        return cls(copied(variables), optimizer_state, jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def with_stats(self, stats: PyTree) -> "Shared":
        """With a real copy of these statistics."""
        variables = dataclasses.replace(self.variables, stats=jax.tree.map(lambda x: jnp.array(x, copy=True), stats))
        return dataclasses.replace(self, variables=variables)


def copied(tree: Variables) -> Variables:
    """The same in new buffers."""
    real: Variables = jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
    return real


def held_for(online: Variables, follow: Follow) -> Variables:
    """A target's first value: a real copy, float32 at least where it moves by small shares."""
    held = copied(online)
    params = in_float32(held.params) if follow.is_soft else held.params
    stats = in_float32(held.stats) if follow.is_soft_on_stats else held.stats
    return Variables(params, stats, held.graph)


def in_dtypes_of(held: Variables, like: Variables) -> Variables:
    """As the network takes them."""
    cast: Variables = jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), held, like)
    return cast


def described(variables: Variables) -> str:
    """How large they are: `72 parameters (float32), 4 statistics`."""
    params = jax.tree.leaves(variables.params)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in params})) or "none"
    stats = sum(leaf.size for leaf in jax.tree.leaves(variables.stats))
    return f"{sum(leaf.size for leaf in params)} parameters ({dtypes}), {stats} statistics"

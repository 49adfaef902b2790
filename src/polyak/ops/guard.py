"""The guard of a training step: what is not finite does not enter the state, is counted, and is named."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from polyak.core.struct import struct
from polyak.core.types import PyTree


@struct
class Guard:
    """Counts of what was refused; part of an agent's state.

    Attributes:
        skipped: gradient steps refused so far.
        in_a_row: updates in a row, up to now, of which not one gradient step was taken because of bad numbers.
        first_bad: which quantity was the first that was not finite in the latest update with one: its place in the agent's
            list of quantities, counted from 1; 0 if there never was one.
    """

    skipped: UInt32[Array, ""]
    in_a_row: UInt32[Array, ""]
    first_bad: UInt32[Array, ""]

    @classmethod
    def fresh(cls) -> "Guard":
        """Nothing refused yet."""
        return cls(*(jnp.zeros((), jnp.uint32) for _ in range(3)))

    def after_update(
        self, skipped: UInt32[Array, ""], steps: int | UInt32[Array, ""], bad: Bool[Array, " quantities"]
    ) -> "Guard":
        """The counts after an update that refused `skipped` of its `steps` gradient steps, with flags of what was bad."""
        any_bad = jnp.any(bad)
        first = jnp.argmax(bad).astype(jnp.uint32) + jnp.uint32(1)
        return Guard(
            skipped=self.skipped + skipped,
            in_a_row=jnp.where(any_bad & (skipped > 0) & (skipped == steps), self.in_a_row + jnp.uint32(1), jnp.uint32(0)),
            first_bad=jnp.where(any_bad, first, self.first_bad),
        )


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """No float in the tree is NaN or infinite."""
    return finite_rows(tree, 0)


def finite_rows(tree: PyTree, ndim: int) -> Bool[Array, "..."]:
    """Which rows, numbered by the first `ndim` axes of all leaves, have no float that is NaN or infinite; one True for all
    where there is no float.
    """
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = [jnp.isfinite(leaf).all(axis=tuple(range(ndim, leaf.ndim))) for leaf in floats]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))

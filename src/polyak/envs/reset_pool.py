"""Initial states that are ready before an episode ends, for environments whose reset costs more than a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from polyak.core.struct import struct
from polyak.core.types import PyTree


@struct
class ResetPool:
    """A ring of P initial states, of which every reset takes another one.

    Attributes:
        states: initial states, leaves `[P, ...]`.
        next: index of the state that the next reset takes.
        ready: number of states that no reset has taken, from `next` on.
    """

    states: PyTree
    next: Int32[Array, ""]
    ready: Int32[Array, ""]

    @classmethod
    def full(cls, states: PyTree) -> "ResetPool":
        """A pool of states that no reset has taken."""
        return cls(states, jnp.int32(0), jnp.int32(_size(states)))

    def take(self, wanted: Bool[Array, " B"]) -> tuple[PyTree, "ResetPool"]:
        """Return states `[B, ...]`, of which those of `wanted` environments are taken, and the pool without them."""
        size, count = _size(self.states), wanted.sum(dtype=jnp.int32)
        index = (self.next + jnp.cumsum(wanted, dtype=jnp.int32) - 1) % size
        states = jax.tree.map(lambda leaf: leaf[index], self.states)
        return states, ResetPool(self.states, (self.next + count) % size, self.ready - count)

    def refill(self, reset: Callable[[PRNGKeyArray, int], PyTree], key: PRNGKeyArray, count: int) -> "ResetPool":
        """Draw `count` states at a time, as long as the pool has room for them.

        Args:
            reset: `(key, count) -> states`, as `Dynamics.reset`.
        """
        size = _size(self.states)

        def has_room(loop: tuple[ResetPool, Array]) -> Bool[Array, ""]:
            return loop[0].ready + count <= size

        def draw(loop: tuple[ResetPool, Array]) -> tuple[ResetPool, Array]:
            pool, turn = loop
            index = (pool.next + pool.ready + jnp.arange(count, dtype=jnp.int32)) % size
            fresh = reset(jax.random.fold_in(key, turn), count)
            states = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), pool.states, fresh)
            return ResetPool(states, pool.next, pool.ready + count), turn + jnp.uint32(1)

        return jax.lax.while_loop(has_room, draw, (self, jnp.uint32(0)))[0]


def _size(states: PyTree) -> int:
    size: int = jax.tree.leaves(states)[0].shape[0]
    return size

"""Initial states that are ready before an episode ends, for environments whose reset costs more than a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from polyak.core.struct import static, struct
from polyak.core.types import PyTree


@struct
class ResetPool:
    """A ring of P initial states, of which every reset takes another one.

    Attributes:
        states: initial states, leaves `[P, ...]`.
        position: index of the state that the next reset takes.
        ready: number of states that no reset has taken, from `position` on.
        size: P.
    """

    states: PyTree
    position: Int32[Array, ""]
    ready: Int32[Array, ""]
    size: int = static()

    @classmethod
    def full(cls, states: PyTree, size: int) -> "ResetPool":
        """A pool of states that no reset has taken."""
        return cls(states, jnp.int32(0), jnp.int32(size), size)

    def take(self, first: Bool[Array, " B"]) -> tuple[PyTree, "ResetPool"]:
        """Return states `[B, ...]`, which `first` environments take, and the pool without these."""
        count = first.sum(dtype=jnp.int32)
        index = (self.position + jnp.cumsum(first, dtype=jnp.int32) - 1) % self.size
        states = jax.tree.map(lambda leaf: leaf[index], self.states)
        return states, ResetPool(self.states, (self.position + count) % self.size, self.ready - count, self.size)

    def refill(self, reset: Callable[[PRNGKeyArray, int], PyTree], key: PRNGKeyArray, count: int) -> "ResetPool":
        """Draw `count` states at a time, as long as the pool has room for them.

        Args:
            reset: `(key, count) -> states`, as `Dynamics.reset`.
        """

        def has_room(loop: tuple[ResetPool, Array]) -> Bool[Array, ""]:
            return loop[0].ready + count <= self.size

        def draw(loop: tuple[ResetPool, Array]) -> tuple[ResetPool, Array]:
            pool, turn = loop
            index = (pool.position + pool.ready + jnp.arange(count, dtype=jnp.int32)) % self.size
            fresh = reset(jax.random.fold_in(key, turn), count)
            states = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), pool.states, fresh)
            return ResetPool(states, pool.position, pool.ready + count, self.size), turn + jnp.uint32(1)

        return jax.lax.while_loop(has_room, draw, (self, jnp.uint32(0)))[0]

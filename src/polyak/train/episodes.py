"""Returns and lengths of episodes, measured from time steps, the same in every loop."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from polyak.core.struct import struct
from polyak.core.types import Score, TimeStep

WINDOW = 100


@struct
class Episodes:
    """The episodes under way: return and length so far of each environment."""

    returns: Float[Array, " B"]
    lengths: UInt32[Array, " B"]

    @classmethod
    def fresh(cls, num_envs: int) -> "Episodes":
        """Every environment at the start of an episode."""
        return cls(jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.uint32))


@struct
class Finished:
    """Sums over the episodes that ended in a stretch of time."""

    count: UInt32[Array, ""]
    returns: Float[Array, ""]
    lengths: UInt32[Array, ""]

    @classmethod
    def none(cls) -> "Finished":
        """No episode."""
        return cls(jnp.zeros((), jnp.uint32), jnp.zeros(()), jnp.zeros((), jnp.uint32))

    def __add__(self, other: "Finished") -> "Finished":
        return jax.tree.map(jnp.add, self, other)


def measure(episodes: Episodes, time_steps: TimeStep) -> tuple[Episodes, Finished]:
    """Go through time steps `[T+1, B]`, of which the first was measured before."""

    def step(now: Episodes, time_step: Score) -> tuple[Episodes, tuple[Array, Array, Array]]:
        returns = jnp.where(time_step.first, 0.0, now.returns + time_step.reward)
        lengths = jnp.where(time_step.first, jnp.uint32(0), now.lengths + jnp.uint32(1))
        ended = time_step.last
        return Episodes(returns, lengths), (ended, jnp.where(ended, returns, 0.0), jnp.where(ended, lengths, jnp.uint32(0)))

    counted = jax.tree.map(lambda x: x[1:], time_steps.counted)
    episodes, (ended, returns, lengths) = jax.lax.scan(step, episodes, counted)
    return episodes, Finished(ended.sum(dtype=jnp.uint32), returns.sum(), lengths.sum(dtype=jnp.uint32))


class Window:
    """Mean return and length over about the last hundred episodes, on the host."""

    def __init__(self) -> None:
        self._finished: deque[tuple[int, float, int]] = deque()
        self.total = 0

    def add(self, finished: Finished) -> None:
        """Take in what ended, and forget what is older than the last hundred."""
        count, returns, lengths = (np.asarray(x).item() for x in (finished.count, finished.returns, finished.lengths))
        if count:
            self._finished.append((count, returns, lengths))
            self.total += count
        while self._finished and sum(c for c, _, _ in self._finished) - self._finished[0][0] >= WINDOW:
            self._finished.popleft()

    def metrics(self) -> dict[str, float]:
        """`rollout/ep_rew_mean` and `rollout/ep_len_mean`; nothing before the first episode has ended."""
        count = sum(c for c, _, _ in self._finished)
        if not count:
            return {}
        return {
            "rollout/ep_rew_mean": sum(r for _, r, _ in self._finished) / count,
            "rollout/ep_len_mean": sum(n for _, _, n in self._finished) / count,
        }

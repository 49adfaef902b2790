"""Episode returns and lengths, computed from time steps in the same way by every loop."""

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
    """Running return and length of the current episode of each environment."""

    returns: Float[Array, " B"]
    lengths: UInt32[Array, " B"]

    @classmethod
    def fresh(cls, num_envs: int) -> "Episodes":
        """Zeros: every environment is at the start of an episode."""
        return cls(jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.uint32))


@struct
class Finished:
    """Number of completed episodes, and the sums of their returns and lengths."""

    count: UInt32[Array, ""]
    returns: Float[Array, ""]
    lengths: UInt32[Array, ""]

    @classmethod
    def none(cls) -> "Finished":
        """Zero episodes."""
        return cls(jnp.zeros((), jnp.uint32), jnp.zeros(()), jnp.zeros((), jnp.uint32))

    def __add__(self, other: "Finished") -> "Finished":
        return jax.tree.map(jnp.add, self, other)


def measure(episodes: Episodes, time_steps: TimeStep) -> tuple[Episodes, Finished]:
    """Update `episodes` with time steps `[T+1, B]`, skipping the first, which the previous call counted."""

    def step(episodes: Episodes, time_step: Score) -> tuple[Episodes, tuple[Array, Array, Array]]:
        returns = jnp.where(time_step.first, 0.0, episodes.returns + time_step.reward)
        lengths = jnp.where(time_step.first, jnp.uint32(0), episodes.lengths + jnp.uint32(1))
        ended = time_step.last
        return Episodes(returns, lengths), (ended, jnp.where(ended, returns, 0.0), jnp.where(ended, lengths, jnp.uint32(0)))

    counted = jax.tree.map(lambda x: x[1:], time_steps.counted)
    episodes, (ended, returns, lengths) = jax.lax.scan(step, episodes, counted)
    return episodes, Finished(ended.sum(dtype=jnp.uint32), returns.sum(), lengths.sum(dtype=jnp.uint32))


class Window:
    """Mean return and length over about the last 100 episodes, on the host."""

    def __init__(self) -> None:
        self._finished: deque[tuple[int, float, int]] = deque()
        self.total = 0

    def add(self, finished: Finished) -> None:
        """Add completed episodes and drop those older than the last 100."""
        count, returns, lengths = (np.asarray(x).item() for x in (finished.count, finished.returns, finished.lengths))
        if count:
            self._finished.append((count, returns, lengths))
            self.total += count
        while self._finished and sum(c for c, _, _ in self._finished) - self._finished[0][0] >= WINDOW:
            self._finished.popleft()

    def metrics(self) -> dict[str, float]:
        """`rollout/ep_rew_mean` and `rollout/ep_len_mean`; empty before the first episode ends."""
        count = sum(c for c, _, _ in self._finished)
        if not count:
            return {}
        return {
            "rollout/ep_rew_mean": sum(r for _, r, _ in self._finished) / count,
            "rollout/ep_len_mean": sum(n for _, _, n in self._finished) / count,
        }

"""The episodes of a replay's rows, so that the first and the last row of an episode are found without a search."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32, UInt32

from polyak.core.struct import struct


@struct
class Episodes:
    """The episodes of the rows in a ring; rows of one environment and episode have one number and are consecutive.

    Time counts the rows of an environment since the first rollout, modulo 2³². An episode that begins writes the time of the
    last row of the episode before; so the newest episode has no end yet, and ends with the newest row.

    Attributes:
        number: the episode of each row, counted per environment, modulo 2³².
        end: the time of the last row of episode n of environment b, in row `n mod slots · B + b`.
        time: the time of the newest row.
    """

    number: UInt32[Array, " capacity"]
    end: UInt32[Array, " capacity"]
    time: UInt32[Array, ""]

    @classmethod
    def init(cls, capacity: int) -> "Episodes":
        """No row has an episode."""
        return cls(jnp.zeros(capacity, jnp.uint32), jnp.zeros(capacity, jnp.uint32), jnp.ones((), jnp.uint32))

    @classmethod
    def partition(cls, axis_name: str) -> Any:
        """Rows are split by environment."""
        split: Any = PartitionSpec(axis_name)
        replicated: Any = PartitionSpec()
        return cls(split, split, replicated)

    def add(self, first: Bool[Array, "T1 B"], position: Int32[Array, ""], slots: int) -> "Episodes":
        """The episodes with T + 1 new rows, of which the first replaces the newest one.

        Args:
            first: the row begins an episode, or a stream.
            position: the slot of the new newest row.
        """
        num_steps, num_envs = len(first) - 1, first.shape[1]
        start = (position - num_steps) % slots
        before = jax.lax.dynamic_slice_in_dim(self.number, (start - 1) % slots * num_envs, num_envs)
        steps, env = jnp.arange(num_steps + 1, dtype=jnp.int32)[:, None], jnp.arange(num_envs, dtype=jnp.int32)[None]
        row = (start + steps) % slots * num_envs + env
        numbers = self.number.at[row].set(before[None] + jnp.cumsum(first, axis=0, dtype=jnp.uint32), unique_indices=True)
        # Read back, so that nothing but this write needs the old numbers, which XLA would copy.
        ended = jnp.where(first, _row(numbers[row] - 1, env, slots, num_envs), len(self.end))  # out of range: not written
        time = self.time + steps.astype(jnp.uint32)
        end = self.end.at[ended].set(jnp.broadcast_to(time - 1, first.shape), mode="drop")
        return Episodes(numbers, end, time[-1, 0])

    def end_stream(
        self, position: Int32[Array, ""], skipped: int, slots: int, num_envs: int, enabled: Bool[Array, ""]
    ) -> "Episodes":
        """The episodes after the end of a stream, whose next row is `skipped` rows after its last one.

        Args:
            position: the slot of the last row.
            enabled: False changes nothing.
        """
        env = jnp.arange(num_envs, dtype=jnp.int32)
        number = jax.lax.dynamic_slice_in_dim(self.number, position * num_envs, num_envs)
        ended = jnp.where(enabled, _row(number, env, slots, num_envs), len(self.end))
        numbers = self.number
        # The rows between are of the next episode, which ends where the next stream begins.
        for slot, added in (((position + skipped - 1) % slots, 1), ((position + skipped) % slots, 2)):
            index = jnp.where(enabled, slot * num_envs + env, len(numbers))
            numbers = numbers.at[index].set(number + jnp.uint32(added), mode="drop")
        return Episodes(
            number=numbers,
            end=self.end.at[ended].set(self.time, mode="drop"),
            time=self.time + jnp.where(enabled, jnp.uint32(skipped), jnp.uint32(0)),
        )

    def bounds(
        self,
        slot: Int32[Array, " N"],
        env: Int32[Array, " N"],
        *,
        position: Int32[Array, ""],
        size: UInt32[Array, ""],
        slots: int,
        num_envs: int,
    ) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
        """The number of rows of the same episode before and after each row, of those in the ring.

        Args:
            position: `ReplayState.position`.
            size: `ReplayState.size`.
        """
        age = (position - slot) % slots
        time = self.time - age.astype(jnp.uint32)
        number, newest = self.number[slot * num_envs + env], self.number[position * num_envs + env]
        last = jnp.where(number == newest, self.time, self.end[_row(number, env, slots, num_envs)])
        first = self.end[_row(number - 1, env, slots, num_envs)] + 1
        # Rows of another episode than those that can be drawn may give any number.
        before = jnp.minimum(time - first, jnp.maximum(size.astype(jnp.int32) - age, 0).astype(jnp.uint32))
        after = jnp.minimum(last - time, age.astype(jnp.uint32))
        return before.astype(jnp.int32), after.astype(jnp.int32)


def _row(number: UInt32[Array, "*N"], env: Int32[Array, "*M"], slots: int, num_envs: int) -> Int32[Array, "*N"]:
    return (number % jnp.uint32(slots)).astype(jnp.int32) * num_envs + env

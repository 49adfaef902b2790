"""Streams: consecutive time steps from one source, such as a run or a data set; a replay may hold several."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from polyak.replay.frames import is_between_streams
from polyak.replay.prioritized import Priorities, num_rows
from polyak.replay.replay import ReplayState


def end_stream(state: ReplayState, num_envs: int) -> ReplayState:
    """End the current stream of a replay: the next rollout that is added begins a new stream.

    The new stream begins with the next block of `num_steps` rows. The rows before it are marked and never drawn: n-step sums,
    frame stacks and sequences do not cross them, and the last observation before them stays. A replay that is empty, or whose
    stream has ended already, is unchanged.

    Args:
        num_envs: B of the rollouts.
    """
    slots, rows, num_steps = state.num_slots(num_envs), state.rows, state.num_steps
    position = state.position.astype(jnp.int32)
    is_same = jnp.all(state.layout == jnp.array([slots, num_envs, num_steps], jnp.uint32))
    is_open = is_same & (state.size > 0) & ~jnp.all(is_between_streams(rows, _rows_at(position - 1, slots, num_envs)))
    # There is at least one row between.
    skipped = max(2, num_steps)
    end = jnp.where(is_open, (position + skipped) % slots, position)

    def mark(old: Array, start: Int32[Array, ""], num_slots: int, value: bool) -> Array:
        start = start % slots * num_envs
        before = jax.lax.dynamic_slice_in_dim(old, start, num_slots * num_envs)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(is_open, value, before), start, axis=0)

    between = partial(mark, start=position + 1, num_slots=skipped - 1)
    rows = dataclasses.replace(
        rows,
        terminated=between(rows.terminated, value=True),
        truncated=between(rows.truncated, value=True),
        # The newest row is no transition.
        valid=mark(between(rows.valid, value=False), end, 1, False),
        game_first=None if rows.game_first is None else between(rows.game_first, value=True),
    )
    size = jnp.minimum(state.size + jnp.uint32(skipped), jnp.uint32(slots - 1))
    size = jnp.where(is_open, size, state.size)
    episodes = state.episodes and state.episodes.end_stream(position, skipped, slots, num_envs, is_open)
    state = dataclasses.replace(state, rows=rows, position=end.astype(jnp.uint32), size=size, episodes=episodes)
    if not isinstance(state.priorities, Priorities):
        return state
    index = _rows_at(end + jnp.arange(1 - skipped, 1, dtype=jnp.int32), slots, num_envs)
    tree = state.priorities.tree.set(index, jnp.zeros(len(index)), ~rows.valid[index], num_rows(state))
    return dataclasses.replace(state, priorities=dataclasses.replace(state.priorities, tree=tree))


def _rows_at(slot: Int32[Array, "*n"], slots: int, num_envs: int) -> Int32[Array, " m"]:
    """The rows of all environments in some slots."""
    return (slot.reshape(-1, 1) % slots * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]).reshape(-1)

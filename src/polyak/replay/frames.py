"""Frame stacks: the replay stores each frame once, and stacks frames when observations are drawn."""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from polyak.core.types import PyTree
from polyak.ops.losses import mask_invalid

Padding: TypeAlias = Literal["zero", "first"]
"""Frames of a stack before the first frame of a game: zeros (the ALE's vector environment), or copies of the first frame
(Gymnasium's `FrameStackObservation` with its default padding)."""

NOT_STORED = 2**30


def observations(
    rows: Any,
    frame_stack: int,
    padding: Padding,
    slot: Int32[Array, " N"],
    env: Int32[Array, " N"],
    slots: int,
    num_envs: int,
) -> tuple[PyTree, Int32[Array, " N"]]:
    """The observations of rows `slot * num_envs + env`, and how many rows, up to this one, each was read from.

    A stack never has a frame of another game; it has frames of earlier lives of the same game, as in the environment. A stack
    that begins before its stream counts as read from `NOT_STORED` rows.

    Args:
        rows: the replay's `Rows`.
        frame_stack: frames of an observation, the row's own the last.
        padding: the frames before a game's first frame.
    """
    slot = slot % slots
    if rows.game_first is None:
        return jax.tree.map(lambda x: x[slot * num_envs + env], rows.obs), jnp.ones(slot.shape, jnp.int32)
    back = jnp.arange(frame_stack - 1, -1, -1, dtype=jnp.int32)[None]

    def index(back: Int32[Array, "M k"]) -> Int32[Array, "N k"]:
        return (slot[:, None] - back) % slots * num_envs + env[:, None]

    num_before = jnp.min(jnp.where(rows.game_first[index(back)], back, frame_stack - 1), axis=1)
    stacks = jax.tree.map(lambda x: x[index(jnp.minimum(back, num_before[:, None]))], rows.obs)
    if padding == "zero":
        stacks = mask_invalid(stacks, back <= num_before[:, None])
    is_cut_off = is_between_streams(rows, index(num_before[:, None])[:, 0])
    return stacks, jnp.where(is_cut_off, NOT_STORED, num_before + 1)


def is_between_streams(rows: Any, index: Int32[Array, "*N"]) -> Bool[Array, "*N"]:
    """True for rows between two streams, marked by `polyak.replay.streams.end_stream`."""
    is_between: Array = rows.terminated[index] & rows.truncated[index] & ~rows.valid[index]
    return is_between

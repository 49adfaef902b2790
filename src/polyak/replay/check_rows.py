"""Checks of the arrays that are added to a replay, before anything is stored."""

from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.types import PyTree

NAMES = ("obs", "action", "action_mask")


def check_rows(rows: Any, stored: Any) -> None:
    """Check that a rollout has the arrays that the replay was created for.

    Args:
        rows: with `obs`, `action` and `action_mask`, leaves `[T, B, ...]`.
        stored: the same names, leaves `[capacity, ...]`.

    Raises:
        ValueError: the first leaf that differs, with both shapes.
    """
    got, wanted = (jax.tree_util.tree_leaves_with_path((tree.obs, tree.action, tree.action_mask)) for tree in (rows, stored))
    if [path for path, _ in got] != [path for path, _ in wanted]:
        raise ValueError("Replay: observations, actions and masks must have the trees of the replay")
    for (path, x), (_, y) in zip(got, wanted, strict=True):
        if (x.shape[2:], x.dtype) != (y.shape[1:], y.dtype):
            name = NAMES[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(f"Replay: {name} must be {y.dtype}{list(y.shape[1:])}, got {x.dtype}{list(x.shape[2:])}")


def check_stacks(obs: PyTree, frame_stack: int) -> None:
    """Check that observations are stacks of `frame_stack` frames, along their first axis.

    Raises:
        ValueError: a leaf has another first axis, or none.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(obs):
        if jnp.ndim(leaf) < 2 or jnp.shape(leaf)[0] != frame_stack:
            raise ValueError(
                f"Replay: with frame_stack={frame_stack} obs{jax.tree_util.keystr(path)} must be that number of frames along "
                f"its first axis, got shape {jnp.shape(leaf)}; the environment stacks them, and frame_stack=1 stores "
                f"observations unchanged"
            )

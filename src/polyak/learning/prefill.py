"""Fills the replay of an agent with rollouts of other policies, without learning from them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from polyak.core.types import Rollout
from polyak.learning.check_rollout import as_arrays
from polyak.replay.replay import Replay, ReplayState
from polyak.replay.streams import end_stream


def add_stream(owner: str, ring: Replay, replay: Any, rollout: Rollout) -> ReplayState:
    """Add a rollout of any policy to the replay, as a separate stream; rollout and run may be within an episode.

    No transition, n-step return, frame stack or sequence crosses streams. Rows that are never drawn separate the rollout from
    the run before and after: `num_steps` rows, and at least two.

    Args:
        owner: the method that got the rollout, for errors.
        ring: the replay.
        replay: the replay's state.
        rollout: `[T, B]`, T a multiple of `replay.num_steps`; copied to where the replay is.

    Raises:
        ValueError: the replay has rows of another B, or of a run on several devices, which would be lost.
    """
    _check_layout(owner, replay, rollout.reward.shape[1])
    # The info of a policy may hold values that are no arrays.
    return _add_parts(ring, replay, _put_on_device_of(replay, Rollout(rollout.time_steps, rollout.actions)))


def _check_layout(owner: str, replay: Any, num_envs: int) -> None:
    if isinstance(replay.layout, jax.core.Tracer) or not int(replay.size):
        return
    slots, stored_envs, _ = np.asarray(replay.layout).tolist()
    if slots != replay.num_slots(stored_envs):
        raise ValueError(f"{owner}: the state is that of a run on several devices, to which nothing can be added")
    if num_envs != stored_envs:
        raise ValueError(
            f"{owner}: a rollout must have B={stored_envs} environments, as the {int(replay.size) * stored_envs} time steps in "
            f"the replay, which would be lost, got {num_envs}"
        )


def _put_on_device_of(replay: Any, rollout: Rollout) -> Rollout:
    """Move the rollout to the replay's device, which may be the host while policies act on an accelerator."""
    position: Array = replay.position
    if isinstance(position, jax.core.Tracer):
        return rollout

    def put(x: Any) -> Any:
        is_elsewhere = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.devices() != position.devices()
        return jax.device_put(x, position.sharding) if is_elsewhere else x

    on_device: Rollout = jax.tree.map(put, rollout)
    return on_device


@jax.jit
def _add_parts(ring: Replay, replay: ReplayState, rollout: Rollout) -> ReplayState:
    """Add a rollout, `num_steps` at a time, as a separate stream."""
    rollout = as_arrays(rollout)
    num_envs, num_steps = rollout.reward.shape[1], replay.num_steps

    def add(replay: ReplayState, start: Array) -> tuple[ReplayState, None]:
        def part(x: Array, length: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, length)

        time_steps = jax.tree.map(lambda x: part(x, num_steps + 1), rollout.time_steps)
        actions = jax.tree.map(lambda x: part(x, num_steps), rollout.actions)
        return ring.add(replay, Rollout(time_steps, actions)), None

    starts = jnp.arange(0, len(rollout.reward), num_steps, dtype=jnp.int32)
    # The run may be within an episode: without a mark, the rollout would continue the run, and the next rollout this one.
    end = partial(end_stream, num_envs=num_envs)
    added, _ = jax.lax.scan(add, ring.change_own(replay, end), starts)
    return ring.change_own(added, end)

"""Fills the replay of an agent with rollouts of other policies, without learning from them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from polyak.core.checks import check_state
from polyak.core.types import Rollout
from polyak.learning.check_rollout import as_arrays, check_actions, check_rollout
from polyak.learning.off_policy import OffPolicySettings, OffPolicyState, check_off_policy
from polyak.replay.replay import Replay, ReplayState
from polyak.replay.streams import end_stream


def add_rollout(settings: OffPolicySettings, state: OffPolicyState, rollout: Rollout) -> OffPolicyState:
    """The state with a rollout of any policy in its replay (`polyak.train.collect`, `polyak.replay.from_minari`).

    Nothing is learned, and `env_steps` stays: learning still waits for `learning_starts` transitions of the run's own. The
    rollout is a stream of its own, also where it, or the run, is within an episode: no transition, n-step return, frame stack
    or sequence leads from one to the other. Rows that are never drawn divide it from the run before and after: as many as a
    rollout has, and at least two.

    Args:
        rollout: `[T, B]`, T a multiple of `num_steps`, B the environments of the run, on one device: a run with other
            environments, or on several devices, starts with an empty replay. Copied to where the replay is.

    Raises:
        TypeError, ValueError: the state is no off-policy agent's, the rollout does not fit the agent, an action is outside of
            its space, or the replay has rows of another B, which would be lost.
    """
    owner = type(settings).__name__
    check_state(f"{owner}.add", state, OffPolicyState)
    num_steps, (total, num_envs) = settings.num_steps, check_rollout(rollout, settings.spec)
    if total % num_steps:
        raise ValueError(f"{owner}.add: a rollout must have a multiple of num_steps={num_steps} steps, got {total}")
    check_off_policy(settings, num_envs)
    check_actions(f"{owner}.add", rollout, settings.spec)
    _check_layout(owner, num_steps, state.replay, num_envs)
    # What the policy returned beside its actions may be no arrays.
    rollout = _put_on_device_of(state.replay, Rollout(rollout.time_steps, rollout.actions))
    return dataclasses.replace(state, replay=_add_parts(settings.replay, state.replay, rollout))


def _check_layout(owner: str, num_steps: int, replay: Any, num_envs: int) -> None:
    if replay.num_steps != num_steps:
        raise ValueError(
            f"{owner}.add: num_steps={num_steps}: the state's replay is that of an agent with num_steps={replay.num_steps}"
        )
    if isinstance(replay.layout, jax.core.Tracer):
        return
    if not int(replay.size):
        return
    slots, stored_envs, _ = np.asarray(replay.layout).tolist()
    if slots != replay.num_slots(stored_envs):
        raise ValueError(f"{owner}.add: the state is that of a run on several devices, to which nothing can be added")
    if num_envs != stored_envs:
        raise ValueError(
            f"{owner}.add: a rollout must have the B={stored_envs} environments that the replay's "
            f"{int(replay.size) * stored_envs} time steps have, which would be lost, got {num_envs}"
        )


def _put_on_device_of(replay: Any, rollout: Rollout) -> Rollout:
    """The rollout where the replay is, which may be the host's memory while policies act on an accelerator."""
    position: Array = replay.position
    if isinstance(position, jax.core.Tracer):
        return rollout

    def put(x: Any) -> Any:
        is_elsewhere = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.devices() != position.devices()
        return jax.device_put(x, position.sharding) if is_elsewhere else x

    beside: Rollout = jax.tree.map(put, rollout)
    return beside


@jax.jit
def _add_parts(ring: Replay, replay: ReplayState, rollout: Rollout) -> ReplayState:
    """A replay with a rollout, `num_steps` at a time, as a stream of its own."""
    rollout = as_arrays(rollout)
    num_envs, num_steps = rollout.reward.shape[1], replay.num_steps

    def add(replay: ReplayState, start: Array) -> tuple[ReplayState, None]:
        def part(x: Array, length: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, length)

        time_steps = jax.tree.map(lambda x: part(x, num_steps + 1), rollout.time_steps)
        actions = jax.tree.map(lambda x: part(x, num_steps), rollout.actions)
        return ring.add(replay, Rollout(time_steps, actions)), None

    starts = jnp.arange(0, len(rollout.reward), num_steps, dtype=jnp.int32)
    # The run may be within an episode: its next rollout would go on where this one ends, and this one where the run is.
    added, _ = jax.lax.scan(add, end_stream(replay, num_envs), starts)
    return end_stream(added, num_envs)

"""The batches of an update, drawn in advance from a replay in another memory than the learner's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.core.struct import struct
from polyak.core.types import PyTree, Rollout
from polyak.ops.schedules import StepCount
from polyak.replay.replay import Transition


@struct
class Errors:
    """The TD errors of the batches.

    Attributes:
        index: `Transition.index` of the batches.
        sizes: |δ| of each transition; 0 where it was not learned from yet.
        count: batches so far.
        is_learning: the update takes gradient steps.
    """

    index: Int32[Array, "U N"]
    sizes: Float[Array, "U N"]
    count: Int32[Array, ""]
    is_learning: Bool[Array, ""]


@struct
class DrawnBatches:
    """Batches drawn in advance; they replace the `ReplayState` in an agent's state.

    Attributes:
        batches: the batches of all gradient steps of the next update, leaves `[U, N, ...]`.
        size: `ReplayState.size`, with the update's rollout.
        dropped: `ReplayState.dropped`, without the update's rollout.
        newly_dropped: dropped transitions of the update's rollout.
        env_steps: the `env_steps` of the agent's state after the update.
        metrics: metrics of the priorities, by tag; empty without priorities.
        priorities: the TD errors, from which the replay's priorities are set after the update.
    """

    batches: Transition
    size: UInt32[Array, ""]
    dropped: UInt32[Array, ""]
    newly_dropped: UInt32[Array, ""]
    env_steps: StepCount
    metrics: dict[str, Array]
    priorities: Errors


class DrawnReplay:
    """A replay with batches drawn in advance; it has the methods that an update calls."""

    def add(self, state: DrawnBatches, rollout: Rollout) -> DrawnBatches:
        """The rollout is in the replay already."""
        return dataclasses.replace(state, dropped=state.dropped + state.newly_dropped)

    def sample(self, state: DrawnBatches, key: PRNGKeyArray, batch_size: int, **options: Any) -> Transition:
        """The next batch."""
        batch: Transition = jax.tree.map(lambda x: x[state.priorities.count], state.batches)
        return batch

    def set_priorities(
        self, state: DrawnBatches, index: Array, td_error: Float[Array, " N"], *, enabled: PyTree, axis_name: str | None = None
    ) -> DrawnBatches:
        """Keep the errors; the replay gets them after the update."""
        errors = state.priorities
        sizes = errors.sizes.at[errors.count].set(jnp.where(enabled, td_error, 0.0))
        return dataclasses.replace(state, priorities=dataclasses.replace(errors, sizes=sizes, count=errors.count + 1))

    def metrics(self, state: DrawnBatches, *, axis_name: str | None = None) -> dict[str, Array]:
        """The metrics of the priorities before the update."""
        return state.metrics

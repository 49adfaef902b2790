"""Prioritized replay: transitions are drawn in proportion to their last TD error, with importance weights."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.core.struct import check_settings, choice, integer, number, setting, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.kernels.sum_tree import SumTree
from polyak.ops.losses import sum_over_devices
from polyak.ops.schedules import Count, Linear, Schedule, check_schedule, value_at
from polyak.replay.frames import Padding
from polyak.replay.replay import Replay, ReplayState, Transition, check_capacity
from polyak.replay.uniform import UniformReplay

# The sum of 10^9 of them is finite in float32.
LARGEST_PRIORITY = 1e28


@struct
class Priorities:
    """The priorities of a prioritized replay.

    Attributes:
        tree: (|δ| + ε)^α of each row that can be drawn, 0 for the others.
        largest: the largest priority so far, which new rows get; 1 at first.
        rejected: priorities that were NaN, infinite or negative, and therefore not set.
    """

    tree: SumTree
    largest: Float[Array, ""]
    rejected: UInt32[Array, ""]

    @classmethod
    def init(cls, capacity: int) -> "Priorities":
        """No row can be drawn."""
        return cls(SumTree.init(capacity), jnp.ones((), jnp.float32), jnp.zeros((), jnp.uint32))


@struct
class PrioritizedReplay(Replay):
    """A `UniformReplay` whose transitions are drawn in proportion to their priority, pᵢ = (|δᵢ| + ε)^α.

        P(i) = pᵢ / Σ p,    wᵢ = (N P(i))^-β / max_j (N P(j))^-β,    the maximum over the batch

    New transitions have the largest priority so far. Rows that are no transitions, or that are not finite, have priority 0 and
    are never drawn. Updates and draws take O(log capacity).

    Attributes:
        capacity: rows, over all environments and devices.
        alpha: α; 0 draws uniformly.
        beta: β, a number or a schedule of `env_steps`; 1 corrects completely for the draws, 0 not at all.
        eps: ε, in the units of the TD error; with 0, transitions without an error are not drawn again.
        frame_stack: frames of an observation, as in `UniformReplay`.
        frame_padding: the frames of a stack before the first frame of a game, as in `UniformReplay`.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Schaul et al. 2016, arXiv:1511.05952, section 3.3 (proportional), 3.4 (weights) and table 3 (β).
    """

    capacity: int = integer(default=100_000)
    alpha: Scalar = number(default=0.6, at_least=0)
    beta: Schedule = setting(
        default=Linear(0.4, 1.0, 1_000_000), check=partial(check_schedule, above=-1.0, at_least=0, at_most=1)
    )
    eps: Scalar = number(default=1e-6, at_least=0)
    frame_stack: int = integer(default=1, at_most=64)
    frame_padding: Padding = choice(default="zero", choices=("zero", "first"), used_if=("frame_stack", range(2, 65)))

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def has_priorities(self) -> bool:
        """True."""
        return True

    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check the capacity; see `Replay.check`."""
        check_capacity(self, num_envs, num_steps, n_step + self.frame_stack - 1, devices)

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay; see `UniformReplay.init`."""
        state = self._rows.init(obs, action, action_mask, num_steps=num_steps)
        return dataclasses.replace(state, priorities=Priorities.init(self.capacity))

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows and priorities are split by environment; see `Replay.partition`."""
        replicated: Any = PartitionSpec()
        tree: Any = PartitionSpec(axis_name)
        priorities = Priorities(tree, replicated, replicated)
        return dataclasses.replace(self._rows.partition(axis_name, num_steps), priorities=priorities)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions, which get the largest priority so far; see `UniformReplay.add`."""
        state = self._rows.add(state, rollout)
        num_steps, num_envs = rollout.reward.shape
        slots = state.layout[0].astype(jnp.int32)
        # The rollout's rows, the newest one after them, and the one before, which an episode that begins has made invalid.
        slot = (state.position.astype(jnp.int32) + jnp.arange(-num_steps - 1, 1, dtype=jnp.int32)) % slots
        index = (slot[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]).reshape(-1)
        priorities: Priorities = state.priorities
        valid, is_new = state.rows.valid[index], jnp.arange(len(index)) >= num_envs
        value = jnp.where(valid, priorities.largest, 0.0)
        tree = priorities.tree.set(index, value, is_new | ~valid, num_rows(state))
        return dataclasses.replace(state, priorities=dataclasses.replace(priorities, tree=tree))

    def sample(
        self,
        state: ReplayState,
        key: PRNGKeyArray,
        batch_size: int,
        *,
        num_envs: int,
        gamma: Scalar,
        n_step: int = 1,
        env_steps: Count = 0,
        axis_name: str | None = None,
    ) -> Transition:
        """Transitions drawn in proportion to their priorities, with importance weights; see `Replay.sample`.

        With an `axis_name`, the largest weight is the largest of the batches of all devices.
        """
        index, probability = state.priorities.tree.draw(key, batch_size, num_rows(state))
        batch = self._rows.transitions(state, index, num_envs=num_envs, n_step=n_step, gamma=gamma)
        is_drawn = probability > 0
        # N cancels out; the ratio of two probabilities neither overflows nor underflows to a weight of 0.
        smallest = jnp.min(jnp.where(is_drawn, probability, jnp.inf))
        smallest = smallest if axis_name is None else jax.lax.pmin(smallest, axis_name)
        weight = jnp.where(is_drawn, smallest / jnp.where(is_drawn, probability, 1.0), 0.0)
        weight = jnp.where(is_drawn, weight ** value_at(self.beta, env_steps), 0.0)
        return dataclasses.replace(batch, weight=weight * batch.weight)

    def set_priorities(
        self,
        state: ReplayState,
        index: Int32[Array, " N"],
        td_error: Float[Array, " N"],
        *,
        enabled: Bool[Array, ""] | bool = True,
        axis_name: str | None = None,
    ) -> ReplayState:
        """The replay with the priorities (|δ| + ε)^α of rows that were drawn.

        Rows that are no transitions keep priority 0. A row that was drawn twice gets the larger priority. A TD error that is
        NaN, infinite or negative is rejected and counted: its row keeps its priority. See `Replay.set_priorities`.

        Raises:
            ValueError: `td_error` has another shape than `index`.
        """
        if td_error.shape != index.shape:
            raise ValueError(f"PrioritizedReplay: td_error must have the shape {index.shape} of index, got {td_error.shape}")
        priorities: Priorities = state.priorities
        is_accepted = jnp.isfinite(td_error) & (td_error >= 0)
        size = jnp.where(is_accepted, td_error, 0.0) + jnp.asarray(self.eps, jnp.float32)
        value = jnp.minimum(size ** jnp.asarray(self.alpha, jnp.float32), LARGEST_PRIORITY)
        is_set = is_accepted & state.rows.valid[index] & enabled
        largest = jnp.max(jnp.where(is_set, value, 0.0), initial=0.0)
        largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
        tree = priorities.tree.set(index, value, is_set, num_rows(state))
        rejected = sum_over_devices(jnp.sum(~is_accepted & enabled, dtype=jnp.uint32), axis_name)
        priorities = Priorities(tree, jnp.maximum(priorities.largest, largest), priorities.rejected + rejected)
        return dataclasses.replace(state, priorities=priorities)

    def metrics(self, state: ReplayState, *, axis_name: str | None = None) -> dict[str, Array]:
        """The mean priority (|δ| + ε)^α of the rows, 0 for resets, the largest so far, and how many were rejected, by tag."""
        priorities: Priorities = state.priorities
        total, rows = priorities.tree.total(num_rows(state)), (state.size * state.layout[1]).astype(jnp.float32)
        total, rows = sum_over_devices(jnp.stack([total, rows]), axis_name)
        return {
            "replay/mean_priority": total / jnp.maximum(rows, 1.0),
            "replay/max_priority": priorities.largest,
            "replay/rejected_priorities": priorities.rejected,
        }

    @property
    def _rows(self) -> UniformReplay:
        return UniformReplay(self.capacity, self.frame_stack, self.frame_padding)


def num_rows(state: ReplayState) -> Int32[Array, ""]:
    """Number of rows written since the replay was last empty: slots 0 to `size`, of every environment."""
    return ((state.size + jnp.uint32(1)) * state.layout[1]).astype(jnp.int32)

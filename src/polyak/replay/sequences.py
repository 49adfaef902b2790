"""Sequences of time steps for recurrent networks, with the recurrent state that was stored while collecting."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from polyak.core.struct import check_settings, integer, static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.kernels.random_below import random_below
from polyak.ops.losses import finite_rows, mask_invalid
from polyak.ops.schedules import Count
from polyak.replay.frames import is_between_streams
from polyak.replay.replay import Replay, ReplayState, Transition, check_capacity
from polyak.replay.uniform import UniformReplay


@struct
class SequenceObs:
    """Sequences of observations for a recurrent network; they replace the `obs` of a `Transition`.

    Attributes:
        obs: leaves `[L + 1, S, ...]`: the time steps of S sequences.
        first: an episode begins: the recurrent state is reset before the step.
        carry: leaves `[S, ...]`, before the first step.
        index: the observation of each transition `[N]`: row `t · S + s`.
        burn_in: the first time steps, which only bring the recurrent state up to date.
    """

    obs: PyTree
    first: Bool[Array, "T S"]
    carry: PyTree
    index: Int32[Array, " N"]
    burn_in: int = static(default=0)


@struct
class SequenceReplay(Replay):
    """A `UniformReplay` that draws sequences of time steps, for a recurrent network.

    A sequence begins where a rollout began, so every `num_steps` steps, with the recurrent state that the policy had there. Its
    first `burn_in` steps only update that state with the network's current parameters; the other steps are transitions to
    learn from. After the end of an episode the sequence continues with the next episode, from a reset recurrent state: nothing
    passes between episodes. n-step returns end with the sequence, and a sequence that began before `end_stream` has no
    transitions after it.

    Attributes:
        capacity: rows, over all environments and devices.
        sequence_length: L, time steps of a sequence, the burn-in included.
        burn_in: time steps that are not learned from.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (R2D2).
    """

    draws_sequences: ClassVar[bool] = True

    capacity: int = integer(default=100_000)
    sequence_length: int = integer(default=16)
    burn_in: int = integer(default=0, at_least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.burn_in >= self.sequence_length:
            raise ValueError(f"SequenceReplay: burn_in={self.burn_in} must be less than sequence_length={self.sequence_length}")

    @property
    def draw_length(self) -> int:
        """L."""
        return self.sequence_length

    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check the capacity, and that each step of a rollout is learned from; see `Replay.check`."""
        check_capacity(self, num_envs, num_steps, max(n_step, self.sequence_length + num_steps), devices)
        if self.capacity % (num_steps * devices):
            raise ValueError(
                f"SequenceReplay: capacity={self.capacity} must be divisible by num_steps * devices = {num_steps} * {devices}"
            )
        self.check_num_steps(num_steps)

    def check_num_steps(self, num_steps: int) -> None:
        """Check that each step of a rollout is learned from.

        Raises:
            ValueError: the steps after the burn-in are fewer than the steps of a rollout.
        """
        if self.sequence_length - self.burn_in < num_steps:
            raise ValueError(
                f"SequenceReplay: sequence_length - burn_in must be at least num_steps={num_steps}, or steps of each rollout "
                f"are never learned from; got {self.sequence_length} - {self.burn_in}"
            )

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay; see `UniformReplay.init`."""
        state = self._rows.init(obs, action, action_mask, num_steps=num_steps)
        num_rollouts = self.capacity // num_steps
        carries = jax.tree.map(lambda x: jnp.zeros((num_rollouts, *jnp.shape(x)), jnp.asarray(x).dtype), carry)
        rows = dataclasses.replace(state.rows, first=jnp.zeros(self.capacity, bool))
        return dataclasses.replace(state, rows=rows, carries=carries)

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows and recurrent states are split by environment; see `Replay.partition`."""
        split: Any = PartitionSpec(axis_name)
        return dataclasses.replace(self._rows.partition(axis_name, num_steps), carries=split)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions and the recurrent state before them; see `UniformReplay.add`.

        A rollout without a recurrent state (`carry=()`, of another policy) gets the initial state, zeros. So does an
        environment whose state is NaN or infinite, which lasts from a non-finite observation to the end of the episode.

        Raises:
            ValueError: the recurrent state has other parts than the stored ones.
        """
        state = self._rows.add(state, rollout)
        num_steps, num_envs = rollout.reward.shape
        start = (state.position.astype(jnp.int32) - num_steps) % state.layout[0].astype(jnp.int32) // num_steps * num_envs
        carry = rollout.carry
        if isinstance(carry, tuple) and not carry:
            carry = jax.tree.map(lambda x: jnp.zeros((num_envs, *x.shape[1:]), x.dtype), state.carries)
        trees: list[Any] = [jax.tree.structure(carry), jax.tree.structure(state.carries)]
        if trees[0] != trees[1]:
            raise ValueError(
                f"update: rollout.carry must have the recurrent states of collect_policy(state), got {trees[0]} in place of "
                f"{trees[1]}"
            )
        carry = mask_invalid(carry, finite_rows(carry, 1))
        write = jax.lax.dynamic_update_slice_in_dim
        carries = jax.tree.map(lambda old, new: write(old, new.astype(old.dtype), start, axis=0), state.carries, carry)
        return dataclasses.replace(state, carries=carries)

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
        """All transitions after the burn-in of sequences drawn uniformly, with replacement; `obs` are `SequenceObs`.

        See `Replay.sample`; `batch_size` is S, the number of sequences.
        """
        length, num_steps = self.sequence_length, state.num_steps
        slots = state.num_slots(num_envs)
        # Rollouts, counted from the newest, from which on there are L steps.
        nearest = -(-length // num_steps)
        count = state.size.astype(jnp.int32) // num_steps - nearest + 1
        number = random_below(key, (batch_size,), jnp.maximum(count, 1).astype(jnp.uint32) * jnp.uint32(num_envs))
        env = number % num_envs
        start = (state.position.astype(jnp.int32) - (nearest + number // num_envs) * num_steps) % slots
        steps = jnp.arange(length + 1, dtype=jnp.int32)[:, None]
        index = (start[None] + steps) % slots * num_envs + env[None]
        learned = index[self.burn_in : length].reshape(-1)
        position = jnp.broadcast_to(steps[self.burn_in : length], (length - self.burn_in, batch_size)).reshape(-1)
        batch = self._rows.transitions(
            state, learned, num_envs=num_envs, n_step=n_step, gamma=gamma, most_steps=length - position
        )
        first = state.rows.first
        assert first is not None, "init stores it"
        sequences = SequenceObs(
            obs=jax.tree.map(lambda x: x[index], state.rows.obs),
            first=first[index],
            carry=jax.tree.map(lambda x: x[start // num_steps * num_envs + env], state.carries),
            index=position * batch_size + jnp.tile(jnp.arange(batch_size, dtype=jnp.int32), length - self.burn_in),
            burn_in=self.burn_in,
        )
        assert batch.num_summed is not None, "transitions sets it"
        after = sequences.index + batch.num_summed * batch_size
        # The recurrent state of another stream ends with it.
        is_after = jnp.cumsum(is_between_streams(state.rows, index).astype(jnp.int32), axis=0) > 0
        is_learned = (count > 0) & ~is_after[self.burn_in : length].reshape(-1)
        weight = jnp.where(is_learned, batch.weight, 0.0)
        return dataclasses.replace(batch, obs=sequences, next_obs=dataclasses.replace(sequences, index=after), weight=weight)

    @property
    def _rows(self) -> UniformReplay:
        return UniformReplay(self.capacity)

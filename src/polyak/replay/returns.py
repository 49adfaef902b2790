"""A uniform replay that knows the return of each step to the end of its episode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.any_seed import is_any
from polyak.ops.schedules import Count
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.uniform import UniformReplay


@struct
class Returns:
    """The returns of rows.

    Attributes:
        value: Σ_k γ^k r_{t+k} to the end of the episode; meaningless unless `is_whole`.
        is_whole: the episode has reached a terminal state; False where it was cut short, or goes on.
    """

    value: Float[Array, "*N"]
    is_whole: Bool[Array, "*N"]


@struct
class ReturnReplay(UniformReplay):
    """A `UniformReplay` whose transitions have the return of the rest of their episode, G_t = Σ_k γ^k r_{t+k}.

    A return is known once its episode has terminated. An episode that goes on, or was cut short (by a time limit, or because a
    step had NaN or infinity, or the stream ended), has none. A rollout with the end of an episode also writes its older rows.

    Attributes:
        gamma: γ; agents set it to theirs. Returns in the replay keep the γ that they were stored with.

    Raises:
        TypeError, ValueError: a setting is out of its range.
    """

    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay; see `UniformReplay.init`."""
        state = super().init(obs, action, action_mask, num_steps=num_steps)
        returns = Returns(jnp.zeros(self.capacity, jnp.float32), jnp.zeros(self.capacity, bool))
        return dataclasses.replace(state, returns=returns)

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows and returns are split by environment; see `Replay.partition`."""
        rows: Any = PartitionSpec(axis_name)
        return dataclasses.replace(super().partition(axis_name, num_steps), returns=rows)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions, and the returns of episodes that it ends; see `UniformReplay.add`."""
        assert state.returns is not None, "init creates them"
        stored = super().add(state, rollout)
        num_steps, num_envs = rollout.reward.shape
        slots, rows, gamma = stored.num_slots(num_envs), stored.rows, jnp.asarray(self.gamma, jnp.float32)
        newest, size = stored.position.astype(jnp.int32) - 1, stored.size.astype(jnp.int32)

        def goes_on(carry: tuple[Array, Returns, Returns]) -> Bool[Array, ""]:
            age, after, _ = carry
            return (age < num_steps) | is_any(after.is_whole & (age < size))

        def step_back(carry: tuple[Array, Returns, Returns]) -> tuple[Array, Returns, Returns]:
            age, after, returns = carry
            at = (newest - age) % slots * num_envs

            def row_of(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, at, num_envs)

            terminated, valid = row_of(rows.terminated), row_of(rows.valid)
            is_last = terminated | row_of(rows.truncated) | ~valid
            value = row_of(rows.reward) + jnp.where(is_last, 0.0, gamma * after.value)
            is_whole = jnp.where(is_last, terminated & valid, after.is_whole)
            # Older rows change where the episode goes on to a terminal state in this rollout.
            is_changed = (age < num_steps) | (after.is_whole & ~is_last & (age < size))
            at = jnp.where(is_changed, at + jnp.arange(num_envs, dtype=jnp.int32), stored.capacity)
            row = Returns(value, is_whole)
            returns = jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), returns, row)
            return age + 1, Returns(value, is_whole & is_changed), returns

        end = Returns(jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, bool))
        *_, returns = jax.lax.while_loop(goes_on, step_back, (jnp.int32(0), end, state.returns))
        return dataclasses.replace(stored, returns=returns)

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
        """Transitions drawn uniformly, with their returns; see `Replay.sample`."""
        assert state.returns is not None, "init creates them"
        batch = super().sample(state, key, batch_size, num_envs=num_envs, gamma=gamma, n_step=n_step)
        value, is_whole = state.returns.value[batch.index], state.returns.is_whole[batch.index]
        return dataclasses.replace(batch, whole_return=value, has_whole_return=is_whole)


def with_returns(owner: str, replay: Replay, gamma: Scalar) -> ReturnReplay:
    """The replay with returns of this γ.

    Raises:
        ValueError: the replay is no `UniformReplay`, or of a class derived from it.
    """
    if type(replay) not in (UniformReplay, ReturnReplay):
        wanted = "replay is exactly a UniformReplay, no class derived from it"
        raise ValueError(f"{owner}: monte_carlo_weight must be None unless {wanted}, got {replay!r}")
    return ReturnReplay(**_fields(replay), gamma=gamma)


def without_returns(replay: Replay) -> Replay:
    """The `UniformReplay` of a `ReturnReplay`; other replays unchanged."""
    return UniformReplay(**_fields(replay)) if type(replay) is ReturnReplay else replay


def _fields(replay: Replay) -> dict[str, Any]:
    """The settings of a `UniformReplay`."""
    return {field.name: getattr(replay, field.name) for field in dataclasses.fields(UniformReplay)}

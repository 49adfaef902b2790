"""A uniform replay that knows the return of each step to the end of its episode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.schedules import Count
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.uniform import UniformReplay


@struct
class Returns:
    """The returns of stored rows.

    Attributes:
        value: Σ_k γ^k r_{t+k} of the rewards so far.
        discount: γ^m, m the steps from t to the next row of the environment.
        is_running: the episode of the row goes on.
        is_whole: the episode has reached a terminal state; False where it was cut short, or goes on.
    """

    value: Float[Array, "*N"]
    discount: Float[Array, "*N"]
    is_running: Bool[Array, "*N"]
    is_whole: Bool[Array, "*N"]


@struct
class ReturnReplay(UniformReplay):
    """A `UniformReplay` whose transitions have the return of the rest of their episode, G_t = Σ_k γ^k r_{t+k}.

    A return is known once its episode has terminated. An episode that goes on, or was cut short (by a time limit, or because a
    step had NaN or infinity, or the stream ended), has none. A rollout changes the returns of all rows of running episodes.

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
        zeros, flags = jnp.zeros((2, self.capacity), jnp.float32), jnp.zeros((2, self.capacity), bool)
        state = super().init(obs, action, action_mask, num_steps=num_steps)
        return dataclasses.replace(state, returns=Returns(*zeros, *flags))

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows and returns are split by environment; see `Replay.partition`."""
        rows: Any = PartitionSpec(axis_name)
        return dataclasses.replace(super().partition(axis_name, num_steps), returns=rows)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions, and the returns that these have changed; see `UniformReplay.add`."""
        assert state.returns is not None, "init creates them"
        stored = super().add(state, rollout)
        num_steps, num_envs = rollout.reward.shape
        slots = stored.num_slots(num_envs)
        start = (stored.position.astype(jnp.int32) - num_steps) % slots

        def rows_at(x: Array, slot: Any, count: int) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(x, slot % slots * num_envs, count * num_envs)
            return rows.reshape(count, num_envs)

        rows = stored.rows
        reward, terminated, truncated, valid = (
            rows_at(x, start, num_steps) for x in (rows.reward, rows.terminated, rows.truncated, rows.valid)
        )
        new = _returns(reward, terminated, terminated | truncated | ~valid, valid, jnp.asarray(self.gamma, jnp.float32))
        first = jax.tree.map(lambda x: x[:1], new)
        # Where the transition before is not valid, or the replay was emptied, the rollout continues no episode.
        continues = rows_at(rows.valid, start - 1, 1) & jnp.all(state.layout == stored.layout)

        def change(old: Returns) -> Returns:
            is_running = old.is_running & continues
            return Returns(
                value=old.value + jnp.where(is_running, old.discount * first.value, 0.0),
                discount=old.discount * first.discount,
                is_running=is_running & first.is_running,
                is_whole=old.is_whole | (is_running & first.is_whole),
            )

        old = state.returns
        size = slots * num_envs
        changed = change(jax.tree.map(lambda x: x[:size].reshape(slots, num_envs), old))
        changed = jax.tree.map(lambda x, rows: jax.lax.dynamic_update_slice_in_dim(x, rows, start, axis=0), changed, new)
        returns = jax.tree.map(lambda x, changed: x.at[:size].set(changed.reshape(-1)), old, changed)
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
        ValueError: the replay is no `UniformReplay`.
    """
    if type(replay) not in (UniformReplay, ReturnReplay):
        raise ValueError(f"{owner}: monte_carlo_weight must be None unless replay is a UniformReplay, got {replay!r}")
    fields = {field.name: getattr(replay, field.name) for field in dataclasses.fields(UniformReplay)}
    return ReturnReplay(**fields, gamma=gamma)


def _returns(
    reward: Float[Array, "T B"],
    terminated: Bool[Array, "T B"],
    last: Bool[Array, "T B"],
    valid: Bool[Array, "T B"],
    gamma: Float[Array, ""],
) -> Returns:
    """The returns of a rollout's rows, of its own rewards.

    Args:
        last: the sum ends with the step.
    """

    def step(after: Returns, x: tuple[Array, ...]) -> tuple[Returns, Returns]:
        reward, terminated, last, valid = x
        row = Returns(
            value=jnp.where(valid, reward, 0.0) + jnp.where(last, 0.0, gamma * after.value),
            discount=gamma * jnp.where(last, 1.0, after.discount),
            is_running=~last & after.is_running,
            is_whole=jnp.where(last, terminated & valid, after.is_whole),
        )
        return row, row

    zeros, ones = jnp.zeros(reward.shape[1], jnp.float32), jnp.ones(reward.shape[1], jnp.float32)
    end = Returns(zeros, ones, ones > 0, zeros > 0)
    return jax.lax.scan(step, end, (reward, terminated, last, valid), reverse=True)[1]

"""Uniform replay: a ring of time steps, from which n-step transitions are built when they are drawn."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.core.struct import check_settings, choice, integer, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.kernels.random_below import random_below
from polyak.ops.losses import finite_rows, flatten_steps, mask_invalid
from polyak.ops.schedules import Count
from polyak.replay.frames import Padding, observations
from polyak.replay.replay import Replay, ReplayState, Rows, Transition, check_capacity

# Independent draws of each sample until one is a transition. Where one row in 20 only resets, all four miss once in 160,000.
DRAWS = 4

_NAMES = ("obs", "action", "action_mask", "reward")

_write = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)


class Steps(NamedTuple):
    """The steps of n-step transitions, `[n, N]`.

    Attributes:
        reward: the reward of each step.
        terminated: the step reached a terminal state.
        last: the sum of rewards ends with the step.
    """

    reward: Float[Array, "n N"]
    terminated: Bool[Array, "n N"]
    last: Bool[Array, "n N"]


ChangeSteps: TypeAlias = Callable[[Steps, Int32[Array, "n N"]], Steps]
"""`change_steps(steps, rows)`: the steps of transitions with other goals; `rows` follow the steps in the storage."""


@struct
class UniformReplay(Replay):
    """A ring of the last `capacity` time steps, drawn from uniformly.

    An observation is stored once: the next observation of a row is in the next slot. Each environment has
    `slots = capacity / B`, rounded down to a multiple of the rollout length; the oldest slot is overwritten.

    Attributes:
        capacity: rows, over all environments and devices.
        frame_stack: observations are stacks of this many frames along their first axis, oldest first, of which each frame is
            stored once; 1 stores observations unchanged.
        frame_padding: the frames of a stack before the first frame of a game: `"zero"`, or copies of the `"first"` frame.

    Raises:
        TypeError, ValueError: a setting is out of its range.
    """

    capacity: int = integer(default=100_000)
    frame_stack: int = integer(default=1, at_most=64)
    frame_padding: Padding = choice(default="zero", choices=("zero", "first"), used_if=("frame_stack", range(2, 65)))

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check the capacity; see `Replay.check`."""
        check_capacity(self, num_envs, num_steps, n_step + self.frame_stack - 1, devices)

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay; see `Replay.init`.

        Raises:
            ValueError: observations are no stacks of `frame_stack` frames.
        """
        if self.frame_stack > 1:
            _check_stacks(obs, self.frame_stack)
            obs = jax.tree.map(lambda x: x[-1], obs)

        def storage(x: Any) -> Array:
            return jnp.zeros((self.capacity, *jnp.shape(x)), jnp.asarray(x).dtype)

        obs, action, action_mask = jax.tree.map(storage, (obs, action, action_mask))
        flags = [jnp.zeros(self.capacity, bool) for _ in range(3 if self.frame_stack == 1 else 4)]
        rows = Rows(obs, action, action_mask, jnp.zeros(self.capacity, jnp.float32), *flags)
        position, size, dropped = (jnp.zeros((), jnp.uint32) for _ in range(3))
        return ReplayState(rows, position, size, dropped, jnp.zeros(3, jnp.uint32), num_steps)

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows are split by environment, and nothing else; see `Replay.partition`."""
        replicated: Any = PartitionSpec()
        rows: Any = PartitionSpec(axis_name)
        return ReplayState(rows, replicated, replicated, replicated, replicated, num_steps)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions and its last observation.

        Transitions with NaN or infinity are stored as zeros that are never drawn, and counted. A rollout continues the rollout
        before it, or begins new episodes (a resumed run with new environments), or follows `end_stream`. With another B, or on
        another number of devices, the replay starts empty, because positions of rows depend on both.

        Args:
            rollout: `[T, B]` with T = `state.num_steps`.

        Raises:
            ValueError: the rollout has another length, too many environments, or arrays of other shapes or dtypes.
        """
        num_steps, num_envs = rollout.reward.shape
        if num_steps != state.num_steps:
            raise ValueError(f"Replay: rollouts must have num_steps={state.num_steps} steps, got {num_steps}")
        slots = state.num_slots(num_envs)
        rows, dropped = _rows_of(rollout)
        if self.frame_stack > 1:
            frames = jax.tree.map(lambda x: x[:, :, -1], rows.obs)
            rows = dataclasses.replace(rows, obs=frames, game_first=rollout.time_steps.episode_record.first)
        if state.rows.first is not None:
            rows = dataclasses.replace(rows, first=rollout.time_steps.first)
        _check_rows(rows, state.rows)
        layout = jnp.array([slots, num_envs, num_steps], jnp.uint32)
        is_same = jnp.all(state.layout == layout)
        position, size = (jnp.where(is_same, x, jnp.uint32(0)) for x in (state.position, state.size))
        state = dataclasses.replace(state, position=position, size=size)
        start = position.astype(jnp.int32)
        end = (start + num_steps) % slots
        # In blocks, so that XLA writes them in place: the rollout's rows never wrap around, and the last row is separate.
        valid = _write(state.rows.valid, _previous(state, rollout, slots), (start - 1) % slots * num_envs)
        stored: Rows = dataclasses.replace(state.rows, valid=valid)
        for first, last, at in ((0, num_steps, start), (num_steps, num_steps + 1, end)):
            block = jax.tree.map(lambda x, first=first, last=last: flatten_steps(x[first:last]), rows)
            stored = jax.tree.map(lambda old, new, at=at: _write(old, new, at * num_envs), stored, block)
        return dataclasses.replace(
            state,
            rows=stored,
            position=end.astype(jnp.uint32),
            size=jnp.minimum(state.size + jnp.uint32(num_steps), jnp.uint32(slots - 1)),
            dropped=state.dropped + dropped,
            layout=layout,
        )

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
        """Transitions drawn uniformly, with replacement, from those in the replay; see `Replay.sample`."""
        index = self.draw(state, key, batch_size, num_envs)
        return self.transitions(state, index, num_envs=num_envs, n_step=n_step, gamma=gamma)

    def transitions(
        self,
        state: ReplayState,
        index: Int32[Array, " N"],
        *,
        num_envs: int,
        n_step: int = 1,
        gamma: Scalar,
        most_steps: Int32[Array, " N"] | None = None,
        change_steps: ChangeSteps | None = None,
    ) -> Transition:
        """The transitions that start from the given rows.

        Args:
            index: rows in the storage; rows that are no transitions get weight 0.
            num_envs: B of the rollouts.
            n_step: n, the most steps that rewards are summed over.
            gamma: γ.
            most_steps: the most steps of each transition, where that is less than n.
            change_steps: a function of the n steps of each transition and of the rows after them `[n, N]`; returns other steps.

        Raises:
            ValueError: other environments filled the replay, or several devices did; not where the state is traced.
        """
        slots = state.num_slots(num_envs)
        layout = [] if isinstance(state.layout, jax.core.Tracer) else np.asarray(state.layout)[:2].tolist()
        if layout not in ([], [0, 0], [slots, num_envs]):
            raise ValueError(f"Replay: {layout[1]} environments of {layout[0]} rows filled it, got {num_envs} of {slots} rows")
        slot, env = index // num_envs, index % num_envs
        # 0 is the newest transition.
        age = (state.position.astype(jnp.int32) - 1 - slot) % slots
        steps = jnp.arange(n_step, dtype=jnp.int32)[:, None]
        # [n, N]: the rows from each one on.
        following = (slot[None] + steps) % slots * num_envs + env[None]
        reward, terminated, truncated, valid = (
            x[following] for x in (state.rows.reward, state.rows.terminated, state.rows.truncated, state.rows.valid)
        )
        last = terminated | truncated
        if change_steps is not None:
            after = (slot[None] + steps + 1) % slots * num_envs + env[None]
            reward, terminated, last = change_steps(Steps(reward, terminated, last), after)
        exists = valid & (steps <= age[None]) & (age < state.size.astype(jnp.int32))[None]
        if most_steps is not None:
            exists = exists & (steps < most_steps[None])
        goes_on = jnp.concatenate([exists[:1], exists[1:] & ~last[:-1]])
        summed = jnp.cumprod(goes_on.astype(jnp.int32), axis=0) > 0
        powers = jnp.asarray(gamma, jnp.float32) ** steps.astype(jnp.float32)
        num_summed = summed.sum(axis=0, dtype=jnp.int32)
        next_index = (slot + num_summed) % slots * num_envs + env
        discount = jnp.asarray(gamma, jnp.float32) ** num_summed.astype(jnp.float32)
        rows = state.rows
        action, next_action, action_mask, next_action_mask = (
            jax.tree.map(lambda x, at=at: x[at], tree) for tree in (rows.action, rows.action_mask) for at in (index, next_index)
        )
        frames = (rows, self.frame_stack, self.frame_padding)
        obs, num_frames = observations(*frames, slot, env, slots, num_envs)
        next_obs, _ = observations(*frames, slot + num_summed, env, slots, num_envs)
        is_stored = age + num_frames <= state.size.astype(jnp.int32)
        return Transition(
            obs=obs,
            action=action,
            action_mask=action_mask,
            reward=jnp.sum(jnp.where(summed, powers * reward, 0.0), axis=0),
            discount=jnp.where(jnp.any(summed & terminated, axis=0), 0.0, discount),
            next_obs=next_obs,
            next_action_mask=next_action_mask,
            weight=(summed[0] & is_stored).astype(jnp.float32),
            index=index,
            num_summed=num_summed,
            # The last row of an episode, and the newest, are not valid. An update that does not use both fields drops them.
            next_action=next_action,
            has_next_action=rows.valid[next_index],
        )

    def draw(self, state: ReplayState, key: PRNGKeyArray, batch_size: int, num_envs: int) -> Int32[Array, " N"]:
        """Rows that are transitions, but for the rare one whose every draw was none."""
        slots = state.num_slots(num_envs)
        number = random_below(key, (DRAWS, batch_size), jnp.maximum(state.size, jnp.uint32(1)) * jnp.uint32(num_envs))
        age, env = number // num_envs, number % num_envs
        index = (state.position.astype(jnp.int32) - 1 - age) % slots * num_envs + env
        first_valid = jnp.argmax(state.rows.valid[index], axis=0)[None]
        return jnp.take_along_axis(index, first_valid, axis=0)[0]


def _rows_of(rollout: Rollout) -> tuple[Rows, UInt32[Array, ""]]:
    """The rows `[T+1, B, ...]` of a rollout, and the number of its transitions that are not finite."""
    steps = rollout.time_steps
    # Integers are finite, whatever they are.
    finite_obs = jnp.broadcast_to(finite_rows(steps.obs, 2), steps.reward.shape)
    finite = finite_obs[:-1] & finite_obs[1:] & jnp.isfinite(rollout.reward) & finite_rows(rollout.actions, 2)
    valid = rollout.valid & finite

    def with_newest(x: Array) -> Array:
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])

    action, reward = mask_invalid((rollout.actions, rollout.reward), finite)
    rows = Rows(
        obs=mask_invalid(steps.obs, finite_obs),
        action=jax.tree.map(with_newest, action),
        action_mask=steps.action_mask,
        reward=with_newest(reward),
        terminated=with_newest(rollout.terminated),
        truncated=with_newest(rollout.truncated),
        valid=with_newest(valid),
    )
    return rows, jnp.sum(rollout.valid & ~finite, dtype=jnp.uint32)


def _previous(state: ReplayState, rollout: Rollout, slots: int) -> Bool[Array, " B"]:
    """Validity of the transition that leads to the rollout's first observation: False where that begins an episode."""
    # To compare that observation with the stored one would copy the storage: it would be read before it is written.
    num_envs = rollout.reward.shape[1]
    start = (state.position.astype(jnp.int32) - 1) % slots * num_envs
    return jax.lax.dynamic_slice_in_dim(state.rows.valid, start, num_envs) & ~rollout.time_steps.first[0]


def _check_rows(rows: Any, stored: Any) -> None:
    """Check that a rollout has the arrays that the replay was created for.

    Args:
        rows: with `obs`, `action`, `action_mask` and `reward`, leaves `[T, B, ...]`.
        stored: the same names, leaves `[capacity, ...]`.

    Raises:
        ValueError: the first leaf that differs, with both shapes.
    """
    got, wanted = (jax.tree_util.tree_leaves_with_path((x.obs, x.action, x.action_mask, x.reward)) for x in (rows, stored))
    if [path for path, _ in got] != [path for path, _ in wanted]:
        raise ValueError("Replay: observations, actions and masks must have the trees of the replay")
    for (path, x), (_, y) in zip(got, wanted, strict=True):
        if (x.shape[2:], x.dtype) != (y.shape[1:], y.dtype):
            name = _NAMES[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(f"Replay: {name} must be {y.dtype}{list(y.shape[1:])}, got {x.dtype}{list(x.shape[2:])}")


def _check_stacks(obs: PyTree, frame_stack: int) -> None:
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

"""The base of replays, settings with pure methods over stored rows, and the transitions that are drawn from a replay."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.schedules import Count


@struct
class Rows:
    """The stored time steps: row t has `obs_t` and the transition that starts from `obs_t`.

    Attributes:
        terminated: the transition reached a terminal state.
        truncated: the transition was the last before the episode was cut short.
        valid: the row is a finite transition. False where the environment only reset, in the newest row, whose action is not
            known yet, and between two streams, where `terminated` and `truncated` are both set.
        game_first: with frame stacks, the row has the first frame of a game (which may have several lives, each an episode), or
            is between two streams; else None.
        first: with sequences, the row begins an episode; else None.
    """

    obs: PyTree
    action: PyTree
    action_mask: PyTree
    reward: Float[Array, " N"]
    terminated: Bool[Array, " N"]
    truncated: Bool[Array, " N"]
    valid: Bool[Array, " N"]
    game_first: Bool[Array, " N"] | None = None
    first: Bool[Array, " N"] | None = None


@struct
class ReplayState:
    """The stored rows; donate it, and add before sampling: then the rows are updated in place.

    Attributes:
        rows: leaves `[capacity, ...]`; row `slot · B + b` is of environment b.
        position: the slot of the newest observation, in [0, slots).
        size: rows of each environment: transitions, rows that only reset, and rows between two streams.
        dropped: transitions that were not stored, because of NaN or infinity.
        layout: slots, environments and rollout length, which decide the positions of rows; zeros before the first rollout.
        num_steps: the length of the rollouts that are added.
        priorities: the `Priorities` of a `PrioritizedReplay`, which `set_priorities` changes; None in other replays.
        carries: the recurrent states of a `SequenceReplay`, leaves `[capacity // num_steps, ...]`, or None.
        episodes: the `Episodes` of a `HindsightReplay`, or None.
        data: the `ReplayState` of the data of a `MixedReplay`, or None.
        returns: the `Returns` of a `ReturnReplay`, or None.
    """

    rows: Rows
    position: UInt32[Array, ""]
    size: UInt32[Array, ""]
    dropped: UInt32[Array, ""]
    layout: UInt32[Array, "3"]
    num_steps: int = static()
    priorities: PyTree = None
    carries: PyTree = None
    episodes: PyTree = None
    data: PyTree = None
    returns: PyTree = None

    @property
    def capacity(self) -> int:
        """Rows, over all environments and devices."""
        return len(self.rows.reward)

    def num_slots(self, num_envs: int) -> int:
        """Rows of each environment; on a mesh, the state has the rows of one device only.

        Raises:
            ValueError: the capacity is below two rollouts of each environment; the message contains the smallest capacity.
        """
        least = 2 * self.num_steps * num_envs
        if self.capacity < least:
            raise ValueError(
                f"Replay: capacity={self.capacity} must be at least 2 * num_steps * num_envs = 2 * {self.num_steps} * "
                f"{num_envs} = {least}"
            )
        return self.capacity // (num_envs * self.num_steps) * self.num_steps

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def __repr__(self) -> str:
        """Rows and memory, which is known before anything is allocated: `jax.eval_shape(replay.init, ...)`."""
        if not all(isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray) for x in jax.tree.leaves(self)):
            return "ReplayState(...)"  # a tree of something else, such as shardings
        obs = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in jax.tree.leaves(self.rows.obs))
        return f"ReplayState(capacity={self.capacity}, obs={obs}, memory={self.nbytes / 1e6:.1f} MB)"


@struct
class Transition:
    """A batch of n-step transitions, in which a value is bootstrapped as `reward + discount · V(next_obs)`.

    Attributes:
        reward: Σ_{k<m} γ^k r_{t+k}, over the m ≤ n steps to the end of the episode or to the newest row.
        discount: γ^m, or 0 after a terminal state.
        next_obs: the observation m steps later.
        next_action_mask: the actions that are allowed there, or None.
        weight: weight in the loss: 1, or the importance weight; 0 for a row that is not learned from.
        index: the first row of the transition in the storage, for `PrioritizedReplay.set_priorities`.
        num_summed: m, the steps to `next_obs`; None for transitions from elsewhere.
        next_action: the action that the replay has for `next_obs`; None for transitions from elsewhere.
        has_next_action: `next_action` was taken in `next_obs`: the episode goes on, and its next row is in the replay.
        from_data: the transition is of a data set, in a batch of a `MixedReplay` or of `polyak.train.offline`; else None.
        whole_return: Σ γ^k r_{t+k} to the end of the episode, of a `ReturnReplay`; else None.
        has_whole_return: `whole_return` is known, as the episode has terminated.
    """

    obs: PyTree
    action: PyTree
    action_mask: PyTree
    reward: Float[Array, " N"]
    discount: Float[Array, " N"]
    next_obs: PyTree
    next_action_mask: PyTree
    weight: Float[Array, " N"]
    index: Int32[Array, " N"]
    num_summed: Int32[Array, " N"] | None = None
    next_action: PyTree = None
    has_next_action: Bool[Array, " N"] | None = None
    from_data: Bool[Array, " N"] | None = None
    whole_return: Float[Array, " N"] | None = None
    has_whole_return: Bool[Array, " N"] | None = None


class Replay(abc.ABC):
    """The base of replays: frozen settings with pure methods over a `ReplayState`, given to an agent as `replay=`.

    A replay of your own is a `polyak.core.struct.struct` with these methods, or inherits from `UniformReplay`, which stores
    rows, and draws from them in its own way. `set_priorities` and `metrics` have defaults for a replay without priorities.

    Attributes:
        draws_sequences: `Transition.obs` is a `SequenceObs`, for a recurrent network.
    """

    draws_sequences: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Rows, over all environments and devices."""

    @property
    def has_priorities(self) -> bool:
        """`sample` gives importance weights, and `set_priorities` keeps the TD errors."""
        return False

    @property
    def has_data(self) -> bool:
        """A part of each batch is from a data set; `sample` sets `Transition.from_data`."""
        return False

    @property
    def draw_length(self) -> int:
        """Time steps of each sample of a batch: 1 of a transition, L of a sequence."""
        return 1

    def with_capacity(self, capacity: int) -> "Replay":
        """The replay with another capacity."""
        return dataclasses.replace(self, capacity=capacity)  # type: ignore[type-var]

    def for_env(self, owner: str, spec: EnvSpec) -> "Replay":
        """The replay for an environment.

        Args:
            owner: the agent, for errors.

        Raises:
            ValueError: the replay needs other observations.
        """
        return self

    @abc.abstractmethod
    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check that the capacity is large enough, and that devices can split the rows equally; see `check_capacity`.

        Args:
            num_envs: environments of each device.
            num_steps: the length of the rollouts that are added.
            n_step: the most steps that rewards are summed over.
            devices: number of devices.

        Raises:
            ValueError: the capacity is too small, or the rows cannot be split.
        """

    def divide(self, batch_size: int) -> tuple[int, int]:
        """The transitions of a batch of one device that are the environment's, and that are of data."""
        return batch_size, 0

    @abc.abstractmethod
    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay.

        Args:
            obs: an observation of one environment; arrays, NumPy's or JAX's.
            action: an action of one environment.
            action_mask: a mask of one environment, or None where the environment has none.
            num_steps: the length of the rollouts that are added.
            carry: the recurrent state of one environment; `()` without one.
        """

    @abc.abstractmethod
    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with the transitions of a rollout `[T, B]` and its last observation; T is the `num_steps` of `init`."""

    @abc.abstractmethod
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
        """A batch of transitions.

        Args:
            batch_size: transitions, or sequences.
            num_envs: B of the rollouts that filled the replay.
            gamma: γ.
            n_step: n, the most steps that rewards are summed over.
            env_steps: valid transitions seen so far, which schedules are functions of.
            axis_name: inside `shard_map`, the mesh axis over which the rows are split: each device draws from its own.
        """

    def set_priorities(
        self,
        state: ReplayState,
        index: Int32[Array, " N"],
        td_error: Float[Array, " N"],
        *,
        enabled: Bool[Array, ""] | bool = True,
        axis_name: str | None = None,
    ) -> ReplayState:
        """The replay with the TD errors of a batch, in `ReplayState.priorities`; nothing else of the state may change.

        Args:
            index: `Transition.index`.
            td_error: |δ|.
            enabled: False changes nothing.
            axis_name: the mesh axis over which the replay is split.
        """
        return state

    def change_own(self, state: ReplayState, change: Callable[[ReplayState], ReplayState]) -> ReplayState:
        """The replay after a change of the rows that `add` has stored, and of their priorities."""
        return change(state)

    def metrics(self, state: ReplayState, *, axis_name: str | None = None) -> dict[str, Array]:
        """Metrics of the replay besides its size, by tag."""
        return {}

    @abc.abstractmethod
    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Return the `PartitionSpec` of the state: rows are split by environment; see `Agent.partition`.

        Args:
            num_steps: the `num_steps` of `init`.
        """


def check_replay(owner: str, name: str, value: Any) -> None:
    """Check that a setting is a replay.

    Raises:
        TypeError: the value is no replay, or its class is no struct.
    """
    if not isinstance(value, Replay):
        raise TypeError(
            f"{owner}: {name} must be a polyak.replay.Replay, such as polyak.UniformReplay(100_000), got {value!r:.80}"
        )
    if jax.tree_util.all_leaves([value]):
        raise TypeError(f"{owner}: {name} must be a pytree: decorate {type(value).__name__} with polyak.core.struct.struct")


def check_draws_transitions(owner: str, replay: Replay) -> None:
    """Check that a replay draws transitions.

    Raises:
        ValueError: the replay draws sequences.
    """
    if replay.draws_sequences:
        users = "DQN, BC, SAC, TQC, TD3 and DDPG"
        raise ValueError(
            f"{owner}: replay must draw transitions; sequences are for recurrent networks of {users}, got {replay!r}"
        )


def check_capacity(replay: Replay, num_envs: int, num_steps: int, longest: int, devices: int) -> None:
    """Check that each environment has room for two rollouts, and for a rollout and the longest draw.

    Args:
        num_envs: environments of each device.
        longest: the most rows of one environment that a draw reads.

    Raises:
        ValueError: the rows cannot be split equally over the devices, or the capacity is below the one in the message.
    """
    owner, capacity = type(replay).__name__, replay.capacity
    if capacity % devices:
        raise ValueError(f"{owner}: capacity={capacity} must be divisible by devices={devices}")
    least = max(2 * num_steps, num_steps + longest) * num_envs * devices
    if capacity < least:
        raise ValueError(
            f"{owner}: capacity={capacity} must be at least {least} for num_envs={num_envs * devices}, num_steps={num_steps} "
            f"and draws of {longest} consecutive steps"
        )

"""Shared types and interfaces: time steps, rollouts, policies, agents, networks, environments."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.printing import short_repr
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct

if TYPE_CHECKING:
    # A default for TypeVar is in the standard library from Python 3.13 on.
    import typing_extensions

    State = typing_extensions.TypeVar("State", default=Any)
else:
    State = TypeVar("State")

T = TypeVar("T")

PyTree: TypeAlias = Any
Scalar: TypeAlias = float | Float[Array, ""]


def copy_buffers(tree: T) -> T:
    """Copy every array to a new JAX buffer that nothing else references, so that it can be donated.

    The copy is complete on return: the source arrays may change afterwards.
    """
    # Onto the device first: `device_put` copies device arrays, but may alias NumPy's buffers in spite of `may_alias=False`.
    # `jnp.array` and `jnp.copy` compile a program for every shape.
    copied: T = jax.block_until_ready(jax.device_put(jax.device_put(tree), may_alias=False))
    return copied


@struct
class Histogram:
    """Counts of values in equal bins between their minimum and maximum.

    Attributes:
        low: the minimum.
        high: the maximum.
        counts: number of values per bin; the last bin includes the maximum.
        total: the sum of the values.
        squares: the sum of their squares.
    """

    low: Float[Array, "*S"]
    high: Float[Array, "*S"]
    counts: Float[Array, "*S bins"]
    total: Float[Array, "*S"]
    squares: Float[Array, "*S"]


@struct
class Mean:
    """A metric that is a mean: loops add up totals and counts of all updates since the last report, and report total / count.

    Attributes:
        total: the sum of the values.
        count: the number of values; reports leave out metrics without values, such as losses before learning starts.
    """

    total: Float[Array, "*S"]
    count: Float[Array, "*S"]

    @classmethod
    def of(cls, values: Float[Array, "..."], counts: Bool[Array, "..."] | bool = True) -> "Mean":
        """The mean of the values that count; NaN and infinity never do."""
        counts = jnp.isfinite(values) & jnp.asarray(counts)
        return cls(jnp.sum(jnp.where(counts, values, 0.0)), jnp.sum(counts, dtype=jnp.float32))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def __float__(self) -> float:
        return float(self.total) / float(self.count) if self.count else math.nan

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(float(self), dtype)


Terms: TypeAlias = dict[str, Array]
"""The terms of a loss, by name: scalars, or one value per sample `[N]`."""

Metrics: TypeAlias = dict[str, Array | Mean | Histogram]
"""The metrics of an update by tag: numbers, of which a report has the last; means over the updates since the last report; and
histograms if enabled."""


@struct
class EpisodeRecord:
    """Reward and episode bounds for reported returns, where the agent sees other rewards or parts of episodes.

    Attributes:
        reward: float32, in the environment's units.
        last: the complete episode ends here.
        first: a complete episode begins here; its reward is 0.
    """

    reward: Any
    last: Any
    first: Any


@struct
class TimeStep:
    """The output of an environment, batched `[B]`.

    `reward`, `terminated` and `truncated` belong to the transition that *led to* `obs`; `first` marks the obs of a new
    episode, whose reward is 0. Environments reset on the next step: a step that follows a `last` TimeStep ignores its
    action and returns a `first` one, so the final obs of an episode is part of the rollout and its value can be bootstrapped.

    Attributes:
        obs: any pytree of arrays `[B, ...]`.
        reward: float32, in the environment's units.
        terminated: the transition reached a terminal state, whose value is 0.
        truncated: the episode was cut short; returns bootstrap from the value of `obs`.
        first: `obs` begins an episode.
        action_mask: None, or bool arrays in the tree of the action space, True where an action is allowed.
        record: None, or the reward and episode bounds for reported returns; never used for learning.
        info: None, or numbers `[B]` that an environment in JAX reports, by tag, NaN for environments without a number; never
            used for learning. `HostEnv.info` describes the tags.
    """

    obs: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    action_mask: PyTree = None
    record: EpisodeRecord | None = None
    info: Mapping[str, Any] | None = None

    @property
    def last(self) -> Any:
        """The episode ended here: terminated or truncated."""
        return self.terminated | self.truncated

    @property
    def episode_record(self) -> EpisodeRecord:
        """Reward and episode bounds from which reported returns and lengths are computed."""
        return EpisodeRecord(self.reward, self.last, self.first) if self.record is None else self.record


@struct
class PolicyStep:
    """The output of a policy: `action` in the tree of the action space, the next `carry`, and `info` for the agent."""

    action: PyTree
    carry: PyTree = ()
    info: PyTree = ()


@struct
class Rollout:
    """T steps of B environments, time-major: `time_steps` leaves `[T+1, B, ...]`, `actions` and `info` leaves `[T, B, ...]`.

    Sample t is the transition from `time_steps[t]` by `actions[t]` to `time_steps[t + 1]`. A sample that starts from a `last`
    time step is not a transition (the environment resets there): `valid[t] = ~last[t]`, and every loss masks it.

    Attributes:
        carry: the policy's recurrent state before the first step.
    """

    time_steps: TimeStep
    actions: PyTree
    info: PyTree = ()
    carry: PyTree = ()

    @property
    def obs(self) -> PyTree:
        """The observations before each action, `[T, B, ...]`."""
        return jax.tree.map(lambda x: x[:-1], self.time_steps.obs)

    @property
    def next_obs(self) -> PyTree:
        """The observations after each action, `[T, B, ...]`; at the end of an episode, its final observation."""
        return jax.tree.map(lambda x: x[1:], self.time_steps.obs)

    @property
    def action_mask(self) -> PyTree:
        """The allowed actions, `[T, B, ...]`, or None."""
        return jax.tree.map(lambda x: x[:-1], self.time_steps.action_mask)

    @property
    def reward(self) -> Float[Array, "T B"]:
        """The reward of each transition."""
        return jnp.asarray(self.time_steps.reward[1:])

    @property
    def terminated(self) -> Bool[Array, "T B"]:
        """The transition reached a terminal state."""
        return jnp.asarray(self.time_steps.terminated[1:])

    @property
    def truncated(self) -> Bool[Array, "T B"]:
        """The transition was the last before the episode was cut short."""
        return jnp.asarray(self.time_steps.truncated[1:])

    @property
    def first(self) -> Bool[Array, "T B"]:
        """The sample starts an episode."""
        return jnp.asarray(self.time_steps.first[:-1])

    @property
    def valid(self) -> Bool[Array, "T B"]:
        """The sample is a transition; False where the environment only reset."""
        return ~jnp.asarray(self.time_steps.last[:-1])


@struct
class Variables:
    """A network's arrays: `params` are trained; `stats` (batch-norm statistics, counters, keys) are not.

    Attributes:
        graph: the static half of a Flax NNX or Equinox module, from which it is rebuilt; part of the tree's structure.
    """

    params: PyTree
    stats: PyTree = ()
    graph: Any = static(default=None, repr=False)


@runtime_checkable
class Network(Protocol):
    """A frozen settings object with pure functions over `Variables`."""

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the environment's spaces."""
        ...

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns `(out, carry, stats)` for obs leaves `[B, ...]`."""
        ...


@runtime_checkable
class RecurrentNetwork(Network, Protocol):
    """A network with recurrent state; the carry of any other network is `()`."""

    def initial_carry(self, batch_size: int) -> PyTree:
        """The recurrent state of `batch_size` new episodes, leaves `[B, ...]`; `apply` accepts `()` in its place."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A pytree that acts; the policy resets the carry of environments whose `first` is True."""

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry of `batch_size` new episodes; `()` for a policy without recurrent state."""
        ...

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Any, PyTree]:
        """The distribution over actions and the next carry."""
        ...

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """One action for each environment."""
        ...


@runtime_checkable
class PredictingPolicy(Protocol):
    """A policy with `predict`: any of polyak's, exported ones included."""

    def predict(
        self, obs: Any, carry: PyTree = None, *, deterministic: bool = True, first: Any = None, key: Any = None
    ) -> tuple[Any, PyTree]:
        """The environment's action for an observation or a batch of them, and the carry."""
        ...


@runtime_checkable
class TrainedPolicy(Policy, PredictingPolicy, Protocol):
    """A policy that the loops can run and that predicts."""


Act: TypeAlias = Callable[[TimeStep, PyTree, Any], PolicyStep]
"""`act(time_step, carry, draw)` returns the policy's action, drawn with these random numbers."""


class NumPyActor(NamedTuple):
    """The `action` of policies of one structure in two parts: JAX draws for many steps at a time, NumPy acts.

    Attributes:
        noise: `noise(policy, key, num_envs)`, all random numbers of one step's actions, from the key that `action` would
            receive and nothing else that changes; traced.
        start: `start(policy)` is `act(time_step, carry, noise)`, equal to `action` up to rounding; the policy's arrays are
            NumPy's.
    """

    noise: Callable[[Any, PRNGKeyArray, int], Array]
    start: Callable[[Any], Act]


@runtime_checkable
class Agent(Protocol[State]):
    """A frozen settings object; its state is one pytree with everything that training changes."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces that the agent was built for."""
        ...

    @property
    def num_steps(self) -> int:
        """Rollout length of one update, in steps of each environment."""
        ...

    def init(self, key: PRNGKeyArray) -> State:
        """Create a new state."""
        ...

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check, before anything runs, that the settings work with this number of environments on each device.

        Raises:
            ValueError: a setting does not work with them.
        """
        ...

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True if the matrix products of an update are so small that one CPU thread per device is fastest."""
        ...

    def partition(self, axis_name: str) -> PyTree:
        """Return the `jax.sharding.PartitionSpec` of the state, or a tree of them that is a prefix of the state.

        `PartitionSpec()` replicates (networks, optimizers, statistics); `PartitionSpec(axis_name)` splits the first axis,
        which must be the axis of the environments (a replay).
        """
        ...

    def policy(self, state: State) -> Policy:
        """The greedy policy, for evaluation and export."""
        ...

    def collect_policy(self, state: State) -> Policy:
        """The exploring policy, for collecting rollouts."""
        ...

    def update(
        self, state: State, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[State, Metrics]:
        """Learn from one rollout.

        Args:
            axis_name: where the rollout is split over devices by environments (inside `jax.shard_map`), the mesh axis to
                reduce gradients and statistics over.
        """
        ...

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Return why training cannot continue (too many consecutive skipped updates, and the non-finite quantity), or None."""
        ...


@runtime_checkable
class HasReplay(Protocol):
    """An agent whose state holds transitions of earlier rollouts, in large arrays that change little between checkpoints.

    `policy` and `collect_policy` read none of it, and an agent whose replay is empty again collects before it learns.
    """

    @property
    def replay_field(self) -> str:
        """The field of the state that holds the replay; its arrays are made by `init`, and shared with nothing."""
        ...


@runtime_checkable
class SupportsHostReplay(HasReplay, Protocol):
    """An agent whose replay may be in another memory than the rest of its state: `update` takes batches instead of the replay.

    Attributes:
        num_steps: see `Agent`.
    """

    num_steps: int

    def draw_batches(self, replay: Any, rollout: "Rollout", key: PRNGKeyArray, env_steps: Any) -> tuple[Any, Any]:
        """The replay with the rollout, and the batches of the next update; they have `env_steps` after it, and `priorities`.

        Args:
            replay: the state's replay; donated.
            rollout: the rollout of the next update.
            key: the key of the next update.
            env_steps: the state's `env_steps`.
        """
        ...

    def return_errors(self, replay: Any, errors: Any) -> Any:
        """The replay with the TD errors of an update's batches.

        Args:
            replay: donated.
            errors: `priorities` of the batches in the state after the update.
        """
        ...


@runtime_checkable
class SupportsLag(Protocol):
    """An agent that states how old a rollout may be; without this attribute, rollouts must be of the newest policy."""

    @property
    def max_lag(self) -> int | None:
        """Largest number of updates between collecting a rollout and learning from it; None for any number.

        0 for agents that assume that the newest policy collected the rollout.
        """
        ...


@runtime_checkable
class Env(Protocol):
    """An environment in JAX, batched over `num_envs`: pure functions over a state that is a pytree."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...

    @property
    def num_envs(self) -> int:
        """The number of environments, B."""
        ...

    def init(self, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """Start a new episode in every environment: returns the state, and time steps with `first` set."""
        ...

    def step(self, state: PyTree, action: PyTree, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """Step every environment; environments whose previous time step was `last` reset instead."""
        ...


@runtime_checkable
class HostEnv(Protocol):
    """An environment outside JAX (Gymnasium), batched over `num_envs`, in NumPy; it stores its own state.

    One that reports values which its environments put into `info` has an attribute `info`, a dict of the values `[B]` of the
    last time step by tag, NaN for environments without a value: `rollout/success_rate` and `rollout/ep_rew_mean` at the ends of
    episodes, `env/NAME` at any transition.
    """

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...

    @property
    def num_envs(self) -> int:
        """The number of environments, B."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Start a new episode in every environment; equal seeds give equal episodes."""
        ...

    def step(self, action: PyTree) -> TimeStep:
        """Step every environment; the returned arrays are never overwritten."""
        ...

    def snapshot(self) -> dict[str, Any] | None:
        """The complete state for `restore` (dicts, lists, numbers, strings, arrays), or None if unsupported."""
        ...

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot of an equal environment."""
        ...

    def close(self) -> None:
        """Free processes and windows; a second call does nothing."""
        ...


EPISODE_WINDOW = 100
"""Number of episodes of the means in metrics."""


@dataclass(frozen=True)
class EndedEpisodes:
    """The episodes that ended in one iteration.

    Attributes:
        count: number of episodes.
        returns: sum of their returns.
        lengths: sum of their lengths.
        info: number and sum of the values of `info` by tag; see `HostEnv`.
    """

    count: int
    returns: float
    lengths: int
    info: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@short_repr("env_steps", "target_env_steps", "iteration", "seconds", "compile_seconds", "fps")
@dataclass(frozen=True, repr=False)
class Progress:
    """The progress of a training loop, passed to callbacks.

    Attributes:
        env_steps: valid transitions so far, over all environments (a Python int: it never wraps).
        target_env_steps: valid transitions at the end of training.
        iteration: rollouts collected so far, each followed by an update.
        seconds: wall time of training in this process, without compilation.
        compile_seconds: wall time spent compiling.
        fps: env steps per second of training in this process.
        env: the environment of a host loop, for its `snapshot`; None in the compiled loop, whose state is complete.
        histograms: histograms of the last update by tag, if the agent computes them.
        nondeterminism: why a resumed run may differ from an uninterrupted one: Python policies not known to be deterministic.
        eval_every: env_steps between evaluations of `train.run`; None without evaluations.
        episodes: the newest iterations with about the last 100 episodes, for the means of a resumed run.
        settings: the settings of `train.run` as JSON data, the content of `config.json`; empty in loops alone.
        run_dir: the run directory of `train.run`, or None.
    """

    env_steps: int
    target_env_steps: int
    iteration: int
    seconds: float
    compile_seconds: float
    fps: float
    env: HostEnv | None = None
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    nondeterminism: tuple[str, ...] = ()
    eval_every: int | None = None
    episodes: tuple[EndedEpisodes, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None


Callback: TypeAlias = Callable[[Progress, dict[str, float], PyTree], object]
"""Called by a loop at every report with the progress, the metrics as Python floats (what a callback adds is reported too),
and the state of the loop, a pytree of which anything may be kept. Returning False stops training after this report; an
exception ends it."""

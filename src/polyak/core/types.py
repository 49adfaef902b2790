"""What travels between the rooms: time steps, rollouts, policies, agents, networks, environments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct

PyTree: TypeAlias = Any
Scalar: TypeAlias = float | Float[Array, ""]


def copy_buffers(tree: PyTree) -> Any:
    """Copy every array to a new JAX buffer that nothing else references, so that it can be donated.

    The copy is complete on return: the arrays given may change afterwards.
    """
    # Onto the device first: `device_put` copies device arrays, but may alias NumPy's buffers in spite of `may_alias=False`.
    # `jnp.array` and `jnp.copy` compile a program for every shape.
    return jax.block_until_ready(jax.device_put(jax.device_put(tree), may_alias=False))


@struct
class Histogram:
    """How numbers are spread: how many lie in each of equal bins from the lowest to the highest.

    Attributes:
        counts: by bin; the last one holds the highest number too.
        total: the sum of the numbers.
        squares: the sum of their squares.
    """

    low: Float[Array, "*S"]
    high: Float[Array, "*S"]
    counts: Float[Array, "*S bins"]
    total: Float[Array, "*S"]
    squares: Float[Array, "*S"]


Terms: TypeAlias = dict[str, Array]
"""The scalars that a loss is made of, by name."""

Metrics: TypeAlias = dict[str, Array | Histogram]
"""What an update says of itself: scalars by tag, and histograms where they were asked for."""


@struct
class Score:
    """What the returns of episodes are counted from, where the agent sees another reward or less than whole episodes.

    Attributes:
        reward: float32, in the environment's units.
        last: the whole episode ended here.
        first: a whole episode begins here; its reward is 0.
    """

    reward: Any
    last: Any
    first: Any


@struct
class TimeStep:
    """What an environment hands out, batched `[B]`.

    `reward`, `terminated` and `truncated` belong to the transition that *led to* `obs`; `first` marks the obs of a fresh
    episode, whose reward is 0. Environments reset on the next step: a step that follows a `last` TimeStep ignores its
    action and returns a `first` one, so the final obs of an episode is in the stream and its value can be bootstrapped from.

    Attributes:
        obs: any pytree of arrays `[B, ...]`.
        reward: float32, in the environment's units.
        terminated: the transition reached a terminal state, whose value is 0.
        truncated: the episode was cut short; the value of `obs` still counts.
        first: `obs` begins an episode.
        action_mask: None, or bool arrays in the tree of the action space, True where an action is allowed now.
        score: None, or what is counted instead for the returns that are reported; nothing is learned from it.
    """

    obs: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    action_mask: PyTree = None
    score: Score | None = None

    @property
    def last(self) -> Any:
        """The episode ended here, one way or the other."""
        return self.terminated | self.truncated

    @property
    def counted(self) -> Score:
        """What the returns and lengths of episodes are counted from."""
        return Score(self.reward, self.last, self.first) if self.score is None else self.score


@struct
class PolicyStep:
    """What a policy answers: `action` in the tree of the action space, its next `carry`, and `info` for the learner."""

    action: PyTree
    carry: PyTree = ()
    info: PyTree = ()


@struct
class Rollout:
    """A stretch of B environments, time-major: `time_steps` leaves `[T+1, B, ...]`, `actions` and `info` leaves `[T, B, ...]`.

    Row t is the transition from `time_steps[t]` by `actions[t]` to `time_steps[t + 1]`. The row that starts from a `last`
    time step is no transition (the environment reset there): `valid[t] = ~last[t]`, and it has no weight anywhere.

    Attributes:
        carry: the policy's memory at the first row.
    """

    time_steps: TimeStep
    actions: PyTree
    info: PyTree = ()
    carry: PyTree = ()

    @property
    def obs(self) -> PyTree:
        """The observations acted on, `[T, B, ...]`."""
        return jax.tree.map(lambda x: x[:-1], self.time_steps.obs)

    @property
    def next_obs(self) -> PyTree:
        """The observations reached, `[T, B, ...]`; at the end of an episode its final one."""
        return jax.tree.map(lambda x: x[1:], self.time_steps.obs)

    @property
    def action_mask(self) -> PyTree:
        """The actions that were allowed, `[T, B, ...]`, or None."""
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
        """The transition was the last before a time limit."""
        return jnp.asarray(self.time_steps.truncated[1:])

    @property
    def first(self) -> Bool[Array, "T B"]:
        """The row starts an episode."""
        return jnp.asarray(self.time_steps.first[:-1])

    @property
    def valid(self) -> Bool[Array, "T B"]:
        """The row is a transition; False where the environment only reset."""
        return ~jnp.asarray(self.time_steps.last[:-1])


@struct
class Variables:
    """A network's arrays: `params` are trained; `stats` (batch-norm statistics, counters, keys) are not.

    Attributes:
        graph: what a network needs beside its arrays to be put together again (the static half of a Flax NNX or Equinox
            module); part of the tree's structure.
    """

    params: PyTree
    stats: PyTree = ()
    graph: Any = static(default=None)


@runtime_checkable
class Network(Protocol):
    """A frozen object of settings with pure functions over `Variables`."""

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the environment's spaces."""
        ...

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`."""
        ...


@runtime_checkable
class RecurrentNetwork(Network, Protocol):
    """A network that has a memory; the carry of all others is `()`."""

    def initial_carry(self, batch_size: int) -> PyTree:
        """The memory of `batch_size` fresh episodes, leaves `[B, ...]`; `apply` takes `()` for it."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A pytree that acts; the carry of a row whose `first` is set is reset by the policy."""

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry of `batch_size` fresh episodes; `()` for a policy without memory."""
        ...

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Any, PyTree]:
        """The distribution over actions and the next carry."""
        ...

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """One action for each row."""
        ...


@runtime_checkable
class NumPyPolicy(Protocol):
    """A policy that can act without JAX, where that is cheaper than a compiled call a step."""

    def suits_numpy(self, num_envs: int) -> bool:
        """It can, for these spaces, and it is cheaper, for so many environments."""
        ...

    def noise(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """All that is random in the actions of one step, from the key that `action` would get."""
        ...

    def in_numpy(self) -> Callable[[TimeStep, PyTree, Any], PolicyStep]:
        """`act(time_step, carry, noise)` in NumPy, of a policy whose arrays are NumPy's: `action`'s answers, up to rounding."""
        ...


@runtime_checkable
class Agent(Protocol):
    """A frozen object of settings; the state is one pytree with everything that training changes."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces that the agent was built for."""
        ...

    @property
    def num_steps(self) -> int:
        """Rollout length of one update, in steps of each environment."""
        ...

    @property
    def network(self) -> "Network | None":
        """The network whose settings the command line's network flags change; None for an agent without one."""
        ...

    def init(self, key: PRNGKeyArray) -> Any:
        """A fresh state."""
        ...

    def check(self, num_envs: int) -> None:
        """Check, before anything runs, that the settings work with this number of environments per device.

        Raises:
            ValueError: they do not.
        """
        ...

    def has_small_products(self, num_envs: int, devices: int) -> bool:
        """Whether an update's matrix products are so small that one CPU thread per device computes them fastest."""
        ...

    def partition(self, axis_name: str) -> PyTree:
        """How the state is split over devices: a `jax.sharding.PartitionSpec`, or a tree of them that is a prefix of the state.

        `PartitionSpec()` replicates (networks, optimizers, statistics); `PartitionSpec(axis_name)` splits the first axis,
        which must be that of the environments (a replay).
        """
        ...

    def policy(self, state: Any) -> Policy:
        """The policy that is evaluated and exported: greedy."""
        ...

    def collect_policy(self, state: Any) -> Policy:
        """The policy that collects data: it explores."""
        ...

    def update(self, state: Any, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None) -> tuple[Any, Metrics]:
        """Learn from one rollout.

        Args:
            axis_name: where the rollout is split over devices by environments (inside `jax.shard_map`), the mesh axis to
                reduce gradients and statistics over.
        """
        ...

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Why training cannot go on (too many updates skipped in a row, and what was not finite), or None."""
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
        """B."""
        ...

    def init(self, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """Fresh episodes everywhere: the state, and `first` time steps."""
        ...

    def step(self, state: PyTree, action: PyTree, key: PRNGKeyArray) -> tuple[PyTree, TimeStep]:
        """One step of every environment; rows whose last time step was `last` reset instead."""
        ...


@runtime_checkable
class HostEnv(Protocol):
    """An environment outside JAX (Gymnasium), batched over `num_envs`, in NumPy; it keeps its own state."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...

    @property
    def num_envs(self) -> int:
        """B."""
        ...

    def reset(self, seed: int) -> TimeStep:
        """Fresh episodes everywhere, reproducible by the seed."""
        ...

    def step(self, action: PyTree) -> TimeStep:
        """One step of every environment; the arrays are the caller's to keep."""
        ...

    def snapshot(self) -> dict[str, Any] | None:
        """All that `restore` needs to go on exactly from here (dicts, lists, numbers, strings, arrays), or None."""
        ...

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot of an equal environment."""
        ...

    def close(self) -> None:
        """Free processes and windows; a second call does nothing."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a training loop stands, as callbacks see it.

    Attributes:
        env_steps: valid transitions so far, over all environments (a Python int: it never wraps).
        target_env_steps: how many there shall be.
        iteration: rollouts collected so far, each followed by an update.
        seconds: wall time of training since this process began to train, without compilation.
        compile_seconds: wall time spent compiling.
        fps: env steps per second of training in this process.
        env: the environment of a host loop, for its `snapshot`; None in the compiled loop, whose state holds everything.
        histograms: of the last update, by tag, where the agent was asked for them.
        inexact: why training that goes on from here may not do the same again: policies in Python that are not known to be
            deterministic.
    """

    env_steps: int
    target_env_steps: int
    iteration: int
    seconds: float
    compile_seconds: float
    fps: float
    env: HostEnv | None = None
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    inexact: tuple[str, ...] = ()


Callback: TypeAlias = Callable[[Progress, Mapping[str, float], PyTree], object]
"""Called by a loop at every report with the progress, the metrics as Python floats, and the loop's whole state (a pytree
that may be kept only as a copy: its buffers are donated to the next step). Returning False stops training after this
report; whatever is raised ends it."""

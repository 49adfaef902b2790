"""What all loops share: the state they carry, the keys of an iteration, and reporting."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial, wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.checks import check_integer
from polyak.core.space_check import check_step_arrays
from polyak.core.spaces import EnvSpec, difference
from polyak.core.struct import struct
from polyak.core.types import (
    Agent,
    Callback,
    Env,
    Histogram,
    HostEnv,
    Metrics,
    Progress,
    PyTree,
    Rollout,
    TimeStep,
    copy_buffers,
)
from polyak.train.episodes import Episodes, Finished, Window, measure

T = TypeVar("T")

# The mesh axis over which environments are split.
ENVS = "envs"


class TrainingDiverged(FloatingPointError):
    """Too many updates in a row met numbers that are not finite; the message names the first such quantity."""


@struct
class LoopState:
    """All that a loop carries from one iteration to the next; what a checkpoint holds.

    Attributes:
        agent: the agent's state.
        env: the state of a JAX environment; `()` in a host loop, where the environment keeps its own.
        time_step: what the environment said last.
        carry: the collecting policy's memory.
        episodes: returns and lengths of the episodes under way.
        key: the run's key; it is never changed, only folded with counters.
        iteration: rollouts done.
    """

    agent: PyTree
    env: PyTree
    time_step: TimeStep
    carry: PyTree
    episodes: Episodes
    key: PRNGKeyArray
    iteration: UInt32[Array, ""]


@dataclass(frozen=True)
class TrainResult:
    """How training ended.

    Attributes:
        state: the agent's state; `agent.policy(result.state)` acts.
        loop_state: the loop's whole state, from which it can go on.
        progress: env_steps, seconds, frames per second at the end.
        metrics: the last report.
        stopped: None if all steps were done, else what ended training before: `"callback"`, `"request"`, or, of one among
            several seeds, `"diverged"`.
        diagnosis: why this seed could not go on; None unless it diverged.
    """

    state: PyTree
    loop_state: LoopState
    progress: Progress
    metrics: Mapping[str, float]
    stopped: str | None = None
    diagnosis: str | None = None


@struct
class IterationKeys:
    """The keys of one iteration.

    Attributes:
        act: the policy's key; at step t of the rollout it acts with `fold_in(act, t)`.
        env: the environment's keys `[T]`.
        update: the update's key.
    """

    act: PRNGKeyArray
    env: PRNGKeyArray
    update: PRNGKeyArray


def iteration_keys(key: PRNGKeyArray, iteration: UInt32[Array, ""], num_steps: int) -> IterationKeys:
    """The keys of an iteration: a function of the run's key and the count alone, so that any loop can go on from any other."""
    env_key, loop_key = jax.random.split(key, 3)[1:]
    now = jax.random.fold_in(loop_key, iteration)
    numbers = iteration * jnp.uint32(num_steps) + jnp.arange(num_steps, dtype=jnp.uint32)
    return IterationKeys(
        act=jax.random.fold_in(now, 0),
        env=jax.vmap(lambda number: env_step_key(env_key, number))(numbers),
        update=jax.random.fold_in(now, 1),
    )


def env_step_key(env_key: PRNGKeyArray, number: int | UInt32[Array, ""]) -> PRNGKeyArray:
    """The key of the environment's step with this number (from 0); its reset has a key of its own."""
    return jax.random.fold_in(jax.random.fold_in(env_key, 1), number)


def env_reset_key(env_key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of the environment's first reset."""
    return jax.random.fold_in(env_key, 0)


def run_env_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """The environment's share of the run's key."""
    return jax.random.split(key, 3)[1]


def initial(agent: Agent, num_envs: int, key: PRNGKeyArray, env_state: PyTree, time_step: TimeStep) -> LoopState:
    """The loop's state before the first iteration; every buffer its own, so that it can be donated beside the arguments."""
    check_step_arrays("train: the environment's time_step", time_step, (num_envs,))
    state = agent.init(jax.random.split(key, 3)[0])
    own: LoopState = copy_buffers(
        LoopState(
            agent=state,
            env=env_state,
            time_step=time_step,
            carry=agent.collect_policy(state).initial_state(num_envs),
            episodes=Episodes.fresh(num_envs),
            key=key,
            iteration=jnp.zeros((), jnp.uint32),
        )
    )
    return own


def learn(
    agent: Agent, update: Any, state: LoopState, rollout: Rollout, key: PRNGKeyArray
) -> tuple[PyTree, Episodes, Metrics, Finished]:
    """Measure the rollout's episodes, and update the agent."""
    episodes, finished = measure(state.episodes, rollout.time_steps)
    agent_state, metrics = update(agent, state.agent, rollout, key)
    return agent_state, episodes, metrics, finished


def update_on(mesh: Mesh | None) -> Callable[[Agent, PyTree, Rollout, PRNGKeyArray], tuple[PyTree, Metrics]]:
    """The agent's update, on one device or split by environments over a mesh of them."""

    def update(agent: Agent, state: PyTree, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Metrics]:
        return agent.update(state, rollout, key, axis_name=None if mesh is None else ENVS)

    if mesh is None:
        return update
    steps, carry, everywhere = PartitionSpec(None, ENVS), PartitionSpec(ENVS), PartitionSpec()
    rollouts = Rollout(time_steps=steps, actions=steps, info=steps, carry=carry)  # type: ignore[arg-type]

    def update_on_mesh(agent: Agent, state: PyTree, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Metrics]:
        states = agent.partition(ENVS)
        args, results = (everywhere, states, rollouts, everywhere), (states, everywhere)
        split = jax.shard_map(update, mesh=mesh, in_specs=args, out_specs=results, check_vma=False)
        return split(agent, state, rollout, key)

    return update_on_mesh


def state_sharding(agent: Agent, mesh: Mesh) -> Any:
    """How the agent's state is placed on a mesh: shardings in a tree that is a prefix of the state."""
    return jax.tree.map(partial(NamedSharding, mesh), agent.partition(ENVS))


def default_devices(agent: Agent, env: Env | HostEnv) -> int:
    """Two devices where JAX has them and they pay: a JAX environment with at least 64 copies; otherwise one."""
    if not isinstance(agent, Agent) or not isinstance(env, Env) or env.num_envs < 64 or env.num_envs % 2:
        return 1
    try:
        agent.check(env.num_envs // 2)
    except ValueError:
        return 1
    return min(2, jax.local_device_count())


def mesh_over(devices: int, num_envs: int) -> Mesh | None:
    """A mesh of so many devices for the environments, or None for one.

    Raises:
        ValueError: there are not so many devices, or they cannot share the environments equally.
    """
    check_integer("train", "devices", devices)
    present = jax.local_device_count()
    if devices > present:
        raise ValueError(
            f"train: devices={devices}, but JAX sees {present}; on a CPU call "
            f"jax.config.update('jax_num_cpu_devices', {devices}) before anything else uses JAX"
        )
    check_shares(devices, num_envs)
    if devices == 1:
        return None
    return jax.make_mesh((devices,), (ENVS,), (AxisType.Auto,), devices=jax.local_devices()[:devices])


def check_shares(devices: int, num_envs: int) -> None:
    """Refuse devices that cannot share the environments equally.

    Raises:
        ValueError: with both numbers.
    """
    if num_envs % devices:
        raise ValueError(f"train: num_envs={num_envs} cannot be split over devices={devices}")


def check_match(agent: Agent, env: Env | HostEnv, devices: int) -> None:
    """Refuse an environment that the agent was not built for, before anything runs.

    Raises:
        ValueError: the spaces differ, or the agent cannot work with so many environments.
    """
    if not isinstance(env, HostEnv | Env):
        raise TypeError(f"train: env must be one of polyak.envs.make, got {type(env).__name__}; give that to make first")
    check_integer("train", "devices", devices)
    check_spec("train", agent.spec, env.spec)
    agent.check(env.num_envs // devices)


@runtime_checkable
class HasSpec(Protocol):
    """A policy that knows the spaces it was built for."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...


def check_spec(owner: str, wanted: EnvSpec, got: EnvSpec, whose: str = "agent") -> None:
    """Check that an environment has the spaces, action scaling and masks that an agent or policy was built for.

    Raises:
        ValueError: the first field that differs, with both values.
    """
    if differs := difference(wanted, got):
        what, of_agent, of_env = differs
        raise ValueError(f"{owner}: {what} of the {whose}'s spec is {of_agent}, of the environment {got.id!r} {of_env}")


@dataclass(frozen=True)
class Target:
    """How far a loop goes and how often it reports, in environment steps.

    Raises:
        TypeError, ValueError: not positive integers.
    """

    env_steps: int
    report_every: int | None = None

    def __post_init__(self) -> None:
        check_integer("train", "env_steps", self.env_steps)
        if self.report_every is not None:
            check_integer("train", "report_every", self.report_every)

    def next_report(self, done: int) -> int:
        """The env_steps at which the next report falls due: the next multiple, however far the last iteration overshot."""
        every = self.report_every or max(1, self.env_steps // 100)
        return min((done // every + 1) * every, self.env_steps)


class Reporter:
    """Counts, clocks and callbacks of one run of a loop, on the host."""

    def __init__(
        self, agent: Agent, target: Target, env_steps: int, iteration: int, env: HostEnv | None, inexact: tuple[str, ...] = ()
    ) -> None:
        self._agent, self._target, self._env, self._inexact = agent, target, env, inexact
        self._window = Window()
        self._started_at = env_steps
        self._clock = 0.0
        self.compile_seconds = 0.0
        self.env_steps, self.iteration = env_steps, iteration
        self.metrics: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Time spent here is compilation."""
        start = time.monotonic()
        yield
        self.compile_seconds += time.monotonic() - start

    @contextmanager
    def training(self) -> Iterator[None]:
        """Time spent here is training."""
        start = time.monotonic()
        yield
        self._clock += time.monotonic() - start

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._clock

    def advance(self, env_steps: int, iterations: int, finished: Finished) -> None:
        """Count what was done."""
        self.env_steps += env_steps
        self.iteration += iterations
        self._window.add(finished)

    @property
    def progress(self) -> Progress:
        """Where the loop stands."""
        fps = (self.env_steps - self._started_at) / self._clock if self._clock > 0 else 0.0
        return Progress(
            self.env_steps,
            self._target.env_steps,
            self.iteration,
            self._clock,
            self.compile_seconds,
            fps,
            self._env,
            self._histograms,
            self._inexact,
        )

    def is_due(self, metrics: Metrics, env_steps: int) -> bool:
        """Whether to report now: so many env_steps are done, or training cannot go on, which shall not wait for them."""
        return self.env_steps >= env_steps or self._agent.diagnose(metrics) is not None

    def report(self, metrics: Metrics, state: LoopState, callbacks: Sequence[Callback]) -> bool:
        """Call every callback with the metrics; False if one of them returned False.

        Raises:
            TypeError: a callback returned neither a bool nor None.
            TrainingDiverged: the agent's diagnosis.
        """
        host_metrics = jax.device_get(metrics)
        self._histograms = {name: value for name, value in host_metrics.items() if isinstance(value, Histogram)}
        scalars = {name: float(value) for name, value in host_metrics.items() if name not in self._histograms}
        self.metrics = self._window.metrics() | scalars
        go_on = [_goes_on(callback, callback(self.progress, self.metrics, state)) for callback in callbacks]
        diagnosis = self._agent.diagnose(self.metrics)
        if diagnosis is not None:
            raise TrainingDiverged(diagnosis)
        return all(go_on)

    def result(self, state: LoopState, stopped: str | None, diagnosis: str | None = None) -> TrainResult:
        """What the loop returns."""
        return TrainResult(state.agent, state, self.progress, self.metrics, stopped, diagnosis)


def _goes_on(callback: Callback, returned: object) -> bool:
    if returned is None or isinstance(returned, bool | np.bool_):
        return returned is None or bool(returned)
    name = getattr(callback, "__name__", type(callback).__name__)
    raise TypeError(f"train: callback {name} must return None or a bool, False to stop training, got {returned!r:.80}")


def cached_per_env(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the results for the last 8 arguments, so that programs of equal environments and agents are compiled once.

    Nothing is cached for an environment that may have changed in between: frozen dataclasses are compared by their fields,
    while other objects equal themselves whatever was assigned to them.
    """
    cached = lru_cache(maxsize=8)(make)

    @wraps(make)
    def of(*arguments: Any) -> T:
        if any(isinstance(x, Env) and _may_change(x) for x in arguments):
            return make(*arguments)
        try:
            hash(arguments)
        except TypeError:  # an environment that holds arrays, or an agent that may change
            return make(*arguments)
        return cached(*arguments)

    return of


def _may_change(x: Any) -> bool:
    """Whether an object could change and still equal itself; looks into dataclasses and tuples."""
    if x is None or isinstance(x, type | FunctionType | BuiltinFunctionType):
        return False
    inner = list(x) if isinstance(x, tuple | frozenset) else []
    if is_dataclass(x):
        inner = [getattr(x, field.name) for field in fields(x)]
        if not all(field.compare for field in fields(x)):
            return True
    by_identity: Any = object.__hash__
    return type(x).__hash__ is by_identity or any(map(_may_change, inner))


def shape_of(agent: Any, *others: Any) -> tuple[Any, ...]:
    """The part of the arguments that a program depends on, as a key for `cached_per_env`: tree structure, shapes and dtypes.

    The key cannot be hashed, so nothing is cached, where a setting of the agent (a user's network) may change.
    """
    leaves, structure = jax.tree.flatten((agent, *others))
    return structure, tuple(jax.typeof(leaf) for leaf in leaves), [] if _may_change(agent) else None


@cached_per_env
def jitted_init(env: Env) -> Callable[[PRNGKeyArray], tuple[PyTree, TimeStep]]:
    """The start of a JAX environment."""
    return jax.jit(env.init)

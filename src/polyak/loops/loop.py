"""Code that all loops share: the loop state, the keys of an iteration, and reporting."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PRNGKeyArray, UInt32

from polyak.core.checks import check_integer, check_key
from polyak.core.printing import short_repr
from polyak.core.space_check import check_step_arrays
from polyak.core.spaces import Dict, EnvSpec
from polyak.core.spec_difference import difference
from polyak.core.struct import struct
from polyak.core.types import (
    Agent,
    Callback,
    EndedEpisodes,
    Env,
    Histogram,
    HostEnv,
    Metrics,
    Progress,
    PyTree,
    Rollout,
    State,
    TimeStep,
    copy_buffers,
)
from polyak.loops.agent_check import check_agent, check_agent_state, check_callbacks, check_update
from polyak.loops.episodes import Episodes, EpisodeStatistics, EpisodeTotals, InfoSums, info_means, measure
from polyak.loops.metrics import as_numbers, convert_numbers
from polyak.loops.replay_memory import (
    check_data,
    check_memory,
    copy_except_replay,
    move_to_one_device,
    warn_of_other_devices,
    with_data,
    with_new_replay,
)

T = TypeVar("T")

# Reading a number from the device in every iteration would cost as much as a small update.
DIAGNOSIS_SECONDS = 0.5
# The mesh axis over which environments are split.
ENVS = "envs"


class TrainingDiverged(FloatingPointError):
    """Too many consecutive updates contained NaN or infinity; the message names the first such quantity."""


@struct
class LoopState:
    """Everything that a loop carries from one iteration to the next; the content of a checkpoint.

    Attributes:
        agent: the agent's state.
        env: the state of a JAX environment; `()` in a host loop, where the environment stores its own.
        time_step: the environment's last time step.
        carry: the recurrent state of the collecting policy.
        episodes: running returns and lengths of the current episodes.
        key: the run's key; constant, folded with counters.
        iteration: number of rollouts so far.
    """

    agent: PyTree
    env: PyTree
    time_step: TimeStep
    carry: PyTree
    episodes: Episodes
    key: PRNGKeyArray
    iteration: UInt32[Array, ""]


@short_repr("progress", "metrics", "stopped", "diagnosis")
@dataclass(frozen=True, repr=False)
class TrainResult(Generic[State]):
    """The result of training.

    Attributes:
        agent: the agent that was trained.
        state: the agent's state; `agent.policy(result.state)` is the trained policy.
        loop_state: the complete state of the loop; pass it as `resume_from` to continue.
        progress: env_steps, seconds and steps per second at the end.
        metrics: the metrics of the last report.
        stopped: None if training reached `env_steps`, else the reason: `"callback"`, `"request"`, or `"diverged"` for one of
            several seeds.
        diagnosis: why this seed diverged, or None.
    """

    agent: Agent[State]
    state: State
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
    env: Key[Array, "T"] | UInt32[Array, "T words"]
    update: PRNGKeyArray


def iteration_keys(key: PRNGKeyArray, iteration: UInt32[Array, ""], num_steps: int) -> IterationKeys:
    """Return the keys of an iteration, from the run's key and `iteration` only, so that each loop can resume the other."""
    env_key, loop_key = jax.random.split(key, 3)[1:]
    iteration_key = jax.random.fold_in(loop_key, iteration)
    numbers = iteration * jnp.uint32(num_steps) + jnp.arange(num_steps, dtype=jnp.uint32)
    return IterationKeys(
        act=jax.random.fold_in(iteration_key, 0),
        env=jax.vmap(lambda number: env_step_key(env_key, number))(numbers),
        update=jax.random.fold_in(iteration_key, 1),
    )


def env_step_key(env_key: PRNGKeyArray, number: int | UInt32[Array, ""]) -> PRNGKeyArray:
    """The key of the environment's step `number` = 0, 1, ...; the reset has a separate key."""
    return jax.random.fold_in(jax.random.fold_in(env_key, 1), number)


def env_reset_key(env_key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of the environment's first reset."""
    return jax.random.fold_in(env_key, 0)


def run_env_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """The environment's key, split from the run's key."""
    return jax.random.split(key, 3)[1]


def host_seed(env_key: PRNGKeyArray) -> int:
    """The seed of an environment outside JAX, in [0, 2³¹)."""
    return int(_seed_bits(env_key))


@jax.jit
def _seed_bits(key: PRNGKeyArray) -> UInt32[Array, ""]:
    # One program; outside jit these operations would be seven.
    return jax.random.bits(key, dtype=jnp.uint32) >> 1


def initial(agent: Agent, num_envs: int, key: PRNGKeyArray, env_state: PyTree, time_step: TimeStep) -> LoopState:
    """Create the loop's state before the first iteration, in new buffers that can be donated."""
    check_step_arrays("train: the environment's time_step", time_step, (num_envs,))
    state = agent.init(jax.random.split(key, 3)[0])
    policy = agent.collect_policy(state)
    loop_state = LoopState(
        agent=state,
        env=env_state,
        time_step=time_step,
        carry=policy.initial_state(num_envs),
        episodes=Episodes.fresh(num_envs),
        key=key,
        iteration=jnp.zeros((), jnp.uint32),
    )
    return copy_except_replay(agent, loop_state)


def first_state(
    agent: Agent,
    mesh: Mesh | None,
    resume_from: LoopState | None,
    donate: bool,
    start: Callable[[], LoopState],
    num_envs: int,
    *,
    replay_on_host: bool = False,
    data: PyTree = None,
) -> LoopState:
    """Return the state with which a loop begins, in new buffers: the state of `start`, or of the run to resume.

    Args:
        data: the state of the replay of a `MixedReplay`'s data; not used when resuming.

    Raises:
        TypeError, ValueError: `resume_from` is of another agent or number of environments, the replay or a rollout does not fit
            into memory, or a `MixedReplay` lacks its data; raised before anything runs.
    """
    devices = 1 if mesh is None else mesh.size
    if resume_from is None or not donate:
        check_memory(agent, devices, num_envs=num_envs, on_host=replay_on_host)
    if resume_from is not None:
        if not donate:
            check_resume_from(resume_from, num_envs)
            check_agent_state("train: resume_from", agent, resume_from.agent, resume_from.key)
        warn_of_other_devices(agent, resume_from.agent, num_envs, devices)
        copied = copy_except_replay(agent, resume_from) if donate else copy_buffers(resume_from)
        return copied if replay_on_host or mesh is not None else move_to_one_device(copied)
    check_data(agent, data)
    state = start()
    if mesh is not None:
        # A new replay on the devices: splitting the old replay would need twice the memory.
        state = replace(state, agent=with_new_replay(agent, state.agent, state_sharding(agent, mesh)))
    return state if data is None else replace(state, agent=with_data(agent, state.agent, data))


def check_resume_from(state: Any, num_envs: int) -> None:
    """Check that a state is a loop's state, of as many environments; a data set is one environment.

    Raises:
        TypeError: the state is no `LoopState`.
        ValueError: it is of another number of environments.
    """
    if not isinstance(state, LoopState):
        raise TypeError(f"train: resume_from must be the loop_state of a result, got {type(state).__name__}")
    for size in ({len(leaf) for leaf in jax.tree.leaves(state.time_step)} or {1}) - {num_envs}:
        raise ValueError(f"train: resume_from must be of num_envs={num_envs}, as env is, got {size}")


def update_agent(
    agent: Agent, update: Any, state: LoopState, rollout: Rollout, key: PRNGKeyArray
) -> tuple[PyTree, Episodes, Metrics, EpisodeTotals]:
    """Update the episode statistics and the agent with a rollout; metrics include what the environment reports in `info`."""
    episodes, finished = measure(state.episodes, rollout.time_steps)
    reported = info_means(rollout.time_steps)
    rollout = replace(rollout, time_steps=replace(rollout.time_steps, info=None))
    agent_state, metrics = update(agent, state.agent, rollout, key)
    return agent_state, episodes, metrics | reported, finished


def update_on(mesh: Mesh | None) -> Callable[[Agent, PyTree, Rollout, PRNGKeyArray], tuple[PyTree, Metrics]]:
    """Return the agent's update, on one device or split by environment over a mesh."""

    def update(agent: Agent, state: PyTree, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Metrics]:
        updated = agent.update(state, rollout, key, axis_name=None if mesh is None else ENVS)
        check_update(agent, state, updated)
        return updated

    if mesh is None:
        return update
    steps, carry, replicated = PartitionSpec(None, ENVS), PartitionSpec(ENVS), PartitionSpec()
    rollouts = Rollout(time_steps=steps, actions=steps, info=steps, carry=carry)  # type: ignore[arg-type]

    def update_on_mesh(agent: Agent, state: PyTree, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Metrics]:
        states = agent.partition(ENVS)
        args, results = (replicated, states, rollouts, replicated), (states, replicated)
        sharded_update = jax.shard_map(update, mesh=mesh, in_specs=args, out_specs=results, check_vma=False)
        return sharded_update(agent, state, rollout, key)

    return update_on_mesh


def state_sharding(agent: Agent, mesh: Mesh) -> Any:
    """Return the shardings of the agent's state on a mesh, as a prefix tree of the state."""
    return jax.tree.map(partial(NamedSharding, mesh), agent.partition(ENVS))


def mesh_over(devices: int, num_envs: int) -> Mesh | None:
    """Return a mesh of devices over which the environments are split, or None for one device.

    If `jax.distributed` has connected processes and `devices` exceeds 1, each process has an equal number of the devices.

    Raises:
        ValueError: JAX has fewer devices, or `num_envs` is not divisible by `devices`.
    """
    check_integer("train", "devices", devices)
    processes = jax.process_count() if devices > 1 else 1
    if devices % processes:
        raise ValueError(f"train: devices={devices} must be a multiple of the number of processes, {processes}")
    available, share = jax.local_device_count(), devices // processes
    if share > available:
        raise ValueError(
            f"train: devices={devices}, but JAX sees {available}{' in each process' if processes > 1 else ''}; on a CPU call "
            f"jax.config.update('jax_num_cpu_devices', {share}) before any other use of JAX"
        )
    check_shares(devices, num_envs)
    if devices == 1:
        return None
    own = [jax.local_devices(process)[:share] for process in (range(processes) if processes > 1 else [None])]
    return jax.make_mesh((devices,), (ENVS,), (AxisType.Auto,), devices=[device for some in own for device in some])


def check_shares(devices: int, num_envs: int) -> None:
    """Check that the environments can be split equally over the devices.

    Raises:
        ValueError: `num_envs` is not divisible by `devices`.
    """
    if num_envs % devices:
        raise ValueError(f"train: num_envs={num_envs} cannot be split over devices={devices}")


def check_match(agent: Agent, env: Env | HostEnv, devices: int, key: Any = None, callbacks: Sequence[Callback] = ()) -> None:
    """Check, before anything runs, that the agent was built for the environment.

    Raises:
        TypeError: `agent` is no agent, or `env` is no environment of `polyak.envs.make`.
        ValueError: the spaces differ, or the agent does not support this number of environments per device.
    """
    check_agent("train", agent)
    check_made("train", env)
    if key is not None:
        check_key("train", key)
    check_callbacks("train", callbacks)
    check_integer("train", "devices", devices)
    check_spec("train", agent.spec, env.spec)
    agent.check(env.num_envs // devices, devices)


def check_in_jax(owner: str, env: Any) -> None:
    """Check that an environment can be compiled.

    Args:
        owner: name of the function that compiles the environment, for the message.

    Raises:
        TypeError: `env` is no environment of `polyak.envs.make`.
        ValueError: the environment steps on the host.
    """
    check_made(owner, env)
    if isinstance(env, HostEnv):
        raise ValueError(f"{owner} needs an environment in JAX (such as jax/... or gymnax/...), got {env.spec.id}")


def check_made(owner: str, env: Any, name: str = "env") -> None:
    """Check that the argument `name` is an environment of `polyak.envs.make`.

    Raises:
        TypeError: the argument is no such environment.
    """
    if not isinstance(env, HostEnv | Env):
        raise TypeError(
            f"{owner}: {name} must be created with polyak.envs.make(...), got {type(env).__name__}; wrap it with make first"
        )


def check_spec(owner: str, expected: EnvSpec, got: EnvSpec, expected_by: str = "agent") -> None:
    """Check that an environment has the spaces, action scaling and masks that an agent or policy was built for.

    The observations of a policy may be some of the entries of the environment's.

    Raises:
        ValueError: a field differs; the message names the first such field and both values.
    """
    seen, there = expected.obs, got.obs
    if expected_by == "policy" and isinstance(seen, Dict) and isinstance(there, Dict) and set(seen.spaces) < set(there.spaces):
        got = got.select_entries(tuple(seen.spaces))
    if first_difference := difference(expected, got):
        field, agent_value, env_value = first_difference
        advice = f"; make the environment with action_scaling={agent_value!r}" if field == "action_scaling" else ""
        wanted = f"{owner}: {field} of the {expected_by}'s spec is {agent_value}"
        raise ValueError(f"{wanted}, of the environment {got.id!r} {env_value}{advice}")


@dataclass(frozen=True)
class Target:
    """The length of training and the interval of reports, in environment steps.

    Raises:
        TypeError, ValueError: a field is not a positive integer.
    """

    env_steps: int
    report_every: int | None = None

    def __post_init__(self) -> None:
        check_integer("train", "env_steps", self.env_steps)
        if self.report_every is not None:
            check_integer("train", "report_every", self.report_every)

    def next_report(self, env_steps: int) -> int:
        """Return the env_steps of the next report, the next multiple of `report_every` after `env_steps`."""
        interval = self.report_every or max(1, self.env_steps // 100)
        return min((env_steps // interval + 1) * interval, self.env_steps)


class Reporter:
    """Counts steps, measures time and calls the callbacks of one run of a loop, on the host.

    Attributes:
        seconds: training time so far, without compilation.
        compile_seconds: time of compilation.
        env_steps: valid transitions so far.
        iteration: rollouts so far.
        metrics: the metrics of the last report.
    """

    def __init__(
        self,
        agent: Agent,
        target: Target,
        env_steps: int,
        iteration: int,
        env: HostEnv | None,
        nondeterminism: tuple[str, ...] = (),
        episodes: Sequence[EndedEpisodes] = (),
    ) -> None:
        self._agent, self._target, self._env, self._nondeterminism = agent, target, env, nondeterminism
        self._statistics = EpisodeStatistics(episodes)
        self._initial_env_steps = env_steps
        self._next_diagnosis = 0.0
        self.seconds = self.compile_seconds = 0.0
        self.env_steps, self.iteration = env_steps, iteration
        self.metrics: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Count the time of this context as compilation."""
        start = time.monotonic()
        yield
        self.compile_seconds += time.monotonic() - start

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time of this context as training."""
        start = time.monotonic()
        yield
        self.seconds += time.monotonic() - start

    def advance(self, env_steps: int, iterations: int, finished: EpisodeTotals, info: InfoSums | None = None) -> None:
        """Add the steps, iterations, finished episodes and reported values of a chunk."""
        self.env_steps += env_steps
        self.iteration += iterations
        self._statistics.add(finished, info)

    @property
    def progress(self) -> Progress:
        """The current progress."""
        fps = (self.env_steps - self._initial_env_steps) / self.seconds if self.seconds > 0 else 0.0
        return Progress(
            self.env_steps,
            self._target.env_steps,
            self.iteration,
            self.seconds,
            self.compile_seconds,
            fps,
            self._env,
            self._histograms,
            self._nondeterminism,
            episodes=self._statistics.episodes,
        )

    def is_due(self, metrics: Callable[[], Mapping[str, Any]], env_steps: int) -> bool:
        """Return True if a report is due: `env_steps` are reached, or training has diverged (checked twice a second).

        Args:
            metrics: returns the metrics since the last report, for `Agent.diagnose`.
        """
        now = time.monotonic()
        if self.env_steps >= env_steps or now < self._next_diagnosis:
            return self.env_steps >= env_steps
        self._next_diagnosis = now + DIAGNOSIS_SECONDS
        return self._agent.diagnose(as_numbers(metrics())) is not None

    def report(self, metrics: Mapping[str, Any], state: LoopState, callbacks: Sequence[Callback]) -> tuple[bool, LoopState]:
        """Call every callback; returns False if any callback returned False, and the state to continue with.

        The loop donates its state to the next iteration. If a callback still references an array after its return, the returned
        state has a copy of the array.

        Args:
            metrics: metrics of the updates since the last report.

        Raises:
            TypeError: a callback returned neither a bool nor None, or added a metric that is no number.
            TrainingDiverged: the agent's diagnosis.
        """
        metrics = jax.device_get(metrics)
        self._histograms = {name: value for name, value in metrics.items() if isinstance(value, Histogram)}
        numbers = as_numbers(metrics)
        self.metrics = self._statistics.metrics() | numbers
        leaves, structure = jax.tree.flatten(state)
        references = _count_references(leaves)
        results = []
        for callback in callbacks:
            # New containers, so that a callback that stores a container increases the reference count of its arrays.
            result = callback(self.progress, self.metrics, jax.tree.unflatten(structure, leaves))
            name = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
            results.append(_should_continue(name, result))
            convert_numbers(self.metrics, name)
        # Of the update's own numbers: a callback may have changed `self.metrics`.
        if (diagnosis := self._agent.diagnose(numbers)) is not None:
            raise TrainingDiverged(diagnosis)
        kept = [after > before for before, after in zip(references, _count_references(leaves), strict=True)]
        leaves = [copy_buffers(leaf) if is_kept else leaf for leaf, is_kept in zip(leaves, kept, strict=True)]
        return all(results), jax.tree.unflatten(structure, leaves)

    def result(self, state: LoopState, stopped: str | None, diagnosis: str | None = None) -> TrainResult:
        """Create the result of the loop."""
        return TrainResult(self._agent, state.agent, state, self.progress, self.metrics, stopped, diagnosis)


def _count_references(leaves: list[Any]) -> list[int]:
    return [sys.getrefcount(leaf) for leaf in leaves]


def _should_continue(name: str, result: object) -> bool:
    if result is None or isinstance(result, bool | np.bool_):
        return result is None or bool(result)
    raise TypeError(f"train: {name} must return None or a bool, False to stop training, got {result!r:.80}")

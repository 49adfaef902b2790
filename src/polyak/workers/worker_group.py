"""A group of workers that share a batch of environments: the state of each worker, and requests to all workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import jax
import numpy as np

from polyak.core.checks import check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings, choice, integer, number
from polyak.core.types import EpisodeRecord, HostEnv, PyTree, TimeStep
from polyak.core.warn import warn
from polyak.loops.loop import check_spec
from polyak.workers.gradient_worker import GradientTask
from polyak.workers.rollout_worker import Acting, Failure, WorkerStart, WorkerState, installed_versions
from polyak.workers.supervise import Engine, StoppedBeforeStart, Supervisor, WorkerEvent
from polyak.workers.worker_output import WithOutputFile

WAIT_SECONDS = 0.05
"""Longest delay in seconds of a stop request while waiting for workers."""

PINGS = 3
"""Number of calls to a machine, of which the shortest time is reported as its latency."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Timeouts and restarts of workers, and how far they may be ahead of the learner.

    Attributes:
        lag: maximum age, in updates, of a rollout's policy at the update that uses the rollout; at 0, workers wait for each
            update.
        timeout: maximum seconds of a rollout; a slower worker is replaced.
        start_timeout: maximum seconds of the start of a worker.
        restarts: maximum number of restarts of all workers in a training run.
        on_env_error: effect of an exception in an environment: `"raise"` ends training; `"restart"` restarts the worker in new
            episodes, which counts as a restart.
        min_workers: number of workers that training needs. While at least this many other workers are left, a worker that fails
            five times in a row (`supervise.MAX_FAILURES`) is lost, and rollouts do not wait for a worker that waits for its
            restart; the environments of both have weight 0. None needs all workers.
        shared_optimizer: for workers that send gradients: True keeps one optimizer state in the shared copy, False one per
            worker.
        max_staleness: for workers that send gradients: gradients for weights older than this many steps are dropped and
            counted; None accepts any age.
        max_bad: for workers that send gradients: consecutive gradients with NaN or infinity after which a worker is replaced.

    Raises:
        TypeError, ValueError: an option is out of range.
    """

    lag: int = integer(default=0, at_least=0, at_most=None)
    timeout: float = number(default=60.0, above=0.0)
    start_timeout: float = number(default=300.0, above=0.0)
    restarts: int = integer(default=100, at_least=0, at_most=None)
    on_env_error: Literal["raise", "restart"] = choice(default="raise", choices=("raise", "restart"))
    min_workers: int | None = integer(default=None, at_most=None, optional=True)
    shared_optimizer: bool = choice(default=True, choices=(False, True))
    max_staleness: int | None = integer(default=None, at_least=0, at_most=None, optional=True)
    max_bad: int = integer(default=10, at_most=None)

    def __post_init__(self) -> None:
        check_settings(self, "train")


class WorkerGroup:
    """Workers over which a batch of environments is split equally.

    Args:
        parts: functions that create a worker's environments, one per worker.
        spec: spec of one environment.
        num_envs: total number of environments.
        make_engine: creates the engine, when workers are first needed.
        options: see `WorkerOptions`.

    Attributes:
        acting: policy and way of acting, or gradient task, of the workers; set by a training run.
        states: the state from which each worker starts after a restart.
        snapshots: state of each worker's environments after the last rollout used in an update, by `pack_snapshot`.
        under_way: the policy of a rollout in progress, as stored in a snapshot; see `WorkerRollouts`.
        episodes_lost: number of episodes of this training run that were cut by the restart or loss of a worker.
        is_ahead: a training run has requested rollouts, so that the workers may be ahead of the snapshots.
        on_event: called with each `WorkerEvent`; by default, failures are warnings.
        should_stop: called while waiting for the start of workers; True ends the wait.
        is_on_this_machine: all workers are processes of this machine.
        output_directory: directory of one log file per worker for printed output; None leaves the output to the engine.
        on_start: called with a line about the workers' machines, when all workers have started; None for no call.

    Raises:
        ValueError: `num_envs` is no multiple of the number of workers, or `min_workers` exceeds it.
        TypeError: the functions cannot be pickled.
    """

    def __init__(
        self,
        parts: Sequence[Callable[[], HostEnv]],
        spec: EnvSpec,
        num_envs: int,
        make_engine: Callable[[], Engine],
        options: WorkerOptions,
    ) -> None:
        check_integer("train", "workers", len(parts), at_least=1)
        if num_envs % len(parts):
            raise ValueError(f"train: num_envs={num_envs} cannot be split over workers={len(parts)}")
        if options.min_workers is not None and options.min_workers > len(parts):
            raise ValueError(f"train: min_workers={options.min_workers} must be at most workers={len(parts)}")
        self.spec, self.num_envs, self.num_workers, self.options = spec, num_envs, len(parts), options
        try:
            cloudpickle.dumps(parts[0])
        except Exception as error:
            raise TypeError(
                f"train: the function that creates the environment cannot be sent to workers: {type(error).__name__}: {error}; "
                "create such objects inside it"
            ) from error
        self.acting: Acting | GradientTask | None = None
        self.states = [WorkerState(seed=0)] * self.num_workers
        self.snapshots: list[bytes | None] = []
        self._failed_starts: set[int] = set()
        self.under_way: dict[str, Any] | None = None
        self.is_ahead = False
        self.episodes_lost = 0
        self.on_event: Callable[[WorkerEvent], None] = warn_of_failure
        self.should_stop: Callable[[], bool] = lambda: False
        self.on_start: Callable[[str], None] | None = None
        self.is_on_this_machine = False
        self.output_directory: Path | None = None
        self._parts, self._make_engine = list(parts), make_engine
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the workers, created on first use."""
        if self._supervisor is None:
            options, parts = self.options, self._parts
            if (directory := self.output_directory) is not None:
                parts = [WithOutputFile(part, str(directory / f"{worker}.log")) for worker, part in enumerate(parts)]
            payloads = [cloudpickle.dumps(part) for part in parts]
            self._supervisor = Supervisor(
                self._make_engine(),
                payloads,
                lambda index: (self.states[index], self.acting),
                options.timeout,
                options.start_timeout,
                options.restarts,
                self._report,
                min_workers=options.min_workers,
                place_of=lambda result: result.process if isinstance(result, WorkerStart) else (None, None),
            )
        return self._supervisor

    def rows(self, worker: int) -> slice:
        """Return the slice of a batch that belongs to a worker."""
        size = self.num_envs // self.num_workers
        return slice(worker * size, (worker + 1) * size)

    def name_of(self, worker: int) -> str:
        """Return the name of a worker and its environments, for messages."""
        rows = self.rows(worker)
        return f"worker {worker} ({self.spec.id}, envs {rows.start} to {rows.stop - 1})"

    def begin(self, states: Sequence[WorkerState]) -> list[TimeStep | None]:
        """Put every worker into a state, starting the workers if needed; returns time steps, of weight 0 for lost workers.

        Raises:
            StoppedBeforeStart: a stop was requested.
            RuntimeError: a worker has other versions of Python or packages, or too many workers are lost.
            ValueError: a worker's environments have other spaces.
        """
        self.states = list(states)
        supervisor = self.supervisor
        was_started = bool(supervisor.workers)
        if was_started:
            self._settle()
            supervisor.forget_failures()
            self.episodes_lost = 0
            for worker, state in enumerate(states):
                supervisor.request(worker, "begin", state, self.acting)
        else:
            supervisor.start()
        begun: dict[int, WorkerStart] = self.gather("begin" if was_started else "start", self._check_stop)
        if not was_started and self.on_start is not None:
            self.on_start(self._describe_places({worker: one.process[0] for worker, one in begun.items()}))
        self.snapshots, self.is_ahead = [begun[i].snapshot if i in begun else None for i in range(self.num_workers)], False
        empty = jax.tree.map(np.zeros_like, next(iter(begun.values())).time_step)
        return [begun[i].time_step if i in begun else without_weight(empty) for i in range(self.num_workers)]

    def check_result(self, worker: int, result: Any) -> None:
        """Check the result of a worker.

        Raises:
            Exception: the exception raised in the worker, with the worker's name and traceback as a note.
            RuntimeError: a started worker has other versions of Python or packages.
            ValueError: the worker's environments have other spaces.
        """
        if isinstance(result, Failure):
            raise result.exception(self.name_of(worker))
        if isinstance(result, WorkerStart):
            check_versions(self.name_of(worker), result.versions)
            check_spec(self.name_of(worker), self.spec, result.spec, expected_by="learner")

    def check_start(self, worker: int, result: Any) -> None:
        """Check the start of a restarted worker, as `check_result` does; restart a worker that returned invalid values.

        With `on_env_error="restart"`, a worker that raised an exception is restarted too. A worker that fails to restore its
        episodes twice in a row begins new episodes.
        """
        if not isinstance(result, Failure) or (result.invalid_value is None and self.options.on_env_error == "raise"):
            self.check_result(worker, result)
            self._failed_starts.discard(worker)
            return
        # A new seed: equal episodes would fail again.
        state, reason = self.states[worker], f"raised {result.summary}"
        state = replace(state, seed=seed_of_new_episodes(state.seed, 0))
        if worker in self._failed_starts and state.snapshot is not None:
            # A new seed does not change restored episodes.
            state = replace(state, snapshot=None)
            reason += f"; begins new episodes in {self.lose_episodes(worker)} environments"
        self._failed_starts.add(worker)
        self.states[worker] = state
        self.supervisor.fail(worker, reason, result.exception(self.name_of(worker)))

    def gather(
        self, method: str, check: Callable[[], None] = lambda: None, workers: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Wait for the results of a method from all workers that are not lost.

        Args:
            check: called while waiting; may raise to end the wait.
            workers: workers to wait for; None waits for all.
        """
        wanted = range(self.num_workers) if workers is None else workers
        results: dict[int, Any] = {}
        while True:
            for worker, name, result in self.supervisor.results(WAIT_SECONDS):
                self.check_result(worker, result)
                if name == method:
                    results[worker] = result
            if all(worker in results or self.supervisor.is_lost(worker) for worker in wanted):
                return results
            check()

    def lose_episodes(self, worker: int) -> int:
        """Count a worker's episodes as cut; returns their number."""
        rows = self.rows(worker)
        self.episodes_lost += rows.stop - rows.start
        return rows.stop - rows.start

    def metrics(self) -> dict[str, float]:
        """Metrics of the workers since the beginning of training."""
        return {**self.supervisor.metrics(), "workers/episodes_lost": float(self.episodes_lost)}

    def _report(self, event: WorkerEvent) -> None:
        """Pass an event on; if it cuts episodes that updates have used, count them and add this to the event's detail."""
        if event.event in ("failed", "lost"):
            has_snapshot = self.states[event.worker].snapshot is not None
            if event.event == "lost" if has_snapshot else self.supervisor.workers[event.worker].is_warm:
                number = self.lose_episodes(event.worker)
                if event.event == "failed":
                    event = replace(event, detail=f"{event.detail}; begins new episodes in {number} environments")
        self.on_event(event)

    def _describe_places(self, nodes: Mapping[int, str]) -> str:
        """Describe the machines of the workers, the latency of a call to each machine, and the package versions."""
        places = []
        for node in dict.fromkeys(nodes.values()):
            workers = [worker for worker, place in nodes.items() if place == node]
            seconds = min(self._round_trip(workers[0]) for _ in range(PINGS))
            places.append(f"{len(workers)} on {node} (a call takes {1e3 * seconds:.1f} ms)")
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
        return f"workers: {', '.join(places)}; {versions}"

    def _round_trip(self, worker: int) -> float:
        start = time.monotonic()
        self.supervisor.request(worker, "ping")
        self.gather("ping", self._check_stop, [worker])
        return time.monotonic() - start

    def _settle(self) -> None:
        """Wait for starts and requests in progress, and ignore their results."""
        while not self.supervisor.is_settled():
            self._check_stop()
            self.supervisor.results(WAIT_SECONDS)

    def _check_stop(self) -> None:
        if self.should_stop():
            raise StoppedBeforeStart("train: stopped before the workers had started")

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()


def warn_of_failure(event: WorkerEvent) -> None:
    """Warn of a worker that failed."""
    if (failure := event.failure()) is not None:
        warn(f"train: {failure}")


def check_versions(name: str, versions: Mapping[str, str]) -> None:
    """Check that a worker has the versions of Python and packages of this process.

    Raises:
        RuntimeError: a version differs; the message lists each difference.
    """
    own = installed_versions()
    different = [f"{name} {versions.get(name)} (here {here})" for name, here in own.items() if versions.get(name) != here]
    if different:
        raise RuntimeError(f"{name} has other versions: {', '.join(different)}; install the same on every machine")


def join(trees: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate the workers' arrays, leaf by leaf."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=axis), *trees)


def without_weight(zeros: TimeStep) -> TimeStep:
    """Create time steps that have weight 0 everywhere: each both starts and ends an episode."""
    ones = np.ones(zeros.reward.shape, bool)
    mask = jax.tree.map(np.ones_like, zeros.action_mask)
    record = None if zeros.record is None else EpisodeRecord(np.zeros_like(zeros.record.reward), ~ones, ones)
    return TimeStep(zeros.obs, zeros.reward, ~ones, ones, ones, mask, record)


def describe_difference(names: Sequence[str], got: Any, wanted: tuple[PyTree, ...]) -> str | None:
    """Describe the first difference in structure, shape or dtype between trees of NumPy arrays; None if there is none.

    Args:
        names: names of the trees in messages.
        got: tuple of trees to check.
        wanted: tuple of trees of expected arrays or `ShapeDtypeStruct`s.
    """
    structures: list[Any] = [jax.tree.structure(part) for part in wanted]
    parts = got if isinstance(got, tuple) and len(got) == len(names) else (None,) * len(names)
    missing = [name for name, part, one in zip(names, parts, structures, strict=True) if jax.tree.structure(part) != one]
    if missing:
        return f"arrays of {', '.join(missing)} are missing"
    for (path, leaf), value in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(got), strict=True):
        if not isinstance(value, np.ndarray) or value.shape != leaf.shape or value.dtype != leaf.dtype:
            kind, shape = getattr(value, "dtype", type(value).__name__), list(np.shape(value))
            return f"{array_name(names, path)} must be {leaf.dtype}{list(leaf.shape)}, got {kind}{shape}"
    return None


def array_name(names: Sequence[str], path: Sequence[Any]) -> str:
    """Return the name of a leaf in a tuple of named trees, such as `time_steps.obs`."""
    return f"{names[path[0].idx]}{jax.tree_util.keystr(tuple(path[1:]))}"


def seed_of_new_episodes(seed: int, number: int) -> int:
    """Return the seed for the new episodes of a worker that lost its episodes in rollout `number`."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)

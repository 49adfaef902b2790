"""Training with several learners: processes over which the devices and environments of the compiled loop are split.

If one of the processes dies, the whole group restarts from the newest checkpoint. The first learner writes checkpoints into
the run directory, from which this process reads the last checkpoint.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.types import Env, HostEnv, Progress
from polyak.core.warn import warn
from polyak.loops.compiled_loop import start_compiled
from polyak.loops.evaluate import Evaluation
from polyak.loops.loop import LoopState, TrainResult, check_shares
from polyak.loops.processes import from_first_process
from polyak.loops.replay_memory import with_new_replay
from polyak.runs import RunConfig, restore_policy
from polyak.storage.checkpoint import restore, steps
from polyak.storage.progress import read_progress, replay_path
from polyak.storage.run_directory import Run, RunError, open_for_parent
from polyak.storage.writers import with_time
from polyak.train.devices import start_jax
from polyak.train.display import Screen
from polyak.train.result import Result
from polyak.train.settings import TrainSettings
from polyak.train.training import Start, Training, make_result, record_failure, report_event, train_here
from polyak.workers.learner_group import MAX_LEARNERS, Learners, run_group, start_here
from polyak.workers.ray_learners import RayLearners
from polyak.workers.ray_workers import check_ray
from polyak.workers.supervise import StoppedBeforeStart, WorkerEvent

CACHE_DIRECTORY = "jax_compilation_cache_dir"
CACHE_SETTINGS = (
    CACHE_DIRECTORY,
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)
NUMERICAL_SETTINGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""Settings of JAX that change numbers; learners get these and the cache settings from the parent process."""

RECENT_SECONDS = 2.0
"""Maximum age in seconds of a file that may be incomplete."""


@dataclass(frozen=True)
class LearnerTask:
    """The task of every learner.

    Attributes:
        config: the settings.
        env: the environment.
        key_data: key data of the run's key.
        key_impl: implementation of the run's key.
        directory: the run directory, which only the first learner opens.
        jax_settings: settings of JAX: `CACHE_SETTINGS` and `NUMERICAL_SETTINGS`.
    """

    config: RunConfig
    env: Env
    key_data: npt.NDArray[np.uint32]
    key_impl: str
    directory: Path
    jax_settings: Mapping[str, Any]

    @property
    def cache_directory(self) -> Path | None:
        """Directory of JAX's cache of compiled programs, or None."""
        directory = self.jax_settings[CACHE_DIRECTORY]
        return Path(directory) if directory else None


@dataclass(frozen=True)
class LearnerResult:
    """The result that the first learner sends back; the state is in the run directory."""

    progress: Progress
    metrics: Mapping[str, float]
    stopped: str | None


def as_learners(owner: str, learners: Learners | int | None) -> Learners | None:
    """Convert a number to `Learners`; None for one learner, which is this process.

    Raises:
        TypeError, ValueError: `learners` is neither `Learners` nor an integer, or is out of range.
    """
    if not isinstance(learners, Learners):
        check_integer(owner, "learners", learners, at_most=MAX_LEARNERS, optional=True)
        learners = Learners(learners or 1)
    return None if learners.number == 1 else learners


def check_group(settings: TrainSettings) -> Learners | None:
    """Return the learners of the settings, or None for training in this process.

    Raises:
        ValueError: a setting does not work with learners: an object of this process, or another loop.
    """
    group = as_learners("train.run", settings.learners)
    if group is None:
        return None
    if settings.run_dir is None:
        raise ValueError(f"train.run: learners={group.number} needs run_dir, for restarts from its checkpoints")
    alone = [name for name in ("resume_from", "workers", "eval_env", "data") if getattr(settings, name) is not None]
    alone += ["callbacks"] * (len(settings.callbacks) > 0) + ["loop"] * (settings.loop not in ("auto", "compiled"))
    if alone:
        raise ValueError(f"train.run: {alone[0]} must be left out with learners={group.number}, which train in other processes")
    return group


def check_learners(learners: Learners, env: Env | HostEnv, devices: int) -> None:
    """Check that the environment and the devices can be split over learners.

    Raises:
        ValueError: the environment steps on the host, or the devices or environments cannot be split equally.
        ImportError, RuntimeError: an address is given, and Ray is not installed or no cluster answers at the address.
    """
    if isinstance(env, HostEnv):
        raise ValueError(
            f"train: learners={learners.number} needs an environment in JAX (such as jax/... or gymnax/...), "
            f"got {env.spec.id}, which workers=N steps in several processes"
        )
    if devices % learners.number:
        raise ValueError(f"train: devices={devices} must be a multiple of learners={learners.number}")
    check_shares(devices, env.num_envs)
    if learners.address is not None:
        check_ray(learners.address)


def train_with_learners(training: Training, learners: Learners, console: Screen, should_stop: Callable[[], bool]) -> Result:
    """Train in a group of processes, which this process supervises; then read the last checkpoint.

    If a stop is requested while no group trains, the result is the newest checkpoint.

    Raises:
        RuntimeError: no restart is left, or the learners do not connect.
        StoppedBeforeStart: a stop was requested, and there is no checkpoint.
        Exception: an exception that a learner raised, with its type.
    """
    config, run, env = training.config, training.run, training.env
    assert env is not None, "learners collect"
    assert run is not None and isinstance(env, Env), "checked when it was prepared"
    task = LearnerTask(
        config,
        env,
        np.asarray(jax.random.key_data(training.key)),
        str(jax.random.key_impl(training.key)),
        run.directory,
        {name: jax.config.values[name] for name in (*CACHE_SETTINGS, *NUMERICAL_SETTINGS)},
    )
    # Evaluations of all groups: a restarted group does not repeat evaluations before its checkpoint.
    evaluations: dict[int, Evaluation] = {}
    with record_failure([training]), ExitStack() as stack:
        stack.enter_context(_drop_on_failure(task.cache_directory))
        start = (
            start_here if learners.address is None else stack.enter_context(RayLearners(learners.address, should_stop)).start
        )
        learned: LearnerResult | None = None
        try:
            learned = run_group(
                partial(start, partial(run_learner, task, is_quiet=console.quiet), config.devices, learners),
                learners,
                progress=lambda: max(steps(run.checkpoints), default=0),
                on_event=partial(_report, run, console, task.cache_directory),
                on_note=lambda pair: evaluations.update([pair]),
                should_stop=should_stop,
            )
        except StoppedBeforeStart:
            if not steps(run.checkpoints):
                raise
        saved = _restore(run, config, env, training.key, None if learned is None else learned.progress.env_steps)
    state, learned = saved.state, learned or _stop_at(saved, config, run)
    assert state is not None, "a checkpoint"
    trained: TrainResult = TrainResult(config.agent, state.agent, state, learned.progress, learned.metrics, learned.stopped)
    # Drop evaluations of a dead group that are newer than the restored checkpoint.
    evaluations = {env_steps: one for env_steps, one in evaluations.items() if env_steps <= learned.progress.env_steps}
    result = dataclasses.replace(make_result(training, trained, None), evaluations=evaluations)
    if steps(run.best):
        result = dataclasses.replace(result, best_policy=restore_policy(run.best, config.agent)[0])
    return result


def _stop_at(saved: Start, config: RunConfig, run: Run) -> LearnerResult:
    """Create the result of a stop while no group trained, from the newest checkpoint.

    The metrics are from the last report up to this checkpoint, NaN where they were not finite; there are none, with a warning,
    if the file of metrics is damaged.
    """
    assert saved.state is not None, "a checkpoint"
    progress = Progress(saved.env_steps, config.env_steps, int(saved.state.iteration), 0.0, 0.0, 0.0)
    rows: list[dict[str, Any]] = []
    try:
        rows = [row for row in run.read_metrics() if row["env_steps"] <= saved.env_steps]
    except RunError as error:
        warn(f"train: the result has no metrics: {error}")
    log_columns = {"env_steps", *with_time(progress, {})}
    last = rows[-1].items() if rows else ()
    metrics = {name: math.nan if value is None else value for name, value in last if name not in log_columns}
    return LearnerResult(progress, metrics, "request")


def run_learner(
    task: LearnerTask, rank: int, should_stop: Callable[[], bool], note: Callable[[Any], None], *, is_quiet: bool
) -> LearnerResult:
    """Train as one of the processes that `jax.distributed` has connected; the first learner writes and sends evaluations."""
    config, env = task.config, task.env
    # Another machine has no such directory.
    has_cache = task.cache_directory is not None and task.cache_directory.is_dir()
    for name, value in task.jax_settings.items():
        if has_cache or name not in CACHE_SETTINGS:
            jax.config.update(name, value)
    start_jax(config.threads)
    key = jax.random.wrap_key_data(jnp.asarray(task.key_data), impl=task.key_impl)
    run, start = None, Start()
    if rank == 0:
        run = open_for_parent(task.directory)
        start = _restore(run, config, env, key)
        run.rewind(start.env_steps)
    done = from_first_process(np.array([start.env_steps, start.state is not None], np.int64), np.zeros(2, np.int64))
    if done[1]:
        state = from_first_process(start.state, _shape(config, env, key))
        start = Start(state, int(done[0]), start.episodes, is_own=True)
    training = Training(config, env, key, start, run, on_evaluation=note)
    result = train_here(training, Screen(quiet=is_quiet or rank > 0), (), should_stop)
    progress = dataclasses.replace(result.progress, histograms={})
    return LearnerResult(progress, dict(result.metrics), result.stopped)


def _restore(run: Run, config: RunConfig, env: Env, key: PRNGKeyArray, step: int | None = None) -> Start:
    """Restore the newest checkpoint, or the checkpoint of `step`; start from the beginning if there is none."""
    if not steps(run.checkpoints):
        return Start()
    restored = restore(run.checkpoints, _shape(config, env, key), step=step, optional=replay_path(config.agent))
    state: LoopState = restored.tree
    if not restored.is_complete:
        state = dataclasses.replace(state, agent=with_new_replay(config.agent, state.agent))
    return Start(state, restored.step, read_progress(run, restored).episodes, is_own=True)


def _shape(config: RunConfig, env: Env, key: PRNGKeyArray) -> Any:
    """Return the shapes and dtypes of the loop's state."""
    return jax.eval_shape(partial(start_compiled, config.agent, env), key)


@contextmanager
def _drop_on_failure(cache: Path | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        drop_incomplete_programs(cache)
        raise


def drop_incomplete_programs(cache: Path | None) -> None:
    """Remove recent files of the cache, which a killed learner may have left incomplete: JAX writes programs in place."""
    for path in cache.glob("*-cache") if cache is not None else ():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < RECENT_SECONDS:
                path.unlink()


def _report(run: Run, console: Screen, cache: Path | None, event: WorkerEvent) -> None:
    """Report the death of a learner."""
    drop_incomplete_programs(cache)
    failure = f"learner {event.worker} {event.detail}; restarting all learners from the newest checkpoint"
    row = {"learner": event.worker, "event": event.event, "detail": event.detail}
    report_event(run, console, row, failure if event.event == "failed" else None)

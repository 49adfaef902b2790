"""A prepared training, from its start to its result, for `run`, `resume` and the command line."""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from polyak.core.tags import RETURN
from polyak.core.types import Callback, EndedEpisodes, Env, HostEnv, Progress, PyTree, Rollout
from polyak.core.warn import warn
from polyak.loops.compiled_loop import compiled
from polyak.loops.evaluate import Evaluation
from polyak.loops.host_loop import host
from polyak.loops.loop import LoopState, TrainResult
from polyak.loops.offline_loop import offline
from polyak.replay.replay import ReplayState
from polyak.runs import OFFLINE, RunConfig, read_config
from polyak.storage.checkpoint import steps
from polyak.storage.config import ConfigError
from polyak.storage.progress import replay_path, save_state, snapshot_of
from polyak.storage.run_directory import WORKER_OUTPUT, Run, RunError
from polyak.storage.writers import checkpointer, jsonl_logger, tensorboard_logger, with_time
from polyak.train.display import Display, Screen, show_progress
from polyak.train.evaluation import PeriodicEvaluation, describe_limit, evaluate_if_it_ends, evaluation_env
from polyak.train.interrupt import Interrupt
from polyak.train.no_step import explain_no_step
from polyak.train.result import Result
from polyak.train.summary import summary_line, write_summary
from polyak.train.tracking import tracked
from polyak.train.video_callback import periodic_video
from polyak.workers.asynchronous_loop import train_asynchronously
from polyak.workers.learner_group import Learners
from polyak.workers.supervise import StoppedBeforeStart
from polyak.workers.worker_envs import WorkerEnvs
from polyak.workers.worker_group import WorkerGroup


@dataclass(frozen=True)
class Start:
    """The state from which training starts or resumes.

    Attributes:
        state: the loop's state, or None for the beginning.
        env_steps: env_steps of the state.
        episodes: the last episodes before the state.
        is_own: no other code uses the state, so the loop need not copy it.
    """

    state: LoopState | None = None
    env_steps: int = 0
    episodes: tuple[EndedEpisodes, ...] = ()
    is_own: bool = False


@dataclass(frozen=True)
class Training:
    """A training that is ready to start; a context manager that closes the run directory.

    Attributes:
        config: the settings.
        env: the environment; None for a training on data that is not evaluated.
        key: source of all randomness.
        start: the state from which training starts.
        run: the run directory, opened for writing, or None.
        eval_env: the caller's environments for evaluation; None makes copies of `env`.
        eval_episodes: episodes of the evaluation at the end; 0 for none.
        learners: processes that train together; None trains in this process.
        on_evaluation: called with the tuple `(env_steps, evaluation)` of every evaluation during training.
        started_at: time of the monotonic clock when the training was prepared.
        resume_flags: flags of `polyak resume` for objects that the run does not store.
        label: name of the training among several, such as `seed 5 (1 of 2)`.
        history: the rows of the metrics so far, if there is no run directory.
        data: the data set of the offline loop, or the filled replay of the data of a `MixedReplay`; None if the state has it.
    """

    config: RunConfig
    env: Env | HostEnv | None
    key: Any
    start: Start = field(default_factory=Start)
    run: Run | None = None
    eval_env: Env | HostEnv | None = None
    eval_episodes: int = 0
    learners: Learners | None = None
    on_evaluation: Callable[[tuple[int, Evaluation]], None] = lambda pair: None
    started_at: float = field(default_factory=time.monotonic)
    resume_flags: str = ""
    label: str = ""
    history: list[dict[str, float]] = field(default_factory=list)
    data: Rollout | ReplayState | None = None

    @property
    def title(self) -> str:
        """Algorithm, environment and label."""
        name = f"{self.config.algorithm} {self.config.env}"
        return f"{name}, {self.label}" if self.label else name

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None:
            self.run.close()


def name_interrupt(result: Result, interrupt: Interrupt) -> Result:
    """Replace `stopped="request"` in a result by `"interrupt"` if a signal stopped the training."""
    return dataclasses.replace(result, stopped=interrupt.name) if result.stopped == "request" else result


def train_here(training: Training, console: Screen, callbacks: Sequence[Callback], should_stop: Callable[[], bool]) -> Result:
    """Train in this process, and save the final state in the run directory."""
    config, run, start = training.config, training.run, training.start
    loops = {"compiled": compiled, "host": host, "distributed": host, "asynchronous": train_asynchronously, OFFLINE: offline}
    loop: Any = loops[config.loop]
    source: Any = training.data if config.loop == OFFLINE else training.env
    options: dict[str, Any] = {} if config.loop in ("asynchronous", OFFLINE) else {"devices": config.devices}
    if config.replay_on != "device":
        options["replay_on"] = config.replay_on
    if training.data is not None and config.loop != OFFLINE:
        options["data"] = training.data
    with record_failure([training]) as notes, ExitStack() as stack:
        if isinstance(training.env, WorkerEnvs):
            watch_workers(training.env.group, run, console)
            training.env.group.should_stop = should_stop
        display = stack.enter_context(
            show_progress(console, training.title, config.env_steps, start.env_steps, unit=config.unit)
        )
        rollout, left = config.agent.num_steps * config.num_envs, config.env_steps - start.env_steps
        if 0 < left < rollout and config.loop != OFFLINE:
            display.print_text(f"trains on one rollout of num_steps * num_envs = {rollout:,} steps, not {left:,}")
        evaluation = stack.enter_context(periodic_evaluation(training, display, should_stop))
        videos = stack.enter_context(periodic_video(config, training.env, run, start.env_steps, display))
        trackers = stack.enter_context(tracked(config, run, is_resumed=start.env_steps > 0))
        trained: TrainResult = loop(
            config.agent,
            source,
            env_steps=config.env_steps,
            key=training.key,
            callbacks=join_callbacks(training, notes[0], [*evaluation, *videos], [*callbacks, *trackers], display),
            report_every=config.report_every,
            **options,
            resume_from=start.state,
            donate=start.is_own,
            env_steps_done=start.env_steps,
            episodes_done=start.episodes,
            should_stop=should_stop,
        )
        snapshot = save_last(training, trained)
    return with_evaluations(make_result(training, trained, snapshot), evaluation)


def join_callbacks(
    training: Training, note: Callback, periodic: Sequence[Callback], callbacks: Sequence[Callback], display: Callback
) -> list[Callback]:
    """Return all callbacks of a training; the writers come last, so that metrics that a callback adds are written.

    The caller's callbacks learn the settings from the progress.
    """
    config, run = training.config, training.run
    known = {"eval_every": config.eval_every, "settings": config.to_json(), "run_dir": run.directory if run else None}

    def wrap(callback: Callback) -> Callback:
        return lambda progress, *rest: callback(dataclasses.replace(progress, **known), *rest)

    written = writers(run, config, training.start) if run else [_recorder(training.history)]
    # Episodes from before a resumption may have reported what those since then have not yet.
    info_metrics = () if training.start.env_steps else config.env_options.get("info_metrics", ())
    return [note, _missing_info_callback(info_metrics), *periodic, *map(wrap, callbacks), display, *written]


def _missing_info_callback(names: Sequence[str]) -> Callback:
    """A callback that warns once, after the first episode, of `info_metrics` that no step has reported."""
    missing = {f"env/{name}": name for name in names}

    def check(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        for tag in missing.keys() & metrics.keys():
            del missing[tag]
        if missing and RETURN in metrics:
            unknown = ", ".join(map(repr, missing.values()))
            warn(f"train: info_metrics has {unknown}, which no info of the environment has so far")
            missing.clear()

    return check


def _recorder(history: list[dict[str, float]]) -> Callback:
    """A callback that appends each report to a list, for a training without a run directory."""

    def record(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        history.append({"env_steps": progress.env_steps, **with_time(progress, metrics)})

    return record


def watch_workers(group: WorkerGroup, run: Run | None, console: Screen) -> None:
    """Let workers report to the run and the console, and write the output of their environments into the run.

    The output of workers on other machines stays in Ray's logs.
    """
    group.on_event = lambda event: report_event(run, console, dataclasses.asdict(event), event.failure())
    if run is not None and group.is_on_this_machine:
        group.output_directory = run.directory / WORKER_OUTPUT


def report_event(run: Run | None, console: Screen, row: Mapping[str, Any], failure: str | None) -> None:
    """Append an event of a worker or a learner to `workers.jsonl`, and print its failure; with a quiet console, warn of it."""
    if run is not None:
        run.append_worker_event({"time": time.time(), **row})
    if failure is not None and console.quiet:
        warn(f"train: {failure}")
    elif failure is not None:
        console.print_line(failure)


def finish(training: Training, result: Result, console: Screen) -> Result:
    """Write the summary, and evaluate the policy unless training was stopped."""
    run, env_steps = training.run, result.progress.env_steps
    with record_failure([training]) as (note_progress,):
        note_progress(result.progress, {}, None)
        _write_result(training, result)
        if result.stopped is None and training.eval_episodes:
            if is_evaluated(training, env_steps):
                evaluation = result.evaluations.get(env_steps)  # None if its episodes did not end
            else:
                evaluation = _evaluate(training, result, console)
            result = dataclasses.replace(result, evaluation=evaluation)
            _write_result(training, result)
    if result.diagnosis is not None:
        return result
    if result.stopped is None:
        if (reason := explain_no_step(training.config.agent, result.progress, result.metrics)) is not None:
            warn(f"{training.title}: {reason}")
        seconds = time.monotonic() - training.started_at if result.evaluations else None
        console.print_text(summary_line(training.title, result.progress, result.evaluation, seconds, training.config.unit))
        if run is not None:
            console.print_line(f"run: {run.directory}")
    else:
        advice = "" if run is None else f"; continue with: {resume_command(training)}"
        console.print_line(f"stopped by {result.stopped} at {env_steps:,} {training.config.unit}{advice}")
    return result


def make_result(training: Training, trained: TrainResult, snapshot: dict[str, Any] | None) -> Result:
    """Convert the result of a loop to a `Result`."""
    return Result(
        **vars(trained) | {"agent": training.config.agent},
        config=training.config,
        run_dir=training.run.directory if training.run else None,
        env=training.eval_env or training.env,
        snapshot=snapshot,
        history=tuple(training.history),
    )


def save_last(training: Training, trained: TrainResult) -> dict[str, Any] | None:
    """Save the final state, unless the checkpointer has just saved it; returns the host environment's snapshot."""
    run, progress = training.run, trained.progress
    snapshot = snapshot_of(progress)
    if run is not None and progress.env_steps not in steps(run.checkpoints):
        replay, save_replay = replay_path(training.config.agent), training.config.checkpoint_replay
        save_state(run, progress, trained.loop_state, snapshot, replay=replay, save_replay=save_replay)
    return snapshot


def writers(run: Run, config: RunConfig, start: Start) -> Sequence[Callback]:
    """Return the callbacks that write into the run directory."""
    replay = replay_path(config.agent)
    save = checkpointer(run, config.checkpoint_every, replay=replay, save_replay=config.checkpoint_replay)
    callbacks = [jsonl_logger(run), save]
    try:
        callbacks.insert(1, tensorboard_logger(run, resumed_at=start.env_steps or None))
    except ImportError:
        _note_missing_tensorboard()
    return callbacks


@contextmanager
def record_failure(trainings: Sequence[Training]) -> Iterator[list[Callback]]:
    """Write an exception of the block to the summaries, with the last reported progress.

    Yields a callback for each training, which receives its reports. A stop before the start is left to `record_stop`.
    """
    newest: dict[int, Progress] = {}

    def note_progress(i: int) -> Callback:
        def note(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
            newest[i] = progress

        return note

    try:
        yield [note_progress(i) for i in range(len(trainings))]
    except StoppedBeforeStart:
        raise
    except (Exception, SystemExit) as error:  # an environment may raise SystemExit
        for i, training in enumerate(trainings):
            # Writing may fail again, as on a full disk; the first error is reported.
            with contextlib.suppress(RunError):
                _write_summary(training, newest.get(i), stopped=f"{type(error).__name__}: {error}")
        raise


@contextmanager
def record_stop(trainings: Sequence[Training], name: Callable[[], str]) -> Iterator[None]:
    """Write the reason of a `StoppedBeforeStart` to the summaries."""
    try:
        yield
    except StoppedBeforeStart:
        for training in trainings:
            with contextlib.suppress(RunError):
                _write_summary(training, None, stopped=name())
        raise


def resume_command(training: Training) -> str:
    """Return the command that continues the run, or the Python call if the agent or the environment is user-defined."""
    assert training.run is not None, "only a run directory can be continued"
    directory, config, flags = str(training.run.directory), training.config, training.resume_flags
    if not flags:
        user = {"env": config.is_user_env, "agent": _has_user_agent(training.run)}
        if any(user.values()):
            return f"polyak.resume({', '.join([repr(directory), *(f'{name}=...' for name in user if user[name])])})"
    module = "" if "--env" in flags.split() else config.env.rpartition(":")[0]
    return " ".join(filter(None, ["polyak resume", shlex.quote(directory), flags, module and f"--import {module}"]))


def _has_user_agent(run: Run) -> bool:
    """Return True if the run's agent has a user-defined class or network, which the config only describes."""
    try:
        read_config(run)
    except ConfigError:
        return True
    return False


@contextmanager
def periodic_evaluation(
    training: Training, display: Display, should_stop: Callable[[], bool], label: str = ""
) -> Iterator[list[PeriodicEvaluation]]:
    """Yield a list with the callback of the evaluations during training, or an empty list without `eval_every`."""
    config = training.config
    if config.eval_every is None:
        yield []
        return
    with evaluation_env(training.env, config.eval_episodes, training.eval_env) as env:
        yield [
            PeriodicEvaluation(
                config.agent,
                env,
                every=config.eval_every,
                episodes=config.eval_episodes,
                max_steps=config.eval_max_steps,
                seed=config.seed or 0,
                env_steps_done=training.start.env_steps,
                run=training.run,
                on_evaluation=training.on_evaluation,
                display=display,
                label=label,
                unit=config.unit,
                should_stop=should_stop,
            )
        ]


def with_evaluations(result: Result, callbacks: Sequence[PeriodicEvaluation]) -> Result:
    """Return the result with the evaluations during training."""
    for callback in callbacks:
        result = dataclasses.replace(result, evaluations=callback.evaluations, best_policy=callback.best_policy)
    return result


def is_evaluated(training: Training, env_steps: int) -> bool:
    """Return True if the periodic evaluation has already evaluated the last policy in the same episodes."""
    config = training.config
    has_trained = env_steps > training.start.env_steps
    return has_trained and config.eval_every is not None and config.eval_episodes == training.eval_episodes


def without_final_evaluation(training: Training, result: Result) -> Training:
    """Return the training without the evaluation at its end, if that is still to come."""
    env_steps = result.progress.env_steps
    has_evaluation = is_evaluated(training, env_steps) and env_steps in result.evaluations
    is_open = result.stopped is None and training.eval_episodes > 0 and not has_evaluation
    return dataclasses.replace(training, eval_episodes=0) if is_open else training


def _evaluate(training: Training, result: Result, console: Screen) -> Evaluation | None:
    """Evaluate in new environments, with a status line; returns None if an episode does not end."""
    episodes, max_steps = training.eval_episodes, training.config.eval_max_steps
    status = f"{training.title}: evaluating {episodes} episodes …"
    if training.config.loop != OFFLINE and (limit := describe_limit(result.metrics, max_steps)):
        console.print_line(f"{training.title}: {limit}")
    if not console.is_terminal:
        console.print_line(status)
    with console.status(status), evaluation_env(training.env, episodes, training.eval_env) as env:
        return evaluate_if_it_ends(env, result.policy, episodes, training.config.seed or 0, max_steps)


def _write_result(training: Training, result: Result) -> None:
    stopped = result.stopped if result.diagnosis is None else f"TrainingDiverged: {result.diagnosis}"
    _write_summary(training, result.progress, result.evaluation, stopped=stopped)


def _write_summary(
    training: Training, progress: Progress | None, evaluation: Evaluation | None = None, *, stopped: str | None
) -> None:
    if training.run is not None:
        write_summary(training.run, training.config, training.started_at, progress, evaluation, stopped=stopped)


@cache
def _note_missing_tensorboard() -> None:
    print("note: TensorBoard files are not written, metrics.jsonl has everything; pip install 'polyak[tensorboard]'")

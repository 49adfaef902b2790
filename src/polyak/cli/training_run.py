"""Trains in run directories: what `polyak train` and `polyak resume` share."""

import contextlib
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyak import train
from polyak.cli.evaluation import evaluate_policy, make_evaluation_env
from polyak.cli.flags import fail
from polyak.cli.progress import Screen, once_per_iteration, show_progress
from polyak.cli.signals import NAMES, Signals, handle_signals
from polyak.cli.summary import summary_line, write_summary
from polyak.core.types import Callback, Env, HostEnv, Policy
from polyak.runs import RunConfig, run_key
from polyak.storage.callbacks import checkpointer, jsonl_logger, tensorboard_logger
from polyak.storage.checkpoint import steps
from polyak.storage.directory import find
from polyak.storage.progress import save_progress
from polyak.storage.run_directory import Run, RunError, create
from polyak.train.evaluate import Evaluation

# A signal ends the evaluation at once.
TRAINING_SAVED = "training is finished and saved; evaluate it with `polyak evaluate`"


@dataclass(frozen=True)
class Start:
    """Where a resumed training starts: the loop's state, None for the beginning, and its env_steps."""

    state: Any
    env_steps: int


def train_in(run: Run, config: RunConfig, env: Env | HostEnv, eval_episodes: int, start: Start | None = None) -> int:
    """Train and evaluate in a run directory; returns the exit code."""
    console = Screen()
    started_at = time.monotonic()
    title = f"{config.algorithm} {config.env}"
    env_steps_done = start.env_steps if start else 0
    try:
        with handle_signals() as signals, show_progress(console, title, config.env_steps, env_steps_done) as progress:
            result = _loop(config)(
                config.agent,
                env,
                env_steps=config.env_steps,
                key=run_key(config.seed),
                callbacks=[progress, *writers(run, config, start)],
                report_every=config.report_every,
                devices=config.devices,
                resume_from=start.state if start else None,
                env_steps_done=env_steps_done,
                should_stop=signals.stop_requested,
            )
            _save_last(run, result)
        with handle_signals(grace=0.0, consequence=TRAINING_SAVED):
            return _finish(run, config, result, signals, started_at, eval_episodes, console)
    except (Exception, SystemExit) as error:  # an environment may raise SystemExit
        return _report_failure([run], [config], started_at, error)


def train_seeds(directory: Path, config: RunConfig, env: Env | HostEnv, seeds: int, eval_episodes: int) -> int:
    """Train with several seeds, each in its own run directory under `directory`; returns the largest exit code.

    Raises:
        RunError: `directory` exists and is not an empty directory, or cannot be created.
    """
    if os.path.lexists(directory) and (directory.is_symlink() or not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{directory}: the runs of several seeds need a directory that is new or empty")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be created: {error.strerror}") from error
    configs = [replace(config, seed=config.seed + i) for i in range(seeds)]
    directories = [directory / f"seed-{each.seed}" for each in configs]
    if config.loop == "compiled" and not isinstance(env, HostEnv):
        configs = [replace(each, devices=1) for each in configs]
        with ExitStack() as stack:
            runs = [stack.enter_context(create(d, c.to_json())) for d, c in zip(directories, configs, strict=True)]
            return _train_at_once(runs, configs, env, eval_episodes)
    largest = 0
    pending = list(zip(configs, directories, strict=True))
    while pending:
        each, place = pending.pop(0)
        with create(place, each.to_json()) as run:
            code = train_in(run, each, env, eval_episodes)
        if code > 128:
            for other, missing in pending:
                Screen().print_line(f"not started: --seed {other.seed} --run-dir {shlex.quote(str(missing.absolute()))}")
            return code
        largest = max(largest, code)
    return largest


def _train_at_once(runs: Sequence[Run], configs: Sequence[RunConfig], env: Env, eval_episodes: int) -> int:
    console = Screen()
    started_at = time.monotonic()
    first = configs[0]
    keys = jax.vmap(jax.random.key)(np.array([config.seed for config in configs], np.uint32))
    title = f"{first.algorithm} {first.env} x {len(runs)}"
    try:
        with handle_signals() as signals, show_progress(console, title, first.env_steps) as show:
            show_once = once_per_iteration(show)
            results = train.compiled_seeds(
                first.agent,
                env,
                env_steps=first.env_steps,
                keys=keys,
                callbacks=[[show_once, *writers(run, config, None)] for run, config in zip(runs, configs, strict=True)],
                report_every=first.report_every,
                should_stop=signals.stop_requested,
            )
            for run, result in zip(runs, results, strict=True):
                if result.diagnosis is None:
                    _save_last(run, result)
        with handle_signals(grace=0.0, consequence=TRAINING_SAVED):
            return max(
                _finish(run, config, result, signals, started_at, eval_episodes, console)
                for run, config, result in zip(runs, configs, results, strict=True)
            )
    except (Exception, SystemExit) as error:
        return _report_failure(runs, configs, started_at, error)


def writers(run: Run, config: RunConfig, start: Start | None) -> Sequence[Callback]:
    """The callbacks that write into the run directory."""
    callbacks = [jsonl_logger(run), checkpointer(run, config.checkpoint_every)]
    try:
        callbacks.insert(1, tensorboard_logger(run, resumed_at=start.env_steps if start else None))
    except ImportError:
        _note_missing_tensorboard()
    return callbacks


@cache
def _note_missing_tensorboard() -> None:
    print("note: TensorBoard files are not written, metrics.jsonl has everything; pip install 'polyak[tensorboard]'")


def _loop(config: RunConfig) -> Callable[..., train.TrainResult]:
    return train.host if config.loop == "host" else train.compiled


def _save_last(run: Run, result: train.TrainResult) -> None:
    """Save the final state, unless the checkpointer has just saved it."""
    if result.progress.env_steps not in steps(run.checkpoints):
        save_progress(run, result.progress, result.loop_state)


def _finish(
    run: Run,
    config: RunConfig,
    result: train.TrainResult,
    signals: Signals,
    started_at: float,
    eval_episodes: int,
    console: Screen,
) -> int:
    """Evaluate the policy, or report why training stopped; returns the exit code."""
    if result.diagnosis is not None:
        write_summary(run, config, started_at, result.progress, None, stopped=f"TrainingDiverged: {result.diagnosis}")
        return fail(f"{run.directory}: {result.diagnosis}", 1)
    if result.stopped is not None or signals.received is not None:
        name = result.stopped if signals.received is None else NAMES[signals.received]
        write_summary(run, config, started_at, result.progress, None, stopped=name)
        env_steps = f"{result.progress.env_steps:,} env_steps"
        console.print_line(f"stopped by {name} at {env_steps}; continue with: {_resume_command(run)}")
        return signals.exit_code
    write_summary(run, config, started_at, result.progress, None, stopped=None)
    evaluation = None
    if eval_episodes:
        evaluation = _evaluate(config, config.agent.policy(result.state), eval_episodes, console)
        write_summary(run, config, started_at, result.progress, evaluation, stopped=None)
    console.print_line(summary_line(config, result.progress, evaluation))
    console.print_line(f"run: {run.directory}")
    return 0


def _evaluate(config: RunConfig, policy: Policy, episodes: int, console: Screen) -> Evaluation:
    """Evaluate in new environments, and show it: without a time limit it may take long."""
    status = f"{config.algorithm} {config.env}: evaluating {episodes} episodes …"
    if not console.is_terminal:
        console.print_line(status)
    with console.status(status):
        return evaluate_policy(make_evaluation_env(config, episodes), policy, episodes, config.seed)


def _report_failure(runs: Iterable[Run], configs: Iterable[RunConfig], started_at: float, error: BaseException) -> int:
    """Print the error that ended the training or its evaluation and write it to the summaries; returns the exit code."""
    has_diverged = isinstance(error, train.TrainingDiverged)
    if not has_diverged:
        traceback.print_exception(error)
    for run, config in zip(runs, configs, strict=True):
        # A full disk takes no summary either; the first error is the one to report.
        with contextlib.suppress(RunError):
            write_summary(run, config, started_at, None, None, stopped=f"{type(error).__name__}: {error}")
        if not has_diverged:
            where = "continue from the last checkpoint" if find(run.checkpoints) else "no checkpoint was saved; start again"
            print(f"{where} with: {_resume_command(run)}")
    return fail(error if has_diverged else f"{type(error).__name__}: {error}", 1)


def _resume_command(run: Run) -> str:
    return f"polyak resume {shlex.quote(str(run.directory))}"

"""Runs a prepared training with signal handling, for `polyak train` and `polyak resume`."""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from polyak.cli.flags import fail
from polyak.cli.signals import NAMES, Signals, handle_signals
from polyak.cli.user_traceback import print_user_traceback
from polyak.core.space_check import InvalidValue
from polyak.loops.loop import TrainingDiverged
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.directory import find
from polyak.storage.run_directory import SUMMARY, RunError, open_run
from polyak.train.display import Screen
from polyak.train.result import Result
from polyak.train.run_training import train_run
from polyak.train.seeds import label_seed, train_in_parallel
from polyak.train.summary import seed_table
from polyak.train.training import Training, finish, record_stop, resume_command, without_final_evaluation
from polyak.workers.ray_workers import ClusterError
from polyak.workers.supervise import StoppedBeforeStart

# Messages of a signal during the final evaluation, which exits at once, and after a training that was stopped.
TRAINING_SAVED = "training is finished and saved; evaluate it with `polyak evaluate`"
STOPPED_TRAINING_SAVED = "the stopped training is saved; continue it with `polyak resume`"


def run_to_exit_code(training: Training) -> int:
    """Train and evaluate in a run directory; returns the exit code."""
    console = Screen()
    return _run([training], lambda should_stop: [train_run(training, console, (), should_stop)], console)


def run_in_parallel(trainings: Sequence[Training]) -> int:
    """Train and evaluate several seeds as one program; returns the largest exit code."""
    console = Screen()
    trainings = [label_seed(training, i, len(trainings)) for i, training in enumerate(trainings)]
    return _run(trainings, lambda should_stop: train_in_parallel(trainings, console, should_stop), console)


def run_sequentially(prepare_seed: Callable[[int, Path], Training], directories: dict[int, Path]) -> int:
    """Train and evaluate several seeds; a signal ends all. Returns the largest exit code.

    Args:
        prepare_seed: prepares the training of a seed in a directory.
        directories: directory of each seed.
    """
    largest = 0
    pending = list(directories.items())
    while pending:
        position = len(directories) - len(pending)
        code = run_to_exit_code(label_seed(prepare_seed(*pending.pop(0)), position, len(directories)))
        if code > 128:
            for seed, missing in pending:
                Screen().print_line(f"not started: --seed {seed} --run-dir {shlex.quote(str(missing.absolute()))}")
            return code
        largest = max(largest, code)
    return largest


def print_statistics(directories: Iterable[Path]) -> None:
    """Print the results of several seeds, and mean, IQM and interval of their returns."""
    summaries = [open_run(directory).read_summary() for directory in directories if os.path.lexists(directory / SUMMARY)]
    if len(summaries) > 1:
        Screen().print_text(seed_table(summaries))


def _run(trainings: Sequence[Training], start: Callable[[Callable[[], bool]], list[Result]], console: Screen) -> int:
    signals = Signals()
    try:
        with ExitStack() as stack:
            for training in trainings:
                stack.enter_context(training)
            with handle_signals() as signals, record_stop(trainings, lambda: NAMES.get(signals.received or 0, "request")):
                results = start(signals.stop_requested)
            is_stopped = any(result.stopped is not None and result.diagnosis is None for result in results)
            with handle_signals(grace=0.0, consequence=STOPPED_TRAINING_SAVED if is_stopped else TRAINING_SAVED):
                return max(_finish(*pair, signals, console) for pair in zip(trainings, results, strict=True))
    except StoppedBeforeStart as error:
        _print_resumption(trainings)
        return fail(error, signals.exit_code)
    except (Exception, SystemExit) as error:  # An environment may raise SystemExit.
        return _report_failure(trainings, error)


def _finish(training: Training, result: Result, signals: Signals, console: Screen) -> int:
    """Evaluate the policy unless a signal was received, or report why training stopped; returns the exit code."""
    if signals.received is not None and result.stopped == "request":
        result = dataclasses.replace(result, stopped=NAMES[signals.received])
    # One of several seeds may have finished before the signal, which may have skipped its last evaluation.
    finished = training if signals.received is None else without_final_evaluation(training, result)
    finish(finished, result, console)
    if finished is not training and training.run is not None:
        console.print_line(f"not evaluated; evaluate with: {resume_command(training)}")
    if result.diagnosis is None:
        return signals.exit_code
    code = fail(f"{result.run_dir}: {result.diagnosis}", 1)
    _print_advice(training)
    return code


def _report_failure(trainings: Sequence[Training], error: BaseException) -> int:
    """Print the error that ended the training or its evaluation, and how to continue; returns the exit code."""
    if isinstance(error, TrainingDiverged):
        code = fail(error, 1)
        for training in trainings:
            _print_advice(training)
        return code
    # These messages are complete: environment, run or cluster, value or reason, and advice.
    if not isinstance(error, InvalidValue | RunError | CheckpointError | ClusterError):
        print_user_traceback(error)
    _print_resumption(trainings)
    return fail(error if isinstance(error, RunError | CheckpointError) else f"{type(error).__name__}: {error}", 1)


def _print_advice(training: Training) -> None:
    """Print the run directory of a diverged training, and advice."""
    if training.run is not None:
        Screen().print_line(f"run: {training.run.directory}")
    Screen().print_line(
        "advice: for obs, reward or action, run polyak.envs.check_env on the environment; for any other quantity, use a "
        "smaller learning rate or smaller rewards"
    )


def _print_resumption(trainings: Sequence[Training]) -> None:
    for training in trainings:
        if training.run is not None:
            # A run that was moved, removed or damaged cannot be continued there.
            with contextlib.suppress(RunError):
                training.run.read_config()
                is_saved = find(training.run.checkpoints)
                where = "continue from the last checkpoint" if is_saved else "no checkpoint was saved; start again"
                Screen().print_line(f"{where} with: {resume_command(training)}")

"""Runs a prepared training, in this process or in learners."""

from collections.abc import Callable, Sequence

from polyak.core.types import Callback
from polyak.train.display import Screen
from polyak.train.interrupt import catch_interrupt
from polyak.train.learners import train_with_learners
from polyak.train.result import Result
from polyak.train.training import Training, finish, name_interrupt, record_stop, train_here, without_final_evaluation


def run_training(
    training: Training, *, callbacks: Sequence[Callback], progress: bool, should_stop: Callable[[], bool]
) -> Result:
    """Train, evaluate and write the summary; the first Ctrl-C stops after the current iteration.

    Raises:
        StoppedBeforeStart: a stop was requested before workers had started, or before learners had saved a checkpoint.
    """
    return run_until_interrupt(training, callbacks=callbacks, progress=progress, should_stop=should_stop)[0]


def run_until_interrupt(
    training: Training, *, callbacks: Sequence[Callback], progress: bool, should_stop: Callable[[], bool]
) -> tuple[Result, bool]:
    """The result of `run_training`, and whether there was a Ctrl-C, which may have come in the last iteration."""
    console = Screen(quiet=not progress)
    with training:
        with catch_interrupt() as interrupt, record_stop([training], lambda: interrupt.name):
            result = train_run(training, console, callbacks, lambda: interrupt.received or should_stop())
        training = without_final_evaluation(training, result) if interrupt.received else training
        return finish(training, name_interrupt(result, interrupt), console), interrupt.received


def train_run(training: Training, console: Screen, callbacks: Sequence[Callback], should_stop: Callable[[], bool]) -> Result:
    """Train, and save the final state in the run directory."""
    if training.learners is not None:
        return train_with_learners(training, training.learners, console, should_stop)
    return train_here(training, console, callbacks, should_stop)

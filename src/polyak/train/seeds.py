"""Trains several seeds at once, as one program, each with a run directory of its own."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import jax
import numpy as np

from polyak.core.types import Env
from polyak.loops.compiled_seeds import compiled_seeds
from polyak.train.display import Screen, once_per_iteration, show_progress
from polyak.train.result import Result
from polyak.train.training import (
    Training,
    make_result,
    periodic_evaluation,
    record_failure,
    save_last,
    with_evaluations,
    writers,
)


def train_at_once(trainings: Sequence[Training], env: Env, console: Screen, should_stop: Callable[[], bool]) -> list[Result]:
    """Train in an environment in JAX with settings that differ in the seed alone; saves the final states.

    A seed that diverges is not saved, and its result has a `diagnosis`.
    """
    first = trainings[0].config
    keys = jax.vmap(jax.random.key)(np.array([training.config.seed for training in trainings], np.uint32))
    title = f"{first.algorithm} {first.env} x {len(trainings)}"
    with record_failure(trainings), ExitStack() as stack:
        evaluations = [stack.enter_context(periodic_evaluation(training)) for training in trainings]
        display = once_per_iteration(stack.enter_context(show_progress(console, title, first.env_steps)))
        results = compiled_seeds(
            first.agent,
            env,
            env_steps=first.env_steps,
            keys=keys,
            callbacks=[
                [*evaluation, display, *(writers(training.run, training.config, training.start) if training.run else [])]
                for training, evaluation in zip(trainings, evaluations, strict=True)
            ],
            report_every=first.report_every,
            should_stop=should_stop,
        )
        for training, trained in zip(trainings, results, strict=True):
            if trained.diagnosis is None:
                save_last(training, trained)
    return [
        with_evaluations(make_result(training, trained, None), evaluation)
        for training, trained, evaluation in zip(trainings, results, evaluations, strict=True)
    ]

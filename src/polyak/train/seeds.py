"""`polyak.train.run_seeds`: trains several seeds, in one program if the environment is in JAX, each with a run directory."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from polyak.core.checks import check_choice, check_integer
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Callback, Env, HostEnv, State
from polyak.envs.constructors import is_in_jax
from polyak.loops.seeds_loop import compiled_seeds
from polyak.presets import preset
from polyak.runs import check_seed
from polyak.storage.run_files import RunError, make_directory
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import configure_devices_for_seeds
from polyak.train.display import Screen, SeedReports, show_progress
from polyak.train.interrupt import catch_interrupt
from polyak.train.new_training import make_agent, prepare, temporary_envs
from polyak.train.result import Result
from polyak.train.run_training import run_until_interrupt
from polyak.train.settings import SeedSettings, TrainSettings, runs_seeds_with, settings_from
from polyak.train.summary import make_summary, seed_table
from polyak.train.tracking import tracked
from polyak.train.training import (
    Training,
    finish,
    join_callbacks,
    make_result,
    name_interrupt,
    periodic_evaluation,
    record_failure,
    save_last,
    with_evaluations,
    without_final_evaluation,
)
from polyak.train.video_callback import check_videos, periodic_video


@suggest_arguments("train.run_seeds")
@runs_seeds_with(SeedSettings)
def run_seeds(
    agent: Agent[State] | str, env: Env | HostEnv | str | Callable[[], Any], fields: SeedSettings
) -> list[Result[State]]:
    """Train several seeds, as `polyak train --seeds` does; prints mean, IQM and interval of the returns.

    In the compiled loop, the seeds train in parallel as one program, split over the cores; in the host loop, one after another.

    Args:
        agent: see `run`.
        env: see `run`.
        fields: each field of `SeedSettings` is a keyword argument; `env_steps` and `seeds` are required.

    Returns:
        The results in the order of the seeds; after Ctrl-C, without the seeds that were not started. In the compiled loop, a
        seed that diverges has a `diagnosis`, and the other seeds continue.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        RunError: the directory is not new or empty, or cannot be created.
        TrainingDiverged: a seed diverged in the host loop; earlier seeds are saved.
    """
    numbers, loop, callbacks = _check_seeds(fields.seeds, agent, env, fields.callbacks), fields.loop, fields.callbacks
    check_choice("train.run_seeds", "loop", loop, ("auto", "compiled", "host"))
    # In parallel, each seed has one device.
    devices = 1 if is_in_jax(env) and loop != "host" else None
    configure_devices_for_seeds(len(numbers) if devices else 1)
    with temporary_envs("train.run_seeds", agent, env, fields, loop, devices) as (made, source):
        agent_made = make_agent(agent, made.spec, source, fields.env_steps, fields.settings, "train.run_seeds")
        algorithm = agent.lower() if isinstance(agent, str) else None

        def prepare_seed(seed: int, directory: Path | None) -> Training:
            outputs = {} if directory is not None else {"video_every": None, "track": None}
            changes = {"seed": seed, "run_dir": directory, "devices": devices, "callbacks": (), **outputs}
            one = settings_from(TrainSettings, fields, changes)
            return prepare(agent_made, made, one, source=source, algorithm=algorithm, owner="train.run_seeds")

        check_videos("train.run_seeds", made, fields)
        # Check all settings before a directory is created.
        prepare_seed(numbers[0], None)
        run_dir = fields.run_dir
        directories: Any = dict.fromkeys(numbers) if run_dir is None else seed_directories(Path(run_dir), numbers)
        train_seeds = _train_in_parallel if devices else _train_sequentially
        console = Screen(quiet=not fields.progress)
        with compilation_cache(fields.compilation_cache):
            results = train_seeds(
                (prepare_seed(seed, directory) for seed, directory in directories.items()),
                [callbacks(seed) for seed in numbers],
                console,
                fields.should_stop,
            )
        _print_statistics(console, results)
        return results


def _print_statistics(console: Screen, results: Sequence[Result[Any]]) -> None:
    if len(results) > 1:
        console.print_text(
            seed_table([make_summary(one.config, one.progress, one.evaluation, stopped=one.stopped) for one in results])
        )


def label_seed(training: Training, position: int, count: int) -> Training:
    """Return the training with a label that names its seed."""
    return dataclasses.replace(training, label=f"seed {training.config.seed} ({position + 1} of {count})")


def seed_directories(parent: Path, seeds: Iterable[int]) -> dict[int, Path]:
    """Create the parent directory; returns the path of each seed's run directory.

    Raises:
        RunError: the parent exists and is no empty directory, or cannot be created.
    """
    if os.path.lexists(parent) and (parent.is_symlink() or not parent.is_dir() or any(parent.iterdir())):
        raise RunError(f"{parent}: the runs of several seeds need a directory that is new or empty")
    make_directory(parent)
    return {seed: parent / f"seed-{seed}" for seed in seeds}


def _check_seeds(seeds: Any, agent: Any, env: Any, callbacks: Any) -> list[int]:
    """Return the list of seeds, after checks that only several seeds need; an integer n means 0, ..., n - 1."""
    if not callable(callbacks):
        raise TypeError(f"train.run_seeds: callbacks must be a function of the seed that returns a list, got {callbacks!r:.80}")
    if isinstance(agent, str) and preset(agent, str(env)).loop != "auto":
        raise ValueError(f"train.run_seeds: {agent} trains with workers, which are of one run; call train.run for each seed")
    if isinstance(seeds, int):
        check_integer("train.run_seeds", "seeds", seeds)
        return list(range(seeds))
    seeds = seeds.tolist() if isinstance(seeds, np.ndarray) else seeds
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not seeds:
        raise TypeError(f"train.run_seeds: seeds must be their number or a sequence of integers, got {seeds!r:.80}")
    for seed in seeds:
        check_seed("train.run_seeds", "each of seeds", seed)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"train.run_seeds: seeds must differ, got {list(seeds)!r:.80}")
    return list(seeds)


def _train_sequentially(
    trainings: Iterable[Training],
    callbacks: Sequence[Sequence[Callback]],
    console: Screen,
    should_stop: Callable[[], bool],
) -> list[Result]:
    """Train one seed after another, until a training is stopped by a signal or `should_stop`."""
    results: list[Result] = []
    for i, (training, seed_callbacks) in enumerate(zip(trainings, callbacks, strict=True)):
        training = label_seed(training, i, len(callbacks))
        result, is_interrupted = run_until_interrupt(
            training, callbacks=seed_callbacks, progress=not console.quiet, should_stop=should_stop
        )
        results.append(result)
        if is_interrupted or result.stopped == "request":
            break
    return results


def _train_in_parallel(
    trainings: Iterable[Training],
    callbacks: Sequence[Sequence[Callback]],
    console: Screen,
    should_stop: Callable[[], bool],
) -> list[Result]:
    """Train all seeds as one program, and evaluate each policy."""
    with ExitStack() as stack:
        prepared = [stack.enter_context(label_seed(training, i, len(callbacks))) for i, training in enumerate(trainings)]
        with catch_interrupt() as interrupt:
            results = train_in_parallel(prepared, console, lambda: interrupt.received or should_stop(), callbacks)
        for result in results:
            if result.diagnosis is not None:
                console.print_line(f"seed {result.config.seed} diverged: {result.diagnosis}")
        if interrupt.received:  # Some seeds may have finished before the signal.
            prepared = list(map(without_final_evaluation, prepared, results))
        return [
            finish(training, name_interrupt(result, interrupt), console)
            for training, result in zip(prepared, results, strict=True)
        ]


def train_in_parallel(
    trainings: Sequence[Training],
    console: Screen,
    should_stop: Callable[[], bool],
    callbacks: Sequence[Sequence[Callback]] | None = None,
) -> list[Result]:
    """Train seeds as one program in a JAX environment, with equal settings except for the seed; saves the final states.

    A seed that diverges is not saved, and its result has a `diagnosis`.

    Args:
        callbacks: further callbacks of each seed.
    """
    first = trainings[0].config
    keys = jax.vmap(jax.random.key)(np.array([training.config.seed for training in trainings], np.uint32))
    title = f"{first.algorithm} {first.env} x {len(trainings)}"
    with record_failure(trainings) as notes, ExitStack() as stack:
        count = len(trainings)
        display = stack.enter_context(show_progress(console, title, first.env_steps, seeds=count))
        reports = SeedReports(display, count)
        stack.callback(reports.flush)
        evaluations = [
            stack.enter_context(periodic_evaluation(training, display, should_stop, f"seed {training.config.seed} "))
            for training in trainings
        ]
        videos = [
            stack.enter_context(periodic_video(training.config, training.env, training.run, 0, display))
            for training in trainings
        ]
        trackers = [stack.enter_context(tracked(training.config, training.run, is_resumed=False)) for training in trainings]
        given = callbacks or [()] * count
        results = compiled_seeds(
            first.agent,
            cast(Env, trainings[0].env),
            env_steps=first.env_steps,
            keys=keys,
            callbacks=[
                join_callbacks(
                    training, notes[i], [*evaluations[i], *videos[i]], [*given[i], *trackers[i]], reports.callback_of(i)
                )
                for i, training in enumerate(trainings)
            ],
            report_every=first.report_every,
            should_stop=should_stop,
        )
        for training, trained, tracked_runs in zip(trainings, results, trackers, strict=True):
            if trained.diagnosis is None:
                save_last(training, trained)
            for tracked_run in tracked_runs:
                tracked_run.failed = trained.diagnosis is not None
    return [
        with_evaluations(make_result(training, trained, None), evaluation)
        for training, trained, evaluation in zip(trainings, results, evaluations, strict=True)
    ]

"""One training in a run directory: what `train` and `resume` share."""

import contextlib
import os
import shlex
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from polyak import envs, train
from polyak.cli.flags import fail
from polyak.cli.progress import Screen, once_a_round, showing
from polyak.cli.signals import NAMES, Interrupts, catching
from polyak.core.types import Callback, Env, HostEnv, Policy, Progress
from polyak.runs import RunConfig, run_key
from polyak.storage.callbacks import checkpointer, jsonl_logger, tensorboard_logger
from polyak.storage.checkpoint import CheckpointError, restore, steps
from polyak.storage.directory import find
from polyak.storage.progress import check_settings, read_progress, save_progress
from polyak.storage.run_directory import Run, RunError, create
from polyak.train.compiled_loop import start as start_compiled
from polyak.train.episodes import Episodes
from polyak.train.evaluate import Evaluation
from polyak.train.host_loop import reset
from polyak.train.loop import LoopState, check_match

# A greedy policy may walk into a wall for ever where an environment has no time limit.
MAX_EVALUATION_STEPS = 1_000_000

# A signal ends the evaluation at once.
SAVED = "the training is done and saved, and polyak evaluate tells what it reached"


@dataclass(frozen=True)
class Start:
    """Where a resumed training goes on: the loop's state, None for the beginning, and the env_steps it had done."""

    state: Any
    env_steps: int


def train_in(run: Run, config: RunConfig, env: Env | HostEnv, eval_episodes: int, start: Start | None = None) -> int:
    """Train as the configuration says, evaluate, and leave everything in the run directory; returns the exit code."""
    console = Screen()
    began = time.monotonic()
    title = f"{config.algorithm} {config.env}"
    done = start.env_steps if start else 0
    try:
        with catching() as interrupts, showing(console, title, config.env_steps, done) as shown:
            result = _loop(config)(
                config.agent,
                env,
                env_steps=config.env_steps,
                key=run_key(config.seed),
                callbacks=[shown, *writers(run, config, start)],
                report_every=config.report_every,
                devices=config.devices,
                resume_from=start.state if start else None,
                env_steps_done=done,
                should_stop=interrupts.stop_requested,
            )
            _save_last(run, result)
        with catching(grace=0.0, lost=SAVED):
            return _finish(run, config, result, interrupts, began, eval_episodes, console)
    except (Exception, SystemExit) as error:  # an environment may ask for the process's end
        return _failed([run], [config], began, error)


def train_seeds(directory: Path, config: RunConfig, env: Env | HostEnv, seeds: int, eval_episodes: int) -> int:
    """Train with several seeds, each in a run directory of its own under `directory`; returns the first bad exit code, or 0.

    Raises:
        RunError: `directory` is there already, and not an empty directory.
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
    worst = 0
    left = list(zip(configs, directories, strict=True))
    while left:
        each, place = left.pop(0)
        with create(place, each.to_json()) as run:
            code = train_in(run, each, env, eval_episodes)
        if code > 128:
            for other, missing in left:
                Screen().say(f"not begun: --seed {other.seed} --run-dir {shlex.quote(str(missing.absolute()))}")
            return code
        worst = max(worst, code)
    return worst


def _train_at_once(runs: Sequence[Run], configs: Sequence[RunConfig], env: Env, eval_episodes: int) -> int:
    console = Screen()
    began = time.monotonic()
    first = configs[0]
    keys = jax.vmap(jax.random.key)(np.array([config.seed for config in configs], np.uint32))
    title = f"{first.algorithm} {first.env} x {len(runs)}"
    try:
        with catching() as interrupts, showing(console, title, first.env_steps) as shown:
            shown = once_a_round(shown)
            callbacks = [[shown, *writers(run, config, None)] for run, config in zip(runs, configs, strict=True)]
            results = train.compiled_seeds(
                first.agent,
                env,
                env_steps=first.env_steps,
                keys=keys,
                callbacks=callbacks,
                report_every=first.report_every,
                should_stop=interrupts.stop_requested,
            )
            for run, result in zip(runs, results, strict=True):
                if result.diagnosis is None:
                    _save_last(run, result)
        with catching(grace=0.0, lost=SAVED):
            codes = [
                _finish(run, config, result, interrupts, began, eval_episodes, console)
                for run, config, result in zip(runs, configs, results, strict=True)
            ]
        return max(codes)
    except (Exception, SystemExit) as error:
        return _failed(runs, configs, began, error)


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


def make_env(config: RunConfig, num_envs: int, *, import_modules: bool = False) -> Env | HostEnv:
    """Copies of the run's environment, with its settings."""
    return envs.make(
        config.env,
        num_envs=num_envs,
        action_scaling=config.action_scaling,
        env_kwargs=config.env_kwargs,
        import_modules=import_modules,
    )


def evaluation_of(config: RunConfig, policy: Policy, episodes: int) -> Evaluation:
    """A policy's episodes in environments of their own; the run's seed decides their starts."""
    return evaluation_in(evaluation_env(config, episodes), config, policy, episodes)


def evaluation_env(config: RunConfig, episodes: int, *, import_modules: bool = False) -> Env | HostEnv:
    """As many environments as the run has, and no more than episodes."""
    return make_env(config, min(config.num_envs, episodes), import_modules=import_modules)


def evaluation_in(env: Env | HostEnv, config: RunConfig, policy: Policy, episodes: int, seed: int | None = None) -> Evaluation:
    """A policy's episodes in an environment, which is closed; the seed decides their starts."""
    key = jax.random.fold_in(run_key(config.seed if seed is None else seed), 0x65766C)
    try:
        return train.evaluate(policy, env, episodes=episodes, key=key, max_steps=MAX_EVALUATION_STEPS)
    finally:
        if isinstance(env, HostEnv):
            env.close()


def restored_start(run: Run, config: RunConfig, env: Env | HostEnv, *, force: bool = False) -> Start:
    """The newest valid checkpoint, with the environment put back to where it was if that can be done.

    Where it cannot, new episodes begin, other than those that the run began with. A run that was ended before its first
    checkpoint starts again from the beginning.

    Args:
        force: resume with the run's config.json although the checkpoint was trained with other settings.

    Raises:
        ValueError: the agent is not for this environment.
        CheckpointError: there is no valid one, or it is of another agent or environment, or was trained with other settings.
    """
    check_match(config.agent, env, config.devices)
    if not find(run.checkpoints):
        _refuse_lost_checkpoints(run, config)
        print(f"{run.directory}: was ended before its first checkpoint; it starts again from the beginning")
        return Start(None, 0)
    restored = restore(run.checkpoints, loop_shape(config, env))
    saved, state = read_progress(run, restored), restored.tree
    if not force:
        check_settings(run, saved)
    if isinstance(env, HostEnv) and saved.env is not None:
        env.restore(saved.env)
    elif isinstance(env, HostEnv):
        warnings.warn(f"{saved.resume}; new episodes begin", stacklevel=2)
        time_step = jax.tree.map(jax.numpy.asarray, env.reset((config.seed + saved.env_steps) % 2**31))
        state = replace(state, time_step=time_step, episodes=Episodes.fresh(env.num_envs))
    return Start(state, saved.env_steps)


def loop_shape(config: RunConfig, env: Env | HostEnv) -> LoopState:
    """What a checkpoint holds: the loop's state before the first iteration, in shapes, which take no compiling."""
    key = run_key(config.seed)
    if isinstance(env, HostEnv):
        shape = jax.eval_shape(partial(train.initial, config.agent, env.num_envs), key, (), reset(env, key))
    else:
        shape = jax.eval_shape(partial(start_compiled, config.agent, env), key)
    return cast(LoopState, shape)


def summary_line(config: RunConfig, progress: Progress, evaluation: Evaluation | None) -> str:
    """What was reached, in one line."""
    trained = (
        f"{config.algorithm} {config.env}: {progress.env_steps:,} env_steps in {progress.seconds:.1f} s "
        f"({progress.fps:,.0f}/s, compiled in {progress.compile_seconds:.1f} s)"
    )
    if evaluation is None:
        return trained
    return (
        f"{trained}; greedy return {evaluation.mean_return:.1f} ± {evaluation.std_return:.1f} over "
        f"{len(evaluation.returns)} episodes"
    )


def _evaluated(config: RunConfig, policy: Policy, episodes: int, console: Screen) -> Evaluation:
    """A policy's episodes, with a word that they are being played: without a time limit they may take long."""
    doing = f"{config.algorithm} {config.env}: evaluating {episodes} episodes …"
    if not console.is_terminal:
        console.say(doing)
    with console.status(doing):
        return evaluation_of(config, policy, episodes)


def _resume(run: Run) -> str:
    """The command that goes on, as a shell takes it."""
    return f"polyak resume {shlex.quote(str(run.directory))}"


def _refuse_lost_checkpoints(run: Run, config: RunConfig) -> None:
    """A kill may fall between a row of metrics and its checkpoint, but not between two rows."""
    rows = [row["env_steps"] for row in run.read_metrics() if row["env_steps"] >= config.checkpoint_every]
    if len(rows) > 1:
        raise CheckpointError(f"{run.checkpoints}: no checkpoint is there, but the run had come to {rows[-1]:,} env_steps")


def _loop(config: RunConfig) -> Callable[..., train.TrainResult]:
    return train.host if config.loop == "host" else train.compiled


def _save_last(run: Run, result: train.TrainResult) -> None:
    """The state at the end, unless the checkpointer has just saved it."""
    if result.progress.env_steps not in steps(run.checkpoints):
        save_progress(run, result.progress, result.loop_state)


def _finish(
    run: Run,
    config: RunConfig,
    result: train.TrainResult,
    interrupts: Interrupts,
    began: float,
    eval_episodes: int,
    console: Screen,
) -> int:
    """Evaluate what was trained, or say how to go on where it was stopped, or why it cannot; returns the exit code."""
    if result.diagnosis is not None:
        _summarise(run, config, began, result.progress, None, stopped=f"TrainingDiverged: {result.diagnosis}")
        return fail(f"{run.directory}: {result.diagnosis}", 1)
    if result.stopped is not None or interrupts.received is not None:
        name = result.stopped if interrupts.received is None else NAMES[interrupts.received]
        _summarise(run, config, began, result.progress, None, stopped=name)
        steps_done = f"{result.progress.env_steps:,} env_steps"
        console.say(f"stopped by {name} at {steps_done}; go on with: {_resume(run)}")
        return interrupts.exit_code
    _summarise(run, config, began, result.progress, None, stopped=None)
    evaluation = None
    if eval_episodes:
        evaluation = _evaluated(config, config.agent.policy(result.state), eval_episodes, console)
        _summarise(run, config, began, result.progress, evaluation, stopped=None)
    console.say(summary_line(config, result.progress, evaluation))
    console.say(f"run: {run.directory}")
    return 0


def _failed(runs: Iterable[Run], configs: Iterable[RunConfig], began: float, error: Exception | SystemExit) -> int:
    """Say what ended the training or the evaluation after it, here and in the summary; returns the exit code."""
    diverged = isinstance(error, train.TrainingDiverged)
    if not diverged:
        traceback.print_exception(error)
    for run, config in zip(runs, configs, strict=True):
        # On a full disk there is no summary either; the error itself counts.
        with contextlib.suppress(RunError):
            _summarise(run, config, began, None, None, stopped=f"{type(error).__name__}: {error}")
        if not diverged:
            where = "go on from the last checkpoint" if find(run.checkpoints) else "no checkpoint is there yet; start again"
            print(f"{where} with: {_resume(run)}")
    return fail(error if diverged else f"ended by {type(error).__name__}: {error}", 1)


def _summarise(
    run: Run,
    config: RunConfig,
    began: float,
    progress: Progress | None,
    evaluation: Evaluation | None,
    *,
    stopped: str | None,
) -> None:
    run.write_summary(
        {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            **_done(run, began, progress),
            "eval_mean_return": evaluation.mean_return if evaluation else None,
            "eval_std_return": evaluation.std_return if evaluation else None,
            "eval_mean_length": evaluation.mean_length if evaluation else None,
            "eval_episodes": len(evaluation.returns) if evaluation else 0,
            "stopped": stopped,
        }
    )


def _done(run: Run, began: float, progress: Progress | None) -> dict[str, Any]:
    """How far the run is and how long that took: of this process, else of the one that trained to the last checkpoint."""
    done: dict[str, Any] = {
        "env_steps": progress.env_steps if progress else None,
        "wall_seconds": time.monotonic() - began,
        "train_seconds": None,
        "compile_seconds": None,
        "fps": None,
    }
    if progress is not None and progress.seconds > 0:
        times = {"train_seconds": progress.seconds, "compile_seconds": progress.compile_seconds, "fps": progress.fps}
        return done | times
    with contextlib.suppress(RunError, CheckpointError):
        earlier = run.read_summary()
        if earlier.get("env_steps") == max(steps(run.checkpoints), default=0):
            return {name: earlier.get(name) for name in done}
    return done

"""polyak resume RUN: continues a run from its last checkpoint."""

import dataclasses
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import jax

from polyak import train
from polyak.cli.compilation_cache import compilation_cache
from polyak.cli.devices import configure_devices, start_jax
from polyak.cli.evaluation import make_env
from polyak.cli.flags import UsageError, default_hint, fail, parse, print_usage
from polyak.cli.imports import ImportFlag, check_import
from polyak.cli.training_run import Start, train_in
from polyak.core.checks import check_integer
from polyak.core.types import Env, HostEnv
from polyak.ops.schedules import Linear
from polyak.runs import RunConfig, read_config, run_key
from polyak.storage.checkpoint import CheckpointError, restore, steps
from polyak.storage.config import ConfigError
from polyak.storage.directory import find
from polyak.storage.progress import check_settings, read_progress
from polyak.storage.run_directory import SUMMARY, Run, RunError, open_run
from polyak.train.compiled_loop import start as start_compiled
from polyak.train.episodes import Episodes
from polyak.train.host_loop import as_host_env, reset
from polyak.train.loop import LoopState, check_match, mesh_over


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """How long to train."""

    env_steps: Annotated[int | None, default_hint("the run's", "INT")] = None
    """environment steps to train for, including those already done; saved in the run's config.json"""
    eval_episodes: int = 100
    """episodes to evaluate the greedy policy for after training; 0 skips the evaluation"""
    force: bool = False
    """accept a config.json that was edited, or that differs from the settings of the checkpoint"""
    imports: ImportFlag = None
    """module of an environment named `MODULE:Name-v0`, which is imported only if it is named here"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def resume(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        flags = "[--env-steps N] [--eval-episodes N] [--force] [--import MODULE] [--no-compilation-cache]"
        return print_usage(f"polyak resume RUN {flags}\n\nRUN is a run directory.", arguments)
    try:
        return _resume(Path(arguments[0]), arguments[1:])
    except (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def _resume(directory: Path, arguments: list[str]) -> int:
    flags = parse(ResumeFlags, arguments, prog=f"polyak resume {directory}", description="Continue a run.")
    check_integer("polyak resume", "--eval-episodes", flags.eval_episodes, at_least=0)
    if flags.env_steps is not None:
        check_integer("polyak resume", "--env-steps", flags.env_steps)
    if flags.force:
        with open_run(directory, write=True) as run:
            run.accept_config()
    if _is_finished(directory, flags.env_steps, flags.eval_episodes):
        return 0
    config = read_config(open_run(directory))
    may_import = check_import(config.env, flags.imports)
    with open_run(directory, write=True) as run, compilation_cache(flags.compilation_cache, config.threads):
        config = read_config(run)
        planned = config.env_steps
        config = dataclasses.replace(config, env_steps=flags.env_steps or planned)
        _note_ended_schedules(config)
        configure_devices(config.devices, config.loop, config.num_envs)
        start_jax(config.threads)
        # Checked before anything of the run changes.
        mesh_over(config.devices, config.num_envs)
        made = make_env(config, config.num_envs, import_modules=may_import)
        env = as_host_env(made, run_key(config.seed)) if config.loop == "host" else made
        try:
            start = restore_start(run, config, env, force=flags.force)
            if config.env_steps < planned:
                print(f"{directory}: env_steps changed from {planned:,} to {config.env_steps:,}")
            run.change_config(env_steps=config.env_steps)
            run.rewind(start.env_steps)
            return train_in(run, config, env, flags.eval_episodes, start)
        finally:
            if isinstance(env, HostEnv):
                env.close()


def _note_ended_schedules(config: RunConfig) -> None:
    """Print the schedules that have ended for the rest of a training that was made longer; at 0 it learns nothing."""
    fields = {field.name: getattr(config.agent, field.name) for field in dataclasses.fields(config.agent)}
    for name, value in fields.items():
        if isinstance(value, Linear) and value.env_steps < config.env_steps:
            print(f"note: {name} stays at {value.end:g} after {value.env_steps:,.0f} env_steps, the original length of the run")


def _is_finished(directory: Path, env_steps: int | None, eval_episodes: int) -> bool:
    """Whether all env_steps are done and evaluated, which is printed.

    Raises:
        UsageError: the run has done more than `env_steps`.
    """
    run = open_run(directory)
    done = max(steps(run.checkpoints), default=0)
    if env_steps is not None and done > env_steps:
        raise UsageError(f"--env-steps {env_steps:,}: {directory} has already done {done:,}")
    if done < (env_steps or read_config(run).env_steps) or not os.path.lexists(run.directory / SUMMARY):
        return False
    summary = run.read_summary()
    if (eval_episodes and summary.get("eval_mean_return") is None) or summary.get("env_steps") != done:
        return False
    print(f"{directory}: finished at {done:,} env_steps; train longer with --env-steps N")
    return True


def restore_start(run: Run, config: RunConfig, env: Env | HostEnv, *, force: bool = False) -> Start:
    """The newest valid checkpoint; restores the environment's state too, else new episodes start.

    A run that was stopped before its first checkpoint starts from the beginning.

    Args:
        force: resume although the checkpoint was trained with other settings than the run's config.json.

    Raises:
        ValueError: the agent's spec is not the environment's.
        CheckpointError: no checkpoint is valid, or it belongs to another agent or environment, or to other settings.
    """
    check_match(config.agent, env, config.devices)
    if not find(run.checkpoints):
        _check_for_lost_checkpoints(run, config)
        print(f"{run.directory}: was stopped before its first checkpoint; starting from the beginning")
        return Start(None, 0)
    restored = restore(run.checkpoints, loop_shape(config, env))
    saved, state = read_progress(run, restored), restored.tree
    if not force:
        check_settings(run, saved)
    if isinstance(env, HostEnv) and saved.env is not None:
        env.restore(saved.env)
    elif isinstance(env, HostEnv):
        warnings.warn(f"{saved.resume}; new episodes start", stacklevel=2)
        time_step = jax.tree.map(jax.numpy.asarray, env.reset((config.seed + saved.env_steps) % 2**31))
        state = dataclasses.replace(state, time_step=time_step, episodes=Episodes.fresh(env.num_envs))
    return Start(state, saved.env_steps)


def loop_shape(config: RunConfig, env: Env | HostEnv) -> LoopState:
    """Shapes and dtypes of the loop's state, which a checkpoint holds; nothing is compiled."""
    key = run_key(config.seed)
    if isinstance(env, HostEnv):
        shape = jax.eval_shape(partial(train.initial, config.agent, env.num_envs), key, (), reset(env, key))
    else:
        shape = jax.eval_shape(partial(start_compiled, config.agent, env), key)
    return cast(LoopState, shape)


def _check_for_lost_checkpoints(run: Run, config: RunConfig) -> None:
    """Two rows of metrics past the first checkpoint prove that there was one: it is saved after its row."""
    rows = [row["env_steps"] for row in run.read_metrics() if row["env_steps"] >= config.checkpoint_every]
    if len(rows) > 1:
        raise CheckpointError(f"{run.checkpoints}: no checkpoint found, but the metrics reach {rows[-1]:,} env_steps")

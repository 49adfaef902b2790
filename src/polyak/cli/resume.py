"""polyak resume RUN: go on where a run was stopped."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from polyak.cli.devices import make_devices, start_jax
from polyak.cli.flags import UsageError, by_default, fail, parse, usage
from polyak.cli.imports import ImportFlag, check_import
from polyak.cli.training_run import make_env, restored_start, train_in
from polyak.core.checks import check_integer
from polyak.core.types import HostEnv
from polyak.ops.schedules import Linear
from polyak.runs import RunConfig, read_config, run_key
from polyak.storage.checkpoint import CheckpointError, steps
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import SUMMARY, RunError, open_run
from polyak.train.host_loop import as_host_env
from polyak.train.loop import mesh_over


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """How far to go."""

    env_steps: Annotated[int | None, by_default("what was last asked for", "INT")] = None
    """Valid transitions in all, those already done included; kept in the run's config.json."""
    eval_episodes: int = 100
    """Episodes of the greedy policy after training; 0 leaves them out."""
    force: bool = False
    """Accept a config.json that was edited, or differs from the settings that the checkpoint was trained with."""
    imports: ImportFlag = None
    """The module of an environment named `MODULE:Name-v0`; a run's files by themselves import nothing."""


def resume(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        flags = "[--env-steps N] [--eval-episodes N] [--force] [--import MODULE]"
        return usage(f"polyak resume RUN {flags}\n\nRUN is a run directory.", arguments)
    try:
        return _resume(Path(arguments[0]), arguments[1:])
    except (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def _resume(directory: Path, arguments: list[str]) -> int:
    flags = parse(ResumeFlags, arguments, prog=f"polyak resume {directory}", description="Go on where a run was stopped.")
    check_integer("polyak resume", "--eval-episodes", flags.eval_episodes, at_least=0)
    if flags.env_steps is not None:
        check_integer("polyak resume", "--env-steps", flags.env_steps)
    if flags.force:
        with open_run(directory, write=True) as run:
            run.accept_config()
    finished = _nothing_to_do(directory, flags.env_steps, flags.eval_episodes)
    if finished is not None:
        print(finished)
        return 0
    may_import = check_import(read_config(open_run(directory)).env, flags.imports)
    with open_run(directory, write=True) as run:
        config = read_config(run)
        planned = config.env_steps
        config = dataclasses.replace(config, env_steps=flags.env_steps or planned)
        _note_ended_schedules(config)
        make_devices(config.devices, config.loop, config.num_envs)
        start_jax(config.threads)
        # Before anything of the run changes.
        mesh_over(config.devices, config.num_envs)
        made = make_env(config, config.num_envs, import_modules=may_import)
        env = as_host_env(made, run_key(config.seed)) if config.loop == "host" else made
        try:
            start = restored_start(run, config, env, force=flags.force)
            if config.env_steps < planned:
                print(f"{directory}: ends at {config.env_steps:,} env_steps now, instead of {planned:,}")
            run.change_config(env_steps=config.env_steps)
            run.rewind(start.env_steps)
            return train_in(run, config, env, flags.eval_episodes, start)
        finally:
            if isinstance(env, HostEnv):
                env.close()


def _note_ended_schedules(config: RunConfig) -> None:
    """Say which settings stay at their end for the rest of a training that was made longer; at 0 it learns nothing."""
    fields = {field.name: getattr(config.agent, field.name) for field in dataclasses.fields(config.agent)}
    for name, value in fields.items():
        if isinstance(value, Linear) and value.env_steps < config.env_steps:
            print(
                f"note: {name} is {value.end:g} from {value.env_steps:,.0f} env_steps on, the length the run was started with"
            )


def _nothing_to_do(directory: Path, env_steps: int | None, eval_episodes: int) -> str | None:
    """What to say where the run is at its end already, with an evaluation if one is wanted.

    Raises:
        UsageError: it is beyond the env_steps asked for.
    """
    run = open_run(directory)
    done = max(steps(run.checkpoints), default=0)
    if env_steps is not None and done > env_steps:
        raise UsageError(f"--env-steps {env_steps:,}: {directory} has done {done:,} already")
    if done < (env_steps or read_config(run).env_steps) or not os.path.lexists(run.directory / SUMMARY):
        return None
    summary = run.read_summary()
    if (eval_episodes and summary.get("eval_mean_return") is None) or summary.get("env_steps") != done:
        return None
    return f"{directory}: has done its {done:,} env_steps; --env-steps N, for a larger N, goes further"

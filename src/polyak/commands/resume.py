"""polyak resume RUN: go on where a run was stopped."""

import dataclasses
from pathlib import Path

from polyak import envs
from polyak.commands.flags import UsageError, fail, parse
from polyak.commands.training import restored_start, train_in, use_devices
from polyak.core.checks import check_integer
from polyak.core.types import HostEnv
from polyak.io.checkpoint import CheckpointError
from polyak.io.config import ConfigError
from polyak.io.run import RunError, open_run
from polyak.runs import read_config, run_key
from polyak.train.host import as_host_env


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """How far to go."""

    env_steps: int | None = None
    """Valid transitions in all, those already done included. [default: what the run was started with]"""
    eval_episodes: int = 100
    """Episodes of the greedy policy after training."""


def resume(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: polyak resume RUN [--env-steps N] [--eval-episodes N]\n\nRUN is a run directory.")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        return _resume(Path(arguments[0]), arguments[1:])
    except (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def _resume(directory: Path, arguments: list[str]) -> int:
    flags = parse(ResumeFlags, arguments, prog=f"polyak resume {directory}", description="Go on where a run was stopped.")
    check_integer("polyak resume", "--eval-episodes", flags.eval_episodes)
    with open_run(directory, write=True) as run:
        config = read_config(run)
        if flags.env_steps is not None:
            check_integer("polyak resume", "--env-steps", flags.env_steps)
            config = dataclasses.replace(config, env_steps=flags.env_steps)
        devices = use_devices(config.devices, config.loop, config.num_envs)
        made = envs.make(config.env, num_envs=config.num_envs, action_scaling=config.action_scaling, import_modules=False)
        env = as_host_env(made, run_key(config.seed)) if config.loop == "host" else made
        try:
            start = restored_start(run, config, env)
            run.rewind(start.env_steps)
            return train_in(run, dataclasses.replace(config, devices=devices), env, flags.eval_episodes, start)
        finally:
            if isinstance(env, HostEnv):
                env.close()

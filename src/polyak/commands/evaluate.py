"""polyak evaluate RUN: the greedy return of a run's policy."""

import dataclasses
from pathlib import Path

import jax
from rich.console import Console

from polyak.commands.flags import UsageError, fail, parse, usage
from polyak.commands.imports import ImportFlag, check_import
from polyak.commands.training import evaluation_of
from polyak.core.checks import check_integer
from polyak.io.checkpoint import CheckpointError, restore
from polyak.io.config import ConfigError
from polyak.io.run import RunError, open_run
from polyak.runs import check_seed, read_config, run_key


@dataclasses.dataclass(frozen=True)
class EvaluateFlags:
    """How many episodes, from which starts."""

    episodes: int = 100
    """Whole episodes."""
    seed: int = 0
    """Decides the environment's starts."""
    imports: ImportFlag = None
    """The module of an environment named `MODULE:Name-v0`; a run's files by themselves import nothing."""


def evaluate(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        flags = "[--episodes N] [--seed S] [--import MODULE]"
        return usage(f"polyak evaluate RUN {flags}\n\nRUN is a run directory.", arguments)
    try:
        return _evaluate(Path(arguments[0]), arguments[1:])
    except (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def _evaluate(directory: Path, arguments: list[str]) -> int:
    flags = parse(EvaluateFlags, arguments, prog=f"polyak evaluate {directory}", description="The policy's greedy return.")
    check_integer("polyak evaluate", "--episodes", flags.episodes)
    check_seed("polyak evaluate", "--seed", flags.seed)
    run = open_run(directory)
    config = read_config(run)
    may_import = check_import(config.env, flags.imports)
    restored = restore(run.checkpoints, jax.eval_shape(config.agent.init, run_key(0)), prefix=".agent")
    with Console().status(f"evaluating {flags.episodes} episodes …"):
        evaluation = evaluation_of(config, restored.tree, flags.episodes, flags.seed, import_modules=may_import)
    print(
        f"{config.algorithm} {config.env} at {restored.step:,} env_steps: greedy return {evaluation.mean_return:.1f} ± "
        f"{evaluation.std_return:.1f} over {flags.episodes} episodes (mean length {evaluation.mean_length:.1f})"
    )
    return 0

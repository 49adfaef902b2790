"""polyak evaluate RUN: the greedy return of a run's policy."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import tyro
from rich.console import Console

from polyak.commands.flags import UsageError, fail, parse, usage
from polyak.commands.imports import ImportFlag, check_import, named_object
from polyak.commands.training import evaluation_of
from polyak.core.checks import check_integer
from polyak.core.types import Policy
from polyak.io.checkpoint import CheckpointError, restore
from polyak.io.config import ConfigError
from polyak.io.run import RunError, open_run
from polyak.runs import RunConfig, check_seed, read_config, run_key
from polyak.train.evaluate import Evaluation

PolicyFlag: TypeAlias = Annotated[
    str | None, tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="(default: the run's policy alone)")
]


@dataclasses.dataclass(frozen=True)
class EvaluateFlags:
    """How many episodes, from which starts."""

    episodes: int = 100
    """Whole episodes."""
    seed: int = 0
    """Decides the environment's starts."""
    policy: PolicyFlag = None
    """A Python policy to stand beside the run's: a function of the observation, or an object with `action`."""
    imports: ImportFlag = None
    """The module of an environment named `MODULE:Name-v0`; a run's files by themselves import nothing."""


def evaluate(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        flags = "[--episodes N] [--seed S] [--policy MODULE:NAME] [--import MODULE]"
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
    policies = {f"{config.algorithm} at {restored.step:,} env_steps": config.agent.policy(restored.tree)}
    if flags.policy is not None:
        policies[flags.policy] = _python_policy(flags.policy, config)
    with Console().status(f"evaluating {flags.episodes} episodes …"):
        evaluations = {
            name: evaluation_of(config, policy, flags.episodes, flags.seed, import_modules=may_import)
            for name, policy in policies.items()
        }
    if flags.policy is not None:
        print(_table(config, evaluations.items()))
        return 0
    (evaluation,) = evaluations.values()
    print(
        f"{config.algorithm} {config.env} at {restored.step:,} env_steps: greedy return {evaluation.mean_return:.1f} ± "
        f"{evaluation.std_return:.1f} over {flags.episodes} episodes (mean length {evaluation.mean_length:.1f})"
    )
    return 0


def _python_policy(name: str, config: RunConfig) -> Policy:
    """What a person named, in the run's environment."""
    named = named_object(name, "--policy")
    from polyak.parts.python_policy import PythonPolicy

    policy: Policy = PythonPolicy(named, config.agent.spec, name=name)
    return policy


def _table(config: RunConfig, evaluations: Iterable[tuple[str, Evaluation]]) -> str:
    """A row for each policy, in environments that start alike."""
    rows = [(config.env, "return", "±", "mean length", "episodes")]
    rows += [
        (name, f"{e.mean_return:.1f}", f"{e.std_return:.1f}", f"{e.mean_length:.1f}", str(len(e.returns)))
        for name, e in evaluations
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])] for name, *numbers in rows]
    return "\n".join("  ".join(row) for row in aligned)

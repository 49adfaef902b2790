"""polyak evaluate RUN: evaluates the greedy policy of a run, or of each of several."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
import tyro
from rich.console import Console

from polyak.cli.compilation_cache import compilation_cache
from polyak.cli.flags import UsageError, fail, parse_for_run
from polyak.cli.imports import ImportFlag, import_object
from polyak.cli.own import read_own_run, with_agent
from polyak.cli.own_flags import OwnFlagsOfRun
from polyak.core.checks import check_integer
from polyak.core.printing import format_number
from polyak.core.types import Env, HostEnv, Policy, PyTree
from polyak.loops.evaluate import Evaluation
from polyak.loops.loop import check_spec
from polyak.runs import RunConfig, check_seed, open_checkpoints, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import RunError, runs_in
from polyak.train.devices import count_devices
from polyak.train.evaluation import evaluate_policy
from polyak.train.statistics import seed_statistics
from polyak.train.summary import format_return

PolicyFlag: TypeAlias = Annotated[
    str | None, tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="(default: the run's policy alone)")
]


@dataclasses.dataclass(frozen=True)
class EvaluateFlags:
    """How many episodes, and where they start."""

    own: OwnFlagsOfRun

    episodes: int = 100
    """number of episodes"""
    seed: int = 0
    """seed of the environment"""
    policy: PolicyFlag = None
    """Python policy to compare with the run's: a function of the observation, an object with `action`, or a PythonPolicy"""
    imports: ImportFlag = None
    """module of an environment named `MODULE:Name-v0`, which is imported only if it is named here"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def evaluate(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Evaluate the greedy policy of RUN: a run directory, the `best` in one, or a directory of runs (seeds)."
    try:
        directory, flags = parse_for_run(EvaluateFlags, arguments, command="evaluate", description=description)
        check_integer("polyak evaluate", "--episodes", flags.episodes)
        check_seed("polyak evaluate", "--seed", flags.seed)
        with ExitStack() as stack:
            stack.enter_context(compilation_cache(flags.compilation_cache, None))
            count_devices()  # Raises where JAX does not start.
            tasks = _load_all(directory, flags)
            stack = stack.pop_all()
    except (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)
    # An exception from here on is the policy's, not a usage error.
    with stack:
        return _evaluate(tasks[0]) if len(tasks) == 1 else _evaluate_seeds(tasks)


@dataclasses.dataclass(frozen=True)
class _Task:
    """Policies by name, each with its own environment.

    Attributes:
        settings: the run's config without its seed and what depends on the machine: runs where they are equal are seeds of one
            training.
    """

    directory: Path
    flags: EvaluateFlags
    config: RunConfig
    settings: str
    env_steps: int
    policies: dict[str, tuple[Policy, Env | HostEnv]]


def _load_all(directory: Path, flags: EvaluateFlags) -> list[_Task]:
    """What there is to do for a run, or for each run in the directory.

    Raises:
        UsageError: `--policy` is to be compared with several runs.
    """
    inside = runs_in(directory)
    if inside and flags.policy is not None:
        raise UsageError(f"--policy is compared with one run; give one of {', '.join(map(str, inside))}")
    tasks: list[_Task] = []
    try:
        for run in inside or [directory]:
            tasks.append(_load(run, flags))
    except BaseException:
        with _closing(env for task in tasks for _, env in task.policies.values()):
            raise
    return tasks


def _load(directory: Path, flags: EvaluateFlags) -> _Task:
    run, checkpoints = open_checkpoints(directory)
    own = read_own_run(run, flags.own, flags.imports)
    envs = [own.make_env(min(own.config.num_envs, flags.episodes))]
    try:
        config = with_agent(own.config, flags.own, envs[0].spec)
        check_spec("polyak evaluate", config.agent.spec, envs[0].spec)
        policy, env_steps = restore_policy(checkpoints, config.agent)
        policies = {f"{config.algorithm} at {env_steps:,} env_steps": policy}
        if flags.policy is not None:
            policies[flags.policy] = _python_policy(flags.policy, config)
            envs.append(own.make_env(envs[0].num_envs))
    except BaseException:
        with _closing(envs):
            raise
    each = {name: (policy, env) for (name, policy), env in zip(policies.items(), envs, strict=True)}
    settings = json.dumps(run.read_config() | {"seed": None, "threads": None, "devices": None})
    return _Task(directory, flags, config, settings, env_steps, each)


def _evaluate(task: _Task) -> int:
    flags, config = task.flags, task.config
    evaluations = _play([task])[0]
    if flags.policy is not None:
        print(_table(config, evaluations.items()))
        return 0
    (evaluation,) = evaluations.values()
    print(
        f"{config.algorithm} {config.env} at {task.env_steps:,} env_steps: greedy return {format_return(evaluation)} "
        f"(mean length {format_number(evaluation.mean_length)})"
    )
    return 0


def _evaluate_seeds(tasks: Sequence[_Task]) -> int:
    """Evaluate several runs: a row for each, and what they are together where they differ in the seed alone."""
    played: dict[str, list[tuple[_Task, Evaluation]]] = {}
    for task, evaluations in zip(tasks, _play(tasks), strict=True):
        played.setdefault(task.settings, []).extend((task, evaluation) for evaluation in evaluations.values())
    for seeds in played.values():
        rows = [(f"{task.directory.name}: {task.config.algorithm} at {task.env_steps:,} env_steps", e) for task, e in seeds]
        print(_table(seeds[0][0].config, rows))
        if len(seeds) > 1:
            print(seed_statistics([evaluation.mean_return for _, evaluation in seeds]))
    return 0


def _play(tasks: Sequence[_Task]) -> list[dict[str, Evaluation]]:
    """The evaluations of each task, by the names of its policies; closes the environments."""
    flags = tasks[0].flags
    with Console().status("") as status, _closing(env for task in tasks for _, env in task.policies.values()):
        evaluations = []
        for task in tasks:
            status.update(f"evaluating {flags.episodes} episodes of {task.directory} …")
            evaluations.append(
                {
                    name: evaluate_policy(env, policy, flags.episodes, flags.seed)
                    for name, (policy, env) in task.policies.items()
                }
            )
    return evaluations


@contextmanager
def _closing(envs: Iterable[Env | HostEnv]) -> Iterator[None]:
    with ExitStack() as stack:
        for env in envs:
            if isinstance(env, HostEnv):
                stack.callback(env.close)
        yield


def _python_policy(name: str, config: RunConfig) -> Policy:
    """The policy that `--policy` names, for the run's environment."""
    named, spec = import_object(name, "--policy"), config.agent.spec
    from polyak.policies.python.policy import PythonPolicy

    if not isinstance(named, PythonPolicy):
        policy: Policy = PythonPolicy(named, spec, name=name, carry_spec=_carry_spec(named))
        return policy
    for what, got, wanted in (("obs", named.spec.obs, spec.obs), ("action", named.spec.action, spec.action)):
        if got != wanted:
            raise UsageError(f"--policy {name}: {what} of the policy's spec is {got}, of the run's environment {wanted}")
    return named


def _carry_spec(target: Any) -> PyTree:
    """The declared `carry_spec` of a recurrent policy, else the spec of its initial carry."""
    from polyak.policies.python.callee import ActingObject

    if isinstance(target, type) or not isinstance(target, ActingObject):
        return ()
    declared = getattr(target, "carry_spec", None)
    return jax.tree.map(lambda x: np.asarray(x)[0], target.initial_state(1)) if declared is None else declared


def _table(config: RunConfig, evaluations: Iterable[tuple[str, Evaluation]]) -> str:
    """One row for each policy."""
    rows = [(config.env, "return", "±", "mean length", "episodes")]
    rows += [
        (name, *map(format_number, (e.mean_return, e.std_return, e.mean_length)), str(len(e.returns)))
        for name, e in evaluations
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])] for name, *numbers in rows]
    return "\n".join("  ".join(row) for row in aligned)

"""polyak evaluate RUN: evaluates the greedy policy of one or several runs."""

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

from polyak.cli.flags import UsageError, default_hint, fail, parse_for_run, print_note
from polyak.cli.imports import ImportFlag, import_object
from polyak.cli.user_code import read_user_run, with_agent
from polyak.cli.user_flags import UserGroupOfRun
from polyak.cli.user_traceback import print_user_traceback
from polyak.core.checks import check_integer
from polyak.core.printing import format_number
from polyak.core.suggestions import escape_control
from polyak.core.text_table import NOTHING, align_table
from polyak.core.types import Env, HostEnv, Policy, PyTree
from polyak.envs.constructors import is_in_jax
from polyak.loops.evaluate import Evaluation, UnendedEpisodes
from polyak.loops.loop import check_spec
from polyak.runs import RunConfig, check_seed, open_checkpoints, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.pack import is_pack, unpack
from polyak.storage.run_directory import RunError, runs_in
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import count_devices
from polyak.train.evaluation import evaluate_policy
from polyak.train.statistics import seed_statistics
from polyak.train.summary import format_return

PolicyFlag: TypeAlias = Annotated[
    str | None, tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="(default: only the run's policy)")
]


@dataclasses.dataclass(frozen=True)
class EvaluateFlags:
    """Number of episodes, and their seed."""

    user: UserGroupOfRun

    episodes: int = 100
    """number of episodes"""
    seed: int = 0
    """seed of the environment"""
    max_steps: Annotated[int | None, default_hint("the run's --eval-max-steps", "INT")] = None
    """maximum number of steps of each environment"""
    policy: PolicyFlag = None
    """Python policy to compare with: a function of the observation, an object with `action`, or a PythonPolicy"""
    imports: ImportFlag = None
    """module of an environment `MODULE:Name-v0`; without this flag the module is not imported"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def evaluate(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = (
        "Evaluate the greedy policy of RUN: a run directory, its subdirectory `best`, a file of polyak pack, or a directory of "
        "runs (seeds). With --data DATA its value is estimated from a data set; add --help for the flags of that."
    )
    if any(word.partition("=")[0] == "--data" for word in arguments):
        from polyak.cli.evaluate_on_data import evaluate_on_data

        return evaluate_on_data(arguments)
    try:
        directory, flags = parse_for_run(EvaluateFlags, arguments, command="evaluate", description=description)
        check_integer("polyak evaluate", "--episodes", flags.episodes)
        check_seed("polyak evaluate", "--seed", flags.seed)
        check_integer("polyak evaluate", "--max-steps", flags.max_steps, optional=True)
        with ExitStack() as stack:
            stack.enter_context(compilation_cache(flags.compilation_cache, None, print_note))
            count_devices()  # Raises if JAX does not start.
            if is_pack(directory):
                directory = stack.enter_context(unpack(directory))
            inside = runs_in(directory)
            if inside and flags.policy is not None:
                raise UsageError(f"--policy is compared with one run; give one of {', '.join(map(str, inside))}")
            task = None if inside else _load(directory, flags)
            stack = stack.pop_all()
    except ERRORS as error:
        return fail(error)
    # Later exceptions are from the policy or the environment, not usage errors.
    with stack:
        try:
            return _evaluate_all(directory, inside, flags) if task is None else _evaluate(task, flags)
        except UnendedEpisodes as error:
            return fail(error, 1)


ERRORS = (UsageError, ValueError, TypeError, ImportError, RunError, ConfigError, CheckpointError)
"""Reasons for which a run cannot be evaluated."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Policies by name, each with a separate environment.

    Attributes:
        settings: the run's config without seed, threads and devices; runs with equal settings are seeds of one training.
    """

    directory: Path
    config: RunConfig
    settings: str
    env_steps: int
    policies: dict[str, tuple[Policy, Env | HostEnv]]


def _load(directory: Path, flags: EvaluateFlags) -> _Task:
    run, checkpoints = open_checkpoints(directory)
    user_run = read_user_run(run, flags.user, flags.imports)
    # In JAX initial states depend on the number of environments: the last evaluation is repeated with the number of the run.
    num_envs, is_final = user_run.config.num_envs, flags.episodes == user_run.config.episodes_at_end(0)
    envs = [user_run.make_env(num_envs if is_final and is_in_jax(user_run.source.id) else min(num_envs, flags.episodes))]
    try:
        config = with_agent(run, user_run.config, flags.user, envs[0].spec)
        check_spec("polyak evaluate", config.agent.spec, envs[0].spec)
        policy, env_steps = restore_policy(checkpoints, config.agent)
        policies = {f"{config.algorithm} at {env_steps:,} {config.unit}": policy}
        if flags.policy is not None:
            policies[flags.policy] = _python_policy(flags.policy, config)
            envs.append(user_run.make_env(envs[0].num_envs))
    except BaseException:
        with _closing(envs):
            raise
    each = {name: (policy, env) for (name, policy), env in zip(policies.items(), envs, strict=True)}
    settings = json.dumps(run.read_config() | {"seed": None, "threads": None, "devices": None})
    return _Task(directory, config, settings, env_steps, each)


def _evaluate(task: _Task, flags: EvaluateFlags) -> int:
    config, evaluations = task.config, _play(task, flags)
    if flags.policy is not None:
        print("\n".join(_table((config.env,), [((name,), evaluation) for name, evaluation in evaluations.items()])))
        return 0
    (evaluation,) = evaluations.values()
    print(
        f"{config.algorithm} {config.env} at {task.env_steps:,} {config.unit}: greedy return {format_return(evaluation)} "
        f"(mean length {format_number(evaluation.mean_length)})"
    )
    return 0


def _evaluate_all(parent: Path, directories: Sequence[Path], flags: EvaluateFlags) -> int:
    """Evaluate several runs: prints a row for each run, and statistics for runs that differ only in the seed.

    Returns 1 if a run cannot be evaluated; the other runs are evaluated.
    """
    played: dict[str, list[tuple[_Task, Evaluation]]] = {}
    failed: dict[str, str] = {}
    for directory in directories:
        try:
            task = _load(directory, flags)
            (evaluation,) = _play(task, flags).values()
        except (*ERRORS, UnendedEpisodes) as error:
            failed[str(directory.relative_to(parent))] = str(error)
        except Exception as error:  # An environment or a policy may raise any exception.
            print_user_traceback(error)
            failed[str(directory.relative_to(parent))] = f"{type(error).__name__}: {error}"
        else:
            played.setdefault(task.settings, []).append((task, evaluation))
    groups = list(played.values())
    env_ids = {task.config.env for group in groups for task, _ in group}
    if len(env_ids) > 1:
        rows = [((_name(task, parent), task.config.env), evaluation) for group in groups for task, evaluation in group]
        print("\n".join(_table(("run", "environment"), rows)))
    for group in groups:
        names = [_name(task, parent) for task, _ in group]
        if len(env_ids) == 1:
            named = [((name,), evaluation) for name, (_, evaluation) in zip(names, group, strict=True)]
            print("\n".join(_table((*env_ids,), named)))
        if len(group) > 1:
            prefix = f"{names[0]} and seeds like it: " if len(env_ids) > 1 else ""
            print(f"{prefix}{seed_statistics([evaluation.mean_return for _, evaluation in group])}")
    for name, reason in failed.items():
        print(f"{name}  {NOTHING} ({escape_control(reason)})")
    return fail(f"{len(failed)} of {len(directories)} runs could not be evaluated", 1) if failed else 0


def _name(task: _Task, parent: Path) -> str:
    return f"{task.directory.relative_to(parent)}: {task.config.algorithm} at {task.env_steps:,} {task.config.unit}"


def _play(task: _Task, flags: EvaluateFlags) -> dict[str, Evaluation]:
    """Run the evaluations; returns them by the names of the policies, and closes the environments."""
    with Console(markup=False, emoji=False).status("") as status, _closing(env for _, env in task.policies.values()):
        status.update(f"evaluating {flags.episodes} episodes of {task.directory} …")
        episodes, seed, max_steps = flags.episodes, flags.seed, flags.max_steps or task.config.eval_max_steps
        return {name: evaluate_policy(env, policy, episodes, seed, max_steps) for name, (policy, env) in task.policies.items()}


@contextmanager
def _closing(envs: Iterable[Env | HostEnv]) -> Iterator[None]:
    with ExitStack() as stack:
        for env in envs:
            if isinstance(env, HostEnv):
                stack.callback(env.close)
        yield


def _python_policy(name: str, config: RunConfig) -> Policy:
    """Import the policy of `--policy`, for the run's environment."""
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
    """Return the declared `carry_spec` of a recurrent policy, else the spec of its initial carry."""
    from polyak.policies.python.callee import ActingObject

    if isinstance(target, type) or not isinstance(target, ActingObject):
        return ()
    declared = getattr(target, "carry_spec", None)
    return jax.tree.map(lambda x: np.asarray(x)[0], target.initial_state(1)) if declared is None else declared


def _table(titles: Sequence[str], evaluations: Sequence[tuple[Sequence[str], Evaluation]]) -> list[str]:
    """Format a header with titles, and one row with the names and results of each policy."""
    rows: list[list[str]] = [[*titles, "return", "±", "mean length", "episodes"]]
    rows += [
        [*names, *map(format_number, (e.mean_return, e.std_return, e.mean_length)), str(len(e.returns))]
        for names, e in evaluations
    ]
    return align_table(rows, texts=len(titles))

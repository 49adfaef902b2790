"""polyak resume RUN: continues a run from its last checkpoint."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyak.agents import AGENTS
from polyak.cli.agent_flags import agent_flags
from polyak.cli.compilation_cache import compilation_cache
from polyak.cli.flags import (
    EVAL_EPISODES,
    TrainFlags,
    UsageError,
    default_hint,
    fail,
    field_names,
    parse_for_run,
    unknown_flags,
)
from polyak.cli.imports import ImportFlag
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.own import read_own_run, with_agent
from polyak.cli.own_flags import OwnGroupOfRun, resume_flags
from polyak.cli.replay_flags import ReplayFlags
from polyak.cli.training_run import run_to_exit_code
from polyak.core.checks import check_integer, check_number
from polyak.core.types import HostEnv
from polyak.loops.loop import mesh_over
from polyak.runs import MAX_COUNT, MAX_WORKERS, RunConfig, read_config
from polyak.storage.checkpoint import CheckpointError, steps
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import SUMMARY, RunError, open_run
from polyak.train.agent_settings import check_agent_settings
from polyak.train.devices import configure_devices, dispatch_synchronously, leave_accelerators, start_jax
from polyak.train.evaluation import close_envs
from polyak.train.resumption import ended_schedules, prepare_resumption, with_learners, with_workers
from polyak.train.worker_loops import split_over_workers
from polyak.train.worker_settings import Workers
from polyak.workers.ray_workers import ClusterError


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """How long to train."""

    own: OwnGroupOfRun

    env_steps: Annotated[int | None, default_hint("the run's", "INT")] = None
    """environment steps to train for, including those already done; saved in the run's config.json"""
    eval_episodes: Annotated[int | None, default_hint("the run's", "INT")] = None
    """episodes to evaluate the greedy policy for after training; 0 skips the evaluation"""
    force: bool = False
    """accept a config.json that was edited or differs from the checkpoint's, and store other settings of --agent"""
    workers: Annotated[int | None, default_hint("the run's", "INT")] = None
    """processes that step the environments, as many as you like; 0 steps them in this process"""
    ray_address: Annotated[str | None, default_hint("a private Ray on this machine", "ADDRESS")] = None
    """Ray cluster on which the workers or learners run"""
    worker_timeout: Annotated[float | None, default_hint("the run's", "FLOAT")] = None
    """seconds that a rollout may take before its worker is replaced"""
    worker_start_timeout: Annotated[float | None, default_hint("the run's", "FLOAT")] = None
    """seconds that the start of a worker may take before it is tried again"""
    worker_restarts: Annotated[int | None, default_hint("the run's", "INT")] = None
    """how many times workers may be replaced before training ends with an error"""
    on_env_error: Annotated[Literal["raise", "restart"] | None, default_hint("the run's", "{raise,restart}")] = None
    (
        "raise: an exception of an environment in a worker ends the training; restart: the worker starts new episodes, which "
        "counts as a restart"
    )
    min_workers: Annotated[int | None, default_hint("the run's", "INT")] = None
    """continue without workers that keep failing while at least this many are left; their environments have weight 0"""
    learners: Annotated[int | None, default_hint("the run's", "INT")] = None
    """processes that train together in the compiled loop; any number that divides the run's devices, 1 for this process"""
    imports: ImportFlag = None
    """module of an environment named `MODULE:Name-v0`, which is imported only if it is named here"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def resume(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        _check_settings(arguments)
        return _resume(*parse_for_run(ResumeFlags, arguments, command="resume", description="Continue a run directory RUN."))
    except (UsageError, ValueError, TypeError, ImportError, ClusterError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def _check_settings(arguments: Sequence[str]) -> None:
    """Check that no flag is one of `polyak train` whose value the run keeps.

    Raises:
        UsageError: one is; how settings of an agent can be changed.
    """
    for flag in unknown_flags(ResumeFlags, arguments):
        name = flag.removeprefix("--").replace("-", "_")
        if name in field_names(TrainFlags):
            raise UsageError(f"{flag} of a run cannot be changed; start another one with polyak train")
        of_agents = (agent_flags(agent, {}) for agent in AGENTS.values())
        if any(name in field_names(kind) for kind in (NetworkFlags, ReplayFlags, *of_agents)):
            raise UsageError(f"{flag} is the run's; an agent with other settings is given by --agent MODULE:NAME --force")


def _resume(directory: Path, flags: ResumeFlags) -> int:
    if flags.eval_episodes is not None:
        check_integer("polyak resume", "--eval-episodes", flags.eval_episodes, at_least=0)
    if flags.workers is not None:
        check_integer("polyak resume", "--workers", flags.workers, at_least=0, at_most=MAX_WORKERS)
    check_integer("polyak resume", "--min-workers", flags.min_workers, optional=True)
    check_number("polyak resume", "--worker-timeout", flags.worker_timeout, above=0.0, optional=True)
    check_number("polyak resume", "--worker-start-timeout", flags.worker_start_timeout, above=0.0, optional=True)
    check_integer("polyak resume", "--worker-restarts", flags.worker_restarts, at_least=0, at_most=MAX_COUNT, optional=True)
    if flags.env_steps is not None:
        check_integer("polyak resume", "--env-steps", flags.env_steps)
    if flags.force:
        with open_run(directory, write=True) as run:
            run.accept_config()
    if _is_finished(directory, flags):
        return 0
    config = read_own_run(open_run(directory), flags.own, flags.imports).config
    # Raises before the run is opened for writing.
    _with_workers(config, flags)
    with open_run(directory, write=True) as run, compilation_cache(flags.compilation_cache, config.threads):
        own = read_own_run(run, flags.own, flags.imports, exact=True)
        config = own.config
        planned = config.env_steps
        config = dataclasses.replace(config, env_steps=flags.env_steps or planned)
        config, split = _with_workers(config, flags)
        config, learners = with_learners(config, flags.learners)
        if split is None and learners is None and flags.ray_address is not None:
            raise UsageError(f"--ray-address {flags.ray_address} needs workers or learners; give --workers N or --learners N")
        learners = dataclasses.replace(learners, address=flags.ray_address) if learners else None
        if learners is None:
            configure_devices(config.devices, config.loop, config.num_envs)
        else:
            leave_accelerators()
        if config.loop != "compiled" and config.devices == 1:
            dispatch_synchronously()
        start_jax(config.threads)
        if learners is None:
            mesh_over(config.devices, config.num_envs)
        env = own.make_env(1 if split else config.num_envs)
        env = split_over_workers(env, config.num_envs, split) if split else env
        try:
            config = with_agent(run, config, flags.own, env.spec, force=flags.force)
            if flags.own.agent is not None:
                consent = "--force accepts and stores them"
                check_agent_settings(run, config.agent, force=flags.force, owner="polyak resume", consent=consent)
            for sentence in ended_schedules(run, config):
                print(f"note: {sentence}")
            training = prepare_resumption(run, config, env, force=flags.force, learners=learners)
            if config.env_steps < planned:
                print(f"{directory}: env_steps changed from {planned:,} to {config.env_steps:,}")
            episodes, own_flags = _eval_episodes(config, flags), resume_flags(flags.own, flags.ray_address)
            return run_to_exit_code(dataclasses.replace(training, eval_episodes=episodes, resume_flags=own_flags))
        finally:
            if isinstance(env, HostEnv):
                close_envs(env)


def _with_workers(config: RunConfig, flags: ResumeFlags) -> tuple[RunConfig, Workers | None]:
    """The config with the workers of the flags, and how they work; None without workers.

    Raises:
        UsageError: a flag is of workers, and there are none.
    """
    config, split = with_workers(config, flags.workers)
    if split is not None:
        workers = Workers(
            split.number,
            timeout=flags.worker_timeout,
            start_timeout=flags.worker_start_timeout,
            restarts=flags.worker_restarts,
            on_env_error=flags.on_env_error,
            min_workers=flags.min_workers,
            address=flags.ray_address,
        )
        return with_workers(config, workers)
    for name in ("worker_timeout", "worker_start_timeout", "worker_restarts", "on_env_error", "min_workers"):
        if getattr(flags, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(flags, name)} needs workers; give --workers N")
    return config, None


def _eval_episodes(config: RunConfig, flags: ResumeFlags) -> int:
    """Episodes of the evaluation at the end: those of the flag, else the run's."""
    return config.episodes_at_end(EVAL_EPISODES) if flags.eval_episodes is None else flags.eval_episodes


def _is_finished(directory: Path, flags: ResumeFlags) -> bool:
    """Whether all env_steps are done and evaluated, which is printed.

    Raises:
        UsageError: the run has done more than `env_steps`.
    """
    run, env_steps = open_run(directory), flags.env_steps
    done = max(steps(run.checkpoints), default=0)
    if env_steps is not None and done > env_steps:
        raise UsageError(f"--env-steps {env_steps:,}: {directory} has already done {done:,}")
    config = read_config(run, flags.own.agent)
    if done < (env_steps or config.env_steps) or not os.path.lexists(run.directory / SUMMARY):
        return False
    summary = run.read_summary()
    wanted, evaluated = _eval_episodes(config, flags), summary.get("eval_episodes") or 0
    is_evaluated = evaluated > 0 if flags.eval_episodes is None else evaluated == wanted
    if (wanted and not is_evaluated) or summary.get("env_steps") != done or summary.get("stopped") is not None:
        return False
    print(f"{directory}: finished at {done:,} env_steps; train longer with --env-steps N")
    return True

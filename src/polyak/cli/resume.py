"""polyak resume RUN: continues a run from its last checkpoint."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyak.agents import AGENTS
from polyak.cli.agent_flags import agent_flags
from polyak.cli.flags import (
    EVAL_EPISODES,
    TrainFlags,
    UsageError,
    default_hint,
    fail,
    field_names,
    parse_for_run,
    print_note,
    unknown_flags,
)
from polyak.cli.imports import ImportFlag
from polyak.cli.intrinsic_flags import intrinsic_flags
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.offline import check_resume_flags, resume_on_data
from polyak.cli.replay_flags import ReplayFlags
from polyak.cli.training_run import run_to_exit_code
from polyak.cli.user_code import read_user_run, with_agent
from polyak.cli.user_flags import UserGroupOfRun, resume_flags
from polyak.core.checks import check_integer, check_number
from polyak.loops.loop import mesh_over
from polyak.runs import MAX_COUNT, MAX_WORKERS, OFFLINE, RunConfig, read_config
from polyak.storage.checkpoint import CheckpointError, steps
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import SUMMARY, RunError, open_run
from polyak.train.agent_settings import check_agent_settings
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import configure_devices, dispatch_synchronously, leave_accelerators, start_jax
from polyak.train.evaluation import close_envs
from polyak.train.resumption import ended_schedules, prepare_resumption, with_learners, with_workers
from polyak.train.worker_loops import split_over_workers
from polyak.train.worker_settings import Workers, options_in
from polyak.workers.ray_workers import ClusterError


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """Options of a resumed run."""

    user: UserGroupOfRun

    env_steps: Annotated[int | None, default_hint("the run's", "INT")] = None
    (
        "total number of environment steps, or of gradient steps of a run on data alone, including the steps already done; "
        "saved in the run's config.json"
    )
    eval_episodes: Annotated[int | None, default_hint("the run's", "INT")] = None
    """number of episodes of the evaluation after training; 0 skips the evaluation"""
    force: bool = False
    """accept an edited config.json or one that differs from the checkpoint's, and store other settings of --agent"""
    workers: Annotated[int | None, default_hint("the run's", "INT")] = None
    """number of processes that step the environments, which may differ from the run's; 0 steps them in this process"""
    ray_address: Annotated[str | None, default_hint("a private Ray on this machine", "ADDRESS")] = None
    """Ray cluster for the workers or learners"""
    worker_timeout: Annotated[float | None, default_hint("the run's", "FLOAT")] = None
    """maximum seconds of a rollout, after which its worker is replaced"""
    worker_start_timeout: Annotated[float | None, default_hint("the run's", "FLOAT")] = None
    """maximum seconds of a worker's start, after which the start is retried"""
    worker_restarts: Annotated[int | None, default_hint("the run's", "INT")] = None
    """maximum number of worker restarts, after which training ends with an error"""
    on_env_error: Annotated[Literal["raise", "restart"] | None, default_hint("the run's", "{raise,restart}")] = None
    (
        "raise: an exception of an environment in a worker ends training; restart: the worker starts new episodes, which "
        "counts as a restart"
    )
    min_workers: Annotated[int | None, default_hint("the run's", "INT")] = None
    """continue without failing workers while at least this many workers are left; lost environments have weight 0"""
    learners: Annotated[int | None, default_hint("the run's", "INT")] = None
    """number of processes that train together in the compiled loop; must divide the run's devices; 1 is this process"""
    imports: ImportFlag = None
    """module of an environment `MODULE:Name-v0`; without this flag the module is not imported"""
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
    """Check that no flag is a flag of `polyak train` whose value is fixed in a run.

    Raises:
        UsageError: there is such a flag; the message says how settings of an agent can be changed.
    """
    for flag in unknown_flags(ResumeFlags, arguments):
        name = flag.removeprefix("--").replace("-", "_")
        if name == "gradient_steps":
            raise UsageError("--gradient-steps of a run is --env-steps in polyak resume, the total number of steps")
        if name in field_names(TrainFlags):
            raise UsageError(f"{flag} of a run cannot be changed; start another one with polyak train")
        of_agents = (agent_flags(agent, {}) for agent in AGENTS.values())
        if any(name in field_names(kind) for kind in (NetworkFlags, ReplayFlags, intrinsic_flags(), *of_agents)):
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
    if open_run(directory).read_config().get("loop") == OFFLINE:
        check_resume_flags(flags, directory)
        config = read_config(open_run(directory))
        dispatch_synchronously()
        with open_run(directory, write=True) as run, compilation_cache(flags.compilation_cache, config.threads, print_note):
            start_jax(config.threads)
            config = dataclasses.replace(config, env_steps=flags.env_steps or config.env_steps)
            for sentence in ended_schedules(run, config):
                print(f"note: {sentence}")
            return resume_on_data(run, config, flags)
    config = read_config(open_run(directory), flags.user.agent)
    if with_learners(config, flags.learners)[1] is None:
        # Before user-defined code starts JAX.
        configure_devices(config.devices, config.loop, config.num_envs)
    config = read_user_run(open_run(directory), flags.user, flags.imports).config
    # May raise, so it is called before the run is opened for writing.
    _with_workers(config, flags)
    with open_run(directory, write=True) as run, compilation_cache(flags.compilation_cache, config.threads, print_note):
        user_run = read_user_run(run, flags.user, flags.imports, exact=True)
        config = user_run.config
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
        env = user_run.make_env(1 if split else config.num_envs)
        env = split_over_workers(env, config.num_envs, split) if split else env
        try:
            config = with_agent(run, config, flags.user, env.spec, force=flags.force)
            if flags.user.agent is not None:
                consent = "--force accepts and stores them"
                check_agent_settings(run, config.agent, force=flags.force, owner="polyak resume", consent=consent)
            for sentence in ended_schedules(run, config):
                print(f"note: {sentence}")
            training = prepare_resumption(run, config, env, force=flags.force, learners=learners)
            if config.env_steps < planned:
                print(f"{directory}: env_steps changed from {planned:,} to {config.env_steps:,}")
            episodes, given = _eval_episodes(config, flags), resume_flags(flags.user, flags.ray_address)
            return run_to_exit_code(dataclasses.replace(training, eval_episodes=episodes, resume_flags=given))
        finally:
            close_envs(env)


def _with_workers(config: RunConfig, flags: ResumeFlags) -> tuple[RunConfig, Workers | None]:
    """Return the config with the workers of the flags, and the workers with all options, or None for no workers.

    Raises:
        UsageError: a flag needs workers, and there are none.
    """
    config, split = with_workers(config, flags.workers)
    if split is not None:
        return with_workers(config, Workers(split.number, address=flags.ray_address, **options_in(flags)))
    for name in ("worker_timeout", "worker_start_timeout", "worker_restarts", "on_env_error", "min_workers"):
        if getattr(flags, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(flags, name)} needs workers; give --workers N")
    return config, None


def _eval_episodes(config: RunConfig, flags: ResumeFlags) -> int:
    """Return the number of episodes of the final evaluation: the flag's value, else the run's."""
    return config.episodes_at_end(EVAL_EPISODES) if flags.eval_episodes is None else flags.eval_episodes


def _is_finished(directory: Path, flags: ResumeFlags) -> bool:
    """Return True if all env_steps are done and evaluated, and print this.

    Raises:
        UsageError: the run has done more than `env_steps`.
    """
    run, env_steps = open_run(directory), flags.env_steps
    done = max(steps(run.checkpoints), default=0)
    if env_steps is not None and done > env_steps:
        raise UsageError(f"--env-steps {env_steps:,}: {directory} has already done {done:,}")
    config = read_config(run, flags.user.agent)
    if done < (env_steps or config.env_steps) or not os.path.lexists(run.directory / SUMMARY):
        return False
    try:
        summary = run.read_summary()
    except RunError:  # damaged: it is written again
        return False
    wanted, evaluated = _eval_episodes(config, flags), summary.get("eval_episodes") or 0
    is_evaluated = evaluated > 0 if flags.eval_episodes is None else evaluated == wanted
    if (wanted and not is_evaluated) or summary.get("env_steps") != done or summary.get("stopped") is not None:
        return False
    print(f"{directory}: finished at {done:,} {config.unit}; train longer with --env-steps N")
    return True

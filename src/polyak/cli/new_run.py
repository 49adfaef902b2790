"""Trains in a new run directory, from the flags of `polyak train`."""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from polyak import envs
from polyak.agents import agent_class
from polyak.cli.change_parts import change_parts
from polyak.cli.flags import TrainFlags, UsageError, fail, print_note
from polyak.cli.intrinsic_flags import add_intrinsic_reward
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.replay_flags import ReplayFlags
from polyak.cli.training_run import print_statistics, run_in_parallel, run_sequentially, run_to_exit_code
from polyak.cli.user_code import env_maker, import_callable, make_user_agent, store_user_flags
from polyak.cli.user_flags import UserFlags, resume_flags
from polyak.core.checks import check_integer, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.types import Agent, Env, HasReplay, HostEnv
from polyak.envs.constructors import is_in_jax
from polyak.envs.source import EnvSource
from polyak.loops.replay_memory import check_memory
from polyak.presets import preset
from polyak.presets.preset import with_length
from polyak.runs import LOOPS_OF_WORKERS, MAX_COUNT, MAX_WORKERS, algorithm_name, check_seed
from polyak.storage.run_directory import RunError
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import (
    accepts,
    choose_threads,
    configure_devices,
    configure_devices_for_seeds,
    dispatch_synchronously,
    leave_accelerators,
    splits_images,
    start_jax,
)
from polyak.train.evaluation import close_envs
from polyak.train.learners import as_learners
from polyak.train.new_training import check_own_loop, make_agent, prepare
from polyak.train.seeds import seed_directories
from polyak.train.settings import TrainSettings, settings_from
from polyak.train.training import Training
from polyak.train.worker_loops import split_over_workers
from polyak.train.worker_settings import Workers, options_in
from polyak.videos.encoder import VideoError
from polyak.workers.learner_group import Learners
from polyak.workers.ray_workers import ClusterError


def train_new_run(
    algorithm: str,
    env_id: str,
    flags: TrainFlags,
    user: UserFlags,
    settings: Mapping[str, Any],
    network_flags: NetworkFlags,
    replay_flags: ReplayFlags,
    intrinsic: Mapping[str, Any],
) -> int:
    """Train in a new run directory; returns the exit code.

    Args:
        algorithm: name of the algorithm; ignored if `user` names an agent.
        env_id: name of the environment, or of the function that creates it.
        flags: options of the training run.
        user: flags that name a user-defined agent and environment.
        settings: settings of the agent that flags set.
        network_flags: settings of the network.
        replay_flags: settings of the replay.
        intrinsic: the intrinsic reward and its settings that flags set.
    """
    try:
        _check(flags, user, intrinsic)
        # Before user-defined code starts JAX, which reads these; synchronous dispatch is for the host loop on one device.
        if flags.learners > 1:
            leave_accelerators()
        configure_devices(flags.devices or 1, flags.loop, flags.num_envs)
        dispatch_synchronously()
        target, env_kwargs = env_maker(user, env_id)
        is_jax = is_in_jax(target)
        if (own_loop := preset(algorithm or "", env_id).loop) != "auto":
            check_own_loop("polyak train", algorithm, flags.loop, own_loop, is_jax=is_jax)
        workers = _workers(flags)
        loop = _choose_loop(env_id, flags.loop, workers, is_jax=is_jax)
        in_parallel = flags.seeds > 1 and loop == "compiled"
        if in_parallel and flags.devices not in (None, 1):
            raise UsageError(f"--devices {flags.devices} must be left out with --seeds {flags.seeds}, which train in parallel")
        learners = _learners(flags, loop)
        if learners is not None:
            devices = flags.devices or learners.number
        else:
            devices = 1 if in_parallel else configure_devices(flags.devices, loop, flags.num_envs)
        if in_parallel:
            configure_devices_for_seeds(flags.seeds)
        dispatch_synchronously(on=loop != "compiled" and devices == 1)
        named = agent_class(algorithm) if user.agent is None else import_callable(user.agent, "--agent")
        usual: Literal["clip", "rescale"] = getattr(named, "action_scaling", "clip")
        scaling = flags.action_scaling or usual
        source = EnvSource(target, {"action_scaling": scaling, "env_kwargs": env_kwargs})
        copies = 1 if workers else flags.num_envs
        env = envs.make(target, num_envs=copies, action_scaling=scaling, env_kwargs=env_kwargs)
        if workers:
            env = split_over_workers(env, flags.num_envs, workers)
            source = env.source
        try:
            agent = _make_agent(algorithm, flags, user, settings, env.spec, source)
            name = algorithm or type(agent).__name__
            agent = change_parts(name, agent, network_flags, replay_flags, flags.env_steps, settings, flags.num_envs)
            agent = add_intrinsic_reward(agent, intrinsic, flags.env_steps)
            if not flags.checkpoint_replay and not isinstance(agent, HasReplay):
                raise UsageError(f"--no-checkpoint-replay: {name} has no replay")
            is_free = flags.devices is None and learners is None
            if is_free and loop == "host" and splits_images(agent, flags.num_envs):
                devices = configure_devices(2, loop, flags.num_envs)
                dispatch_synchronously(on=False)
            if is_free and not accepts(agent, flags.num_envs, devices):
                devices = 1
            threads = choose_threads(agent, devices, flags.num_envs, flags.seeds if in_parallel else 1)
            with compilation_cache(flags.compilation_cache, threads, print_note):
                available = start_jax(threads)
                check_memory(agent, seeds=flags.seeds if in_parallel else 1, on_host=flags.replay_on == "host")
                devices = min(devices, available) if is_free else devices
                name = algorithm if user.agent is None and intrinsic.get("intrinsic_reward") is None else algorithm_name(agent)
                prepare_seed = partial(_prepare, flags, user, name, agent, env, source, loop, devices, threads, learners)
                return _train(prepare_seed, name, env, env_id, flags, in_parallel)
        finally:
            close_envs(env)
    except (UsageError, ValueError, TypeError, ImportError, ClusterError, RunError, VideoError) as error:
        return fail(error)


def _make_agent(
    algorithm: str, flags: TrainFlags, user: UserFlags, settings: Mapping[str, Any], spec: EnvSpec, source: EnvSource
) -> Agent:
    """Return the agent of the algorithm, or of `--agent`, with these settings."""
    if user.agent is None:
        return make_agent(algorithm, spec, source, flags.env_steps, settings)
    return make_user_agent(user.agent, spec, {name: with_length(value, flags.env_steps) for name, value in settings.items()})


def _train(
    prepare_seed: Callable[[int, Path], Training],
    algorithm: str,
    env: Env | HostEnv,
    env_id: str,
    flags: TrainFlags,
    in_parallel: bool,
) -> int:
    directory = flags.run_dir or run_directory(algorithm, env_id, flags.seed)
    if flags.seeds == 1:
        return run_to_exit_code(prepare_seed(flags.seed, directory))
    directories = seed_directories(directory, range(flags.seed, flags.seed + flags.seeds))
    if in_parallel and not isinstance(env, HostEnv):
        code = run_in_parallel([prepare_seed(seed, place) for seed, place in directories.items()])
    else:
        code = run_sequentially(prepare_seed, directories)
    print_statistics(directories.values())
    return code


def _prepare(
    flags: TrainFlags,
    user: UserFlags,
    algorithm: str,
    agent: Agent,
    env: Env | HostEnv,
    source: EnvSource,
    loop: str,
    devices: int,
    threads: int | None,
    learners: Learners | None,
    seed: int,
    directory: Path,
) -> Training:
    changes = {"seed": seed, "run_dir": directory, "loop": loop, "devices": devices}
    settings = settings_from(TrainSettings, flags, changes)
    training = prepare(agent, env, settings, threads=threads, source=source, algorithm=algorithm, learners=learners)
    return dataclasses.replace(store_user_flags(training, user), resume_flags=resume_flags(user, flags.ray_address))


def _workers(flags: TrainFlags) -> Workers | None:
    """Return the workers that flags request, or None."""
    check_integer("polyak train", "--lag", flags.lag, at_least=0)
    check_number("polyak train", "--worker-timeout", flags.worker_timeout, above=0.0)
    check_number("polyak train", "--worker-start-timeout", flags.worker_start_timeout, above=0.0)
    check_integer("polyak train", "--worker-restarts", flags.worker_restarts, at_least=0, at_most=MAX_COUNT)
    check_integer("polyak train", "--min-workers", flags.min_workers, at_most=flags.workers, optional=True)
    check_integer("polyak train", "--max-staleness", flags.max_staleness, at_least=0, optional=True)
    pushes = {"--no-shared-optimizer": not flags.shared_optimizer}
    pushes[f"--max-staleness {flags.max_staleness}"] = flags.max_staleness is not None
    for flag, is_set in pushes.items():
        if is_set and flags.loop != "asynchronous":
            raise UsageError(f"{flag} needs --loop asynchronous, whose workers push gradients")
    if flags.workers is None:
        needed = {f"--loop {flags.loop}": flags.loop in LOOPS_OF_WORKERS, f"--lag {flags.lag}": flags.lag > 0}
        for name in ("worker_timeout", "worker_start_timeout", "worker_restarts", "on_env_error", "min_workers"):
            value = getattr(flags, name)
            needed[f"--{name.replace('_', '-')} {value}"] = value != getattr(TrainFlags, name)
        for flag, is_set in needed.items():
            if is_set:
                raise UsageError(f"{flag} needs --workers N")
        if flags.ray_address is not None and flags.learners == 1:
            raise UsageError(f"--ray-address {flags.ray_address} needs --workers N or --learners N")
        return None
    check_integer("polyak train", "--workers", flags.workers, at_most=MAX_WORKERS)
    if flags.loop not in ("auto", *LOOPS_OF_WORKERS):
        raise UsageError(f"--workers {flags.workers} must be left out with --loop {flags.loop}")
    if flags.num_envs % flags.workers:
        raise UsageError(f"--workers {flags.workers} must divide --num-envs {flags.num_envs}; set one of them")
    return Workers(flags.workers, address=flags.ray_address, **options_in(flags))


def _learners(flags: TrainFlags, loop: str) -> Learners | None:
    """Return the learners that flags request, or None."""
    if flags.data is not None and (flags.learners > 1 or (flags.seeds > 1 and loop == "compiled")):
        raise UsageError(f"--data {flags.data} must be left out with --learners, and with --seeds that train in parallel")
    learners = as_learners("polyak train", Learners(flags.learners, address=flags.ray_address))
    if learners is not None and loop != "compiled":
        raise UsageError(
            f"--learners {flags.learners} needs an environment in JAX (such as jax/... or gymnax/...) and the compiled loop"
        )
    if learners is not None and flags.seeds > 1:
        raise UsageError(f"--learners {flags.learners} must be left out with --seeds {flags.seeds}, which train in one process")
    if learners is not None and flags.devices and flags.devices % flags.learners:
        raise UsageError(f"--learners {flags.learners} must divide --devices {flags.devices}")
    return learners


def _choose_loop(env_id: str, loop: str, workers: Workers | None, *, is_jax: bool) -> str:
    if workers is not None:
        if is_jax:
            raise UsageError(f"--workers {workers.number} must be left out: {env_id} is in JAX, and compiled with the agent")
        return "distributed" if loop == "auto" else loop
    if loop == "compiled" and not is_jax:
        raise UsageError(
            f"--loop compiled needs an environment in JAX (such as jax/... or gymnax/...); {env_id} steps on the host"
        )
    return loop if loop != "auto" else "compiled" if is_jax else "host"


def _check(flags: TrainFlags, user: UserFlags, intrinsic: Mapping[str, Any]) -> None:
    """Check the values of flags before anything is created; errors have the names of the flags."""
    if user.agent is not None and intrinsic:
        flag = f"--{next(iter(intrinsic)).replace('_', '-')}"
        raise UsageError(f"{flag} must be left out with --agent; return polyak.RND(...) around the agent from its function")
    counts = ("env_steps", "num_envs", "seeds", "eval_episodes", "eval_max_steps", "learners", "devices")
    for name in (*counts, "report_every", "checkpoint_every", "eval_every", "video_every"):
        value = getattr(flags, name)
        if value is not None:
            check_integer("polyak train", f"--{name.replace('_', '-')}", value, at_least=0 if name == "eval_episodes" else 1)
    for name in ("checkpoint_every", "eval_every", "video_every"):
        value = getattr(flags, name)
        if flags.report_every and value and value < flags.report_every:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} must be --report-every {flags.report_every} or more: it happens at reports"
            )
    if flags.eval_every and not flags.eval_episodes:
        raise UsageError(f"--eval-every {flags.eval_every} needs --eval-episodes of at least 1, got 0")
    check_seed("polyak train", "--seed", flags.seed)
    check_seed("polyak train", "--seed + --seeds - 1", flags.seed + flags.seeds - 1)


def run_directory(algorithm: str, env_id: str, seed: int) -> Path:
    """A new directory for a run, `runs/ALGO-ENV-SEED-TIME`, without characters that are special to a shell."""
    # The process too, as several commands may start in the same second.
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    name = re.sub("[/:(]", "-", f"{algorithm}-{env_id}").replace(")", "")
    return Path("runs") / f"{name}-{seed}-{now}"

"""From the flags of `polyak train` to a run directory and a training in it."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from polyak import envs
from polyak.agents import agent_class
from polyak.cli.compilation_cache import compilation_cache
from polyak.cli.devices import choose_threads, configure_devices, start_jax
from polyak.cli.flags import NetworkFlags, TrainFlags, UsageError, fail, parse_settings
from polyak.cli.training_run import train_in, train_seeds
from polyak.core.checks import check_integer
from polyak.core.spaces import Box, EnvSpec, leaf_spaces
from polyak.core.types import Agent, Env, HostEnv
from polyak.presets import preset
from polyak.presets.preset import with_length
from polyak.runs import RunConfig, check_seed
from polyak.storage.run_directory import RunError, create
from polyak.train.loop import mesh_over

# In the slowest environments these are minutes of work.
MAX_ENV_STEPS_BETWEEN_CHECKPOINTS = 100_000


def train_new_run(algorithm: str, env_id: str, flags: TrainFlags, agent_flags: Any, network_flags: NetworkFlags) -> int:
    """Train in a new run directory; returns the exit code."""
    try:
        _check(flags)
        loop = _choose_loop(env_id, flags.loop)
        at_once = flags.seeds > 1 and loop == "compiled"
        if at_once and flags.devices not in (None, 1):
            raise UsageError(f"--devices {flags.devices}: several seeds are trained at once on one device")
        devices = 1 if at_once else configure_devices(flags.devices, loop, flags.num_envs)
        env_kwargs = {} if flags.env_kwargs is None else parse_settings("--env-kwargs", flags.env_kwargs)
        env = envs.make(env_id, num_envs=flags.num_envs, action_scaling=flags.action_scaling, env_kwargs=env_kwargs)
        try:
            agent = _make_agent(algorithm, env_id, env.spec, flags.env_steps, agent_flags, network_flags)
            if flags.devices is None and not _accepts(agent, flags.num_envs // devices):
                devices = 1
            threads = choose_threads(agent, devices, flags.num_envs, flags.seeds if at_once else 1)
            with compilation_cache(flags.compilation_cache, threads):
                available = start_jax(threads)
                devices = devices if flags.devices else min(devices, available)
                config = _make_config(algorithm, env_id, loop, devices, threads, flags, agent, env_kwargs)
                return _train(config, env, flags)
        finally:
            if isinstance(env, HostEnv):
                env.close()
    except (UsageError, ValueError, TypeError, ImportError, RunError) as error:
        return fail(error)


def _train(config: RunConfig, env: Env | HostEnv, flags: TrainFlags) -> int:
    mesh_over(config.devices, config.num_envs)
    config.agent.check(config.num_envs // config.devices)
    directory = flags.run_dir or _run_directory(config)
    if flags.seeds > 1:
        return train_seeds(directory, config, env, flags.seeds, flags.eval_episodes)
    with create(directory, config.to_json()) as run:
        return train_in(run, config, env, flags.eval_episodes)


def _make_config(
    algorithm: str,
    env_id: str,
    loop: str,
    devices: int,
    threads: int | None,
    flags: TrainFlags,
    agent: Agent,
    env_kwargs: dict[str, Any],
) -> RunConfig:
    report_every, checkpoint_every = intervals(flags)
    return RunConfig(
        algorithm=algorithm,
        env=env_id,
        num_envs=flags.num_envs,
        seed=flags.seed,
        env_steps=flags.env_steps,
        loop=loop,
        devices=devices,
        report_every=report_every,
        checkpoint_every=checkpoint_every,
        agent=agent,
        action_scaling=flags.action_scaling,
        env_kwargs=env_kwargs,
        threads=threads,
    )


def intervals(flags: TrainFlags) -> tuple[int | None, int]:
    """env_steps between reports, and between checkpoints, which are saved at reports."""
    if flags.checkpoint_every is None:
        return flags.report_every, max(1, min(flags.env_steps // 10, MAX_ENV_STEPS_BETWEEN_CHECKPOINTS))
    is_frequent = flags.report_every is None and flags.checkpoint_every < flags.env_steps // 100
    return flags.checkpoint_every if is_frequent else flags.report_every, flags.checkpoint_every


def _choose_loop(env_id: str, loop: str) -> str:
    is_jax = env_id.startswith(("jax/", "gymnax/"))
    if loop == "compiled" and not is_jax:
        raise UsageError(f"--loop compiled needs an environment in JAX (jax/..., gymnax/...); {env_id} steps on the host")
    return loop if loop != "auto" else "compiled" if is_jax else "host"


def _check(flags: TrainFlags) -> None:
    """Check the ranges, by the names of the flags, before anything is created."""
    for name in ("env_steps", "num_envs", "seeds", "eval_episodes", "devices", "report_every", "checkpoint_every"):
        value = getattr(flags, name)
        if value is not None:
            check_integer("polyak train", f"--{name.replace('_', '-')}", value, at_least=0 if name == "eval_episodes" else 1)
    if flags.report_every and flags.checkpoint_every and flags.checkpoint_every < flags.report_every:
        raise UsageError(
            f"--checkpoint-every {flags.checkpoint_every} must be --report-every {flags.report_every} or more: checkpoints "
            "are saved at reports"
        )
    check_seed("polyak train", "--seed", flags.seed)
    check_seed("polyak train", "--seed + --seeds - 1", flags.seed + flags.seeds - 1)


def _make_agent(
    algorithm: str, env_id: str, spec: EnvSpec, env_steps: int, agent_flags: Any, network_flags: NetworkFlags
) -> Agent:
    """The agent of the preset, with the settings that flags change."""
    values = {field.name: getattr(agent_flags, field.name) for field in dataclasses.fields(agent_flags)}
    settings = preset(algorithm, env_id).settings(env_steps) | {n: with_length(v, env_steps) for n, v in values.items()}
    agent: Any = agent_class(algorithm)(spec=spec, **settings)
    changes = network_flags.changes()
    if not changes:
        return agent
    if "log_std" in changes and not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(spec.action)):
        raise UsageError(f"--log-std {changes['log_std']}: only Box actions have a standard deviation, got {spec.action}")
    known = {field.name for field in dataclasses.fields(agent.network)} if agent.network is not None else set()
    unknown = [f"--{name.replace('_', '-')}" for name in changes if name not in known]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: {algorithm} has no such network setting")
    return dataclasses.replace(agent, network=dataclasses.replace(agent.network, **changes))


def _accepts(agent: Agent, num_envs: int) -> bool:
    """Whether the agent can train with this number of environments on each device."""
    try:
        agent.check(num_envs)
    except ValueError:
        return False
    return True


def _run_directory(config: RunConfig) -> Path:
    now = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{config.algorithm}-{config.env.replace('/', '-')}-{config.seed}-{now}"

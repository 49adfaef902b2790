"""polyak train ALGO ENV: make a run directory and train in it."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from polyak import envs
from polyak.agents import AGENTS
from polyak.cli.devices import make_devices, start_jax, threads_for
from polyak.cli.flags import (
    NetworkFlags,
    UsageError,
    agent_flags,
    by_default,
    fail,
    numbers_by_name,
    parse,
    usage,
    with_horizon,
)
from polyak.cli.training_run import train_in, train_seeds
from polyak.core.checks import check_integer
from polyak.core.spaces import Box, EnvSpec, leaf_spaces
from polyak.core.struct import unknown_name
from polyak.core.types import Agent, HostEnv
from polyak.networks.actor_critic import network_for
from polyak.presets import Preset, preset
from polyak.runs import RunConfig, check_seed
from polyak.storage.run_directory import RunError, create
from polyak.train.loop import mesh_over

# In the slowest environments it is minutes of work.
MOST_BETWEEN_CHECKPOINTS = 100_000


@dataclasses.dataclass(frozen=True)
class TrainFlags:
    """How long, where and how to train."""

    env_steps: int
    """Valid transitions in all."""
    num_envs: int
    """Copies of the environment."""
    seed: int = 0
    """Decides everything random."""
    seeds: int = 1
    """Train with so many seeds, from --seed on: at once in the compiled loop, else one after another."""
    run_dir: Annotated[Path | None, by_default("runs/ALGO-ENV-SEED-TIME", "PATH")] = None
    """The run directory; must not hold a run yet."""
    loop: Literal["auto", "compiled", "host"] = "auto"
    """compiled: environment and agent as one program, for jax/ and gymnax/; host: the environment steps in Python."""
    devices: Annotated[int | None, by_default("two cores in the compiled loop where it pays, else one", "INT")] = None
    """Devices (on a CPU: cores) that share the environments."""
    eval_episodes: int = 100
    """Episodes of the greedy policy after training; 0 leaves them out."""
    report_every: Annotated[int | None, by_default("a hundredth of all, or --checkpoint-every if that is less", "INT")] = None
    """env_steps between reports."""
    checkpoint_every: Annotated[int | None, by_default("a tenth of all, at most 100,000", "INT")] = None
    """env_steps between checkpoints, which are saved at reports."""
    action_scaling: Literal["clip", "rescale"] = "clip"
    """Box actions are clipped to the bounds, or rescaled to them from [-1, 1]."""
    env_kwargs: Annotated[tuple[str, ...] | None, by_default("its own", "NAME=VALUE [NAME=VALUE ...]")] = None
    """Settings of the environment, numbers and True or False: `--env-kwargs frameskip=2 episodic_life=False`."""


def train(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        names = f"ALGO: {', '.join(AGENTS)}; ENV: see `polyak list`."
        text = f"polyak train ALGO ENV [flags]\n\n{names}\n`polyak train ppo CartPole-v1 --help` shows every flag."
        return usage(text, arguments)
    algorithm = arguments[0]
    if algorithm not in AGENTS:
        return fail(unknown_name(algorithm, tuple(AGENTS), "algorithm"))
    if len(arguments) < 2 or arguments[1].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            return train([algorithm, "CartPole-v1", *arguments[1:]])
        return fail("an environment is missing, e.g.: polyak train ppo CartPole-v1")
    try:
        return _train(algorithm, arguments[1], arguments[2:])
    except (UsageError, ValueError, TypeError, ImportError, RunError) as error:
        return fail(error)


def _train(algorithm: str, env_id: str, arguments: list[str]) -> int:
    found = preset(algorithm, env_id)
    settings = agent_flags(AGENTS[algorithm], found.settings(found.env_steps))
    kind = dataclasses.make_dataclass(
        "Flags",
        [
            ("train", TrainFlags, dataclasses.field(default=TrainFlags(found.env_steps, found.num_envs))),
            ("agent", settings, dataclasses.field(default_factory=settings)),
            ("network", NetworkFlags, dataclasses.field(default=NetworkFlags())),
        ],
    )
    description = f"Train {algorithm} in {env_id}. Settings by default: {found.source}."
    flags: Any = parse(kind, arguments, prog=f"polyak train {algorithm} {env_id}", description=description)
    options: TrainFlags = flags.train
    _check(options)
    is_jax = env_id.startswith(("jax/", "gymnax/"))
    loop = ("compiled" if is_jax else "host") if options.loop == "auto" else options.loop
    if loop == "compiled" and not is_jax:
        raise UsageError(f"--loop compiled needs an environment in JAX (jax/..., gymnax/...); {env_id} steps on the host")
    at_once = options.seeds > 1 and loop == "compiled"
    if at_once and options.devices not in (None, 1):
        raise UsageError(f"--devices {options.devices}: several seeds are trained at once on one device")
    devices = 1 if at_once else make_devices(options.devices, loop, options.num_envs)
    env_kwargs = {} if options.env_kwargs is None else numbers_by_name("--env-kwargs", options.env_kwargs)
    env = envs.make(env_id, num_envs=options.num_envs, action_scaling=options.action_scaling, env_kwargs=env_kwargs)
    try:
        agent = _agent(AGENTS[algorithm], env.spec, found, flags)
        if options.devices is None and not _fits(agent, options.num_envs // devices):
            devices = 1
        threads = threads_for(agent, devices, options.num_envs, options.seeds if at_once else 1)
        present = start_jax(threads)
        devices = devices if options.devices else min(devices, present)
        mesh_over(devices, options.num_envs)
        agent.check(options.num_envs // devices)
        report_every, checkpoint_every = intervals(options)
        config = RunConfig(
            algorithm=algorithm,
            env=env_id,
            num_envs=options.num_envs,
            seed=options.seed,
            env_steps=options.env_steps,
            loop=loop,
            devices=devices,
            report_every=report_every,
            checkpoint_every=checkpoint_every,
            agent=agent,
            action_scaling=options.action_scaling,
            env_kwargs=env_kwargs,
            threads=threads,
        )
        directory = options.run_dir or _run_directory(algorithm, env_id, options.seed)
        if options.seeds > 1:
            return train_seeds(directory, config, env, options.seeds, options.eval_episodes)
        with create(directory, config.to_json()) as run:
            return train_in(run, config, env, options.eval_episodes)
    finally:
        if isinstance(env, HostEnv):
            env.close()


def intervals(options: TrainFlags) -> tuple[int | None, int]:
    """env_steps between reports, and between checkpoints, which are saved at reports."""
    if options.checkpoint_every is None:
        return options.report_every, max(1, min(options.env_steps // 10, MOST_BETWEEN_CHECKPOINTS))
    often = options.report_every is None and options.checkpoint_every < options.env_steps // 100
    return options.checkpoint_every if often else options.report_every, options.checkpoint_every


def _check(options: TrainFlags) -> None:
    """Refuse what is out of range, by its flag, before anything is made."""
    for name in ("env_steps", "num_envs", "seeds", "eval_episodes", "devices", "report_every", "checkpoint_every"):
        value = getattr(options, name)
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            check_integer("polyak train", flag, value, at_least=0 if name == "eval_episodes" else 1)
    if options.report_every and options.checkpoint_every and options.checkpoint_every < options.report_every:
        raise UsageError(
            f"--checkpoint-every {options.checkpoint_every} must be --report-every {options.report_every} or more: checkpoints "
            "are saved at reports"
        )
    check_seed("polyak train", "--seed", options.seed)
    check_seed("polyak train", "--seed + --seeds - 1", options.seed + options.seeds - 1)


def _agent(agent_class: type, spec: EnvSpec, found: Preset, flags: Any) -> Any:
    """The agent of the preset, with what the flags change."""
    env_steps = flags.train.env_steps
    settings = dict(found.settings(env_steps))
    given = {field.name: with_horizon(getattr(flags.agent, field.name), env_steps) for field in dataclasses.fields(flags.agent)}
    network = settings.pop("network", None) or network_for(spec)
    layers = flags.network.given()
    for name in ("hidden", "value_hidden"):
        if layers.get(name) == ():
            raise UsageError(f"--{name.replace('_', '-')} must have one width or more, got none")
    if "log_std" in layers and not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(spec.action)):
        raise UsageError(f"--log-std {layers['log_std']}: only Box actions have a standard deviation, got {spec.action}")
    return agent_class(spec=spec, **given, network=dataclasses.replace(network, **layers))


def _fits(agent: Agent, num_envs: int) -> bool:
    """Whether the agent can work with so many environments on each device."""
    try:
        agent.check(num_envs)
    except ValueError:
        return False
    return True


def _run_directory(algorithm: str, env_id: str, seed: int) -> Path:
    now = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{algorithm}-{env_id.replace('/', '-')}-{seed}-{now}"

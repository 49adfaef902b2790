"""Loads the agent, state and policy of a run directory, without executing code that the files name."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from polyak.agents import AGENTS, WRAPPERS, agent_class
from polyak.core.checks import check_choice, check_integer
from polyak.core.struct import check_settings, choice, integer, number
from polyak.core.suggestions import unknown_name
from polyak.core.types import Agent, Policy
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue, PolicyOnly, Quantiles, QValues, ValueOnly
from polyak.networks.pair import ActorAndCritic, RecurrentActorAndCritic
from polyak.networks.recurrent import GRU, LSTM
from polyak.ops import schedules
from polyak.replay import HindsightReplay, MixedReplay, PrioritizedReplay, SequenceReplay, UniformReplay
from polyak.replay.returns import ReturnReplay
from polyak.storage.checkpoint import restore
from polyak.storage.config import SPEC_CLASSES, ConfigError, from_json, to_json
from polyak.storage.progress import replay_path
from polyak.storage.run_directory import BEST, CONFIG, Run, RunError, open_run

FORMAT = 4

MAX_SEED = 2**32 - 1
"""Maximum seed of a run."""

MAX_NUM_ENVS = 2**20
"""Maximum number of environments of a run, so that a config.json cannot exhaust the memory."""

# JAX creates all threads and devices at startup, hangs with 100,000 threads, and aborts with 20,000 devices.
MAX_THREADS = MAX_DEVICES = 1024

MAX_WORKERS = 2**12
"""Maximum number of worker processes of a run."""

MAX_LAG = 2**10
"""Maximum lag of a run: the random numbers of this many rollouts are in memory."""

MAX_COUNT = 2**31 - 1
"""Maximum of numbers that are compared with 32-bit counts."""

MAX_EVALUATION_STEPS = 1_000_000
"""Maximum steps of each environment in an evaluation: without a time limit a greedy policy may never end its episode."""

LOOPS = ("compiled", "host", "distributed", "asynchronous")

OFFLINE = "offline"
"""The loop of gradient steps on a data set, in which `env_steps` counts gradient steps."""

LOOPS_OF_WORKERS = ("distributed", "asynchronous")
"""The loops whose environments are in worker processes."""


ENV_OPTIONS = (
    "vectorization",
    "timeout",
    "nonfinite",
    "out_of_bounds",
    "drop_unsupported_obs",
    "action_mask_key",
    "info_metrics",
    "reset_pool",
)
"""Arguments of `polyak.envs.make` in `RunConfig.env_options`; none of them opens a file."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of a training run; the content of `config.json`.

    Attributes:
        algorithm: name of the algorithm.
        env: name of the environment.
        num_envs: number of copies of the environment.
        seed: the run's key is `jax.random.key(seed)`; None for another key, which the checkpoints hold.
        env_steps: total number of valid transitions.
        loop: `"compiled"`, `"host"`, `"distributed"`, `"asynchronous"`, or `"offline"`, where env_steps are gradient steps.
        devices: number of devices over which the environments are split.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        checkpoint_every: env_steps between checkpoints.
        agent: the agent with all its settings.
        action_scaling: how Box actions are mapped to the environment's bounds: `"clip"` or `"rescale"`.
        env_kwargs: keyword arguments of the environment; numbers and bools only.
        threads: number of XLA threads on a CPU, which affects the last bits of large matrix products; None is XLA's default.
        is_user_env: the environment is user-defined, and must be passed again to resume or evaluate the run.
        user_flags: the flags of `polyak train` that named the environment: `env` and `wrapper`, and the names of texts in
            `env_kwargs`. Stored flags are compared with new flags; no stored name is imported.
        env_options: further arguments of `polyak.envs.make`.
        eval_every: env_steps between evaluations of the greedy policy during training; None for none.
        eval_episodes: number of episodes of each evaluation during training.
        final_eval_episodes: number of episodes of the final evaluation; None in runs of older versions.
        eval_max_steps: maximum number of steps of each environment in an evaluation.
        video_every: env_steps between videos of the greedy policy; None for none.
        track: tracker of experiments that logs the run; None for none.
        checkpoint_replay: checkpoints contain the agent's replay, if it has one.
        workers: number of worker processes of the distributed and the asynchronous loop; None in other loops.
        lag: maximum age, in updates, of a rollout's policy.
        shared_optimizer: in the asynchronous loop: one optimizer state for all workers, instead of one per worker.
        max_staleness: in the asynchronous loop: maximum age, in steps, of a gradient's weights; None is any age.
        max_bad: in the asynchronous loop: consecutive pushes with NaN or infinity after which a worker is replaced.
        worker_timeout: maximum seconds of a worker's rollout.
        worker_start_timeout: maximum seconds of a worker's start.
        worker_restarts: maximum number of worker restarts.
        on_env_error: an exception of an environment in a worker ends training (`"raise"`) or starts new episodes (`"restart"`).
        min_workers: number of workers that training needs; None is all.
        learners: number of processes over which the devices of the compiled loop are split.
        replay_on: memory of the agent's replay: `"device"`, the training device, or `"host"`.
        data: name of the data set, which the offline loop trains on, and other loops keep beside the replay; None without.
    """

    algorithm: str
    env: str
    num_envs: int
    seed: int | None
    env_steps: int
    loop: str
    devices: int
    report_every: int | None
    checkpoint_every: int
    agent: Any
    action_scaling: Literal["clip", "rescale"] = choice(default="clip", choices=("clip", "rescale"))
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    threads: int | None = integer(default=None, at_most=MAX_THREADS, optional=True)
    is_user_env: bool = choice(default=False, choices=(False, True))
    user_flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_every: int | None = integer(default=None, at_most=None, optional=True)
    eval_episodes: int = integer(default=0, at_least=0, at_most=None)
    final_eval_episodes: int | None = integer(default=None, at_least=0, at_most=None, optional=True)
    eval_max_steps: int = integer(default=MAX_EVALUATION_STEPS, at_most=None)
    video_every: int | None = integer(default=None, at_most=None, optional=True)
    track: Literal["wandb", "mlflow", "trackio", "tensorboard"] | None = choice(
        default=None, choices=(None, "wandb", "mlflow", "trackio", "tensorboard")
    )
    checkpoint_replay: bool = choice(default=True, choices=(False, True))
    workers: int | None = integer(default=None, at_most=MAX_WORKERS, optional=True)
    lag: int = integer(default=0, at_least=0, at_most=MAX_LAG)
    shared_optimizer: bool = choice(default=True, choices=(False, True))
    max_staleness: int | None = integer(default=None, at_least=0, optional=True)
    max_bad: int = integer(default=10)
    worker_timeout: float = number(default=60.0, above=0.0)
    worker_start_timeout: float = number(default=300.0, above=0.0)
    worker_restarts: int = integer(default=100, at_least=0)
    on_env_error: Literal["raise", "restart"] = choice(default="raise", choices=("raise", "restart"))
    min_workers: int | None = integer(default=None, at_most=MAX_WORKERS, optional=True)
    learners: int = integer(default=1, at_most=None)
    replay_on: Literal["device", "host"] = choice(default="device", choices=("device", "host"))
    data: str | None = None

    @property
    def unit(self) -> str:
        """The unit of `env_steps`."""
        return "gradient steps" if self.loop == OFFLINE else "env_steps"

    def __post_init__(self) -> None:
        for name in ("algorithm", "env", *(() if self.data is None else ("data",))):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"run: {name} must be a str, got {value!r}")
            if not value.isprintable():
                raise ValueError(f"run: {name} must be printable, got {value[:80]!r}")
        for name in ("env_steps", "checkpoint_every"):
            check_integer("run", name, getattr(self, name))
        check_integer("run", "report_every", self.report_every, optional=True)
        check_integer("run", "num_envs", self.num_envs, at_most=MAX_NUM_ENVS)
        check_integer("run", "devices", self.devices, at_most=MAX_DEVICES)
        check_settings(self, "run")
        if self.seed is not None:
            check_seed("run", "seed", self.seed)
        check_choice("run", "loop", self.loop, (*LOOPS, OFFLINE))
        if (self.loop in LOOPS_OF_WORKERS) != (self.workers is not None):
            loops = " or ".join(map(repr, LOOPS_OF_WORKERS))
            raise ValueError(f"run: workers must be a number with loop={loops}, else None, got {self.workers}")
        if self.loop == "asynchronous" and (self.lag or self.devices > 1):
            raise ValueError(f"run: lag must be 0 and devices 1 with loop='asynchronous', got {self.lag} and {self.devices}")
        if self.learners > 1 and self.loop != "compiled":
            raise ValueError(f"run: learners must be 1 with loop={self.loop!r}, got {self.learners}")
        if self.learners > 1 and self.video_every is not None:
            raise ValueError(f"run: video_every must be None with learners={self.learners}, which train in other processes")
        if self.devices % self.learners:
            raise ValueError(f"run: learners={self.learners} must divide devices={self.devices}")
        _check_env_kwargs(self.env_kwargs)
        _check_env_options(self.env_options)
        _check_user_flags(self.user_flags)

    def episodes_at_end(self, unknown: int) -> int:
        """Return the number of episodes of the final evaluation; in runs of older versions, `eval_episodes` or `unknown`."""
        if self.final_eval_episodes is not None:
            return self.final_eval_episodes
        return unknown if self.eval_every is None else self.eval_episodes

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data; a user-defined network is stored as a description only and must be passed again on loading."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "agent"}
        return {"format": FORMAT, **fields, "agent": to_json(self.agent, on_unknown="describe")}


def config_classes() -> dict[str, type]:
    """Return the classes that a `config.json` may name, including every agent in `AGENTS` and `WRAPPERS`."""
    pairs = (ActorAndCritic, RecurrentActorAndCritic, PolicyOnly, ValueOnly)
    networks = (Actor, Critics, MLP, NatureCNN, LSTM, GRU, PolicyAndValue, QValues, Quantiles, *pairs)
    replays = (HindsightReplay, MixedReplay, PrioritizedReplay, ReturnReplay, SequenceReplay, UniformReplay)
    agents = map(agent_class, WRAPPERS | AGENTS)
    return {cls.__name__: cls for cls in (*agents, *networks, *replays, *schedules.SCHEDULES)} | SPEC_CLASSES


def read_config(run: Run, agent: Any = None) -> RunConfig:
    """Read the configuration of a run.

    Args:
        agent: the run's agent or its constructor, if its class or its network is user-defined, which the file cannot store.

    Raises:
        ConfigError: the file has another format, a field is missing, unknown or out of range, or the agent cannot be
            rebuilt.
    """
    data = run.read_config()
    what = str(run.directory / "config.json")
    if data.get("format") != FORMAT:
        advice = "it is not from polyak train"
        if isinstance(data.get("format"), int):
            newer = data["format"] > FORMAT
            advice = "upgrade polyak" if newer else "it is from an earlier version, whose runs cannot be continued"
        raise ConfigError(f"{what}: has format {data.get('format')!r}, this version reads {FORMAT}; {advice}")
    fields = dataclasses.fields(RunConfig)
    names = [field.name for field in fields]
    # Fields added later have a default and are absent from older files.
    missing = [field.name for field in fields if field.name not in data and field.default is field.default_factory]
    unknown = [name for name in data if name not in (*names, "format")]
    if missing or unknown:
        raise ConfigError(f"{what}: fields missing: {missing}; fields unknown: {unknown}")
    if agent is None:
        agent = from_json(data["agent"], config_classes(), what=what)
        if not isinstance(agent, Agent):
            raise ConfigError(f"{what}: agent must be an agent, got {agent!r}"[:200])
    try:
        return RunConfig(**{name: data[name] for name in names if name in data and name != "agent"}, agent=agent)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from None


def _check_env_kwargs(env_kwargs: Any) -> None:
    """Check that all values are numbers or bools: a str could name a file that the environment would open."""
    if not isinstance(env_kwargs, Mapping):
        raise TypeError(f"run: env_kwargs must be a mapping, got {env_kwargs!r}")
    for name, value in env_kwargs.items():
        if not isinstance(value, bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"run: env_kwargs[{name!r}] must be a finite number or a bool, got {value!r}")


def _check_env_options(options: Any) -> None:
    """Check the names and that the values are plain data; `polyak.envs.make` checks more."""
    if not isinstance(options, Mapping):
        raise TypeError(f"run: env_options must be a mapping, got {options!r}")
    for name, value in options.items():
        if name not in ENV_OPTIONS:
            raise ValueError(f"run: {unknown_name(str(name)[:80], ENV_OPTIONS, 'env_options entry')}")
        parts = value if isinstance(value, list | tuple) else (value,)
        if not all(part is None or isinstance(part, bool | int | float | str) for part in parts):
            raise ValueError(f"run: env_options[{name!r}] must be plain data, got {value!r:.80}")


def _check_user_flags(user_flags: Any) -> None:
    """Check that the flags are printable names."""
    if not isinstance(user_flags, Mapping):
        raise TypeError(f"run: user_flags must be a mapping, got {user_flags!r:.80}")
    for name, value in user_flags.items():
        check_choice("run", "user_flags: a name", name, ("env", "wrapper", "env_kwargs"))
        names = value if name == "env_kwargs" and isinstance(value, list) else [value]
        if not all(isinstance(part, str) and part.isprintable() for part in names):
            raise ValueError(f"run: user_flags[{name!r}] must be printable names, got {value!r:.80}")


def algorithm_name(agent: Any) -> str:
    """Return the name of an agent's class in `AGENTS`, else the name of the class; `rnd(ppo)` for RND around PPO."""
    path = f"{type(agent).__module__}:{type(agent).__qualname__}"
    for name, known in WRAPPERS.items():
        if known == path:
            return f"{name}({algorithm_name(agent.agent)})"
    return next((name for name, known in AGENTS.items() if known == path), type(agent).__name__)


def open_checkpoints(path: Path) -> tuple[Run, Path]:
    """Open a run; returns the run and the directory of its checkpoints, `RUN/checkpoints`, or `RUN/best` for this path.

    Raises:
        RunError: the path is neither a run directory nor its subdirectory `best`, or the run has no best policy.
    """
    is_best = path.name == BEST and os.path.lexists(path.parent / CONFIG)
    run = open_run(path.parent if is_best else path)
    if is_best and not os.path.lexists(run.best):
        raise RunError(f"{run.best}: there is no best policy; evaluations during training (eval_every) save it")
    return run, run.best if is_best else run.checkpoints


def restore_policy(checkpoints: Path, agent: Agent) -> tuple[Policy, int]:
    """Restore the policy of the newest valid checkpoint, without a replay; also returns the checkpoint's env_steps.

    Raises:
        CheckpointError: there is no valid checkpoint, or its shapes differ from the agent's.
    """
    template = jax.eval_shape(agent.init, jax.random.key(0))
    restored = restore(checkpoints, template, prefix=".agent", skip=replay_path(agent))
    return agent.policy(restored.tree), restored.step


def run_key(seed: int) -> Any:
    """Return the key of a run with a seed."""
    return jax.random.key(np.uint32(seed))


def seed_of(key: Any) -> int | None:
    """Return the seed from which `jax.random.key(seed)` created a key, or None."""
    data = np.asarray(jax.random.key_data(key))
    if data.shape != (2,) or jax.random.key_impl(key) != jax.random.key_impl(run_key(0)):
        return None
    return None if data[0] else int(data[1])


def check_seed(owner: str, name: str, seed: Any) -> None:
    """Check that a seed is valid for `run_key`.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: the seed is negative or exceeds `MAX_SEED`.
    """
    check_integer(owner, name, seed, at_least=0, at_most=MAX_SEED)

"""`polyak.train.run`: trains an agent, or a preset by its name, with the features of `polyak train`."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from polyak import envs
from polyak.agents import AGENTS, action_scaling_of, agent_class
from polyak.core.checks import check_choice, check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments, unknown_name
from polyak.core.types import Agent, Env, HostEnv, State
from polyak.envs.autoreset import AutoReset
from polyak.envs.constructors import is_in_jax, make
from polyak.envs.source import EnvSource, can_make_again, source_of
from polyak.loops.agent_check import check_agent
from polyak.loops.host_replay import check_replay_on
from polyak.loops.loop import LoopState, check_in_jax, check_match, check_resume_from, mesh_over
from polyak.loops.replay_memory import check_memory
from polyak.presets import preset
from polyak.runs import ENV_OPTIONS, LOOPS, LOOPS_OF_WORKERS, RunConfig, algorithm_name, run_key, seed_of
from polyak.storage.run_directory import create
from polyak.train.agent_data import with_data
from polyak.train.agent_settings import check_single_numbers
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import configure_devices, configure_devices_for_images, default_devices, is_jax_started
from polyak.train.evaluation import check_eval_env, close_envs
from polyak.train.learners import check_group, check_learners
from polyak.train.result import Result
from polyak.train.run_training import run_training
from polyak.train.settings import CommonSettings, RunSettings, TrainSettings, runs_with
from polyak.train.training import Start, Training
from polyak.train.video_callback import check_videos
from polyak.train.worker_loops import check_workers, split_over_workers, with_new_episodes
from polyak.train.worker_settings import Workers, as_workers, config_fields
from polyak.workers.learner_group import Learners
from polyak.workers.worker_envs import WorkerEnvs

# In the slowest environments these are minutes of work.
MAX_ENV_STEPS_BETWEEN_CHECKPOINTS = 100_000
EVAL_EPISODES = 10


@suggest_arguments("train")
@runs_with(TrainSettings)
def run(agent: Agent[State] | str, env: Env | HostEnv | str | Callable[[], Any], fields: TrainSettings) -> Result[State]:
    """Train until `env_steps` valid transitions are done; equals `polyak train` with the same seed.

    >>> result = run("ppo", "jax/CartPole-v1", env_steps=512, num_envs=8, settings={"num_steps": 32}, progress=False)
    >>> result.progress.env_steps
    512

    Args:
        agent: the agent, or the name of an algorithm (`"ppo"`) to use the preset for the environment.
        env: an environment of `polyak.envs.make`, or the first argument of `make`: a name, a function, or an environment.
        fields: each field of `TrainSettings` is a keyword argument; `env_steps` is required.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        RunError: `run_dir` is not new or empty, or cannot be created.
        TrainingDiverged: see `Agent.diagnose`.
        StoppedBeforeStart: a stop was requested before workers had started, or before learners had saved a checkpoint.
    """
    group = check_group(fields)
    chosen, split = _choose_workers(agent, env, fields.loop, fields.workers)
    devices = 1 if group else fields.devices
    with (
        compilation_cache(fields.compilation_cache),
        temporary_envs("train.run", agent, env, fields, chosen, devices, split) as (made, source),
    ):
        training = prepare(
            make_agent(agent, made.spec, source, fields.env_steps, fields.settings),
            made,
            dataclasses.replace(fields, loop=chosen),
            source=source,
            algorithm=agent.lower() if isinstance(agent, str) else None,
            learners=group,
        )
        state = _in_new_envs(made, env, fields.resume_from, training.config.loop)
        start = Start(state, fields.env_steps_done)
        training = dataclasses.replace(training, start=start)
        return run_training(training, callbacks=fields.callbacks, progress=fields.progress, should_stop=fields.should_stop)


def _in_new_envs(made: Env | HostEnv, env: Any, state: LoopState | None, loop: str) -> LoopState | None:
    """Return the state to resume from, with new episodes if `run` has created the host environments.

    Raises:
        TypeError, ValueError: the state is no `LoopState`, or is of another number of environments or of another loop.
    """
    if state is None:
        return None
    check_resume_from(state, made.num_envs)
    if isinstance(made, HostEnv) and made is not env:
        return with_new_episodes(made, state, int(state.iteration))
    # Only the compiled loop has the environment's state, which may be empty.
    env_state = jax.eval_shape(made.init, jax.random.key(0))[0] if loop == "compiled" else ()
    is_compiled = bool(jax.tree.leaves(state.env))
    if is_compiled != bool(jax.tree.leaves(env_state)):
        got = "the compiled loop" if is_compiled else "another loop"
        raise ValueError(f"train: resume_from must be a state of the {loop} loop, got a state of {got}")
    return state


def _check_order(agent: Any, env: Any) -> None:
    """Check that agent and environment are not swapped.

    Raises:
        TypeError: agent and environment are swapped.
    """
    is_agent = env.lower() in AGENTS if isinstance(env, str) else isinstance(env, Agent)
    if is_agent or isinstance(agent, Env | HostEnv):
        raise TypeError(f"train.run: agent and env are swapped: call train.run(agent, env), got {agent!r:.80} as agent")


def _choose_workers(agent: Any, env: Any, loop: Any, workers: int | Workers | None) -> tuple[Any, Workers | None]:
    """Return the loop and its workers, or None for none; the preset of a named algorithm may set both.

    Raises:
        TypeError: agent and environment are swapped.
        ValueError: a loop of workers has no workers, workers have another loop, or the algorithm needs another loop.
    """
    _check_order(agent, env)
    check_choice("train.run", "loop", loop, ("auto", *LOOPS))
    defaults = preset(agent if isinstance(agent, str) else "", str(env))
    loop = defaults.loop if loop == "auto" else loop
    if defaults.loop != "auto":
        check_own_loop("train.run", agent, loop, defaults.loop, is_jax=is_in_jax(env))
    workers = defaults.workers if workers is None and loop == defaults.loop else workers
    if workers is None:
        if loop in LOOPS_OF_WORKERS:
            raise ValueError(f"train.run: loop={loop!r} needs workers=N")
        return loop, None
    if loop not in ("auto", *LOOPS_OF_WORKERS):
        raise ValueError(f"train.run: workers must be None with loop={loop!r}, got {workers!r:.80}")
    return "distributed" if loop == "auto" else loop, as_workers("train.run", workers)


def check_own_loop(owner: str, algorithm: str, loop: str, own: str, *, is_jax: bool) -> None:
    """Check the loop of an algorithm that is defined by its loop, such as A3C.

    Raises:
        ValueError: the loop is another one, or workers cannot step the environment.
    """
    if loop != own:
        raise ValueError(f"{owner}: {algorithm.lower()} always uses loop={own!r}; remove loop={loop!r}")
    if is_jax:
        raise ValueError(f"{owner}: {algorithm.lower()} uses loop={own!r}, whose workers step no JAX environment")


def make_envs(
    owner: str,
    agent: Any,
    env: Any,
    num_envs: int | None,
    loop: str = "auto",
    devices: int | None = None,
    workers: Workers | None = None,
) -> tuple[Env | HostEnv, EnvSource | None]:
    """Return the environments and their source, creating them if needed, by default with the preset's number of copies.

    JAX gets two devices if they speed training up, unless it has started.

    Raises:
        ValueError: `num_envs` or `workers` is set for existing environments.
    """
    agent = agent.lower() if isinstance(agent, str) else agent
    is_made = isinstance(env, Env | HostEnv)
    if is_made and num_envs not in (None, env.num_envs):
        raise ValueError(f"{owner}: num_envs must be None where env is made, which has {env.num_envs} copies, got {num_envs}")
    check_integer(owner, "num_envs", num_envs, optional=True)
    count = env.num_envs if is_made else num_envs or preset(str(agent), str(env)).num_envs
    if not is_jax_started():
        configure_devices(devices, "compiled" if is_in_jax(env) and loop != "host" else "host", count)
    if is_made and workers is not None:
        raise ValueError(f"{owner}: env must be a name or a function with workers, which make it, got {type(env).__name__}")
    if is_made:
        configure_devices_for_images(env, loop, devices)
        return env, source_of(env)
    # An existing Gymnasium environment has a fixed number of copies.
    has_number = not (can_make_again(env) or is_in_jax(env))
    scaling = action_scaling_of(agent)
    options: dict[str, Any] = {"action_scaling": scaling} | ({} if has_number and num_envs is None else {"num_envs": count})
    if workers is not None:
        one = envs.make(env, **{**options, "num_envs": 1})
        parts = split_over_workers(one, count, workers)
        return parts, parts.source
    made = envs.make(env, **options)
    configure_devices_for_images(made, loop, devices)
    return made, source_of(made) or EnvSource(env, {})


@contextmanager
def temporary_envs(
    owner: str,
    agent: Any,
    env: Any,
    settings: RunSettings,
    loop: str,
    devices: int | None,
    workers: Workers | None = None,
) -> Iterator[tuple[Env | HostEnv, EnvSource | None]]:
    """Yield the result of `make_envs`, and close the environments at the end unless the caller created them."""
    made, source = make_envs(owner, agent, env, settings.num_envs, loop, devices, workers)
    if isinstance(made, WorkerEnvs):
        made.group.should_stop = settings.should_stop
    try:
        yield made, source
    finally:
        close_if_made(made, env)


def close_if_made(made: Env | HostEnv, env: Any) -> None:
    """Close environments of `make_envs`, unless the caller created them."""
    if made is not env and isinstance(made, HostEnv) and (env is None or can_make_again(env)):
        close_envs(made)


def make_agent(
    agent: Agent | str,
    spec: EnvSpec,
    source: EnvSource | None,
    env_steps: int,
    settings: Mapping[str, Any] | None,
    owner: str = "train.run",
) -> Agent:
    """Return the agent, or create it from the preset for the environment with changed settings.

    Raises:
        ValueError: the name of the algorithm is unknown, `settings` are given for an existing agent, or a setting is an array.
    """
    if not isinstance(agent, str):
        check_agent(owner, agent)
        if settings:
            raise ValueError(f"{owner}: settings must be None where agent is made, got {settings!r:.80}; set its fields")
        made = with_goals(agent, spec.goals)
    else:
        task = source.id if source is not None and isinstance(source.id, str) else spec.id
        made = known_class(owner, agent)(spec=spec, **preset(agent, task).settings(env_steps, settings))
    check_single_numbers(owner, made)
    return made


def known_class(owner: str, algorithm: str) -> Any:
    """Return the class of an algorithm.

    Raises:
        ValueError: the name is unknown.
    """
    name = algorithm.lower()
    if name not in AGENTS:
        raise ValueError(f"{owner}: {unknown_name(name, AGENTS, 'algorithm')}")
    return agent_class(name)


def with_goals(agent: Agent, goals: Any) -> Agent:
    """Return the agent with the functions of an environment's goals, which specs do not compare and files do not store."""
    spec = getattr(agent, "spec", None)
    is_settings = dataclasses.is_dataclass(agent) and "spec" in {field.name for field in dataclasses.fields(agent)}
    if goals is None or not is_settings or not isinstance(spec, EnvSpec) or goals == spec.goals:
        return agent
    changed: Any = dataclasses.replace(agent, spec=dataclasses.replace(spec, goals=goals))  # type: ignore[type-var]
    return changed


def prepare(
    agent: Agent,
    env: Env | HostEnv,
    settings: TrainSettings,
    *,
    threads: int | None = None,
    source: EnvSource | None = None,
    algorithm: str | None = None,
    learners: Learners | None = None,
    owner: str = "train.run",
) -> Training:
    """Check all settings, and create the run directory.

    Args:
        agent: the agent.
        env: the environment.
        settings: see `run`. The fields `num_envs`, `settings`, `workers`, `learners`, `progress`, `callbacks` and `should_stop`
            are not used.
        threads: number of XLA threads, for the config; None is XLA's default.
        source: source of the environments, if it is known.
        algorithm: name of the algorithm if several algorithms share the agent's class; None is `algorithm_name(agent)`.
        learners: processes that train together; None trains in this process.
        owner: the function that was called, for errors.
    """
    agent, data, data_name = with_data(owner, agent, env, settings)
    loop: str = settings.loop
    devices, eval_every, eval_env = settings.devices, settings.eval_every, settings.eval_env
    if devices is None:
        devices = default_devices(agent, env, loop) if learners is None else learners.number
    if learners is not None:
        check_learners(learners, env, devices)
    workers: dict[str, Any] = {}
    if isinstance(env, WorkerEnvs):
        loop = "distributed" if loop == "auto" else loop
        workers = {**config_fields(env.group.options), "workers": env.num_workers}
        check_workers(agent, loop, env.group.options, devices)
    check_match(agent, env, devices)
    if learners is None:
        mesh_over(devices, env.num_envs)
    loop = _checked_loop(owner, agent, env, loop, devices, settings.replay_on, settings.checkpoint_replay)
    report_every, checkpoint_every = intervals(owner, settings, settings.env_steps, settings.video_every)
    eval_episodes = settings.eval_episodes if settings.eval_episodes is not None else EVAL_EPISODES if eval_every else 0
    check_integer(owner, "eval_episodes", eval_episodes, at_least=1 if eval_every else 0)
    check_eval_env(owner, agent, env, eval_env, eval_every, eval_episodes)
    check_videos(owner, env, settings)
    stored = None if source is None else storable(source)
    config = RunConfig(
        algorithm=algorithm or algorithm_name(agent),
        env=(env.spec.id or type(env).__name__) if stored is None else stored.id,
        num_envs=env.num_envs,
        seed=settings.seed if settings.key is None else seed_of(settings.key),
        env_steps=settings.env_steps,
        loop=loop,
        devices=devices,
        replay_on=settings.replay_on,
        report_every=report_every,
        checkpoint_every=checkpoint_every,
        agent=agent,
        action_scaling=env.spec.action_scaling,
        env_kwargs={} if stored is None else stored.options["env_kwargs"],
        threads=threads,
        is_user_env=stored is None,
        env_options=stored_options(source, env),
        eval_every=eval_every,
        eval_episodes=eval_episodes if eval_every else 0,
        final_eval_episodes=eval_episodes,
        eval_max_steps=settings.eval_max_steps,
        video_every=settings.video_every,
        track=settings.track,
        checkpoint_replay=settings.checkpoint_replay,
        data=data_name,
        **workers,
        learners=1 if learners is None else learners.number,
    )
    run = None if settings.run_dir is None else create(settings.run_dir, config.to_json())
    key = run_key(settings.seed or 0) if settings.key is None else settings.key
    start = Start(settings.resume_from, settings.env_steps_done)
    return Training(config, env, key, start, run, eval_env, eval_episodes, learners, data=data)


def _checked_loop(owner: str, agent: Agent, env: Env | HostEnv, loop: str, devices: int, replay_on: str, saved: bool) -> str:
    """Return the loop, after a check of its environments and replay."""
    if loop == "auto":
        loop = "host" if isinstance(env, HostEnv) else "compiled"
    if loop == "compiled":
        check_in_jax(f"{owner}: loop='compiled'", env)
    check_replay_on(agent, loop, devices, replay_on, saved)
    check_memory(agent, devices, num_envs=env.num_envs, on_host=replay_on == "host")
    return loop


def intervals(owner: str, settings: CommonSettings, steps: int, video_every: int | None = None) -> tuple[int | None, int]:
    """Return the steps between reports and between checkpoints, which are saved at reports.

    Args:
        steps: the length of the training, in the unit of the intervals.

    Raises:
        TypeError, ValueError: an interval is not a positive integer, or is shorter than `report_every`.
    """
    report_every, checkpoint_every = settings.report_every, settings.checkpoint_every
    wanted = {"checkpoint_every": checkpoint_every, "eval_every": settings.eval_every, "video_every": video_every}
    for name, value in ({"report_every": report_every} | wanted).items():
        check_integer(owner, name, value, optional=True)
        if report_every and value and value < report_every:
            raise ValueError(f"{owner}: {name}={value} must be at least report_every={report_every}: it happens at reports")
    shortest = min((value for value in wanted.values() if value), default=steps)
    if report_every is None and shortest < steps // 100:
        report_every = shortest
    return report_every, checkpoint_every or max(1, min(steps // 10, MAX_ENV_STEPS_BETWEEN_CHECKPOINTS))


def storable(source: EnvSource) -> EnvSource | None:
    """Return the source of an environment, or None if a run cannot store it: no name; text or objects as kwargs."""
    kwargs = source.options.get("env_kwargs", {})
    numbers = [value for value in kwargs.values() if isinstance(value, bool | int | float)]
    is_plain = len(numbers) == len(kwargs) and all(math.isfinite(value) for value in numbers)
    if not isinstance(source.id, str) or not is_plain:
        return None
    return EnvSource(source.id, {**source.options, "env_kwargs": dict(kwargs)})


def stored_options(source: EnvSource | None, env: Env | HostEnv | None) -> dict[str, Any]:
    """Return the arguments of `make` in `ENV_OPTIONS` that are not its defaults, also of a user-defined environment."""
    options, defaults = {} if source is None else source.options, inspect.signature(make).parameters
    if isinstance(env, AutoReset) and not (source and isinstance(source.id, str)) and env.reset_pool is not None:
        options = {"reset_pool": env.reset_pool}
    return {name: options[name] for name in ENV_OPTIONS if name in options and options[name] != defaults[name].default}

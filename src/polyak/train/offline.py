"""`polyak.train.offline`: trains an agent on a data set, with the features of `polyak.train.run`."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyak import envs
from polyak.agents import action_scaling_of
from polyak.core.checks import check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Env, HostEnv, State
from polyak.data.data_set import DataSet
from polyak.envs.constructors import is_in_jax
from polyak.envs.source import EnvSource, source_of
from polyak.loops.agent_check import check_agent
from polyak.loops.loop import check_spec
from polyak.loops.replay_memory import check_memory
from polyak.runs import OFFLINE, RunConfig, algorithm_name, run_key
from polyak.storage.run_directory import create
from polyak.train.agent_data import check_class_learns_from_data, check_learns_from_data, load_data, with_room
from polyak.train.compilation_cache import compilation_cache
from polyak.train.new_training import EVAL_EPISODES, close_if_made, intervals, known_class, make_agent, storable, stored_options
from polyak.train.result import Result
from polyak.train.run_training import run_training
from polyak.train.settings import Data, OfflineSettings, runs_offline_with
from polyak.train.training import Training

OWNER = "train.offline"


@suggest_arguments(OWNER)
@runs_offline_with(OfflineSettings)
def offline(agent: Agent[State] | str, data: Data, fields: OfflineSettings) -> Result[State]:
    """Train on a data set, with gradient steps alone; equals `polyak train ALGO [ENV] --data PATH` with the same seed.

    The data are in the agent's replay, on the device, and in the checkpoints, from which `polyak.resume` continues to the bit.
    Everything that counts env_steps elsewhere counts gradient steps here. Settings for collecting (`num_steps`,
    `updates_per_step`, `learning_starts`, exploration) have no effect.

    >>> import polyak
    >>> env = polyak.envs.make("jax/CartPole-v1", num_envs=8)
    >>> data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 500)
    >>> offline("dqn", data, gradient_steps=10, progress=False).progress.env_steps
    10

    Args:
        agent: an agent with a replay, or the name of an algorithm (`"iql"`) to use the preset for the data's environment.
        data: the data set, or the first argument of `polyak.data.load`.
        fields: each field of `OfflineSettings` is a keyword argument; `gradient_steps` is required.

    Raises:
        TypeError, ValueError: an argument or the data are invalid; raised before anything runs.
        RunError: `run_dir` is not new or empty, or cannot be created.
        TrainingDiverged: see `Agent.diagnose`.
    """
    agent = agent.lower() if isinstance(agent, str) else agent
    algorithm, steps = agent if isinstance(agent, str) else None, fields.gradient_steps
    with (
        compilation_cache(fields.compilation_cache),
        evaluation_envs(agent, fields.env, fields.eval_episodes) as (made, source),
    ):
        data_set = load_data(OWNER, data, _spec_of(agent, made))
        built = make_agent(agent, spec_for(agent, data_set, made), source, steps, fields.settings, OWNER)
        training = prepare_offline(fit_to_data(built, data_set), data_set, made, source, fields, algorithm)
        return run_training(training, callbacks=fields.callbacks, progress=fields.progress, should_stop=fields.should_stop)


@contextmanager
def evaluation_envs(agent: Any, env: Any, episodes: int | None) -> Iterator[tuple[Env | HostEnv | None, EnvSource | None]]:
    """Yield the environments for evaluation and their source, which are closed at the end unless the caller created them."""
    check_integer(OWNER, "eval_episodes", episodes, at_least=0, optional=True)
    if env is None:
        yield None, None
        return
    made = env if isinstance(env, Env | HostEnv) else make_evaluation_env(agent, env, episodes)
    try:
        yield made, source_of(made) or (None if made is env else EnvSource(env, {}))
    finally:
        close_if_made(made, env)


def make_evaluation_env(agent: Any, env: Any, episodes: int | None) -> Env | HostEnv:
    """Create one environment for each episode of an evaluation, at most 10."""
    count = min(episodes or EVAL_EPISODES, EVAL_EPISODES)
    options: dict[str, Any] = {"num_envs": count} if isinstance(env, str) or is_in_jax(env) or callable(env) else {}
    made: Env | HostEnv = envs.make(env, action_scaling=action_scaling_of(agent), **options)
    return made


def _spec_of(agent: Any, env: Env | HostEnv | None) -> EnvSpec | None:
    """Return the spaces that the data must have, or None for a named agent without environment, after checks that need no data.

    Raises:
        TypeError, ValueError: the algorithm is unknown, the agent has no replay, or its spec is not the environment's.
    """
    if isinstance(agent, str):
        check_class_learns_from_data(OWNER, known_class(OWNER, agent))
        return None if env is None else env.spec
    check_agent(OWNER, agent)
    check_learns_from_data(OWNER, agent)
    spec: EnvSpec = agent.spec
    if env is not None:
        check_spec(OWNER, spec, env.spec)
    return spec


def fit_to_data(agent: Any, data: DataSet) -> Any:
    """Return the agent with room for the data in its replay.

    Raises:
        TypeError, ValueError: the agent does not learn from a replay, or its settings do not fit the data.
    """
    check_learns_from_data(OWNER, agent)
    _check_settings(agent, data)
    return with_room(agent, data)


def _check_settings(agent: Any, data: DataSet) -> None:
    settings = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
    name, n_step, longest = type(agent).__name__, settings.get("n_step", 1), int(data.lengths.max())
    if settings.get("normalize_reward") == "return":
        raise ValueError(
            f"{OWNER}: {name}: normalize_reward must be 'reward' or None to learn from data, got 'return', the statistics of "
            "returns that the agent's own policy collects"
        )
    if n_step > longest:
        raise ValueError(
            f"{OWNER}: {name}: n_step={n_step} must be at most {longest}, the steps of the longest episode of "
            f"{data.name!r}; set a smaller n_step"
        )


def spec_for(agent: Any, data: DataSet, env: Env | HostEnv | None) -> EnvSpec:
    """The spec of an agent or an algorithm: the environment's, or the data's with the action scaling of the agent."""
    return dataclasses.replace(data.spec, action_scaling=action_scaling_of(agent)) if env is None else env.spec


def prepare_offline(
    agent: Any,
    data: DataSet,
    env: Env | HostEnv | None,
    source: EnvSource | None,
    fields: OfflineSettings,
    algorithm: str | None,
    threads: int | None = None,
) -> Training:
    """Check all settings, and create the run directory.

    Args:
        fields: see `offline`; `env`, `settings`, `progress`, `compilation_cache`, `callbacks` and `should_stop` are not used.
        algorithm: name of the algorithm; None is `algorithm_name(agent)`.
        threads: number of XLA threads, for the config; None is XLA's default.
    """
    steps, eval_every, episodes = fields.gradient_steps, fields.eval_every, fields.eval_episodes
    report_every, checkpoint_every = intervals(OWNER, fields, steps)
    if env is None and (eval_every or episodes):
        raise ValueError(f"{OWNER}: eval_every and eval_episodes need env, the environment to evaluate in")
    episodes = episodes if episodes is not None else 0 if env is None else EVAL_EPISODES
    check_integer(OWNER, "eval_episodes", episodes, at_least=1 if eval_every else 0)
    check_memory(agent)
    stored = None if source is None else storable(source)
    config = RunConfig(
        algorithm=algorithm or algorithm_name(agent),
        env=stored.id if stored is not None else data.spec.id or data.name,
        num_envs=1 if env is None else env.num_envs,
        seed=fields.seed,
        env_steps=steps,
        loop=OFFLINE,
        devices=1,
        report_every=report_every,
        checkpoint_every=checkpoint_every,
        agent=agent,
        action_scaling=agent.spec.action_scaling,
        env_kwargs={} if stored is None else stored.options["env_kwargs"],
        threads=threads,
        is_user_env=stored is None and not (env is None and data.has_spaces and data.spec.id),
        env_options=stored_options(source, env),
        eval_every=eval_every,
        eval_episodes=episodes if eval_every else 0,
        final_eval_episodes=episodes,
        eval_max_steps=fields.eval_max_steps,
        track=fields.track,
        data=data.name,
    )
    rollout = data.rollout(agent.spec, num_steps=agent.num_steps, pad=True)
    run = None if fields.run_dir is None else create(fields.run_dir, config.to_json())
    return Training(config, env, run_key(fields.seed), run=run, eval_env=env, eval_episodes=episodes, data=rollout)

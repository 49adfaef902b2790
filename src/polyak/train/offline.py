"""`polyak.train.offline`: trains an agent on a data set, with the features of `polyak.train.run`."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from polyak import envs
from polyak.agents import action_scaling_of
from polyak.core.checks import check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Callback, Env, HostEnv, State
from polyak.data.data_set import DataSet
from polyak.envs.constructors import is_in_jax
from polyak.envs.source import EnvSource, source_of
from polyak.loops.agent_check import check_agent, check_callbacks
from polyak.loops.loop import check_spec
from polyak.loops.replay_memory import check_memory
from polyak.runs import MAX_EVALUATION_STEPS, OFFLINE, RunConfig, algorithm_name, check_seed, run_key
from polyak.storage.run_directory import create
from polyak.tracking.names import TrackerName
from polyak.train.agent_data import check_class_learns_from_data, check_learns_from_data, load_data, with_room
from polyak.train.compilation_cache import compilation_cache as cached_programs
from polyak.train.new_training import EVAL_EPISODES, close_if_made, intervals, known_class, make_agent, storable, stored_options
from polyak.train.result import Result
from polyak.train.run_training import run_training
from polyak.train.training import Training

OWNER = "train.offline"


@suggest_arguments(OWNER)
def offline(
    agent: Agent[State] | str,
    data: DataSet | str | os.PathLike[str] | Mapping[str, Any],
    *,
    gradient_steps: int,
    env: Env | HostEnv | str | Callable[[], Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    report_every: int | None = None,
    checkpoint_every: int | None = None,
    eval_every: int | None = None,
    eval_episodes: int | None = None,
    eval_max_steps: int = MAX_EVALUATION_STEPS,
    track: TrackerName | None = None,
    compilation_cache: bool = True,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Result[State]:
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
        gradient_steps: total number of gradient steps.
        env: the environment for evaluation, as for `polyak.train.run`; None evaluates nothing.
        settings: fields of a named agent that replace the preset's values.
        seed: seed of all randomness.
        run_dir: a new directory for config, metrics, TensorBoard, checkpoints and summary; None writes nothing.
        progress: show a progress bar in a terminal, plain lines elsewhere.
        report_every: gradient steps between reports; None is a hundredth of all, or less as for `polyak.train.run`.
        checkpoint_every: gradient steps between checkpoints; None is a tenth of all, at most 100,000.
        eval_every: gradient steps between evaluations of the greedy policy (`eval/mean_reward`); needs `env`.
        eval_episodes: number of episodes of each evaluation, and at the end; None is 10 with `env`, else 0.
        eval_max_steps: maximum number of steps of each environment in an evaluation.
        track: tracker that logs settings, metrics and checkpoints; see `polyak.train.run`.
        compilation_cache: keep compiled programs; see `polyak.train.run`.
        callbacks: called at every report; see `Callback`.
        should_stop: called between iterations; True ends the training.

    Raises:
        TypeError, ValueError: an argument or the data are invalid; raised before anything runs.
        RunError: `run_dir` is not new or empty, or cannot be created.
        TrainingDiverged: see `Agent.diagnose`.
    """
    agent = agent.lower() if isinstance(agent, str) else agent
    check_integer(OWNER, "gradient_steps", gradient_steps)
    check_callbacks(OWNER, callbacks)
    check_seed(OWNER, "seed", seed)
    with cached_programs(compilation_cache), evaluation_envs(agent, env, eval_episodes) as (made, source):
        data_set = load_data(OWNER, data, _spec_of(agent, made))
        built = make_agent(agent, spec_for(agent, data_set, made), source, gradient_steps, settings, OWNER)
        training = prepare_offline(
            fit_to_data(built, data_set),
            data_set,
            made,
            source,
            algorithm=agent if isinstance(agent, str) else algorithm_name(agent),
            gradient_steps=gradient_steps,
            seed=seed,
            run_dir=run_dir,
            report_every=report_every,
            checkpoint_every=checkpoint_every,
            eval_every=eval_every,
            eval_episodes=eval_episodes,
            eval_max_steps=eval_max_steps,
            track=track,
        )
        return run_training(training, callbacks=callbacks, progress=progress, should_stop=should_stop)


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
    *,
    algorithm: str,
    gradient_steps: int,
    seed: int,
    run_dir: str | os.PathLike[str] | None,
    report_every: int | None,
    checkpoint_every: int | None,
    eval_every: int | None,
    eval_episodes: int | None,
    eval_max_steps: int,
    track: TrackerName | None,
    threads: int | None = None,
) -> Training:
    """Check all settings, and create the run directory; see `offline`.

    Args:
        threads: number of XLA threads, for the config; None is XLA's default.
    """
    report_every, checkpoint_every = intervals(gradient_steps, report_every, checkpoint_every, eval_every, owner=OWNER)
    if env is None and (eval_every or eval_episodes):
        raise ValueError(f"{OWNER}: eval_every and eval_episodes need env, the environment to evaluate in")
    episodes = eval_episodes if eval_episodes is not None else 0 if env is None else EVAL_EPISODES
    check_integer(OWNER, "eval_episodes", episodes, at_least=1 if eval_every else 0)
    check_memory(agent)
    stored = None if source is None else storable(source)
    config = RunConfig(
        algorithm=algorithm,
        env=stored.id if stored is not None else data.spec.id or data.name,
        num_envs=1 if env is None else env.num_envs,
        seed=seed,
        env_steps=gradient_steps,
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
        eval_max_steps=eval_max_steps,
        track=track,
        data=data.name,
    )
    rollout = data.rollout(agent.spec, num_steps=agent.num_steps, pad=True)
    run = None if run_dir is None else create(run_dir, config.to_json())
    return Training(config, env, run_key(seed), run=run, eval_env=env, eval_episodes=episodes, data=rollout)

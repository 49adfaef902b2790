"""Training with workers: environments split over processes of one machine or of many, by Ray."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from polyak import envs
from polyak.core.checks import check_callbacks, check_integer, check_key
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Callback, Env, HostEnv, State
from polyak.envs.source import EnvSource, can_make_again, source_of
from polyak.loops.agent_check import check_agent
from polyak.loops.episodes import Episodes
from polyak.loops.host_loop import host
from polyak.loops.host_replay import ReplayOn
from polyak.loops.loop import LoopState, Reporter, Target, TrainResult
from polyak.train.worker_settings import Workers, as_workers, with_options
from polyak.workers.asynchronous_loop import check_shares_gradients, train_asynchronously
from polyak.workers.learner_group import StoppedBeforeStart
from polyak.workers.ray_workers import RayWorkers, check_ray
from polyak.workers.worker_envs import WorkerEnvs
from polyak.workers.worker_group import WorkerGroup, WorkerOptions
from polyak.workers.worker_rollouts import check_lag


def split_over_workers(
    env: Env | HostEnv, num_envs: int, workers: Workers, should_stop: Callable[[], bool] = lambda: False
) -> WorkerEnvs:
    """Copies of an environment, split over workers; the environment is closed.

    Args:
        env: one copy, which only tells the spaces and how it was made.
        should_stop: called while waiting for the start of workers.

    Raises:
        ValueError: the environment is in JAX, was made as an object, or cannot be split.
        ImportError: Ray is not installed.
        ClusterError: no Ray cluster answers at the address.
    """
    try:
        if not isinstance(env, HostEnv):
            raise ValueError(
                f"train: workers step environments outside JAX, got {env.spec.id}; leave workers out, and it is compiled"
            )
        source = source_of(env)
        if source is None:
            raise ValueError(f"train: workers must make {env.spec.id} themselves; pass its name or a function that creates it")
        if source.options.get("vectorization") == "own":
            raise ValueError("train: vectorization='own' cannot be split over workers; pass 'sync'")
        if source.options.get("vectorization", "auto") == "auto" and not str(source.id).startswith("ALE/"):
            # A vectorized form has one random generator for all its environments.
            source = EnvSource(source.id, {**source.options, "vectorization": "sync"})
        # Gymnasium is imported only where environments need it.
        from polyak.envs.parts import split

        parts = split(source, num_envs, workers.number)
        if workers.make_engine is None:
            # Before a run directory is created.
            check_ray(workers.address)
        make_engine = workers.make_engine or (
            lambda: RayWorkers(workers.number, workers.address, should_stop=lambda: group.should_stop())
        )
        group = WorkerGroup(parts, env.spec, num_envs, make_engine, workers.options())
        group.should_stop = should_stop
        group.is_on_this_machine = workers.make_engine is None and workers.address is None
        if workers.address is not None:
            group.on_start = print
        return WorkerEnvs(group, source)
    finally:
        if isinstance(env, HostEnv):
            env.close()


def check_workers(agent: Agent, loop: str, options: WorkerOptions, devices: int = 1) -> None:
    """Check that an agent can be trained with workers in this loop.

    Raises:
        TypeError: it cannot push gradients.
        ValueError: it does not bear the lag, or the options are of pushes; or it pushes gradients, and there is a lag, or more
            than one device.
    """
    check_agent("train", agent)
    if loop == "distributed":
        check_lag(agent, options.lag)
        pushes = {
            "shared_optimizer=False": not options.shared_optimizer,
            "max_staleness": options.max_staleness is not None,
            "max_bad": options.max_bad != WorkerOptions().max_bad,
        }
        for name, is_set in pushes.items():
            if is_set:
                raise ValueError(f"train: {name} is for loop='asynchronous', whose workers push gradients; leave it out")
        return
    check_shares_gradients(agent)
    if options.lag:
        raise ValueError(
            f"train: lag={options.lag}: workers that push gradients wait for nobody; max_staleness bounds how old they are"
        )
    if devices != 1:
        raise ValueError(f"train: devices={devices}: gradients that workers push come from one device")


def _make(agent: Agent, env: Any, num_envs: int, options: Workers, should_stop: Callable[[], bool]) -> WorkerEnvs:
    """The environments of `distributed` and `asynchronous`, after a check of everything."""
    check_agent("train", agent)
    check_integer("train", "num_envs", num_envs)
    if num_envs % options.number:
        raise ValueError(f"train: num_envs={num_envs} cannot be split over workers={options.number}")
    if not can_make_again(env):
        raise TypeError(f"train: env must be a name, or a function that creates it, got {type(env).__name__}")
    return split_over_workers(envs.make(env, action_scaling=agent.spec.action_scaling), num_envs, options, should_stop)


def with_new_episodes(env: HostEnv, state: LoopState, seed: int) -> LoopState:
    """The state of a training at the start of new episodes."""
    time_step = jax.tree.map(jnp.asarray, env.reset(seed))
    return dataclasses.replace(state, time_step=time_step, episodes=Episodes.fresh(env.num_envs))


def _train(
    agent: Agent,
    env: WorkerEnvs,
    target: Target,
    resume_from: LoopState | None,
    env_steps_done: int,
    loop: Callable[..., TrainResult],
) -> TrainResult:
    """Train with workers, which end with the training.

    Raises:
        StoppedBeforeStart: training should stop before they have started, and there is no state to return.
    """
    try:
        # Workers, which have to be started, begin new episodes.
        resume_from = resume_from and with_new_episodes(env, resume_from, int(resume_from.iteration))
        return loop(resume_from=resume_from)
    except StoppedBeforeStart:
        if resume_from is None:
            raise
        return Reporter(agent, target, env_steps_done, int(resume_from.iteration), env).result(resume_from, "request")
    finally:
        env.close()


@suggest_arguments("train")
def asynchronous(
    agent: Agent[State],
    env: str | Callable[[], Any],
    *,
    num_envs: int,
    workers: int | Workers,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    resume_from: LoopState | None = None,
    env_steps_done: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult[State]:
    """Train asynchronously (A3C): every worker pushes gradients to a shared copy of the network, and pulls its weights.

    Nobody waits for anybody, so two trainings differ, and none can be resumed exactly. `distributed` with `lag` and IMPALA
    learns as fast, and sends rollouts in place of gradients. The result has the state of the other loops, with the shared
    weights as online copy.

    Args:
        agent: an agent whose update has two halves: `A2C` or `IMPALA`.
        env: name of the environment, or a function that creates it; it is made in the workers.
        num_envs: environments in all; workers have equal parts.
        workers: number of processes, or how they work, with `shared_optimizer`, `max_staleness` and `max_bad`.
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness.
        callbacks: called at every report.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        resume_from: the state of a stopped run; new episodes start.
        env_steps_done: env_steps that the stopped run had completed.
        should_stop: called while waiting for workers; True ends the training.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        ImportError: Ray is not installed.
        RuntimeError: Ray does not start, or no restart is left.
        StoppedBeforeStart: it should stop before the workers have started, and there is no state to return.
        Exception: what an environment raises, of its type.
        TrainingDiverged: see `Agent.diagnose`.

    Source: Mnih et al. 2016, arXiv:1602.01783, algorithm S3.
    """
    target = Target(env_steps, report_every)
    check_key("train", key)
    check_callbacks("train", callbacks)
    options = as_workers("train.asynchronous", workers)
    check_workers(agent, "asynchronous", options.options())
    made = _make(agent, env, num_envs, options, should_stop)
    loop = partial(
        train_asynchronously,
        agent,
        made,
        env_steps=env_steps,
        key=key,
        callbacks=callbacks,
        report_every=report_every,
        env_steps_done=env_steps_done,
        should_stop=should_stop,
    )
    return _train(agent, made, target, resume_from, env_steps_done, loop)


@suggest_arguments("train")
def distributed(
    agent: Agent[State],
    env: str | Callable[[], Any],
    *,
    num_envs: int,
    workers: int | Workers,
    env_steps: int,
    key: PRNGKeyArray,
    lag: int | None = None,
    timeout: float | None = None,
    start_timeout: float | None = None,
    restarts: int | None = None,
    on_env_error: Literal["raise", "restart"] | None = None,
    min_workers: int | None = None,
    address: str | None = None,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int = 1,
    replay_on: ReplayOn = "device",
    resume_from: LoopState | None = None,
    env_steps_done: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult[State]:
    """Train with worker processes that step the environments, until `env_steps` valid transitions are done.

    Workers split the environments and change nothing else: with `lag=0` the numbers are those of `train.host`; to the bit
    where the policy is small enough to act in NumPy, rollouts have several steps, and every worker has a multiple of 4
    environments. A worker that dies or hangs is replaced and repeats its rollout from the snapshot before it; environments
    without snapshots begin new episodes.

    Args:
        agent: the agent to train.
        env: name of the environment, or a function that creates it; it is made in the workers.
        num_envs: environments in all; workers have equal parts.
        workers: number of processes, or how they work.
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness.
        lag, timeout, start_timeout, restarts, on_env_error, min_workers, address: see `train.Workers`, where they may stand
            instead. A lag of 0, the default, waits for each update; 1 collects while the agent learns, with the same numbers
            in every run; more lets fast workers be ahead of slow ones. Without an address a private Ray starts, and ends.
        callbacks: called at every report.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: over which the update is split.
        replay_on: see `train.host`.
        resume_from, env_steps_done: the state of a stopped run, whose episodes start anew, and its env_steps.
        should_stop: called while waiting for workers; True ends the training.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        ImportError: Ray is not installed.
        RuntimeError: Ray does not start, or no restart is left.
        StoppedBeforeStart: it should stop before the workers have started, and there is no state to return.
        Exception: what an environment raises, of its type.
        TrainingDiverged: see `Agent.diagnose`.
    """
    target = Target(env_steps, report_every)
    check_key("train", key)
    check_callbacks("train", callbacks)
    own: dict[str, Any] = {"lag": lag, "timeout": timeout, "start_timeout": start_timeout, "restarts": restarts}
    own |= {"on_env_error": on_env_error, "min_workers": min_workers, "address": address}
    options = with_options("train.distributed", workers, own)
    check_workers(agent, "distributed", options.options())
    made = _make(agent, env, num_envs, options, should_stop)
    loop = partial(
        host,
        agent,
        made,
        env_steps=env_steps,
        key=key,
        callbacks=callbacks,
        report_every=report_every,
        devices=devices,
        replay_on=replay_on,
        env_steps_done=env_steps_done,
        should_stop=should_stop,
    )
    return _train(agent, made, target, resume_from, env_steps_done, loop)

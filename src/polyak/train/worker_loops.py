"""Training with workers: environments split over processes of one machine or of many, by Ray."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from polyak.core.types import Agent, Env, HostEnv
from polyak.envs.source import EnvSource, source_of
from polyak.loops.agent_check import check_agent
from polyak.loops.episodes import Episodes
from polyak.loops.loop import LoopState
from polyak.train.worker_settings import Workers
from polyak.workers.asynchronous_loop import check_shares_gradients
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


def with_new_episodes(env: HostEnv, state: LoopState, seed: int) -> LoopState:
    """The state of a training at the start of new episodes."""
    time_step = jax.tree.map(jnp.asarray, env.reset(seed))
    return dataclasses.replace(state, time_step=time_step, episodes=Episodes.fresh(env.num_envs))

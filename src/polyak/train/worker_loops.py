"""Training with workers: environments split over Ray processes on one or several machines."""

import dataclasses

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


def split_over_workers(env: Env | HostEnv, num_envs: int, workers: Workers) -> WorkerEnvs:
    """Create copies of an environment, split over workers; the environment is closed.

    Args:
        env: one copy, used only for its spec and its source.

    Raises:
        ValueError: the environment is in JAX, was passed as an object, or cannot be split.
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
            # A vectorized environment has one random generator for all copies.
            source = EnvSource(source.id, {**source.options, "vectorization": "sync"})
        # Imports Gymnasium, which JAX environments do not need.
        from polyak.envs.parts import split

        parts = split(source, num_envs, workers.number)
        if workers.make_engine is None:
            # Check before a run directory is created.
            check_ray(workers.address)
        make_engine = workers.make_engine or (
            lambda: RayWorkers(workers.number, workers.address, should_stop=lambda: group.should_stop())
        )
        group = WorkerGroup(parts, env.spec, num_envs, make_engine, workers.options())
        group.is_on_this_machine = workers.make_engine is None and workers.address is None
        if workers.address is not None:
            group.on_start = print
        return WorkerEnvs(group, source)
    finally:
        if isinstance(env, HostEnv):
            env.close()


def check_workers(agent: Agent, loop: str, options: WorkerOptions, devices: int = 1) -> None:
    """Check that an agent can be trained with workers in a loop.

    Raises:
        TypeError: the asynchronous loop is used, and the agent does not implement `SharesGradients`.
        ValueError: an option does not fit the loop, the lag exceeds the agent's `max_lag`, or the asynchronous loop has more
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
            f"train: lag={options.lag}: workers that push gradients do not wait; max_staleness bounds the age of gradients"
        )
    if devices != 1:
        raise ValueError(f"train: devices={devices}: the asynchronous loop supports one device only")


def with_new_episodes(env: HostEnv, state: LoopState, seed: int) -> LoopState:
    """Return the loop's state at the start of new episodes."""
    time_step = jax.tree.map(jnp.asarray, env.reset(seed))
    return dataclasses.replace(state, env=(), time_step=time_step, episodes=Episodes.fresh(env.num_envs))

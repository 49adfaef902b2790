"""Which cores a training computes on; what JAX reads once, when it starts."""

import contextlib
import math
import os

import jax

from polyak.agents.ppo import PPO
from polyak.core.spaces import leaf_spaces
from polyak.core.types import Agent
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.layers import Layers, is_image
from polyak.networks.recurrent import RecurrentActorCritic
from polyak.runs import MOST_THREADS
from polyak.train.loop import check_shares

# XLA's threads, read when JAX starts: as many as there are cores unless this says otherwise.
THREADS = "PJRT_NPROC"
# Another setting that JAX refuses to change once it has started.
DEVICES = "jax_num_cpu_devices"

# Up to here, and without images, the products of a minibatch are so small that waking another thread costs more than it gains:
# 2,048 rows in minibatches of 64 take 8.4 ms on one thread and 10.0 on two with (64, 64), 62 and 113 with (256, 256).
MOST_ROWS = 256
MOST_WIDTH = 256


def make_devices(wanted: int | None, loop: str, num_envs: int) -> int:
    """How many devices to use; on a CPU it makes that many of its cores, which must happen before JAX starts.

    By itself it takes two in the compiled loop with at least 64 environments: from there on the second core pays. For the
    host loop it makes the CPU compute where it is called from: handing a step of 50 µs to another thread costs as much again.

    Raises:
        ValueError: they cannot share the environments equally.
    """
    cores = len(os.sched_getaffinity(0))
    pays = loop == "compiled" and num_envs >= 64 and num_envs % 2 == 0 and cores >= 2
    devices = wanted or (2 if pays else 1)
    check_shares(devices, num_envs)
    if loop == "host" and wanted in (None, 1):
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if devices > 1:
        # Where JAX has started already, its devices are those that it has; the loop says so if they are too few.
        with contextlib.suppress(RuntimeError):
            jax.config.update(DEVICES, devices)
    return devices


def threads_for(agent: Agent, devices: int, num_envs: int, seeds_at_once: int = 1) -> int | None:
    """How many threads to start JAX with: as many as the environment says, else one a device where products are small.

    None leaves it to JAX, also where it has started already. How many they are changes the last bits of large products.
    """
    if has_started():
        return None
    given = os.environ.get(THREADS, "")
    if given.isdecimal() and 0 < int(given) <= MOST_THREADS:
        return int(given)
    small = seeds_at_once == 1 and isinstance(agent, PPO) and has_small_products(agent, devices, num_envs)
    return devices if small else None


def start_jax(threads: int | None) -> int:
    """Start JAX with so many threads, None for its own choice, unless it runs already; how many devices it has."""
    before = os.environ.get(THREADS)
    _put(threads if threads is None else str(threads))
    try:
        return jax.local_device_count()
    finally:
        _put(before)


def has_started() -> bool:
    """JAX has settled on its devices and threads, and refuses another number of devices."""
    devices = getattr(jax.config, DEVICES)
    try:
        jax.config.update(DEVICES, 2 if devices == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update(DEVICES, devices)
    return False


def has_small_products(agent: PPO, devices: int, num_envs: int) -> bool:
    """Whether other threads than the devices' own only hold an update up. Several devices take small parts of a minibatch."""
    network, obs = agent.network, [leaf for _, leaf in leaf_spaces(agent.spec.obs)]
    if not isinstance(network, Layers) or any(is_image(leaf) for leaf in obs):
        return False
    inputs = sum(math.prod(leaf.shape) for leaf in obs)
    critic = network.of_critic.hidden if isinstance(network, ActorCritic) else ()
    memory = (network.width,) if isinstance(network, RecurrentActorCritic) else ()
    rows = agent.num_steps * num_envs // agent.num_minibatches
    if agent.microbatch_size is not None:
        rows = agent.microbatch_size * (agent.num_steps if memory else 1)
    return max((inputs, *network.hidden, *critic, *memory)) <= MOST_WIDTH and (devices > 1 or rows <= MOST_ROWS)


def _put(value: str | None) -> None:
    if value is None:
        os.environ.pop(THREADS, None)
    else:
        os.environ[THREADS] = value

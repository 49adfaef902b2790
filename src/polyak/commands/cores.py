"""Which cores a training computes on; what JAX reads once, when it starts."""

import contextlib
import os

import jax

from polyak.agents.ppo import PPO
from polyak.core.spaces import leaf_spaces
from polyak.core.types import Agent
from polyak.parts.modules import Layers, is_image
from polyak.parts.networks import ActorCritic

# XLA's threads, read when JAX starts: as many as there are cores unless this says otherwise.
THREADS = "PJRT_NPROC"

# Up to here, and without images, the products of a minibatch are so small that waking another thread costs more than it gains:
# 2,048 rows in minibatches of 64 take 8.4 ms on one thread and 10.0 on two with (64, 64), 62 and 113 with (256, 256).
MOST_ROWS = 256
MOST_WIDTH = 256


def make_devices(wanted: int | None, loop: str, num_envs: int) -> int:
    """How many devices to use; on a CPU it makes that many of its cores, which must happen before JAX starts.

    By itself it takes two in the compiled loop with at least 64 environments: from there on the second core pays. For the
    host loop it makes the CPU compute where it is called from: handing a step of 50 µs to another thread costs as much again.
    """
    cores = len(os.sched_getaffinity(0))
    pays = loop == "compiled" and num_envs >= 64 and num_envs % 2 == 0 and cores >= 2
    devices = wanted or (2 if pays else 1)
    if loop == "host" and wanted in (None, 1):
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if devices > 1:
        # Where JAX has started already, its devices are those that it has; the loop says so if they are too few.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
    return devices


def start_devices(wanted: int | None, devices: int, agent: Agent, num_envs: int) -> int:
    """Start JAX, on a thread for each device where an update's products are small; how many devices there are to use.

    Args:
        wanted: as many must be used; None: those made, as far as they are there.
        devices: those made.
    """
    if isinstance(agent, PPO) and has_small_products(agent, devices, num_envs):
        os.environ.setdefault(THREADS, str(devices))
    return min(devices, jax.local_device_count()) if wanted is None else devices


def has_small_products(agent: PPO, devices: int, num_envs: int) -> bool:
    """Whether other threads than the devices' own only hold an update up. Several devices take small parts of a minibatch."""
    if not isinstance(agent.network, Layers) or any(is_image(leaf) for _, leaf in leaf_spaces(agent.spec.obs)):
        return False
    critic = agent.network.of_critic.hidden if isinstance(agent.network, ActorCritic) else ()
    narrow = max((*agent.network.hidden, *critic), default=0) <= MOST_WIDTH
    rows = agent.num_steps * num_envs // agent.num_minibatches
    return narrow and (devices > 1 or rows <= MOST_ROWS)

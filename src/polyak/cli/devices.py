"""Which cores a training computes on; what JAX reads once, when it starts."""

import contextlib
import os

import jax

from polyak.core.types import Agent
from polyak.runs import MOST_THREADS
from polyak.train.loop import check_shares

# XLA's threads, read when JAX starts: as many as there are cores unless this says otherwise.
THREADS = "PJRT_NPROC"
# Another setting that JAX refuses to change once it has started.
DEVICES = "jax_num_cpu_devices"


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
    return devices if seeds_at_once == 1 and agent.has_small_products(num_envs, devices) else None


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


def _put(value: str | None) -> None:
    if value is None:
        os.environ.pop(THREADS, None)
    else:
        os.environ[THREADS] = value

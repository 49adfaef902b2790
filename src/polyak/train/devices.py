"""Chooses the devices and threads of a training run, which JAX reads once, when it starts."""

import contextlib
import os

import jax

from polyak.core.types import Agent, Env, HasReplay, HostEnv
from polyak.loops.loop import check_shares
from polyak.loops.rollouts import MakesRollouts
from polyak.networks.layers import has_images
from polyak.runs import MAX_THREADS

# Environment variable for the number of XLA's threads, by default the number of cores; read when JAX starts.
THREADS = "PJRT_NPROC"
# JAX rejects a new value once it has started.
DEVICES = "jax_num_cpu_devices"
PLATFORMS = "jax_platforms"


def configure_devices(wanted: int | None, loop: str, num_envs: int) -> int:
    """Choose the number of devices, and configure the number of CPU devices of JAX before it starts.

    The default is two in the compiled loop with at least 64 environments, where a second core speeds training up, else one.

    Raises:
        ValueError: the number of environments is no multiple of the number of devices.
    """
    cores = len(os.sched_getaffinity(0))
    pays = loop == "compiled" and num_envs >= 64 and num_envs % 2 == 0 and cores >= 2
    devices = wanted or (2 if pays else 1)
    check_shares(devices, num_envs)
    if devices > 1:
        # Once JAX has started its devices are fixed; the loop raises if there are too few.
        with contextlib.suppress(RuntimeError):
            jax.config.update(DEVICES, devices)
    return devices


def splits_images(agent: Agent, num_envs: int) -> bool:
    """Return True if two devices speed up an agent outside the compiled loop: it has no replay, and observes images."""
    learns_from_images = has_images(agent.spec.obs) and not isinstance(agent, HasReplay)
    return learns_from_images and len(os.sched_getaffinity(0)) >= 2 and accepts(agent, num_envs, 2)


def default_devices(agent: Agent, env: Env | HostEnv, loop: str = "auto") -> int:
    """Return 2 if JAX has two devices and they speed training up (compiled: at least 64 environments; else: images), else 1."""
    if not isinstance(agent, Agent):
        return 1
    if isinstance(env, Env) and loop != "host":
        pays = env.num_envs >= 64 and accepts(agent, env.num_envs, 2)
    else:
        pays = not isinstance(env, MakesRollouts) and splits_images(agent, env.num_envs)
    return min(2, jax.local_device_count()) if pays else 1


def accepts(agent: Agent, num_envs: int, devices: int) -> bool:
    """Return True if the agent can train with this number of environments split over the devices."""
    if num_envs % devices:
        return False
    try:
        agent.check(num_envs // devices, devices)
    except ValueError:
        return False
    return True


def leave_accelerators() -> None:
    """Restrict JAX in this process to the CPU, unless it has started: the learners use the accelerators."""
    if not is_jax_started():
        jax.config.update(PLATFORMS, "cpu")


def configure_devices_for_seeds(count: int) -> None:
    """Configure JAX, before it starts, to see several CPU devices: the largest divisor of `count` up to the number of cores.

    A larger number that the caller has configured is kept.
    """
    cores = len(os.sched_getaffinity(0))
    _configure_at_least(max(n for n in range(1, min(cores, count) + 1) if count % n == 0))


def configure_devices_for_images(env: Env | HostEnv, loop: str, wanted: int | None) -> None:
    """Configure JAX, before it starts, to see two CPU devices for images outside the compiled loop, if there are two cores.

    The number of environments must be even. A larger number that the caller has configured is kept.
    """
    shows_images = (isinstance(env, HostEnv) or loop == "host") and has_images(env.spec.obs)
    if wanted is None and shows_images and env.num_envs % 2 == 0 and len(os.sched_getaffinity(0)) >= 2:
        _configure_at_least(2)


def _configure_at_least(devices: int) -> None:
    if devices > max(1, getattr(jax.config, DEVICES)):
        with contextlib.suppress(RuntimeError):
            jax.config.update(DEVICES, devices)


def dispatch_synchronously(*, on: bool = True) -> None:
    """Make JAX dispatch synchronously, for the host loop on one device: a thread costs as much as the 50 µs of a step.

    JAX reads this setting when it starts.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", not on)


def choose_threads(agent: Agent, devices: int, num_envs: int, parallel_seeds: int = 1) -> int | None:
    """Choose the number of JAX threads: the value of PJRT_NPROC, else one per device if the agent prefers it, else the cores.

    Returns None if JAX has started. The number changes the last bits of large products, so a run stores it.
    """
    if is_jax_started():
        return None
    setting = threads_setting()
    if setting is not None:
        return setting
    is_single = parallel_seeds == 1 and agent.prefers_single_thread(num_envs, devices)
    return devices if is_single else max(devices, len(os.sched_getaffinity(0)))


def threads_setting() -> int | None:
    """The value of PJRT_NPROC, the number of JAX threads that the user has set, or None."""
    setting = os.environ.get(THREADS, "")
    return int(setting) if setting.isdecimal() and 0 < int(setting) <= MAX_THREADS else None


def start_jax(threads: int | None) -> int:
    """Start JAX with a number of threads (None: default) unless it has started; returns the number of devices.

    Raises:
        ValueError: see `count_devices`.
    """
    before = os.environ.get(THREADS)
    _set_threads(threads if threads is None else str(threads))
    try:
        return count_devices()
    finally:
        _set_threads(before)


def count_devices() -> int:
    """Start JAX, and return the number of its devices.

    Raises:
        ValueError: JAX does not start, on the platforms in `JAX_PLATFORMS` or on any.
    """
    try:
        return jax.local_device_count()
    except (RuntimeError, AssertionError) as error:
        # JAX raises an AssertionError without a message for a known platform that is missing.
        platforms, reason = getattr(jax.config, PLATFORMS), str(error).partition(" (set JAX_PLATFORMS")[0]
        where = f" with JAX_PLATFORMS={platforms}" if platforms else ""
        way_out = "unset JAX_PLATFORMS, or set it to cpu" if platforms else "set JAX_PLATFORMS=cpu to use the CPU"
        raise ValueError(f"JAX does not start{where}{f': {reason}' if reason else ''}; {way_out}") from error


def is_jax_started() -> bool:
    """Return True if JAX has started: it then rejects another number of devices."""
    devices = getattr(jax.config, DEVICES)
    try:
        jax.config.update(DEVICES, 2 if devices == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update(DEVICES, devices)
    return False


def _set_threads(value: str | None) -> None:
    if value is None:
        os.environ.pop(THREADS, None)
    else:
        os.environ[THREADS] = value

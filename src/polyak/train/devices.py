"""The devices and threads of a training, which JAX reads once, when it starts."""

import contextlib
import os

import jax

from polyak.core.types import Agent, Env, HasReplay, HostEnv
from polyak.loops.loop import check_shares
from polyak.loops.rollouts import MakesRollouts
from polyak.networks.layers import has_images
from polyak.runs import MAX_THREADS

# The number of XLA's threads, read when JAX starts; by default the number of cores.
THREADS = "PJRT_NPROC"
# JAX rejects a new value once it has started.
DEVICES = "jax_num_cpu_devices"
PLATFORMS = "jax_platforms"


def configure_devices(wanted: int | None, loop: str, num_envs: int) -> int:
    """Choose the number of devices and configure JAX, before it starts, to see that many on a CPU.

    By default two in the compiled loop with at least 64 environments, where a second core pays, else one.

    Raises:
        ValueError: the devices cannot share the environments equally.
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
    """Whether two devices pay for an agent outside the compiled loop: it learns from rollouts, and those have images."""
    learns_from_images = has_images(agent.spec.obs) and not isinstance(agent, HasReplay)
    return learns_from_images and len(os.sched_getaffinity(0)) >= 2 and accepts(agent, num_envs, 2)


def default_devices(agent: Agent, env: Env | HostEnv, loop: str = "auto") -> int:
    """Two devices if JAX has two and they pay: in the compiled loop for at least 64 environments, else for images."""
    if not isinstance(agent, Agent):
        return 1
    if isinstance(env, Env) and loop != "host":
        pays = env.num_envs >= 64 and accepts(agent, env.num_envs, 2)
    else:
        pays = not isinstance(env, MakesRollouts) and splits_images(agent, env.num_envs)
    return min(2, jax.local_device_count()) if pays else 1


def accepts(agent: Agent, num_envs: int, devices: int) -> bool:
    """Whether the agent can train with this number of environments split over the devices."""
    if num_envs % devices:
        return False
    try:
        agent.check(num_envs // devices, devices)
    except ValueError:
        return False
    return True


def leave_accelerators() -> None:
    """Compute on the CPU in this process, unless JAX has started: learners have the accelerators."""
    if not is_jax_started():
        jax.config.update(PLATFORMS, "cpu")


def configure_devices_for_seeds(count: int) -> None:
    """Configure JAX, before it starts, to see as many devices on a CPU as there are cores that can share the seeds equally.

    More devices that the caller has configured stay.
    """
    cores = len(os.sched_getaffinity(0))
    _configure_at_least(max(n for n in range(1, min(cores, count) + 1) if count % n == 0))


def configure_devices_for_images(env: Env | HostEnv, loop: str, wanted: int | None) -> None:
    """Configure JAX, before it starts, to see two devices on a CPU of two cores, if they can share the environments.

    Outside the compiled loop. More devices that the caller has configured stay.
    """
    shows_images = (isinstance(env, HostEnv) or loop == "host") and has_images(env.spec.obs)
    if wanted is None and shows_images and env.num_envs % 2 == 0 and len(os.sched_getaffinity(0)) >= 2:
        _configure_at_least(2)


def _configure_at_least(devices: int) -> None:
    if devices > max(1, getattr(jax.config, DEVICES)):
        with contextlib.suppress(RuntimeError):
            jax.config.update(DEVICES, devices)


def dispatch_synchronously(*, on: bool = True) -> None:
    """For the host loop on one device: another thread costs as much as the step of 50 µs that it would compute.

    JAX reads it when it starts.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", not on)


def choose_threads(agent: Agent, devices: int, num_envs: int, seeds_at_once: int = 1) -> int | None:
    """The number of threads to start JAX with: that of PJRT_NPROC, else one per device if matrix products are small.

    None is JAX's default, also if JAX has started. The number changes the last bits of large products.
    """
    if is_jax_started():
        return None
    setting = os.environ.get(THREADS, "")
    if setting.isdecimal() and 0 < int(setting) <= MAX_THREADS:
        return int(setting)
    return devices if seeds_at_once == 1 and agent.prefers_single_thread(num_envs, devices) else None


def start_jax(threads: int | None) -> int:
    """Start JAX with this number of threads, None for its default, unless it has started; returns the number of devices.

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
    """The number of JAX's devices; starts it.

    Raises:
        ValueError: it does not start, on the platforms that `JAX_PLATFORMS` names, or at all.
    """
    try:
        return jax.local_device_count()
    except (RuntimeError, AssertionError) as error:
        # For a platform that it knows, and that is not there, JAX asserts without a word.
        platforms, reason = getattr(jax.config, PLATFORMS), str(error).partition(" (set JAX_PLATFORMS")[0]
        where = f" with JAX_PLATFORMS={platforms}" if platforms else ""
        way_out = "leave it out, or take cpu" if platforms else "JAX_PLATFORMS=cpu computes on the CPU"
        raise ValueError(f"JAX does not start{where}{f': {reason}' if reason else ''}; {way_out}") from error


def is_jax_started() -> bool:
    """Whether JAX has fixed its devices and threads: it rejects another number of devices then."""
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

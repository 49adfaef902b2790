"""Memory of a replay: checks that it fits before anything runs, and moves loop states without a second copy of the replay."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import Agent, HasReplay, PyTree, copy_buffers
from polyak.core.warn import warn
from polyak.loops.processes import put

T = TypeVar("T")


def check_memory(agent: Agent, devices: int = 1, seeds: int = 1, *, num_envs: int | None = None, on_host: bool = False) -> None:
    """Check that the agent's replay and a rollout fit into the available memory of the devices or of the host.

    Args:
        num_envs: number of environments of a rollout; None skips the check of the rollout.
        on_host: the replay is in host memory.

    Raises:
        ValueError: the replay or the rollout does not fit; the message has the bytes needed and available.
    """
    name = type(agent).__name__
    if num_envs is not None:
        steps = f"num_steps={agent.num_steps} steps of num_envs={num_envs} environments"
        needed = seeds * num_envs * rollout_bytes(agent.spec, agent.num_steps)
        _check_fits(f"a rollout of {steps} needs at least", needed, "use fewer", devices, on_host=False)
    if isinstance(agent, HasReplay):
        field = agent.replay_field
        shapes = jax.eval_shape(lambda key: getattr(agent.init(key), field), jax.random.key(0))
        needed = seeds * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        _check_fits(f"the replay of {name} needs", needed, "use a smaller capacity", devices, on_host=on_host)


def rollout_bytes(spec: EnvSpec, num_steps: int) -> int:
    """Return the bytes of one environment's rollout: observations, rewards, flags and actions, without the policy's `info`."""
    obs, action = (sum(x.nbytes for x in jax.tree.leaves(zeros(space))) for space in (spec.obs, spec.action))
    reward_and_flags = 4 + 3
    return (num_steps + 1) * (obs + reward_and_flags) + num_steps * action


def _check_fits(what: str, needed: int, advice: str, devices: int, *, on_host: bool) -> None:
    stats = None if on_host else jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        where, available = f"{devices} device(s)", devices * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    else:
        where, available = "this machine", available_memory()
    if available is not None and needed > available:
        raise ValueError(f"train: {what} {needed:,} bytes, {where} has {available:,} available; {advice}")


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate: the free memory of the machine, or the limit of its cgroups.

    Returns None if the operating system is not Linux.

    Args:
        root: directory in which `proc` and `sys` are mounted.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return max(0, min([free, *_cgroup_limits(root)]))


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the bytes left in each cgroup of the process, of version 1 or 2, up to the root of the hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage, cache = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be a path of the host, of which only the top is mounted.
        inside = top / path.lstrip("/")
        for group in (inside, *[parent for parent in inside.parents if parent.is_relative_to(top)]):
            left = _bytes_left(group / limit, group / usage, group / "memory.stat", cache)
            if left is not None:
                yield left


def _bytes_left(limit: Path, usage: Path, stat: Path, cache: str) -> int | None:
    """Return the limit minus the used bytes, without page cache, which the kernel can drop; None without a limit."""
    try:
        most, used = limit.read_text().strip(), int(usage.read_text())
        cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.split()[:1] == [cache]]
        return None if most == "max" else int(most) - used + sum(cached)
    except (OSError, ValueError):
        return None


def copy_except_replay(agent: Agent, state: T) -> T:
    """Copy every array of the loop's state except the replay's arrays, so that the whole state can be donated.

    The replay is too large to copy: `state` cannot be used any more once the result is donated.
    """
    if not isinstance(agent, HasReplay):
        return copy_buffers(state)
    loop_state: Any = state
    replay_state = getattr(loop_state.agent, agent.replay_field)
    rest: Any = copy_buffers(replace(loop_state, agent=_with_replay(agent, loop_state.agent, ())))
    result: T = replace(rest, agent=_with_replay(agent, rest.agent, replay_state))
    return result


def move_to_one_device(state: T) -> T:
    """Move the loop's state to one device: it may be on several, or its replay in host memory after `replay_on="host"`."""
    devices = {device for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    if len(devices) == 1:
        return state
    loop_state: Any = state
    moved: T = jax.device_put(state, min(loop_state.key.devices(), key=lambda device: device.id))
    return moved


def warn_of_other_devices(agent: Agent, agent_state: PyTree, num_envs: int, devices: int) -> None:
    """Warn if the replay of a state has rows of another number of devices, which its next rollout discards."""
    if not isinstance(agent, HasReplay):
        return
    # Slots, environments of each device, and rollout length; zeros before the first rollout.
    layout = getattr(getattr(agent_state, agent.replay_field), "layout", (0, 0, 0))
    own = int(layout[1])
    if own and own * devices != num_envs:
        emptied = f"with devices={devices} it starts empty, and learning waits for learning_starts transitions"
        warn(f"train: resume_from has a replay of devices={num_envs // own}; {emptied}")


def put_on_devices(tree: PyTree, shardings: PyTree) -> Any:
    """Move arrays to devices leaf by leaf, deleting the arrays of `tree`, so that at most one leaf exists twice.

    Args:
        shardings: a prefix tree of `tree`.
    """
    return jax.tree.map(_move, tree, jax.tree.broadcast(shardings, tree))


def _move(x: Any, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, donate=True)
    placed = put(x, sharding)
    if isinstance(x, jax.Array) and x is not placed:
        x.delete()
    return placed


def with_new_replay(agent: Agent, agent_state: PyTree, shardings: PyTree = None) -> PyTree:
    """Return the agent's state with an empty replay; the arrays of the old replay are deleted.

    Args:
        shardings: shardings of the agent's state, as a prefix tree; None is the default device.
    """
    if not isinstance(agent, HasReplay):
        return agent_state
    field = agent.replay_field
    places = None if shardings is None else getattr(jax.tree.broadcast(shardings, agent_state), field)
    for leaf in jax.tree.leaves(getattr(agent_state, field)):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    # Compiled, so that only the replay of a new state is computed.
    make = jax.jit(lambda: getattr(agent.init(jax.random.key(0)), field), out_shardings=places)
    return _with_replay(agent, agent_state, make())


def draws_data(agent: Agent) -> bool:
    """Return True for an agent whose replay needs data in its state, a `MixedReplay`."""
    return bool(getattr(getattr(agent, "replay", None), "has_data", False))


def check_data(agent: Agent, data: PyTree) -> None:
    """Check that an agent with a `MixedReplay` gets data.

    Raises:
        ValueError: they are missing.
    """
    if draws_data(agent) and data is None:
        raise ValueError("train: data must be passed, as the agent has a MixedReplay, whose data are in the state alone")


def with_data(agent: Any, agent_state: PyTree, data: PyTree) -> PyTree:
    """Return the agent's state with data in its replay, where that is."""
    replay_state = getattr(agent_state, agent.replay_field)
    return _with_replay(agent, agent_state, agent.replay.with_data(replay_state, data))


def _with_replay(agent: HasReplay, agent_state: Any, replay_state: PyTree) -> Any:
    return replace(agent_state, **{agent.replay_field: replay_state})

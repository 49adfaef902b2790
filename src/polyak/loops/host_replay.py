"""The replay of an agent in the memory of the host, while the agent learns on an accelerator."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice
from polyak.core.spaces import zeros
from polyak.core.types import Agent, HasReplay, PyTree, Rollout, SupportsHostReplay, TimeStep, copy_buffers
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.program_cache import cached_per_env, shape_of

ReplayOn: TypeAlias = Literal["device", "host"]
"""The memory of a replay: that of the device that learns, or of the host."""

Arrays: TypeAlias = tuple[TimeStep, PyTree, PyTree, PyTree]
"""`Collected.arrays`: time steps, actions, info, and the carry after the last step."""

Update: TypeAlias = Callable[[list[Any], Array, Arrays], tuple[Any, ...]]
"""An update: of the leaves of the state, the means and a rollout to the fields of `Learned`, of which the leaves are first."""


@runtime_checkable
class ReplayPlace(Protocol):
    """The memory of a training's replay, and what the host loop's state has in its place."""

    def take(self, state: LoopState) -> LoopState:
        """The state to learn with, of one with the replay."""
        ...

    def give_back(self, state: LoopState) -> LoopState:
        """The reverse."""
        ...

    def compile(self, arrays: Arrays) -> None:
        """Compile for rollouts like this one."""
        ...

    def learn(self, update: Update, leaves: list[Any], means: Array, arrays: Arrays) -> tuple[Any, ...]:
        """What `update` returns for the leaves of the state, the means and a rollout."""
        ...


class HostReplay:
    """A replay in the host's memory. Its programs run there; batches go to the device that learns.

    Args:
        agent: what is trained.
        learner: the device.
    """

    def __init__(self, agent: Agent, learner: jax.Device) -> None:
        assert isinstance(agent, SupportsHostReplay), "check_replay_on has checked it"
        self._agent: Any = agent
        self._field, self._learner, self._host = agent.replay_field, learner, host_device()
        self._settings: list[Any] = jax.device_put(jax.tree.leaves(agent), self._host)
        self._draw: Any = None
        self._return_errors: Any = None
        self._shapes: PyTree = None

    def take(self, state: LoopState) -> LoopState:
        """The state with batches of zeros in place of the replay, on the device that learns."""
        agent_state: Any = state.agent
        self._replay = jax.device_put(getattr(agent_state, self._field), self._host)
        # Copies: an update donates the state.
        copies = copy_buffers((agent_state.env_steps, state.key, state.iteration, state.carry))
        self._env_steps, self._key, self._iteration, self._carry = jax.device_put(copies, self._host)
        if self._shapes is None:
            self._draw, self._return_errors = _programs(shape_of(self._agent, state))
            counters = (self._key, self._iteration, self._env_steps)
            self._shapes = jax.eval_shape(self._draw, self._settings, self._replay, self._empty_rollout(state), *counters)[1]
        drawn = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._shapes)
        learned: LoopState = jax.device_put(self._with(state, drawn), self._learner)
        self._structure = jax.tree.structure(learned)
        return learned

    def give_back(self, state: LoopState) -> LoopState:
        """The state with the replay."""
        return self._with(state, self._replay)

    def compile(self, arrays: Arrays) -> None:
        """Compile the programs that run on the host."""
        time_steps, actions, _, carry = arrays
        rollout = Rollout(time_steps, actions, carry=carry)
        counters = (self._key, self._iteration, self._env_steps)
        draw = self._draw.lower(self._settings, self._replay, rollout, *counters).compile()
        return_errors = self._return_errors.lower(self._settings, self._replay, self._shapes.priorities).compile()
        self._draw, self._return_errors = partial(draw, self._settings), partial(return_errors, self._settings)

    def learn(self, update: Update, leaves: list[Any], means: Array, arrays: Arrays) -> tuple[Any, ...]:
        """Add the rollout to the replay, put the batches of the update into the state, and set their priorities after it."""
        time_steps, actions, _, carry = arrays
        rollout = Rollout(time_steps, actions, carry=self._carry)
        self._replay, drawn, counters = self._draw(self._replay, rollout, self._key, self._iteration, self._env_steps)
        (self._iteration, self._env_steps), self._carry = counters, carry
        state = self._with(jax.tree.unflatten(self._structure, leaves), jax.device_put(drawn, self._learner))
        learned = update(jax.tree.leaves(state), means, arrays)
        after: Any = jax.tree.unflatten(self._structure, learned[0])
        errors = jax.device_put(getattr(after.agent, self._field).priorities, self._host)
        self._replay = self._return_errors(self._replay, errors)
        return learned

    def _with(self, state: LoopState, replay: PyTree) -> LoopState:
        agent_state: Any = state.agent
        return replace(state, agent=replace(agent_state, **{self._field: replay}))

    def _empty_rollout(self, state: LoopState) -> Rollout:
        num_steps, num_envs = self._agent.num_steps, len(state.time_step.reward)
        time_steps = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (num_steps + 1, *x.shape)), state.time_step)
        actions = jax.tree.map(jnp.asarray, zeros(self._agent.spec.action, (num_steps, num_envs)))
        return Rollout(time_steps, actions, carry=state.carry)


class DeviceReplay:
    """A replay that stays in the agent's state."""

    def take(self, state: LoopState) -> LoopState:
        """The state."""
        return state

    def give_back(self, state: LoopState) -> LoopState:
        """The state."""
        return state

    def compile(self, arrays: Arrays) -> None:
        """Nothing runs but the update."""

    def learn(self, update: Update, leaves: list[Any], means: Array, arrays: Arrays) -> tuple[Any, ...]:
        """`update`, and nothing else."""
        return update(leaves, means, arrays)


def host_device() -> jax.Device:
    """The device whose memory is the host's.

    Raises:
        ValueError: JAX was started without its CPU.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            f"train: replay_on='host' needs JAX's CPU beside the accelerator: add cpu to JAX_PLATFORMS ({error})"
        ) from error


def check_replay_on(agent: Agent, loop: str, devices: int, replay_on: Any, in_checkpoints: bool = True) -> None:
    """Check that the agent's replay can be in this memory, and that there is one where checkpoints are to be without.

    Raises:
        TypeError, ValueError: it is neither `"device"` nor `"host"`, or the agent has no replay that can be outside of its
            state, or the loop or the number of devices needs it there, or JAX was started without its CPU.
    """
    check_choice("train", "replay_on", replay_on, ("device", "host"))
    if not in_checkpoints and not isinstance(agent, HasReplay):
        raise ValueError(f"train: checkpoint_replay={in_checkpoints}: {type(agent).__name__} has no replay; leave it out")
    if replay_on == "device":
        return
    if not isinstance(agent, HasReplay):
        raise ValueError(f"train: replay_on='host': {type(agent).__name__} has no replay")
    if not isinstance(agent, SupportsHostReplay):
        missing = " and ".join(name for name in ("draw_batches", "return_errors") if getattr(agent, name, None) is None)
        raise ValueError(
            f"train: replay_on='host': {type(agent).__name__} lacks {missing} of types.SupportsHostReplay; use 'device'"
        )
    if loop not in ("host", "distributed"):
        raise ValueError(f"train: replay_on='host' needs the host loop or workers, got loop={loop!r}")
    if devices != 1:
        raise ValueError(f"train: replay_on='host' needs devices=1, got {devices}")
    host_device()


def replay_memory(replay_on: ReplayOn) -> AbstractContextManager[Any]:
    """A context in which new arrays are in the memory of the replay: in that of the learner's device it might not fit."""
    return nullcontext() if replay_on == "device" else jax.default_device(host_device())


@cached_per_env
def _programs(shape: tuple[Any, ...]) -> tuple[Any, Any]:
    """`_draw` and the agent's `return_errors`, jitted; of the agent's leaves in place of the agent.

    Args:
        shape: `shape_of` the agent and the loop's state.
    """
    structure = shape[0].children()[0]

    def draw(settings: list[Any], replay: PyTree, *inputs: Any) -> tuple[PyTree, PyTree, Any]:
        return _draw(structure.unflatten(settings), replay, *inputs)

    def return_errors(settings: list[Any], replay: PyTree, errors: PyTree) -> PyTree:
        return structure.unflatten(settings).return_errors(replay, errors)

    return jax.jit(draw, donate_argnums=1), jax.jit(return_errors, donate_argnums=1)


def _draw(
    agent: SupportsHostReplay,
    replay: PyTree,
    rollout: Rollout,
    key: PRNGKeyArray,
    iteration: UInt32[Array, ""],
    env_steps: UInt32[Array, ""],
) -> tuple[PyTree, PyTree, tuple[UInt32[Array, ""], UInt32[Array, ""]]]:
    """The replay, the batches, and the numbers of the iteration and the env_steps after the update."""
    update_key = iteration_keys(key, iteration, agent.num_steps).update
    replay, drawn = agent.draw_batches(replay, rollout, update_key, env_steps)
    return replay, drawn, (iteration + jnp.uint32(1), drawn.env_steps)

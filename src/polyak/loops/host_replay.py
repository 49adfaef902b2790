"""An agent's replay in host memory, while the agent trains on an accelerator."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice
from polyak.core.spaces import zeros
from polyak.core.types import Agent, HasReplay, PyTree, Rollout, SupportsHostReplay, TimeStep, copy_buffers
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.program_cache import cached_per_env, shape_of

ReplayOn: TypeAlias = Literal["device", "host"]
"""Memory of a replay: the memory of the training device, or host memory."""

Arrays: TypeAlias = tuple[TimeStep, PyTree, PyTree, PyTree]
"""`Collected.arrays`: time steps, actions, info, and the carry after the last step."""

Update: TypeAlias = Callable[[list[Any], Array, Arrays], tuple[Any, ...]]
"""`update(leaves, means, arrays)`: leaves of the state, means of metrics, a rollout; returns the fields of `Learned`."""


class HostReplay:
    """A replay in host memory. Its programs run on the CPU; batches are copied to the training device.

    Args:
        agent: the agent that is trained.
        learner: the training device.
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
        """Take the replay; returns the state with batches of zeros in its place, on the training device."""
        agent_state: Any = state.agent
        self._replay = jax.device_put(getattr(agent_state, self._field), self._host)
        # Copies, because an update donates the state.
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
        """Return the state with the replay."""
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
        """Add the rollout to the replay, update with batches of the replay, and set the new priorities of the batches."""
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
        """Do nothing."""

    def learn(self, update: Update, leaves: list[Any], means: Array, arrays: Arrays) -> tuple[Any, ...]:
        """Call `update`."""
        return update(leaves, means, arrays)


ReplayPlace: TypeAlias = HostReplay | DeviceReplay
"""The place of the replay while the agent trains. `take` and `give_back` move it out of the loop's state and back; `learn`
calls an update on the leaves of the state, the means and a rollout, with batches of the replay."""


def host_device() -> jax.Device:
    """Return the CPU device of JAX.

    Raises:
        ValueError: JAX was started without the CPU platform.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            f"train: replay_on='host' needs JAX's CPU platform next to the accelerator: add cpu to JAX_PLATFORMS ({error})"
        ) from error


def check_replay_on(agent: Agent, loop: str, devices: int, replay_on: Any, in_checkpoints: bool = True) -> None:
    """Check that the agent supports `replay_on`, and has a replay if `in_checkpoints` is False.

    Raises:
        TypeError, ValueError: `replay_on` is neither `"device"` nor `"host"`; or the agent, the loop or the number of devices
            does not support a replay in host memory; or JAX was started without the CPU platform.
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


def default_memory(replay_on: ReplayOn) -> AbstractContextManager[Any]:
    """Return a context in which new arrays are created in the memory of the replay, as device memory may be too small."""
    return nullcontext() if replay_on == "device" else jax.default_device(host_device())


@cached_per_env
def _programs(shape: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return `_draw` and the agent's `return_errors`, jitted; both take the agent's leaves in place of the agent.

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
    env_steps: PyTree,
) -> tuple[PyTree, PyTree, tuple[UInt32[Array, ""], PyTree]]:
    """Draw batches; returns the replay, the batches, and the iteration and env_steps after the update."""
    update_key = iteration_keys(key, iteration, agent.num_steps).update
    replay, drawn = agent.draw_batches(replay, rollout, update_key, env_steps)
    return replay, drawn, (iteration + jnp.uint32(1), drawn.env_steps)

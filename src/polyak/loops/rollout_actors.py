"""Actors of the host loop's rollouts; the program of an update also computes the inputs of the next actor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from polyak.core.policy_faults import ExceptionRelay
from polyak.core.types import Agent, PyTree
from polyak.loops.host_actor import Actor, Actors, choose_actors, step_keys
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.program_cache import cached_per_env, shape_of


@dataclass(frozen=True)
class ActorInputs:
    """Arrays that the update program computes for acting in the next rollout.

    They are part of the update program because the call of a separate program would cost more than the computation.

    Attributes:
        actors: acts with the arrays; None if a rollout has one step, whose action is the array.
    """

    actors: Actors | None

    def compute(self, agent: Agent, state: LoopState) -> PyTree:
        """Return the action, or the policy's leaves and the random numbers of its actions; traced."""
        keys = step_keys(iteration_keys(state.key, state.iteration, agent.num_steps).act, jnp.uint32(0), agent.num_steps)
        # Results must be equal, bit for bit, in the update program and in the separate program that runs before the first
        # rollout and after a resume.
        policy, keys = jax.lax.optimization_barrier((agent.collect_policy(state.agent), keys))
        if self.actors is not None:
            return jax.tree.leaves(policy), self.actors.draws(policy, keys)
        time_step, carry = jax.lax.optimization_barrier((state.time_step, state.carry))
        return policy.action(time_step, carry, keys[0])

    def actor(self, inputs: PyTree) -> Actor:
        """Create the actor of a rollout."""
        if self.actors is None:
            return lambda t, time_step, carry: inputs
        leaves, draws = inputs
        act, draws = self.actors.start(leaves), np.asarray(draws)
        return lambda t, time_step, carry: act(time_step, carry, draws[t])


class RolloutActors:
    """Creates the actors of rollouts, from the leaves of the loop's state or from `ActorInputs`.

    Args:
        agent: the agent that is trained.
        state: the loop's state.
        mesh: the devices over which the update is split, or None.
        settings: leaves of the agent.
        exact: require actions equal, bit for bit, to the actions of a compiled loop.
    """

    def __init__(self, agent: Agent, state: LoopState, mesh: Mesh | None, settings: list[Any], *, exact: bool) -> None:
        policy = jax.eval_shape(agent.collect_policy, state.agent)
        acts_once = agent.num_steps == 1 and mesh is None and not ExceptionRelay(policy).active
        num_envs, key_impl = state.time_step.reward.shape[0], str(jax.random.key_impl(state.key))
        self.inputs = ActorInputs(None if acts_once else choose_actors(policy, key_impl, num_envs, exact=exact))
        self._program, self._settings = _inputs_program(shape_of(agent, state), self.inputs), settings
        self._device = None if mesh is None else mesh.devices.flat[0]

    def from_state(self, leaves: list[Any]) -> Actor:
        """Create the actor of the next rollout from the leaves of the state."""
        return self.from_inputs(self._program(self._settings, leaves))

    def from_inputs(self, inputs: PyTree) -> Actor:
        """Create the actor of the next rollout from the result of `ActorInputs.compute`."""
        # Results of an update on several devices are on all devices, and each device would compute the actions.
        return self.inputs.actor(inputs if self._device is None else jax.device_put(inputs, self._device))


def rollout_actor(agent: Agent, state: LoopState, *, exact: bool) -> Actor:
    """Create the actor of the next rollout."""
    return RolloutActors(agent, state, None, jax.tree.leaves(agent), exact=exact).from_state(jax.tree.leaves(state))


@cached_per_env
def _inputs_program(shape: tuple[Any, ...], inputs: ActorInputs) -> Callable[[list[Any], list[Any]], PyTree]:
    def compute(settings: list[Array], leaves: list[Array]) -> PyTree:
        agent, state = shape[0].unflatten([*settings, *leaves])
        return inputs.compute(agent, state)

    return jax.jit(compute)

"""The actors of the host loop's rollouts, of which the update's program computes the next one's arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from polyak.core.policy_faults import ExceptionRelay
from polyak.core.types import Agent, PyTree
from polyak.loops.actor import Acting, Actor, step_keys, way_of_acting
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.program_cache import cached_per_env, shape_of


@dataclass(frozen=True)
class Preparation:
    """What a compiled program computes of the loop's state for the actor of the next rollout.

    The program of an update does it as well, for each program that is called costs the host loop more than what it computes.

    Attributes:
        acting: how the actor acts; None where a rollout has one step, whose action the program computes.
    """

    acting: Acting | None

    def prepare(self, agent: Agent, state: LoopState) -> PyTree:
        """The action, or the policy's leaves and what it draws from; traced."""
        keys = step_keys(iteration_keys(state.key, state.iteration, agent.num_steps).act, jnp.uint32(0), agent.num_steps)
        # Within the program of an update the bits are those of a program of their own, as before the first rollout and after a
        # resume.
        inputs = agent.collect_policy(state.agent), keys, state.time_step, state.carry
        policy, keys, time_step, carry = jax.lax.optimization_barrier(inputs)
        if self.acting is None:
            return policy.action(time_step, carry, keys[0])
        return jax.tree.leaves(policy), self.acting.draws(policy, keys)

    def actor(self, prepared: PyTree) -> Actor:
        """The actor of a rollout."""
        if self.acting is None:
            return lambda t, time_step, carry: prepared
        return self.acting.actor(*prepared)


class ActorSource:
    """The actors of a training's rollouts: each of the leaves of the loop's state, or of what an update has prepared.

    Args:
        agent: what is trained.
        state: the loop's state.
        mesh: the devices that the update is split over, or None.
        settings: the agent's leaves.
        exact: whether actions must equal those of a compiled loop bit for bit.
    """

    def __init__(self, agent: Agent, state: LoopState, mesh: Mesh | None, settings: list[Any], *, exact: bool) -> None:
        policy = jax.eval_shape(agent.collect_policy, state.agent)
        acts_once = agent.num_steps == 1 and mesh is None and not ExceptionRelay(policy).active
        num_envs, key_impl = state.time_step.reward.shape[0], str(jax.random.key_impl(state.key))
        self.preparation = Preparation(None if acts_once else way_of_acting(policy, key_impl, num_envs, exact=exact))
        self._program, self._settings = _prepare_program(shape_of(agent, state), self.preparation), settings
        self._device = None if mesh is None else mesh.devices.flat[0]

    def of_state(self, leaves: list[Any]) -> Actor:
        """The actor of the next rollout, of the leaves of the state."""
        return self.of_prepared(self._program(self._settings, leaves))

    def of_prepared(self, prepared: PyTree) -> Actor:
        """The actor of the next rollout, of what `Preparation.prepare` has returned for the state."""
        # What the update of several devices returns is on all of them, and each would compute the actions.
        return self.preparation.actor(prepared if self._device is None else jax.device_put(prepared, self._device))


def rollout_actor(agent: Agent, state: LoopState, *, exact: bool) -> Actor:
    """The actor for the next rollout."""
    return ActorSource(agent, state, None, jax.tree.leaves(agent), exact=exact).of_state(jax.tree.leaves(state))


@cached_per_env
def _prepare_program(shape: tuple[Any, ...], preparation: Preparation) -> Callable[[list[Any], list[Any]], PyTree]:
    def prepare(settings: list[Array], leaves: list[Array]) -> PyTree:
        agent, state = shape[0].unflatten([*settings, *leaves])
        return preparation.prepare(agent, state)

    return jax.jit(prepare)

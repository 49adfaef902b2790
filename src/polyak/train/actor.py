"""How the host loop acts: in NumPy where the policy is small enough to, else by one jitted call a step."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from polyak.core.policy_faults import CallsPython
from polyak.core.types import Agent, NumPyPolicy, Policy, PolicyStep, PyTree, TimeStep
from polyak.train.loop import LoopState, iteration_keys, kept, shape_of
from polyak.train.packing import packing
from polyak.train.philox import philox_key


@runtime_checkable
class Acting(Protocol):
    """Acts through one rollout after the other."""

    def rollout(self, agent: Agent, state: LoopState) -> Callable[[int, TimeStep, PyTree], PolicyStep]:
        """`act(t, time_step, carry)` of the next rollout, in which arrays are NumPy's."""
        ...


def acting(agent: Agent, state: LoopState, mesh: Mesh | None, *, exact: bool) -> Acting:
    """The faster of the two ways that the policy has.

    Args:
        exact: the compiled loop's actions to the bit; NumPy's may differ where two are equally probable up to rounding.
    """
    policy = jax.eval_shape(agent.collect_policy, state.agent)
    num_envs = state.time_step.reward.shape[0]
    # What calls Python calls it the same way from a compiled program, and gets the same answers.
    exact = exact and not isinstance(policy, CallsPython)
    if not exact and isinstance(policy, NumPyPolicy) and policy.suits_numpy(num_envs):
        return _in_numpy(num_envs, shape_of(agent, state))
    return _jitted(mesh, shape_of(agent, state))


# One for each shape of the arguments, so that only the last few programs are kept.


@kept
def _in_numpy(num_envs: int, shape: tuple[Any, ...]) -> Acting:
    return NumPyActor(num_envs)


@kept
def _jitted(mesh: Mesh | None, shape: tuple[Any, ...]) -> Acting:
    structure, leaves, _ = shape
    agent, state = jax.tree.unflatten(structure, leaves)
    return Jitted(agent, state, mesh)


class NumPyActor:
    """All that is random is drawn beforehand, in one jitted call a rollout; the policy's arrays are NumPy's."""

    def __init__(self, num_envs: int) -> None:
        def prepare(agent: Agent, state: LoopState) -> tuple[Policy, Array]:
            policy: Any = agent.collect_policy(state.agent)
            words = iteration_keys(state.key, state.iteration, agent.num_steps).act
            return policy, jax.lax.map(lambda its_words: policy.noise(philox_key(its_words), num_envs), words)

        self._prepare = jax.jit(prepare)

    def rollout(self, agent: Agent, state: LoopState) -> Callable[[int, TimeStep, PyTree], PolicyStep]:
        """Nothing of JAX is called while the environment steps."""
        policy, noise = jax.tree.map(np.asarray, self._prepare(agent, state))
        act = policy.in_numpy()
        return lambda t, time_step, carry: act(time_step, carry, noise[t])


class Jitted:
    """One call a step, with as few arrays as possible: the policy in one vector, keys already on the device, and of the time
    step only what the policy reads. Each array handed over costs 1 to 3 µs.

    Args:
        agent, state: shapes will do.
        mesh: of the update.
    """

    def __init__(self, agent: Agent, state: LoopState, mesh: Mesh | None) -> None:
        pack, unpack = packing(jax.eval_shape(lambda agent, state: agent.collect_policy(state.agent), agent, state))
        time_step = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.time_step)

        def prepare(agent: Agent, state: LoopState) -> tuple[PyTree, Array]:
            keys = iteration_keys(state.key, state.iteration, agent.num_steps)
            return pack(agent.collect_policy(state.agent)), keys.act

        def act(packed: PyTree, words: Array, seen: dict[str, PyTree], carry: PyTree) -> PolicyStep:
            return unpack(packed).action(dataclasses.replace(time_step, **seen), carry, philox_key(words))

        self._prepare, self._act, self._mesh = jax.jit(prepare), jax.jit(act), mesh
        packed, words = jax.eval_shape(prepare, agent, state)
        fields = {field.name: getattr(time_step, field.name) for field in dataclasses.fields(time_step)}
        self._sees = _read(act, packed, jax.ShapeDtypeStruct(words.shape[1:], words.dtype), fields, state.carry)

    def rollout(self, agent: Agent, state: LoopState) -> Callable[[int, TimeStep, PyTree], PolicyStep]:
        """With a carry that is NumPy's at first, and then stays on the device."""
        # What an update on several devices leaves is on all of them, and acting would be done by each.
        prepared = self._prepare(agent, state)
        packed, words_of_all = prepared if self._mesh is None else jax.device_put(prepared, self._mesh.devices.flat[0])
        # Outside of the program: with a result for each of thousands of steps it would compile for minutes.
        words = list(words_of_all)
        jitted, sees = self._act, self._sees

        def act(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
            step: PolicyStep = jitted(packed, words[t], {name: getattr(time_step, name) for name in sees}, carry)
            return step

        return act


def _read(act: Callable[..., Any], packed: PyTree, words: Any, fields: dict[str, PyTree], carry: PyTree) -> tuple[str, ...]:
    """The names of the fields that `act(packed, words, fields, carry)` computes with."""
    arguments = (packed, words, fields, carry)
    program = jax.make_jaxpr(act)(*arguments).jaxpr
    used = {id(variable) for equation in program.eqns for variable in equation.invars} | {id(v) for v in program.outvars}
    is_used = jax.tree.unflatten(jax.tree.structure(arguments), [id(variable) in used for variable in program.invars])
    return tuple(name for name, leaves in is_used[2].items() if any(jax.tree.leaves(leaves)))

"""Acting outside compiled loops: in NumPy where that is faster, otherwise with one jitted call per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

from polyak.core.policy_faults import CallsPython
from polyak.core.types import Act, NumPyActor, Policy, PolicyStep, PyTree, TimeStep
from polyak.loops.program_cache import cached_per_env, shape_of

Actor: TypeAlias = Callable[[int, TimeStep, PyTree], PolicyStep]
"""`actor(t, time_step, carry)` returns the policy's action at step t = 0, 1, ..., drawn with the key `fold_in(key, t)`."""


def choose_actors(policy: Policy, key_impl: str, num_envs: int, *, exact: bool) -> "Actors":
    """Return the faster way of acting that the policy supports: in NumPy, or by one jitted call per step.

    Args:
        policy: the policy, or its shapes.
        key_impl: implementation of the random keys.
        num_envs: B.
        exact: require actions equal, bit for bit, to the actions of a compiled loop; NumPy may differ by rounding.
    """
    # A policy that calls Python makes the same call, with the same result, from a compiled program.
    exact = exact and not isinstance(policy, CallsPython)
    return Actors(shape_of(policy), key_impl, num_envs, in_numpy=not exact and acts_in_numpy(policy, num_envs))


def acts_in_numpy(policy: Policy, num_envs: int) -> bool:
    """Return True if a policy acts faster in NumPy than in JAX, for B = `num_envs`."""
    return find_numpy_actor(policy, num_envs) is not None


def find_numpy_actor(policy: Policy, num_envs: int) -> NumPyActor | None:
    """Return `numpy_actor(policy, num_envs)`, imported lazily so that Python policies and exported policies need no Flax."""
    if isinstance(policy, CallsPython):
        return NumPyActor(type(policy).seed, type(policy).direct_call)
    from polyak.policies.numpy_policies import numpy_actor

    return numpy_actor(policy, num_envs)


@dataclass(frozen=True)
class Actors:
    """Acts with any policy of one tree structure, in NumPy or by one jitted call per step.

    If the policy acts in NumPy, JAX only draws random numbers, for many steps at a time. The jitted call takes the policy's
    leaves, and keys as plain integers, derived for many steps at a time: a nested tree, a typed key and a `fold_in` would each
    cost tens of microseconds per step.

    Attributes:
        shape: `shape_of` the policy.
        key_impl: implementation of the random keys.
        num_envs: B.
        in_numpy: the policy acts in NumPy.
    """

    shape: tuple[Any, ...]
    key_impl: str
    num_envs: int
    in_numpy: bool

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """Return the random numbers for the actions of steps with these keys, `[T, ...]`: noise, or the keys' bits; traced."""
        if not self.in_numpy:
            return jax.random.key_data(keys)
        return jax.vmap(lambda key: self._numpy_actor.noise(policy, key, self.num_envs))(keys)

    def start(self, leaves: Sequence[Any]) -> Act:
        """Return `act(time_step, carry, draw)` for a policy with these leaves, on one device; NumPy copies no leaves."""
        if not self.in_numpy:
            program = self._program
            return lambda time_step, carry, bits: program(leaves, bits, time_step, carry)
        (policy,) = jax.tree.unflatten(self.shape[0], [np.asarray(leaf) for leaf in leaves])
        return self._numpy_actor.start(policy)

    @cached_property
    def _program(self) -> Callable[..., PolicyStep]:
        return _act_program(self.shape, self.key_impl)

    @cached_property
    def _numpy_actor(self) -> NumPyActor:
        (policy,) = jax.tree.unflatten(*self.shape[:2])
        actor = find_numpy_actor(policy, self.num_envs)
        assert actor is not None, "acts_in_numpy has found one"
        return actor


def make_actor(policy: Policy, key: PRNGKeyArray, num_envs: int, *, exact: bool, block: int) -> Actor:
    """Create an actor for any number of steps; call it with t = 0, 1, ... in order.

    Args:
        policy: the policy, with its arrays on one device.
        key: source of all randomness in the actions.
        num_envs: B.
        exact: see `choose_actors`.
        block: number of steps for which random numbers are drawn at a time.
    """
    actors = choose_actors(policy, str(jax.random.key_impl(key)), num_envs, exact=exact)
    act_with, draws = actors.start(jax.tree.leaves(policy)), np.zeros(0)
    draw = partial(_noise_program(actors, block), policy) if actors.in_numpy else partial(_key_bits, block)

    def act(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        nonlocal draws
        if t % block == 0:
            draws = np.asarray(draw(key, np.uint32(t)))
        return act_with(time_step, carry, draws[t % block])

    return act


def act_with_keys(policy: Policy, key_data: Any, key_impl: str) -> Actor:
    """Create an actor that makes one jitted call per step, with keys from the bits `key_data`, `[T, ...]`."""
    program, leaves = _act_program(shape_of(policy), key_impl), jax.tree.leaves(policy)
    return lambda t, time_step, carry: program(leaves, key_data[t], time_step, carry)


def step_keys(key: PRNGKeyArray, start: Any, count: int) -> Key[Array, " count"]:
    """Return the keys of the `count` steps from step `start`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, start + jnp.arange(count, dtype=jnp.uint32))


@partial(jax.jit, static_argnums=0)
def _key_bits(count: int, key: PRNGKeyArray, start: Array) -> Array:
    return jax.random.key_data(step_keys(key, start, count))


@cached_per_env
def _noise_program(actors: Actors, block: int) -> Callable[..., Array]:
    return jax.jit(lambda policy, key, start: actors.draws(policy, step_keys(key, start, block)))


@cached_per_env
def _act_program(shape: tuple[Any, ...], key_impl: str) -> Callable[..., PolicyStep]:
    def act(leaves: Sequence[Any], key_data: Array, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        (policy,) = jax.tree.unflatten(shape[0], leaves)
        return policy.action(time_step, carry, jax.random.wrap_key_data(key_data, impl=key_impl))

    return jax.jit(act)

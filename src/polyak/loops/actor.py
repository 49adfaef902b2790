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


def actors_of(policy: Policy, key_impl: str, num_envs: int, *, exact: bool) -> "Actors":
    """The faster of the two ways of acting that the policy supports.

    Args:
        policy: the policy, or its shapes.
        key_impl: the implementation of the keys.
        num_envs: B.
        exact: whether actions must equal those of a compiled loop bit for bit. NumPy may differ by rounding.
    """
    # A policy that calls Python makes the same call, with the same result, from a compiled program.
    exact = exact and not isinstance(policy, CallsPython)
    return Actors(shape_of(policy), key_impl, num_envs, in_numpy=not exact and acts_in_numpy(policy, num_envs))


def acts_in_numpy(policy: Policy, num_envs: int) -> bool:
    """Whether NumPy is the faster way for a policy in so many environments."""
    return find_numpy_actor(policy, num_envs) is not None


def find_numpy_actor(policy: Policy, num_envs: int) -> NumPyActor | None:
    """See `numpy_actor`, which is imported when it is needed: policies in Python, and those of a file, act without Flax."""
    if isinstance(policy, CallsPython):
        return NumPyActor(type(policy).seed, type(policy).direct_call)
    from polyak.policies.numpy_policies import numpy_actor

    return numpy_actor(policy, num_envs)


@dataclass(frozen=True)
class Actors:
    """One way of acting, for all policies of one structure: in NumPy, or by one jitted call per step.

    In NumPy, JAX only draws the random numbers, of many steps at a time. The jitted call takes the policy's leaves, and keys as
    plain integers, derived many at a time: a nested tree, a typed key and a `fold_in` would each cost tens of microseconds per
    step.

    Attributes:
        shape: of the policy, see `shape_of`.
        key_impl: the implementation of the keys.
        num_envs: B.
        in_numpy: which of the two.
    """

    shape: tuple[Any, ...]
    key_impl: str
    num_envs: int
    in_numpy: bool

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """What the actions of steps with these keys are drawn with, `[T, ...]`: noise, or the bits of the keys; traced."""
        if not self.in_numpy:
            return jax.random.key_data(keys)
        return jax.vmap(lambda key: self._numpy_actor.noise(policy, key, self.num_envs))(keys)

    def start(self, leaves: Sequence[Any]) -> Act:
        """`act(time_step, carry, draw)` of the policy with these leaves, on one device; NumPy sees them without a copy."""
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
        assert actor is not None, "as acts_in_numpy says"
        return actor


def make_actor(policy: Policy, key: PRNGKeyArray, num_envs: int, *, exact: bool, block: int) -> Actor:
    """An actor for any number of steps; call it with t = 0, 1, ... in order.

    Args:
        policy: the policy, with its arrays on one device.
        key: the source of all randomness in the actions.
        num_envs: B.
        exact: see `actors_of`.
        block: number of steps whose draws are made at a time.
    """
    actors = actors_of(policy, str(jax.random.key_impl(key)), num_envs, exact=exact)
    act_with, draws = actors.start(jax.tree.leaves(policy)), np.zeros(0)
    draw = partial(_noise_program(actors, block), policy) if actors.in_numpy else partial(_key_bits, block)

    def act(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        nonlocal draws
        if t % block == 0:
            draws = np.asarray(draw(key, np.uint32(t)))
        return act_with(time_step, carry, draws[t % block])

    return act


def act_with_keys(policy: Policy, key_data: Any, key_impl: str) -> Actor:
    """Acts by one jitted call per step, with the keys of these bits `[T, ...]`."""
    program, leaves = _act_program(shape_of(policy), key_impl), jax.tree.leaves(policy)
    return lambda t, time_step, carry: program(leaves, key_data[t], time_step, carry)


def step_keys(key: PRNGKeyArray, start: Any, count: int) -> Key[Array, " count"]:
    """Keys of the `count` steps that begin at step `start`."""
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
        step: PolicyStep = policy.action(time_step, carry, jax.random.wrap_key_data(key_data, impl=key_impl))
        return step

    return jax.jit(act)

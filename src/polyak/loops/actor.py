"""Acting outside compiled loops: in NumPy where that is faster, otherwise with one jitted call per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

from polyak.core.policy_faults import CallsPython
from polyak.core.types import NumPyPolicy, Policy, PolicyStep, PyTree, TimeStep
from polyak.loops.program_cache import cached_per_env, shape_of

Actor: TypeAlias = Callable[[int, TimeStep, PyTree], PolicyStep]
"""`actor(t, time_step, carry)` returns the policy's action at step t = 0, 1, ..., drawn with the key `fold_in(key, t)`."""


Step: TypeAlias = Callable[[Any, TimeStep, PyTree], PolicyStep]
"""`step(draw, time_step, carry)` returns the policy's action, drawn with one of the `draws` of `Actors`."""


@runtime_checkable
class Actors(Protocol):
    """One way of acting, for all policies of one structure."""

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """What the actions of steps with these keys are drawn with, `[T, ...]`; traced."""
        ...

    def step(self, leaves: Sequence[Any]) -> Step:
        """Acts by the policy with these leaves, which are on one device."""
        ...


def actors_of(policy: Policy, key_impl: str, num_envs: int, *, exact: bool) -> Actors:
    """The faster of the two ways of acting that the policy supports.

    Args:
        policy: the policy, or its shapes.
        key_impl: the implementation of the keys.
        num_envs: B.
        exact: whether actions must equal those of a compiled loop bit for bit. NumPy may differ by rounding.
    """
    # A policy that calls Python makes the same call, with the same result, from a compiled program.
    exact = exact and not isinstance(policy, CallsPython)
    in_numpy = not exact and acts_in_numpy(policy, num_envs)
    return NumPyActors(shape_of(policy), num_envs) if in_numpy else JitActors(shape_of(policy), key_impl)


def acts_in_numpy(policy: Policy, num_envs: int) -> bool:
    """Whether NumPy is the faster way for a policy in so many environments."""
    return isinstance(policy, NumPyPolicy) and policy.suits_numpy(num_envs)


@dataclass(frozen=True)
class NumPyActors:
    """They act in NumPy; JAX only draws the random numbers, of many steps at a time.

    Attributes:
        shape: of the policy, see `shape_of`.
        num_envs: B.
    """

    shape: tuple[Any, ...]
    num_envs: int

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """The noise of each step, `[T, B, ...]`."""
        assert isinstance(policy, NumPyPolicy), "as suits_numpy says"
        return jax.vmap(lambda key: policy.noise(key, self.num_envs))(keys)

    def step(self, leaves: Sequence[Any]) -> Step:
        """Acts with the arrays where they lie; NumPy sees them without a copy."""
        (policy,) = jax.tree.unflatten(self.shape[0], [np.asarray(leaf) for leaf in leaves])
        act = policy.in_numpy()
        return lambda noise, time_step, carry: act(time_step, carry, noise)


@dataclass(frozen=True)
class JitActors:
    """They act by one jitted call per step.

    The call takes the policy's leaves, and keys as plain integers, derived many at a time: a nested tree, a typed key and a
    `fold_in` would each cost tens of microseconds per step.

    Attributes:
        shape: of the policy, see `shape_of`.
        key_impl: the implementation of the keys.
    """

    shape: tuple[Any, ...]
    key_impl: str

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """The bits of the keys."""
        return jax.random.key_data(keys)

    def step(self, leaves: Sequence[Any]) -> Step:
        """Acts on the device of the leaves."""
        program = self._program
        return lambda bits, time_step, carry: program(leaves, bits, time_step, carry)

    @cached_property
    def _program(self) -> Callable[..., PolicyStep]:
        return _act_program(self.shape, self.key_impl)


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
    step, draws = actors.step(jax.tree.leaves(policy)), np.zeros(0)
    draw = partial(_key_bits, block) if isinstance(actors, JitActors) else partial(_noise_program(actors, block), policy)

    def act(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        nonlocal draws
        if t % block == 0:
            draws = np.asarray(draw(key, np.uint32(t)))
        return step(draws[t % block], time_step, carry)

    return act


def act_with_keys(policy: Policy, key_data: Any, key_impl: str) -> Actor:
    """Acts by one jitted call per step, with the keys of these bits `[T, ...]`."""
    step = JitActors(shape_of(policy), key_impl).step(jax.tree.leaves(policy))
    return lambda t, time_step, carry: step(key_data[t], time_step, carry)


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

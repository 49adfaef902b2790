"""Acting outside compiled loops: in NumPy where that is faster, otherwise with one jitted call per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@runtime_checkable
class Acting(Protocol):
    """A way of acting, of all policies of one structure."""

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """What steps with these keys draw from, `[T, ...]`; traced."""
        ...

    def actor(self, leaves: Sequence[Any], draws: Any) -> Actor:
        """Acts with a policy's leaves, on one device, and its `draws` from step 0 on."""
        ...


def way_of_acting(policy: Policy, key_impl: str, num_envs: int, *, exact: bool) -> Acting:
    """The faster of the two ways that the policy supports.

    Args:
        policy: the policy, or its shapes.
        key_impl: of the keys.
        exact: whether actions must equal those of a compiled loop bit for bit. NumPy may differ by rounding.
    """
    # A policy that calls Python makes the same call, with the same result, from a compiled program.
    exact = exact and not isinstance(policy, CallsPython)
    if not exact and isinstance(policy, NumPyPolicy) and policy.suits_numpy(num_envs):
        return InNumPy(jax.tree.structure(policy), num_envs)
    return Jitted(shape_of(policy), key_impl)


@dataclass(frozen=True)
class InNumPy:
    """Acts in NumPy; JAX only draws the random numbers, of many steps at a time.

    Attributes:
        structure: of the policy.
        num_envs: B.
    """

    structure: Any
    num_envs: int

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """The noise of each step, `[T, B, ...]`."""
        assert isinstance(policy, NumPyPolicy), "as suits_numpy says"
        return jax.vmap(lambda key: policy.noise(key, self.num_envs))(keys)

    def actor(self, leaves: Sequence[Any], draws: Any) -> Actor:
        """Acts with the arrays where they lie; NumPy sees them without a copy."""
        policy: NumPyPolicy = jax.tree.unflatten(self.structure, [np.asarray(leaf) for leaf in leaves])
        act, noise = policy.in_numpy(), np.asarray(draws)
        return lambda t, time_step, carry: act(time_step, carry, noise[t])


@dataclass(frozen=True)
class Jitted:
    """Acts by one jitted call per step.

    It takes the policy's leaves, and keys as plain integers, derived many at a time: a nested tree, a typed key and a `fold_in`
    would each cost tens of microseconds per step.

    Attributes:
        shape: of the policy, see `shape_of`.
        key_impl: of the keys.
    """

    shape: tuple[Any, ...]
    key_impl: str

    def draws(self, policy: Policy, keys: Key[Array, " T"]) -> Array:
        """The bits of the keys."""
        return jax.random.key_data(keys)

    def actor(self, leaves: Sequence[Any], draws: Any) -> Actor:
        """Acts on the device of the leaves."""
        program, bits = self._program, np.asarray(draws)
        return lambda t, time_step, carry: program(leaves, bits[t], time_step, carry)

    @cached_property
    def _program(self) -> Callable[..., PolicyStep]:
        return _act_program(self.shape, self.key_impl)


def make_actor(policy: Policy, key: PRNGKeyArray, num_envs: int, *, exact: bool, block: int) -> Actor:
    """An actor for any number of steps; call it with t = 0, 1, ... in order.

    Args:
        policy: the policy, with its arrays on one device.
        key: the source of all randomness in the actions.
        num_envs: B.
        exact: as of `way_of_acting`.
        block: number of steps for which is drawn at a time.
    """
    acting, leaves = way_of_acting(policy, str(jax.random.key_impl(key)), num_envs, exact=exact), jax.tree.leaves(policy)
    draw = _draw_program(acting, block)
    actor: Actor | None = None

    def act(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        nonlocal actor
        if t % block == 0 or actor is None:
            actor = acting.actor(leaves, draw(policy, key, np.uint32(t)))
        return actor(t % block, time_step, carry)

    return act


def act_with_keys(policy: Policy, key_data: Any, key_impl: str) -> Actor:
    """Acts by one jitted call per step, with the keys of these bits `[T, ...]`."""
    return Jitted(shape_of(policy), key_impl).actor(jax.tree.leaves(policy), key_data)


def step_keys(key: PRNGKeyArray, start: Any, count: int) -> Key[Array, " count"]:
    """Keys of the `count` steps that begin at step `start`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, start + jnp.arange(count, dtype=jnp.uint32))


@cached_per_env
def _draw_program(acting: Acting, block: int) -> Callable[..., Array]:
    return jax.jit(lambda policy, key, start: acting.draws(policy, step_keys(key, start, block)))


@cached_per_env
def _act_program(shape: tuple[Any, ...], key_impl: str) -> Callable[..., PolicyStep]:
    def act(leaves: Sequence[Any], key_data: Array, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        (policy,) = jax.tree.unflatten(shape[0], leaves)
        step: PolicyStep = policy.action(time_step, carry, jax.random.wrap_key_data(key_data, impl=key_impl))
        return step

    return jax.jit(act)

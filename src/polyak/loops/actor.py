"""Acting outside compiled loops: in NumPy where that is faster, otherwise with one jitted call per step."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

from polyak.core.policy_faults import CallsPython
from polyak.core.types import NumPyPolicy, Policy, PolicyStep, PyTree, TimeStep
from polyak.loops.program_cache import cached_per_env, shape_of

Actor: TypeAlias = Callable[[int, TimeStep, PyTree], PolicyStep]
"""`actor(t, time_step, carry)` returns the policy's action at step t = 0, 1, ..., drawn with the key `fold_in(key, t)`."""


def make_actor(policy: Policy, key: PRNGKeyArray, num_envs: int, *, exact: bool, block: int) -> Actor:
    """Create the faster of the two actors that the policy supports.

    Args:
        policy: the policy, with its arrays on one device.
        key: the source of all randomness in the actions.
        exact: whether actions must equal those of a compiled loop bit for bit. NumPy may differ by rounding.
        block: number of steps whose keys or random numbers are computed at a time.
    """
    # A policy that calls Python makes the same call, with the same result, from a compiled program.
    exact = exact and not isinstance(policy, CallsPython)
    if not exact and isinstance(policy, NumPyPolicy) and policy.suits_numpy(num_envs):
        return NumPyActor(policy, key, num_envs, block)
    return JitActor(policy, key, block)


class NumPyActor:
    """Acts in NumPy; JAX only draws the random numbers, one block of steps at a time."""

    def __init__(self, policy: NumPyPolicy, key: PRNGKeyArray, num_envs: int, block: int) -> None:
        self._draw = _noise_program(shape_of(policy), num_envs, block)
        self._policy, self._key, self._block = policy, key, block
        arrays: NumPyPolicy = jax.tree.map(np.asarray, policy)
        self._act, self._noise = arrays.in_numpy(), np.zeros(0)

    def __call__(self, t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        """Return the policy's action at step t; call with t = 0, 1, ... in order."""
        if t % self._block == 0:
            self._noise = np.asarray(self._draw(self._policy, self._key, np.uint32(t)))
        return self._act(time_step, carry, self._noise[t % self._block])


class JitActor:
    """Acts by one jitted call per step.

    The policy is flattened once and keys are passed as plain integers, derived one block of steps at a time: a nested tree, a
    typed key and a `fold_in` would each cost tens of microseconds per step.
    """

    def __init__(self, policy: Policy, key: PRNGKeyArray, block: int) -> None:
        self._act = _act_program(shape_of(policy), str(jax.random.key_impl(key)))
        self._leaves, self._key, self._block = jax.tree.leaves(policy), key, block
        self._keys = np.zeros(0)

    def __call__(self, t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        """Return the policy's action at step t; call with t = 0, 1, ... in order."""
        if t % self._block == 0:
            self._keys = np.asarray(_key_data(self._key, np.uint32(t), self._block))
        return self._act(self._leaves, self._keys[t % self._block], time_step, carry)


def act_with_keys(policy: Policy, key_data: Any, key_impl: str) -> Actor:
    """Acts by one jitted call per step, with the keys of these bits `[T, ...]`."""
    program, leaves = _act_program(shape_of(policy), key_impl), jax.tree.leaves(policy)
    return lambda t, time_step, carry: program(leaves, key_data[t], time_step, carry)


def step_keys(key: PRNGKeyArray, start: Array, count: int) -> Key[Array, " count"]:
    """Keys of the `count` steps that begin at step `start`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, start + jnp.arange(count, dtype=jnp.uint32))


@partial(jax.jit, static_argnums=2)
def _key_data(key: PRNGKeyArray, start: Array, count: int) -> Array:
    return jax.random.key_data(step_keys(key, start, count))


@cached_per_env
def _noise_program(shape: tuple[Any, ...], num_envs: int, block: int) -> Callable[..., Array]:
    def draw(policy: NumPyPolicy, key: PRNGKeyArray, start: Array) -> Array:
        return jax.vmap(lambda step_key: policy.noise(step_key, num_envs))(step_keys(key, start, block))

    return jax.jit(draw)


@cached_per_env
def _act_program(shape: tuple[Any, ...], key_impl: str) -> Callable[..., PolicyStep]:
    def act(leaves: list[Array], key_data: Array, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        (policy,) = jax.tree.unflatten(shape[0], leaves)
        step: PolicyStep = policy.action(time_step, carry, jax.random.wrap_key_data(key_data, impl=key_impl))
        return step

    return jax.jit(act)

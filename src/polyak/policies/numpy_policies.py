"""Policies that act in NumPy, one step at a time: for a small network, a compiled call costs more than its arithmetic."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from polyak.core.policy_faults import CallsPython
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Act, NumPyActor, PolicyStep, PyTree, TimeStep
from polyak.ops.distributions.exploration import uniform_over
from polyak.ops.schedules import SCHEDULES, value_at
from polyak.policies.exploration import EpsilonGreedy, RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy
from polyak.policies.noise import GaussianNoise
from polyak.policies.numpy_network import Numbers, action_noise, numpy_mode, numpy_sampler, suits_numpy


def numpy_actor(policy: Any, num_envs: int) -> NumPyActor | None:
    """The actor of a policy in NumPy; None if NumPy cannot compute it or a compiled call is faster.

    Args:
        policy: the policy, or its shapes.
        num_envs: B.
    """
    # A derived class may act otherwise.
    kind = _KINDS.get(type(policy))
    if kind is not None:
        return kind(policy, num_envs)
    return NumPyActor(type(policy).seed, type(policy).direct_call) if isinstance(policy, CallsPython) else None


def _network(policy: NetworkPolicy, num_envs: int) -> NumPyActor | None:
    suits = suits_numpy(policy.network, policy.spec, num_envs, with_value=policy.return_info)
    return NumPyActor(_draw_noise, _start_network) if suits else None


def _draw_noise(policy: NetworkPolicy | GaussianNoise, key: PRNGKeyArray, num_envs: int) -> Array:
    return action_noise(policy.spec, key, num_envs)


def _start_network(policy: NetworkPolicy) -> Act:
    act = numpy_sampler(
        policy.variables, policy.normalizer, policy.network, policy.spec, squash=policy.squash, return_info=policy.return_info
    )

    def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
        action, info = act(time_step.obs, np.zeros_like(noise) if policy.is_deterministic else noise)
        return PolicyStep(action, carry, info)

    return step


def _discounted_return(policy: DiscountedReturn, num_envs: int) -> NumPyActor | None:
    inner = numpy_actor(policy.policy, num_envs)
    if inner is None:
        return None

    def start(policy: DiscountedReturn) -> Act:
        act, gamma = inner.start(policy.policy), np.float32(policy.gamma)

        def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
            inner_carry, discounted = carry
            acted = act(time_step, inner_carry, noise)
            reward = np.where(np.isfinite(time_step.reward), time_step.reward, np.float32(0.0))
            discounted = np.where(time_step.first, np.float32(0.0), reward + gamma * discounted)
            return PolicyStep(acted.action, (acted.carry, discounted), acted.info)

        return step

    return NumPyActor(lambda policy, key, num_envs: inner.noise(policy.policy, key, num_envs), start)


def _epsilon_greedy(policy: EpsilonGreedy, num_envs: int) -> NumPyActor | None:
    """For a number ε and the policy of a network with one Discrete action."""
    is_plain = isinstance(policy.spec.action, Discrete) and not isinstance(policy.epsilon, SCHEDULES)
    suits = is_plain and _is_small_network(policy.policy, num_envs)
    return NumPyActor(_draw_exploration, _start_epsilon_greedy) if suits else None


def _draw_exploration(policy: EpsilonGreedy, key: PRNGKeyArray, num_envs: int) -> Array:
    """For each row a uniform number that is compared with ε, and a random action, `[B, 2]`."""
    explore_key, action_key = jax.random.split(key)
    random = uniform_over(policy.spec, num_envs).sample(seed=action_key)
    return jnp.stack([jax.random.uniform(explore_key, (num_envs,), jnp.float32), random.astype(jnp.float32)], axis=1)


def _start_epsilon_greedy(policy: Any) -> Act:
    mode, epsilon = _mode(policy.policy), np.float32(policy.epsilon)
    each = epsilon / np.float32(policy.spec.action.n)
    with np.errstate(divide="ignore"):
        log_greedy, log_other = np.log1p(each - epsilon), np.log(each)

    def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
        greedy = mode(time_step.obs)
        action = np.where(noise[:, 0] < epsilon, noise[:, 1].astype(np.int32), greedy)
        return PolicyStep(action, carry, {"log_prob": np.where(action == greedy, log_greedy, log_other)})

    return step


def _random_warm_start(policy: RandomWarmStart, num_envs: int) -> NumPyActor | None:
    """For one Box of floats, around a policy whose noise has the action's shape.

    The noise of a Python policy is a seed, and the noise of another `RandomWarmStart` has random actions too.
    """
    inner, source = numpy_actor(policy.policy, num_envs), policy.policy
    while type(source) is DiscountedReturn:
        source = source.policy
    if inner is None or type(source) not in (NetworkPolicy, GaussianNoise) or not _has_float_box(policy.spec):
        return None

    def noise(policy: RandomWarmStart, key: PRNGKeyArray, num_envs: int) -> Array:
        """The inner policy's noise and the random action, `[B, 2, ...]`."""
        random_key, key = jax.random.split(key)
        random = uniform_over(policy.spec, num_envs).sample(seed=random_key)
        return jnp.stack([inner.noise(policy.policy, key, num_envs), random], axis=1)

    def start(policy: RandomWarmStart) -> Act:
        act, is_over = inner.start(policy.policy), int(policy.env_steps) >= int(policy.steps)

        def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
            acted = act(time_step, carry, noise[:, 0])
            return acted if is_over else PolicyStep(noise[:, 1], acted.carry, acted.info)

        return step

    return NumPyActor(noise, start)


def _gaussian_noise(policy: GaussianNoise, num_envs: int) -> NumPyActor | None:
    """For one Box of floats and the policy of a network; the noise is ε, which later settings and counts leave unchanged."""
    suits = _has_float_box(policy.spec) and _is_small_network(policy.policy, num_envs)
    return NumPyActor(_draw_noise, _start_gaussian_noise) if suits else None


def _start_gaussian_noise(policy: Any) -> Act:
    mode, (low, high) = _mode(policy.policy), (x[None] for x in policy.spec.action_bounds(policy.spec.action))
    # A schedule is evaluated by JAX, a number is not.
    is_schedule = isinstance(policy.scale, SCHEDULES)
    scale = np.asarray(value_at(policy.scale, policy.env_steps) if is_schedule else policy.scale, np.float32)

    def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
        return PolicyStep(np.clip(np.clip(mode(time_step.obs), low, high) + scale * noise, low, high), carry)

    return step


def _is_small_network(policy: Any, num_envs: int) -> bool:
    return type(policy) is NetworkPolicy and numpy_actor(policy, num_envs) is not None


def _mode(policy: NetworkPolicy) -> Callable[[Numbers], Numbers]:
    return numpy_mode(policy.variables, policy.normalizer, policy.network, policy.spec, squash=policy.squash)


def _has_float_box(spec: EnvSpec) -> bool:
    return isinstance(spec.action, Box) and spec.action.dtype.kind == "f"


_KINDS: Mapping[type, Callable[[Any, int], NumPyActor | None]] = {
    NetworkPolicy: _network,
    DiscountedReturn: _discounted_return,
    EpsilonGreedy: _epsilon_greedy,
    RandomWarmStart: _random_warm_start,
    GaussianNoise: _gaussian_noise,
}

"""Validates a rollout passed to `update` against the agent's spec and network."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.space_check import (
    ArraySpec,
    action_specs,
    check_dtype,
    check_shape,
    check_step_arrays,
    obs_specs,
    range_error,
    read_leaves,
)
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, leaf_spaces
from polyak.core.tree_check import flatten, named_leaves
from polyak.core.types import PyTree, RecurrentNetwork, Rollout
from polyak.ops.distributions import parameter_shapes
from polyak.ops.gradient_step import in_float32

# Of actions that were rescaled in float32, relative to the bound where that is above 1.
ROUNDING = 1e-5


def check_rollout(rollout: Rollout, spec: EnvSpec) -> tuple[int, int]:
    """Check a rollout and return its `(T, B)`; only shapes and dtypes are checked, so under `jit` this runs while tracing.

    Raises:
        TypeError: rewards are not floats, flags or masks are not bool, or actions are integers where the space has floats or
            vice versa.
        ValueError: rewards are not `[T+1, B]` with T >= 1, or the shapes of flags, observations, actions or masks do not
            match; masks are missing although the environment has them.
    """
    steps = rollout.time_steps
    shape = jnp.shape(steps.reward)
    if len(shape) != 2 or shape[0] < 2:
        raise ValueError(f"update: rollout.time_steps.reward must be [T+1, B], with T >= 1, got {shape}")
    times, num_envs = shape
    check_step_arrays("update: rollout.time_steps", steps, shape)
    _check_leaves("update: rollout.time_steps.obs", steps.obs, obs_specs(spec.obs), (times, num_envs))
    specs = action_specs(spec)
    actions = _check_leaves("update: rollout.actions", rollout.actions, specs, (times - 1, num_envs))
    for array_spec, leaf in zip(specs, actions, strict=True):
        check_dtype(array_spec.name("update: rollout.actions"), leaf, array_spec.dtype, exact=True)
    _check_masks(steps.action_mask, spec, (times, num_envs))
    return times - 1, num_envs


def check_actions(owner: str, rollout: Rollout, spec: EnvSpec) -> None:
    """Check that the actions of a rollout's transitions lie in the agent's space; traced actions are not checked.

    NaN and infinity pass: the replay leaves such transitions out, and counts them.

    Raises:
        ValueError: an action is outside, by more than rounding; the message has the first.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((rollout.time_steps, rollout.actions))):
        return
    valid, specs = np.asarray(rollout.valid), action_specs(spec)
    for array_spec, leaf in zip(specs, read_leaves(owner, specs, rollout.actions), strict=True):
        actions = np.asarray(leaf)
        if array_spec.dtype.kind == "f":
            actions = actions.astype(np.float64)
        inside = np.clip(actions, array_spec.low, array_spec.high)
        is_known = valid.reshape(*valid.shape, *(1,) * (actions.ndim - 2)) & np.isfinite(actions)
        is_rounded = np.abs(actions - inside) <= ROUNDING * np.maximum(np.abs(inside), 1)
        name = array_spec.name(f"{owner}: rollout.actions")
        message = range_error(name, np.where(is_known & ~is_rounded, actions, array_spec.low), array_spec.low, array_spec.high)
        if message:
            advice = "clip them to the bounds, as the environment does" if array_spec.dtype.kind == "f" else "they count from 0"
            raise ValueError(f"{message}; {advice}")


def as_arrays(rollout: Rollout) -> Rollout:
    """Convert a rollout to JAX arrays, which traced loops can index; `info` is unchanged.

    Rewards are in at least float32, and so are actions, which networks return in it whatever the space's dtype is.
    """
    parts = (rollout.time_steps, rollout.actions, rollout.carry)
    time_steps, actions, carry = jax.tree.map(jnp.asarray, parts)
    actions = in_float32(actions)
    if jnp.finfo(time_steps.reward.dtype).bits < 32:
        # Returns are computed in the dtype of the rewards.
        time_steps = dataclasses.replace(time_steps, reward=time_steps.reward.astype(jnp.float32))
    return Rollout(time_steps, actions, rollout.info, carry)


def check_carry(carry: PyTree, network: RecurrentNetwork, num_envs: int) -> None:
    """Check that the carry of a rollout is the network's recurrent state for `num_envs`, or `()` for new episodes.

    Raises:
        ValueError: trees or shapes differ, or integers replace floats or vice versa.
    """
    expected = jax.eval_shape(lambda: network.initial_carry(num_envs))
    structure, empty, expected_structure = (flatten(tree)[1] for tree in (carry, (), expected))
    if structure == empty:
        return
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (expected, carry)]
    if structure != expected_structure or shapes[0] != shapes[1]:
        raise ValueError(f"update: rollout.carry must be the network's carry with shapes {shapes[0]}, got {shapes[1]}")
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(carry)]
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(expected)]
    if floating != [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]:
        raise ValueError(f"update: rollout.carry must have the dtypes of the network's carry {expected}, got {dtypes}")


def check_returns(rollout: Rollout, setting: str = "normalize_reward='return'") -> None:
    """Check that a rollout's carry has the returns of `DiscountedReturn` next to the recurrent state.

    Args:
        setting: the setting, or the agent, that needs the returns, for the error.

    Raises:
        ValueError: the carry has no returns.
    """
    carry = rollout.carry
    if not (isinstance(carry, tuple) and len(carry) == 2 and jnp.shape(carry[1]) == rollout.reward.shape[1:]):
        raise ValueError(f"update: {setting} needs rollouts of collect_policy(state), got carry {carry!r:.80}")


def _check_masks(mask: PyTree, spec: EnvSpec, lead: tuple[int, int]) -> None:
    masks = {path: leaf for path, leaf in named_leaves(mask) if leaf is not None}
    choices = [(path, leaf) for path, leaf in leaf_spaces(spec.action) if isinstance(leaf, Discrete | MultiDiscrete)]
    # One flag per logit.
    expected = {path: (*lead, *parameter_shapes(leaf)) for path, leaf in choices}
    if spec.has_action_mask and expected and not masks:
        raise ValueError("update: rollout.time_steps.action_mask must be given since the spec has_action_mask, got None")
    for path, leaf in masks.items():
        name = "update: rollout.time_steps.action_mask" + (f" {path!r}" if path else "")
        if path not in expected:
            raise ValueError(f"{name} must be None for {spec.action}; only Discrete and MultiDiscrete actions have masks")
        check_shape(name, leaf, expected[path])
        if jnp.result_type(leaf) != jnp.bool_:
            raise TypeError(f"{name} must be bool, got {jnp.result_type(leaf)}")


def _check_leaves(name: str, tree: PyTree, specs: tuple[ArraySpec, ...], lead: tuple[int, int]) -> list[Any]:
    """Check paths and shapes of the leaves of a tree and return the leaves."""
    leaves = read_leaves(name, specs, tree)
    for spec, leaf in zip(specs, leaves, strict=True):
        is_swapped = np.shape(leaf) == (lead[1], lead[0], *spec.shape)
        check_shape(spec.name(name), leaf, (*lead, *spec.shape), hint=": time comes first" if is_swapped else "")
    if len(jax.tree.leaves(tree)) != len(specs):
        paths = [path for path, _ in named_leaves(tree)]
        raise ValueError(f"{name} must have the leaves {[spec.path for spec in specs]} of the spec, got {paths}")
    return leaves

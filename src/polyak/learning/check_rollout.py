"""A rollout that somebody hands in is of the environment, and its memory of the network, that the agent has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.space_check import ArraySpec, action_specs, check_dtype, check_shape, check_step_arrays, obs_specs, read_leaves
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, leaf_spaces
from polyak.core.types import PyTree, RecurrentNetwork, Rollout
from polyak.ops.distributions import parameter_shapes
from polyak.ops.trees import flatten, named_leaves


def check_rollout(rollout: Rollout, spec: EnvSpec) -> tuple[int, int]:
    """Its `(T, B)`; only shapes and dtypes are looked at, so under `jit` this runs while tracing.

    Raises:
        TypeError: rewards are not floating, flags or masks not bool, or actions integers where the space has floats or the
            reverse.
        ValueError: rewards are not `[T+1, B]` with T of 1 or more, or flags, observations, actions or masks do not go with
            them; there are no masks where the environment has them.
    """
    steps = rollout.time_steps
    shape = jnp.shape(steps.reward)
    if len(shape) != 2 or shape[0] < 2:
        raise ValueError(f"update: rollout.time_steps.reward must be [T+1, B], with T of 1 or more, got {shape}")
    times, num_envs = shape
    check_step_arrays("update: rollout.time_steps", steps, shape)
    _check_leaves("update: rollout.time_steps.obs", steps.obs, obs_specs(spec.obs), (times, num_envs))
    specs = action_specs(spec)
    actions = _check_leaves("update: rollout.actions", rollout.actions, specs, (times - 1, num_envs))
    for wanted, leaf in zip(specs, actions, strict=True):
        check_dtype(wanted.name("update: rollout.actions"), leaf, wanted.dtype, exact=True)
    _check_masks(steps.action_mask, spec, (times, num_envs))
    return times - 1, num_envs


def as_arrays(rollout: Rollout) -> Rollout:
    """The rollout in JAX arrays, which traced loops can index, with rewards in float32 or wider; `info` is unchanged."""
    parts = (rollout.time_steps, rollout.actions, rollout.carry)
    time_steps, actions, carry = jax.tree.map(jnp.asarray, parts)
    if jnp.finfo(time_steps.reward.dtype).bits < 32:
        # Returns are summed in the dtype of the rewards.
        time_steps = dataclasses.replace(time_steps, reward=time_steps.reward.astype(jnp.float32))
    return Rollout(time_steps, actions, rollout.info, carry)


def check_carry(carry: PyTree, network: RecurrentNetwork, num_envs: int) -> None:
    """A rollout's carry is the network's memory for so many environments, or `()` for fresh episodes.

    Raises:
        ValueError: it has another tree or other shapes, or integers where the memory has floats or the reverse.
    """
    wanted = jax.eval_shape(lambda: network.initial_carry(num_envs))
    structure, empty, needed = (flatten(tree)[1] for tree in (carry, (), wanted))
    if structure == empty:
        return
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (wanted, carry)]
    if structure != needed or shapes[0] != shapes[1]:
        raise ValueError(f"update: rollout.carry must be the network's memory, of shapes {shapes[0]}, got {shapes[1]}")
    kinds = [jnp.result_type(leaf) for leaf in jax.tree.leaves(carry)]
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(wanted)]
    if floating != [jnp.issubdtype(kind, jnp.floating) for kind in kinds]:
        raise ValueError(f"update: rollout.carry must be of numbers as the network's memory {wanted}, got {kinds}")


def _check_masks(mask: PyTree, spec: EnvSpec, lead: tuple[int, int]) -> None:
    got = {path: leaf for path, leaf in named_leaves(mask) if leaf is not None}
    choices = [(path, leaf) for path, leaf in leaf_spaces(spec.action) if isinstance(leaf, Discrete | MultiDiscrete)]
    # A flag for each logit.
    wanted = {path: (*lead, *parameter_shapes(leaf)) for path, leaf in choices}
    if spec.has_action_mask and wanted and not got:
        raise ValueError("update: rollout.time_steps.action_mask must be given, for the spec has_action_mask; got None")
    for path, leaf in got.items():
        name = "update: rollout.time_steps.action_mask" + (f" {path!r}" if path else "")
        if path not in wanted:
            raise ValueError(f"{name} must be None, for only Discrete and MultiDiscrete actions have masks, got {spec.action}")
        check_shape(name, leaf, wanted[path])
        if jnp.result_type(leaf) != jnp.bool_:
            raise TypeError(f"{name} must be bool, got {jnp.result_type(leaf)}")


def _check_leaves(name: str, tree: PyTree, specs: tuple[ArraySpec, ...], lead: tuple[int, int]) -> list[Any]:
    """The leaves of a tree, after a check of paths and shapes."""
    leaves = read_leaves(name, specs, tree)
    for spec, leaf in zip(specs, leaves, strict=True):
        is_swapped = np.shape(leaf) == (lead[1], lead[0], *spec.shape)
        check_shape(spec.name(name), leaf, (*lead, *spec.shape), hint=": time comes first" if is_swapped else "")
    if len(jax.tree.leaves(tree)) != len(specs):
        paths = [path for path, _ in named_leaves(tree)]
        raise ValueError(f"{name} must have the leaves {[spec.path for spec in specs]} of the spec, got {paths}")
    return leaves

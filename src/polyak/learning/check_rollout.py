"""A rollout that somebody hands in is of the environment, and its memory of the network, that the agent has."""

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.checks import check_step_arrays
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, leaf_spaces
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
    for name in ("terminated", "truncated", "first"):
        got = jnp.shape(getattr(steps, name))
        if got != shape:
            raise ValueError(f"update: rollout.time_steps.{name} must be [T+1, B] = {shape} as reward is, got {got}")
    _check_leaves("time_steps.obs", steps.obs, spec.obs, (times, num_envs))
    _check_leaves("actions", rollout.actions, spec.action, (times - 1, num_envs))
    check_step_arrays("update: rollout.time_steps", steps)
    _check_kinds(rollout.actions, spec.action)
    _check_masks(steps.action_mask, spec, (times, num_envs))
    return times - 1, num_envs


def as_arrays(rollout: Rollout) -> Rollout:
    """The same with arrays of JAX for those of NumPy, which a loop that is traced cannot index; what policies add, as it is."""
    parts = (rollout.time_steps, rollout.actions, rollout.carry)
    time_steps, actions, carry = jax.tree.map(jnp.asarray, parts)
    return Rollout(time_steps, actions, rollout.info, carry)


def check_memory(carry: PyTree, network: RecurrentNetwork, num_envs: int) -> None:
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
        if jnp.shape(leaf) != wanted[path]:
            raise ValueError(f"{name} must have the shape {wanted[path]}, got {jnp.shape(leaf)}")
        if jnp.result_type(leaf) != jnp.bool_:
            raise TypeError(f"{name} must be bool, got {jnp.result_type(leaf)}")


def _check_kinds(actions: PyTree, space: Space) -> None:
    got = {path: jnp.result_type(leaf) for path, leaf in named_leaves(actions)}
    for path, leaf in leaf_spaces(space):
        # An agent's Box actions are floats also where the environment's are integers: its actions are rounded on their way.
        wanted = np.dtype(np.float32) if isinstance(leaf, Box) else leaf.dtype
        if jnp.issubdtype(wanted, jnp.floating) != jnp.issubdtype(got[path], jnp.floating):
            name = f" {path!r}" if path else ""
            raise TypeError(f"update: rollout.actions{name} must be {wanted}, got {got[path]}")


def _check_leaves(name: str, tree: PyTree, space: Space, lead: tuple[int, int]) -> None:
    got = {path: jnp.shape(leaf) for path, leaf in named_leaves(tree)}
    wanted = {path: (*lead, *leaf.shape) for path, leaf in leaf_spaces(space)}
    if got.keys() != wanted.keys():
        raise ValueError(f"update: rollout.{name} must be {_listed(wanted)}, as the spec has it, got {_listed(got)}")
    for path, shape in wanted.items():
        if got[path] != shape:
            leaf = f" {path!r}" if path else ""
            hint = ": time comes first" if got[path] == (shape[1], shape[0], *shape[2:]) else ""
            raise ValueError(f"update: rollout.{name}{leaf} must have the shape {shape}, got {got[path]}{hint}")


def _listed(paths: dict[str, tuple[int, ...]]) -> str:
    if "" in paths:
        return "one array"
    return f"a tree of {', '.join(map(repr, paths))}" if paths else "nothing"

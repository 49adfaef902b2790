"""The steps and actions of a rollout that somebody hands in are of the environment that the agent is for."""

import jax.numpy as jnp

from polyak.core.checks import check_step_dtypes
from polyak.core.spaces import EnvSpec, Space, leaf_spaces
from polyak.core.types import PyTree, Rollout
from polyak.ops.trees import named_leaves


def check_rollout(rollout: Rollout, spec: EnvSpec) -> tuple[int, int]:
    """Its `(T, B)`; only shapes and dtypes are looked at, so under `jit` this runs while tracing.

    Raises:
        TypeError: rewards are not floating, flags not bool, or actions integers where the space has floats or the reverse.
        ValueError: rewards are not `[T+1, B]` with T of 1 or more, or flags, observations or actions do not go with them.
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
    check_step_dtypes("update: rollout.time_steps", steps)
    _check_kinds(rollout.actions, spec.action)
    return times - 1, num_envs


def _check_kinds(actions: PyTree, space: Space) -> None:
    got = dict(named_leaves(actions))
    for path, leaf in leaf_spaces(space):
        if jnp.issubdtype(leaf.dtype, jnp.floating) != jnp.issubdtype(jnp.result_type(got[path]), jnp.floating):
            name = f" {path!r}" if path else ""
            raise TypeError(f"update: rollout.actions{name} must be {leaf.dtype}, got {jnp.result_type(got[path])}")


def _check_leaves(name: str, tree: PyTree, space: Space, lead: tuple[int, int]) -> None:
    got = {path: jnp.shape(leaf) for path, leaf in named_leaves(tree)}
    wanted = {path: (*lead, *leaf.shape) for path, leaf in leaf_spaces(space)}
    if got.keys() != wanted.keys():
        raise ValueError(f"update: rollout.{name} must be {_listed(wanted)}, as the spec has it, got {_listed(got)}")
    for path, shape in wanted.items():
        if got[path] != shape:
            leaf = f" {path!r}" if path else ""
            raise ValueError(f"update: rollout.{name}{leaf} must have the shape {shape}, got {got[path]}")


def _listed(paths: dict[str, tuple[int, ...]]) -> str:
    if "" in paths:
        return "one array"
    return f"a tree of {', '.join(map(repr, paths))}" if paths else "nothing"

"""A rollout that somebody hands in is of the environment that the agent is for."""

import jax
import jax.numpy as jnp

from polyak.core.spaces import EnvSpec, map_space
from polyak.core.types import PyTree, Rollout
from polyak.ops.trees import check_same_tree


def check_rollout(rollout: Rollout, spec: EnvSpec) -> tuple[int, int]:
    """Its `(T, B)`; only shapes are looked at, so under `jit` this runs while tracing.

    Raises:
        ValueError: rewards are not `[T+1, B]` with T of 1 or more, or another leaf does not go with them, by name.
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
    for name, value, space, lead in (
        ("time_steps.obs", steps.obs, spec.obs, (times, num_envs)),
        ("actions", rollout.actions, spec.action, (times - 1, num_envs)),
    ):
        wanted = map_space(lambda leaf, lead=lead: _shaped((*lead, *leaf.shape)), space)
        check_same_tree(_shapes(value), wanted, "update", sides=(f"rollout.{name}", "the spec's"))
    return times - 1, num_envs


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _shaped(jnp.shape(x)), tree)


def _shaped(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)

"""Counts of the updates of an agent with a replay in which nothing was stored, or no gradient step was applied."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from polyak.core.types import Rollout
from polyak.learning.rollout_batch import any_over_devices
from polyak.ops.gradient_step import Guard, StepLog, all_finite, flag_quantities


def count_skips(guard: Guard, log: StepLog, dropped: Array, valid: Array, bad_data: Bool[Array, " quantities"]) -> Guard:
    """The guard after an update that dropped `dropped` of the `valid` transitions of its rollout.

    A rollout with no transition that can be stored counts as a skipped step, because its environment is broken. A rollout that
    is stored before `learning_starts` resets the count of consecutive skipped updates.
    """
    is_lost = (dropped == valid) & (valid > 0)
    is_waiting = (dropped < valid) & ~jnp.any(log.skipped | log.applied)
    skipped, applied = (flags.sum(0, dtype=jnp.uint32) for flags in (log.skipped, log.applied))  # of each network
    applied = jnp.where(is_lost, jnp.uint32(0), applied + is_waiting.astype(jnp.uint32))
    return guard.after_update(skipped.at[0].add(is_lost.astype(jnp.uint32)), applied, log.bad.any(0) | (bad_data & is_lost))


def nonfinite_data(rollout: Rollout, axis_name: str | None) -> Bool[Array, " quantities"]:
    """Flag the quantities of the rollout that have NaN or infinity."""
    steps, actions = rollout.time_steps, rollout.actions
    flags = {"obs": ~all_finite(steps.obs), "reward": ~jnp.isfinite(steps.reward).all(), "action": ~all_finite(actions)}
    return any_over_devices(flag_quantities(flags), axis_name)

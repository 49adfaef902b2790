"""Agents whose gradients come from asynchronous workers: the receiver's state, what a worker pulls, and one push."""

import dataclasses

import jax
import jax.numpy as jnp

from polyak.copies.receive import Push, Senders, receive, worker_copies
from polyak.copies.shared import Shared
from polyak.core.checks import check_state
from polyak.core.types import Metrics, PyTree
from polyak.learning.on_policy import (
    OnPolicySettings,
    OnPolicyState,
    RolloutSummary,
    after_step,
    check_applicable,
    optimizer_at,
)
from polyak.ops.gradient_step import all_finite, flag_quantities
from polyak.ops.schedules import saturating_add


def share_copies(
    settings: OnPolicySettings, state: OnPolicyState, num_workers: int, *, shared_optimizer: bool = True
) -> tuple[OnPolicyState, Senders]:
    """The state of the one who receives the gradients of workers, with a shared copy; and the counts of the workers.

    Args:
        shared_optimizer: whether the shared copy has the only optimizer, or each worker its own, which the receiver holds.
    """
    check_state(f"{type(settings).__name__}.share", state, OnPolicyState)
    copies, optimizer_state = state.copies, state.copies.optimizer_state
    shared = Shared.init(copies.online, jax.tree.map(jnp.copy, optimizer_state) if shared_optimizer else ())
    senders = Senders.init(num_workers, None if shared_optimizer else optimizer_state)
    copies = dataclasses.replace(copies, shared=shared, optimizer_state=(), shared_optimizer=shared_optimizer)
    return dataclasses.replace(state, copies=copies), senders


def unshare_copies(settings: OnPolicySettings, state: OnPolicyState, senders: Senders) -> OnPolicyState:
    """The state of `share` as one of `init`, with the shared weights as online copy.

    It has the shared copy's optimizer state, or where every worker has its own, the first one's.

    Raises:
        ValueError: there is no shared copy.
    """
    check_state(f"{type(settings).__name__}.unshare", state, OnPolicyState)
    copies, shared = state.copies, state.copies.shared
    if shared is None:
        raise ValueError(f"{type(settings).__name__}: unshare needs a state of share, got one without a shared copy")
    first = jax.tree.map(lambda x: x[0], senders.optimizer_state)
    own = dataclasses.replace(
        copies,
        online=shared.variables,
        shared=None,
        optimizer_state=shared.optimizer_state if copies.shared_optimizer else first,
        shared_optimizer=False,
    )
    return dataclasses.replace(state, copies=own)


def state_of_worker(settings: OnPolicySettings, state: OnPolicyState) -> OnPolicyState:
    """What a worker pulls of the receiver's state: all that `collect_policy` and `gradients` use."""
    check_state(f"{type(settings).__name__}.worker_state", state, OnPolicyState)
    return dataclasses.replace(state, copies=worker_copies(state.copies))


def receive_gradients(
    settings: OnPolicySettings,
    state: OnPolicyState,
    senders: Senders,
    push: Push,
    gradients: PyTree,
    summary: RolloutSummary,
    *,
    max_staleness: int | None = None,
    max_bad: int = 10,
) -> tuple[OnPolicyState, Senders, Metrics]:
    """As `apply`, for gradients that a worker sent to the shared copy; see `polyak.copies.receive.receive`.

    Raises:
        ValueError: there is no shared copy, or the gradients have another tree.
    """
    check_state(f"{type(settings).__name__}.receive", state, OnPolicyState)
    copies, shared = state.copies, state.copies.shared
    if shared is None:
        raise ValueError(f"{type(settings).__name__}: receive needs a shared copy; make one with share(state, num_workers)")
    check_applicable(settings, state, shared.optimizer_state if copies.shared_optimizer else None)
    is_finite = ~jnp.any(summary.bad) & jnp.isfinite(summary.terms["loss"])
    shared, senders, receipt = receive(
        shared,
        senders,
        push,
        gradients,
        optimizer=optimizer_at(settings, state.env_steps),
        is_finite=is_finite,
        has_samples=summary.weight > 0,
        max_staleness=max_staleness,
        max_bad=max_bad,
    )
    # The first of the causes is reported: a bad step is one of finite gradients.
    causes = {"loss": ~jnp.isfinite(summary.terms["loss"]), "gradient": ~all_finite(gradients), "step": receipt.rejected}
    bad = (summary.bad | flag_quantities(causes)) & receipt.rejected
    guard = copies.guard.after_update(receipt.rejected.astype(jnp.uint32), receipt.applied.astype(jnp.uint32), bad)
    steps = saturating_add(copies.steps, receipt.applied.astype(jnp.uint32))
    copies = dataclasses.replace(copies, shared=shared, steps=steps, guard=guard)
    counts = receipt.applied | receipt.empty
    state, metrics = after_step(settings, state, copies, summary, counts=counts, applied=receipt.applied)
    return state, senders, metrics

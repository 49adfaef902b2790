"""Workers that train one shared copy, as pure functions: pull, push with bounded staleness, and the synchronous round.

The shared copy travels beside the workers; each holds the one that it last saw, in the same buffers. Donate it together with
them or not at all. A worker's gradients and the statistics after its step come from `polyak.copies.loss_gradients`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from polyak.copies.accumulated import Accumulated
from polyak.copies.network_copies import NetworkCopies, Shared, guard_after_step
from polyak.core.checks import check_integer
from polyak.core.types import Metrics, PyTree, Scalar
from polyak.ops.gradient_step import flag_quantities
from polyak.ops.trees import all_finite, check_same_tree, in_float32


def staleness(worker: NetworkCopies, shared: Shared) -> Int32[Array, ""]:
    """How many gradient steps the shared copy has taken since the worker pulled it; a metric."""
    return (shared.version - worker.version).astype(jnp.int32)


def pull(worker: NetworkCopies, shared: Shared) -> NetworkCopies:
    """The worker with the shared copy as it is now, and its online copy equal to it.

    Raises:
        ValueError: the trees differ.
    """
    return dataclasses.replace(worker, shared=shared).update_online()


def push(
    worker: NetworkCopies,
    shared: Shared,
    gradients: PyTree = None,
    *,
    stats: PyTree = None,
    max_staleness: int | None = None,
) -> tuple[NetworkCopies, Shared]:
    """The worker's gradients applied to the shared copy, by the shared optimiser or the worker's own.

    The worker's online copy stays as it is until it pulls.

    Args:
        gradients: the worker's accumulated ones if None.
        stats: the worker's statistics after its step, which take the place of the shared copy's where the step is taken
            (the newest count); None: those stay. Where they are not finite, nothing is applied.
        max_staleness: gradients of weights that are older, by more than so many steps, are dropped and counted.

    Raises:
        ValueError: the trees differ, or `max_staleness` is negative.
        TypeError: `max_staleness` is no integer.
    """
    fresh = jnp.array(True)
    if max_staleness is not None:
        check_integer("push", "max_staleness", max_staleness, at_least=0)
        fresh = staleness(worker, shared) <= max_staleness
    if stats is not None:
        check_same_tree(stats, shared.variables.stats, "push", sides=("statistics", "shared"))
    bad = {"statistics": ~all_finite(stats)}
    pushed = dataclasses.replace(worker, shared=shared).apply_gradients("shared", gradients, bad=bad, apply=fresh)
    assert pushed.shared is not None, "it was put there"
    applied = dataclasses.replace(pushed.shared, dropped=shared.dropped + (~fresh).astype(jnp.uint32))
    if stats is not None:
        taken = applied.version != shared.version
        applied = applied.with_stats(_where(taken, stats, shared.variables.stats))
    return dataclasses.replace(pushed, shared=applied), applied


def synchronous_round(
    workers: Sequence[NetworkCopies],
    shared: Shared,
    gradients: Sequence[PyTree],
    *,
    stats: Sequence[PyTree] | None = None,
    reduce: Literal["sum", "mean"] = "mean",
    clip: Scalar | None = None,
    clip_when: Literal["each", "total"] = "each",
) -> tuple[list[NetworkCopies], Shared]:
    """All workers' gradients as one: reduced, one step of the optimiser, and everyone pulls.

    A worker whose gradient or statistics are not finite is left out, and its own guard counts that. Workers with their own
    optimisers have seen the same gradients since they began, so their states are one: the first one's steps, and all take it.

    Args:
        gradients: one tree a worker.
        stats: each worker's statistics after its step. The shared copy takes their mean over the workers that were not left
            out (of integers, bools and keys: the first such worker's). Means over rows are then those of one large batch;
            variances lack what lies between the workers' batches. None: the shared copy's stay.
        reduce: as for `NetworkCopies.accumulate`.
        clip: likewise.
        clip_when: likewise; `"each"` is each worker's.

    Raises:
        ValueError: not one gradient (and tree of statistics) a worker, or trees differ.
    """
    if not workers or len(workers) != len(gradients) or (stats is not None and len(stats) != len(workers)):
        and_stats = "" if stats is None else f" and {len(stats)} trees of statistics"
        raise ValueError(
            f"synchronous_round: {len(workers)} workers, {len(gradients)} gradients{and_stats}; one for each worker is wanted"
        )
    for one in stats or ():
        check_same_tree(one, shared.variables.stats, "synchronous_round", sides=("statistics", "shared"))
    first = dataclasses.replace(workers[0], shared=shared).reset_gradients()
    is_finite = [all_finite(one) for one in stats] if stats is not None else [jnp.array(True)] * len(workers)
    counted = []
    total = Accumulated.zeros(shared.variables.params)
    for gradient, valid in zip(gradients, is_finite, strict=True):
        number = total.number
        total = total.add(gradient, reduce=reduce, clip=clip, clip_when=clip_when, valid=valid)
        counted.append(total.number != number)
    stepped = dataclasses.replace(first, gradients=total).apply_gradients("shared")
    assert stepped.shared is not None, "it was put there"
    taken = stepped.shared.version != shared.version
    after = stepped.shared
    if stats is not None:
        mean = _mean_of_counted(stats, jnp.stack(counted), shared.variables.stats)
        after = after.with_stats(_where(taken, mean, shared.variables.stats))
    step_is_bad = ~taken & jnp.any(jnp.stack(counted))
    together = []
    for worker, ok, counts in zip(workers, is_finite, counted, strict=True):
        # A real copy for each, so that workers can be donated together.
        state = jax.tree.map(lambda x: jnp.array(x, copy=True), stepped.optimizer_state)
        # Bad statistics make the gradient beside them bad, so they are named alone.
        bad = flag_quantities({"gradient": ~counts & ok, "statistics": ~ok, "step": step_is_bad})
        guard, _ = guard_after_step(worker.guard, taken, jnp.array(False), bad)
        worker = dataclasses.replace(worker, optimizer_state=state, guard=guard).reset_gradients()
        together.append(pull(worker, after))
    return together, after


def _mean_of_counted(trees: Sequence[PyTree], counted: Bool[Array, " workers"], otherwise: PyTree) -> PyTree:
    """The mean over the trees that count; of what is no float, the first one that counts; `otherwise` where none does."""
    number = jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)

    def mean(old: Array, *leaves: Array) -> Array:
        if not jnp.issubdtype(old.dtype, jnp.floating):
            for leaf, counts in reversed(list(zip(leaves, counted, strict=True))):
                old = jnp.where(counts, leaf, old)
            return old
        terms = [jnp.where(counts, in_float32(x), 0.0) for x, counts in zip(leaves, counted, strict=True)]
        return jnp.where(jnp.any(counted), (sum(terms[1:], terms[0]) / number).astype(old.dtype), old)

    averaged: PyTree = jax.tree.map(mean, otherwise, *trees)
    return averaged


def _where(condition: Bool[Array, ""], tree: PyTree, otherwise: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, otherwise)


def metrics_of(copies: Sequence[NetworkCopies]) -> Metrics:
    """What there is to watch of each: `critic/target_distance`, `critic/skipped_steps`, `critic/staleness` and so on.

    Raises:
        ValueError: two of them have one name, so that one would hide the other.
    """
    names = [one.name for one in copies]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"metrics_of: more than one of the copies has the name {twice[0]!r}; create each with its own name=")
    metrics: Metrics = {}
    for one in copies:
        metrics[f"{one.name}/skipped_steps"] = one.guard.skipped
        metrics[f"{one.name}/skipped_in_a_row"] = one.guard.in_a_row
        if one.gradients is not None:
            metrics[f"{one.name}/skipped_gradients"] = one.gradients.skipped
        if one.target is not None:
            metrics[f"{one.name}/target_distance"] = one.distance("online", "target")
        if one.shared is not None:
            metrics[f"{one.name}/shared_version"] = one.shared.version
            metrics[f"{one.name}/staleness"] = staleness(one, one.shared)
            metrics[f"{one.name}/dropped_pushes"] = one.shared.dropped
    return metrics

"""A synchronous round of several workers that train one shared copy, and metrics of copies.

The shared copy is passed alongside the workers; each worker stores the one it last pulled, in the same buffers. Donate it
together with the workers or not at all. `NetworkCopies.compute_gradients` computes a worker's gradients and statistics.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from polyak.copies.accumulated import Accumulated
from polyak.copies.network_copies import NetworkCopies
from polyak.copies.shared import Shared
from polyak.core.tree_check import check_same_tree
from polyak.core.types import Metrics, PyTree, Scalar
from polyak.ops.gradient_step import all_finite, flag_quantities, in_float32


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
    """Reduce all workers' gradients, make one optimizer step, and pull the result into every worker.

    A worker with NaN or infinity in its gradient or statistics is excluded, and its own guard counts it. Workers with their
    own optimizers have seen the same gradients since the start, so their states are equal: the first one is used for all.

    Args:
        gradients: one tree per worker.
        stats: each worker's statistics after its step. The shared copy gets their mean over the workers that were not
            excluded (for integers, bools and keys: the first such worker's). Batch means then equal the mean of one large
            batch; variances lack the variance between the workers' batches. None leaves the shared copy's statistics.
        reduce: see `NetworkCopies.accumulate`.
        clip: see `NetworkCopies.accumulate`.
        clip_when: see `NetworkCopies.accumulate`; `"each"` clips each worker's gradient.

    Raises:
        ValueError: the numbers of workers and gradients (or trees of statistics) differ, or trees differ.
    """
    if not workers or len(workers) != len(gradients) or (stats is not None and len(stats) != len(workers)):
        and_stats = "" if stats is None else f" and {len(stats)} trees of statistics"
        raise ValueError(
            f"synchronous_round: pass one gradient tree per worker, got {len(workers)} workers, {len(gradients)} gradients"
            f"{and_stats}"
        )
    for one in stats or ():
        check_same_tree(one, shared.variables.stats, "synchronous_round", sides=("statistics", "shared"))
    is_finite = [all_finite(one) for one in stats] if stats is not None else [jnp.array(True)] * len(workers)
    counted = []
    total = Accumulated.zeros(shared.variables.params)
    for gradient, valid in zip(gradients, is_finite, strict=True):
        number = total.number
        total = total.add(gradient, reduce=reduce, clip=clip, clip_when=clip_when, valid=valid)
        counted.append(total.number != number)
    mean = None if stats is None else _mean_of_counted(stats, jnp.stack(counted), shared.variables.stats)
    first = dataclasses.replace(workers[0], shared=shared, gradients=total)
    stepped = first.apply_gradients("shared", stats=mean)
    after = stepped.shared
    assert after is not None, "set above"
    is_applied = after.version != shared.version
    step_is_bad = ~is_applied & jnp.any(jnp.stack(counted))
    new_workers = []
    for worker, ok, counts in zip(workers, is_finite, counted, strict=True):
        # New buffers for each worker, so that all workers can be donated in one call.
        state = jax.tree.map(lambda x: jnp.array(x, copy=True), stepped.optimizer_state)
        # Bad statistics also exclude the gradient, so only the statistics are reported.
        bad = flag_quantities({"gradient": ~counts & ok, "statistics": ~ok, "step": step_is_bad})
        is_bad, steps = jnp.any(bad), worker.steps + is_applied.astype(jnp.uint32)
        guard = worker.guard.after_update(is_bad.astype(jnp.uint32), (is_applied & ~is_bad).astype(jnp.uint32), bad)
        worker = dataclasses.replace(worker, optimizer_state=state, guard=guard, steps=steps).reset_gradients()
        new_workers.append(worker.pull(after))
    return new_workers, after


def _mean_of_counted(trees: Sequence[PyTree], counted: Bool[Array, " workers"], otherwise: PyTree) -> PyTree:
    """The mean over the counted trees; for leaves that are not floats, the first counted one; `otherwise` if none counts."""
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


def metrics_of(copies: Sequence[NetworkCopies]) -> Metrics:
    """Metrics of several `NetworkCopies`, such as `critic/target_distance`, `critic/skipped_steps` and `critic/staleness`.

    Raises:
        ValueError: two `NetworkCopies` have the same name, so the metrics of one would overwrite the other's.
    """
    names = [one.name for one in copies]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"metrics_of: names must be unique, got {duplicates[0]!r} twice; create each with its own name=")
    metrics: Metrics = {}
    for one in copies:
        metrics[f"{one.name}/skipped_steps"] = one.guard.skipped
        metrics[f"{one.name}/consecutive_skipped_updates"] = one.guard.consecutive_skipped_updates
        if one.gradients is not None:
            metrics[f"{one.name}/skipped_gradients"] = one.gradients.skipped
        if one.target is not None:
            metrics[f"{one.name}/target_distance"] = one.distance("online", "target")
        if one.shared is not None:
            metrics[f"{one.name}/shared_version"] = one.shared.version
            metrics[f"{one.name}/staleness"] = one.staleness(one.shared)
            metrics[f"{one.name}/dropped_pushes"] = one.shared.dropped
    return metrics

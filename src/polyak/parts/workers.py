"""Workers that train one shared copy, as pure functions: pull, push with bounded staleness, and the synchronous round.

The shared copy travels beside the workers; each holds the one that it last saw, in the same buffers. Donate it together with
them or not at all. Statistics of a shared copy advance in `NetworkCopies.train_and_sync`; pushed gradients carry none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from polyak.core.checks import check_integer
from polyak.core.types import PyTree, Scalar
from polyak.parts.copies import NetworkCopies, Shared


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
    worker: NetworkCopies, shared: Shared, gradients: PyTree = None, *, max_staleness: int | None = None
) -> tuple[NetworkCopies, Shared]:
    """The worker's gradients applied to the shared copy, by the shared optimiser or the worker's own.

    The worker's online copy stays as it is until it pulls.

    Args:
        gradients: the worker's accumulated ones if None.
        max_staleness: gradients of weights that are older, by more than so many steps, are dropped and counted.

    Raises:
        ValueError: the trees differ, or `max_staleness` is negative.
        TypeError: `max_staleness` is no integer.
    """
    fresh = jnp.array(True)
    if max_staleness is not None:
        check_integer("push", "max_staleness", max_staleness, at_least=0)
        fresh = staleness(worker, shared) <= max_staleness
    before = worker.skipped
    pushed = dataclasses.replace(worker, shared=shared).apply_gradients("shared", gradients, keep=fresh)
    assert pushed.shared is not None, "it was put there"
    dropped = (~fresh).astype(jnp.uint32)
    applied = dataclasses.replace(pushed.shared, dropped=shared.dropped + dropped)
    # What is dropped for its age is counted as that, not as a bad number.
    skipped = jnp.where(fresh, pushed.skipped, before)
    return dataclasses.replace(pushed, shared=applied, skipped=skipped), applied


def synchronous_round(
    workers: Sequence[NetworkCopies],
    shared: Shared,
    gradients: Sequence[PyTree],
    *,
    reduce: Literal["sum", "mean"] = "mean",
    clip: Scalar | None = None,
    clip_when: Literal["each", "total"] = "each",
) -> tuple[list[NetworkCopies], Shared]:
    """All workers' gradients as one: reduced, one step of the optimiser, and everyone pulls.

    A worker's gradient that is not finite is left out. Workers with their own optimisers have seen the same gradients since
    they began, so their states are one: the first one's steps, and all take it.

    Args:
        gradients: one tree a worker.
        reduce: as for `NetworkCopies.accumulate`.
        clip: likewise.
        clip_when: likewise; `"each"` is each worker's.

    Raises:
        ValueError: not one gradient a worker, or trees differ.
    """
    if not workers or len(workers) != len(gradients):
        raise ValueError(f"synchronous_round: {len(workers)} workers and {len(gradients)} gradients; one for each is wanted")
    first = dataclasses.replace(workers[0], shared=shared).reset_gradients()
    for gradient in gradients:
        first = first.accumulate(gradient, reduce=reduce, clip=clip, clip_when=clip_when)
    first = first.apply_gradients("shared").reset_gradients()
    assert first.shared is not None, "it was put there"
    stepped = [first]
    for worker in workers[1:]:
        state = jax.tree.map(lambda x: jnp.array(x, copy=True), first.optimizer_state)
        stepped.append(dataclasses.replace(worker, optimizer_state=state).reset_gradients())
    return [pull(worker, first.shared) for worker in stepped], first.shared

"""The receiving side of asynchronous training: gradients of many workers for one shared copy, each applied exactly once."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int32, UInt32

from polyak.copies.network_copies import NetworkCopies
from polyak.copies.shared import Shared
from polyak.core.checks import check_integer
from polyak.core.struct import struct
from polyak.core.tree_check import check_same_tree
from polyak.core.types import PyTree, copy_buffers
from polyak.ops.gradient_step import Aux, all_finite, apply_gradient, in_float32


@struct
class Push:
    """The header of the gradients that a worker sends.

    Attributes:
        worker: the worker's number, from 0.
        sequence: the number of this push, which the worker counts from 1. A push that is sent again keeps its number.
        version: the version of the shared copy that the gradients were computed with.
    """

    worker: Int32[Array, ""]
    sequence: UInt32[Array, ""]
    version: UInt32[Array, ""]

    @classmethod
    def create(cls, worker: int, sequence: int, version: int | UInt32[Array, ""]) -> "Push":
        """From Python integers."""
        return cls(jnp.int32(worker), jnp.uint32(sequence), jnp.asarray(version, jnp.uint32))


@struct
class Senders:
    """The receiver's record of each of W workers.

    Attributes:
        sequence: the number of the latest push; 0 before the first. A worker that is started again continues from it.
        applied: pushes applied.
        repeated: pushes that arrived again, and were ignored.
        stale: pushes dropped because they were too old.
        rejected: pushes with NaN or infinity, in the gradients or the step.
        consecutive_rejected: rejected pushes since the last push that was applied.
        optimizer_state: states of the workers' own optimizers, leaves `[W, ...]`; None if the shared copy has the only one.
    """

    sequence: UInt32[Array, " W"]
    applied: UInt32[Array, " W"]
    repeated: UInt32[Array, " W"]
    stale: UInt32[Array, " W"]
    rejected: UInt32[Array, " W"]
    consecutive_rejected: UInt32[Array, " W"]
    optimizer_state: PyTree

    @classmethod
    def init(cls, num_workers: int, optimizer_state: PyTree = None) -> "Senders":
        """No push has arrived.

        Args:
            optimizer_state: the initial state of every worker's own optimizer; None where the shared copy has the only one.

        Raises:
            TypeError, ValueError: `num_workers` is not a positive integer.
        """
        check_integer("Senders", "num_workers", num_workers)
        states = jax.tree.map(lambda x: jnp.tile(jnp.asarray(x), (num_workers, *(1,) * jnp.ndim(x))), optimizer_state)
        sequence, applied, repeated, stale, rejected, consecutive = (jnp.zeros(num_workers, jnp.uint32) for _ in range(6))
        return cls(sequence, applied, repeated, stale, rejected, consecutive, states)

    def is_quarantined(self, max_bad: int) -> Bool[Array, " W"]:
        """True for workers whose last `max_bad` pushes, or more, were rejected."""
        return self.consecutive_rejected >= max_bad

    def readmit(self, worker: int | Int32[Array, ""]) -> "Senders":
        """End the quarantine of a worker, for one that was started again."""
        return dataclasses.replace(self, consecutive_rejected=self.consecutive_rejected.at[worker].set(0))

    def _count(self, push: Push, receipt: "Receipt") -> "Senders":
        def add(counts: Array, flag: Array) -> Array:
            return counts.at[push.worker].add(flag.astype(jnp.uint32))

        consecutive = add(self.consecutive_rejected, receipt.rejected)
        return dataclasses.replace(
            self,
            sequence=self.sequence.at[push.worker].max(push.sequence),
            applied=add(self.applied, receipt.applied),
            repeated=add(self.repeated, receipt.repeated),
            stale=add(self.stale, receipt.stale),
            rejected=add(self.rejected, receipt.rejected),
            consecutive_rejected=consecutive.at[push.worker].multiply((~receipt.applied).astype(jnp.uint32)),
        )


@struct
class Receipt:
    """The outcome of a push; exactly one flag is True.

    Attributes:
        applied: the push is in the shared copy.
        empty: the rollout had no samples, so nothing changed.
        repeated: the push had arrived before.
        stale: the push was too old, or of a version that the shared copy does not have yet.
        rejected: the push held NaN or infinity, or its worker is none of the W.
        quarantined: the worker is in quarantine.
    """

    applied: Bool[Array, ""]
    empty: Bool[Array, ""]
    repeated: Bool[Array, ""]
    stale: Bool[Array, ""]
    rejected: Bool[Array, ""]
    quarantined: Bool[Array, ""]


def receive(
    shared: Shared,
    senders: Senders,
    push: Push,
    gradients: PyTree,
    *,
    optimizer: optax.GradientTransformation,
    stats: PyTree = None,
    is_finite: Bool[Array, ""] | bool = True,
    has_samples: Bool[Array, ""] | bool = True,
    max_staleness: int | None = None,
    max_bad: int = 10,
) -> tuple[Shared, Senders, Receipt]:
    """Apply a worker's gradients to the shared copy, unless they have arrived before, are too old, or hold NaN or infinity.

    A push that is not applied changes no bit of the weights and the optimizer states. Donate `shared` and `senders`.

    Args:
        gradients: in the tree of the weights.
        optimizer: its state is in the shared copy or, if `senders` has a state for each worker, in `senders`.
        stats: the worker's statistics after its step; they replace the shared copy's if the step is applied. None leaves them.
        is_finite: False rejects the push: the worker found NaN or infinity in the data of the gradients.
        has_samples: False applies nothing: these gradients of 0 are of a rollout that only resets, and would still move the
            weights by momentum.
        max_staleness: gradients of weights more than this many steps old are dropped; None accepts gradients of any earlier
            version.
        max_bad: consecutive rejections after which a worker is in quarantine: its pushes are ignored until `readmit`.

    Raises:
        ValueError: the trees differ, or `max_staleness` or `max_bad` is out of range.
        TypeError: `max_staleness` or `max_bad` is not an integer.
    """
    check_integer("receive", "max_bad", max_bad)
    check_integer("receive", "max_staleness", max_staleness, at_least=0, optional=True)
    check_same_tree(gradients, shared.variables.params, "receive", sides=("gradients", "params"))
    if stats is not None:
        check_same_tree(stats, shared.variables.stats, "receive", sides=("statistics", "shared"))
    is_known = (push.worker >= 0) & (push.worker < len(senders.sequence))
    # JAX writes nothing out of bounds, but reads the last worker's there, and counts negative numbers from the end.
    push = dataclasses.replace(push, worker=jnp.where(is_known, push.worker, len(senders.sequence)))
    is_new = ~is_known | (push.sequence > senders.sequence[push.worker])
    is_quarantined = is_known & senders.is_quarantined(max_bad)[push.worker]
    is_fresh = shared.is_fresh(push.version, max_staleness)
    enabled = is_new & ~is_quarantined & is_fresh
    is_empty = enabled & is_finite & ~jnp.asarray(has_samples)
    is_stale = is_new & ~is_quarantined & ~is_fresh

    states = senders.optimizer_state
    state = shared.optimizer_state if states is None else jax.tree.map(lambda x: x[push.worker], states)
    gradients = in_float32(gradients)
    bad = {"gradient": ~all_finite(gradients) | ~is_known}
    variables, state, log = apply_gradient(
        optimizer, shared.variables, state, gradients, Aux({}, stats), bad, enabled & ~is_empty, is_finite
    )
    new_shared = shared.after_step(variables, state if states is None else shared.optimizer_state, log)
    receipt = Receipt(log.applied, is_empty, ~is_new, is_stale, log.skipped, is_new & is_quarantined)
    new_shared = dataclasses.replace(new_shared, dropped=shared.dropped + is_stale.astype(jnp.uint32))
    new_senders = senders._count(push, receipt)
    if states is not None:
        states = jax.tree.map(lambda all_, one: all_.at[push.worker].set(one), states, state)
        new_senders = dataclasses.replace(new_senders, optimizer_state=states)
    return new_shared, new_senders, receipt


def worker_copies(copies: NetworkCopies) -> NetworkCopies:
    """The copies that a worker pulls: the shared weights as its online copy, and their version; without optimizer and target.

    Raises:
        ValueError: there is no shared copy.
    """
    shared = copies.shared
    if shared is None:
        raise ValueError(f"{copies.name}: worker_copies needs a shared copy, got the copies {', '.join(copies.names)}")
    return dataclasses.replace(
        copies,
        optimizer=None,
        online=copy_buffers(shared.variables),
        target=None,
        shared=None,
        optimizer_state=(),
        gradients=None,
        target_follow=None,
        target_count=None,
        online_follow=None,
        online_count=None,
        version=jnp.array(shared.version, copy=True),
        shared_optimizer=False,
    )

"""The copy of a network that several workers train."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables, copy_buffers
from polyak.ops.gradient_step import StepLog


@struct
class Shared:
    """The copy that several workers train.

    Attributes:
        variables: the weights and statistics.
        optimizer_state: the state of the shared optimizer, or `()` if each worker has its own.
        version: gradient steps applied.
        dropped: pushes dropped because they were too stale.
    """

    variables: Variables
    optimizer_state: PyTree
    version: UInt32[Array, ""]
    dropped: UInt32[Array, ""]

    @classmethod
    def init(cls, variables: Variables, optimizer_state: PyTree) -> "Shared":
        """Copy these into new buffers, with all counters 0."""
        return cls(copy_buffers(variables), optimizer_state, jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def is_fresh(self, version: UInt32[Array, ""], max_staleness: int | None) -> Bool[Array, ""]:
        """True for gradients of a version that this copy had at most `max_staleness` gradient steps ago; None: at any time."""
        is_past = version <= self.version
        return is_past if max_staleness is None else is_past & (self.version - version <= jnp.uint32(max_staleness))

    def after_step(self, variables: Variables, optimizer_state: PyTree, log: StepLog) -> "Shared":
        """This copy with what `apply_gradient` returned; an applied gradient step counts as a version."""
        version = self.version + log.applied.astype(jnp.uint32)
        return dataclasses.replace(self, variables=variables, optimizer_state=optimizer_state, version=version)

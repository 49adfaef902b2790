"""The copy of a network that several workers train."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, UInt32

from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables, copy_buffers
from polyak.ops.gradient_step import Aux, StepLog, apply_gradient


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

    def step(
        self,
        optimizer: optax.GradientTransformation,
        optimizer_state: PyTree,
        gradients: PyTree,
        aux: Aux,
        bad: Mapping[str, Bool[Array, ""]],
        enabled: Bool[Array, ""] | bool = True,
        data_is_finite: Bool[Array, ""] | bool = True,
    ) -> tuple["Shared", PyTree, StepLog]:
        """One gradient step of this copy, which counts as a version, and the optimizer state after it; see `apply_gradient`."""
        variables, optimizer_state, log = apply_gradient(
            optimizer, self.variables, optimizer_state, gradients, aux, bad, enabled, data_is_finite
        )
        version = self.version + log.applied.astype(jnp.uint32)
        return dataclasses.replace(self, variables=variables, version=version), optimizer_state, log

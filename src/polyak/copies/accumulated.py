"""Gradient accumulation over several calls, as a sum or mean, with optional clipping."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, UInt32

from polyak.core.checks import check_choice, check_number
from polyak.core.struct import struct
from polyak.core.tree_check import check_same_tree
from polyak.core.types import PyTree, Scalar
from polyak.ops.gradient_step import all_finite, clip_to_norm, global_norm, in_float32


@struct
class Accumulated:
    """Accumulated gradients and how `read` reduces them.

    Attributes:
        total: the sum of the gradients, in float32.
        number: gradients added.
        mean: `read` returns the mean, not the sum; set by the latest `add`.
        clip: `read` clips to this norm; 0 disables clipping; set by the latest `add`.
        skipped: gradients not added because they, or the sum, held NaN or infinity.
        has_bad: True if a gradient was skipped since the last reset.
    """

    total: PyTree
    number: UInt32[Array, ""]
    mean: Bool[Array, ""]
    clip: Float[Array, ""]
    skipped: UInt32[Array, ""]
    has_bad: Bool[Array, ""]

    @classmethod
    def zeros(cls, params: PyTree) -> "Accumulated":
        """Empty accumulator for parameters of these shapes."""
        total = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return cls(
            total=total,
            number=jnp.zeros((), jnp.uint32),
            mean=jnp.zeros((), bool),
            clip=jnp.zeros((), jnp.float32),
            skipped=jnp.zeros((), jnp.uint32),
            has_bad=jnp.zeros((), bool),
        )

    def add(
        self,
        gradients: PyTree,
        *,
        reduce: Literal["sum", "mean"] = "sum",
        clip: Scalar | None = None,
        clip_when: Literal["each", "total"] = "each",
        valid: Bool[Array, ""] | bool = True,
    ) -> "Accumulated":
        """Add a gradient; one with NaN or infinity is skipped and counted.

        Args:
            gradients: floats of any width, with the tree structure of the parameters.
            reduce: `"sum"` or `"mean"`, the result of `read`.
            clip: maximum global norm; None disables clipping.
            clip_when: clip each gradient before it is added, or the total when it is read.
            valid: False skips the gradient.

        Raises:
            ValueError: the trees differ, or an argument is out of range.
            TypeError: `clip` is not a number.
        """
        check_choice("accumulate", "reduce", reduce, ("sum", "mean"))
        check_choice("accumulate", "clip_when", clip_when, ("each", "total"))
        check_number("accumulate", "clip", clip, above=0, optional=True)
        check_same_tree(gradients, self.total, "accumulate", sides=("gradients", "params"))
        gradients = in_float32(gradients)
        each_clip, total_clip = (clip, None) if clip_when == "each" else (None, clip)
        clipped = gradients if each_clip is None else clip_to_norm(gradients, global_norm(gradients), each_clip)
        total = jax.tree.map(jnp.add, self.total, clipped)
        valid = jnp.asarray(valid) & all_finite(gradients) & all_finite(total)
        return Accumulated(
            total=optax.tree.where(valid, total, self.total),
            number=self.number + valid.astype(jnp.uint32),
            mean=jnp.array(reduce == "mean"),
            clip=jnp.asarray(0.0 if total_clip is None else total_clip, jnp.float32),
            skipped=self.skipped + (~valid).astype(jnp.uint32),
            has_bad=self.has_bad | ~valid,
        )

    def reset(self) -> "Accumulated":
        """Empty accumulator; the skip count is kept."""
        return dataclasses.replace(Accumulated.zeros(self.total), skipped=self.skipped)

    def read(self) -> PyTree:
        """The sum or mean of the gradients, clipped if `clip` is set; zeros if none were added."""
        divisor = jnp.where(self.mean, jnp.maximum(self.number, jnp.uint32(1)), jnp.uint32(1)).astype(jnp.float32)
        reduced = jax.tree.map(lambda g: g / divisor, self.total)
        return clip_to_norm(reduced, global_norm(reduced), jnp.where(self.clip > 0, self.clip, jnp.inf))

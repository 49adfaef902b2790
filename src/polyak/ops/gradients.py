"""Gradients on their way into weights: accumulated in float32, clipped, and stepped along only where all stays finite."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from polyak.core.checks import check_choice, check_number
from polyak.core.struct import struct
from polyak.core.types import PyTree, Scalar
from polyak.ops.guard import Guard, all_finite
from polyak.ops.trees import check_same_tree
from polyak.ops.updates import apply_updates

QUANTITIES = ("loss", "gradient", "statistics", "step")
"""What has to be finite for a gradient step to be taken, in the order in which one spoils the next."""


@struct
class Accumulated:
    """Gradients added up, and how they are read.

    Attributes:
        total: their sum, in float32.
        number: how many.
        mean: what is read is the mean, not the sum; as the latest one that was added wants it.
        clip: the norm to which what is read is scaled down, or 0 where it is not; likewise.
        refused: how many were not added, because they or the sum were not finite.
        spoilt: one was refused since the last reset.
    """

    total: PyTree
    number: UInt32[Array, ""]
    mean: Bool[Array, ""]
    clip: Float[Array, ""]
    refused: UInt32[Array, ""]
    spoilt: Bool[Array, ""]

    @classmethod
    def zeros(cls, params: PyTree) -> "Accumulated":
        """None yet, for parameters of these shapes."""
        total = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return cls(
            total=total,
            number=jnp.zeros((), jnp.uint32),
            mean=jnp.zeros((), bool),
            clip=jnp.zeros((), jnp.float32),
            refused=jnp.zeros((), jnp.uint32),
            spoilt=jnp.zeros((), bool),
        )

    def add(
        self,
        gradients: PyTree,
        *,
        reduce: Literal["sum", "mean"] = "sum",
        clip: Scalar | None = None,
        clip_when: Literal["each", "total"] = "each",
        keep: Bool[Array, ""] | bool = True,
    ) -> "Accumulated":
        """With one more; or, where it is not finite, as before, and that counted.

        Args:
            gradients: floats of any width, in the tree of the parameters.
            reduce: read all of them as their sum, or as their mean.
            clip: the largest global norm.
            clip_when: of each one before it is added, or of what is read in the end.
            keep: False refuses it.

        Raises:
            ValueError: the trees differ, or a setting is none of these.
            TypeError: `clip` is no number.
        """
        check_choice("accumulate", "reduce", reduce, ("sum", "mean"))
        check_choice("accumulate", "clip_when", clip_when, ("each", "total"))
        check_number("accumulate", "clip", clip, above=0, optional=True)
        check_same_tree(gradients, self.total, "accumulate", sides=("gradients", "params"))
        gradients = in_float32(gradients)
        each, whole = (clip, None) if clip_when == "each" else (None, clip)
        total = jax.tree.map(jnp.add, self.total, gradients if each is None else clipped(gradients, tree_norm(gradients), each))
        keep = jnp.asarray(keep) & all_finite(gradients) & all_finite(total)
        return Accumulated(
            total=jax.tree.map(lambda new, old: jnp.where(keep, new, old), total, self.total),
            number=self.number + keep.astype(jnp.uint32),
            mean=jnp.array(reduce == "mean"),
            clip=jnp.asarray(0.0 if whole is None else whole, jnp.float32),
            refused=self.refused + (~keep).astype(jnp.uint32),
            spoilt=self.spoilt | ~keep,
        )

    def reset(self) -> "Accumulated":
        """None any more; what was refused stays counted."""
        return dataclasses.replace(Accumulated.zeros(self.total), refused=self.refused)

    def read(self) -> PyTree:
        """Their sum or mean, clipped if so wanted; zeros where there are none."""
        divisor = jnp.where(self.mean, jnp.maximum(self.number, jnp.uint32(1)), jnp.uint32(1)).astype(jnp.float32)
        reduced = jax.tree.map(lambda g: g / divisor, self.total)
        norm = tree_norm(reduced)
        scale = jnp.where((self.clip > 0) & (norm > self.clip), self.clip / norm, 1.0)
        return jax.tree.map(lambda g: g * scale, reduced)


def step_along(
    optimizer: Any, params: PyTree, state: PyTree, gradients: PyTree, keep: Bool[Array, ""]
) -> tuple[PyTree, PyTree, Bool[Array, "2"]]:
    """Parameters and optimiser state after one step, and whether the gradient and what the step gives are finite.

    Both are as before, to the bit, where `keep` is False or one of the two is not finite.

    Args:
        optimizer: an `optax.GradientTransformation`, with a float32 state whatever the parameters' dtype.
        gradients: float32.
    """
    # Optax mixes floats and integer counts, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, stepped = optimizer.update(gradients, state, in_float32(params))
    moved = apply_updates(params, updates)
    finite = jnp.stack([all_finite(gradients), all_finite((moved, stepped))])
    taken = keep & jnp.all(finite)
    params, state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), (moved, stepped), (params, state))
    return params, state, finite


def guarded(
    guard: Guard, keep: Bool[Array, ""], missing: Bool[Array, ""], bad: Bool[Array, "4"]
) -> tuple[Guard, Bool[Array, ""]]:
    """The counts after a step, and whether it was taken. One that was not asked for breaks no row of bad ones.

    Args:
        keep: the step was asked for.
        missing: there was no gradient.
        bad: which of `QUANTITIES` were not finite.
    """
    any_bad = jnp.any(bad)
    taken = keep & ~any_bad
    after = guard.after_update((any_bad | missing).astype(jnp.uint32), 1, bad)
    return dataclasses.replace(after, in_a_row=jnp.where(taken | any_bad, after.in_a_row, guard.in_a_row)), taken


def refused_in_a_row(guard: Guard, max_bad_steps: int) -> str | None:
    """What was not finite first in the last of so many gradient steps refused in a row; None if there are not as many."""
    in_a_row = int(guard.in_a_row)
    if in_a_row < max_bad_steps:
        return None
    return (
        f"{in_a_row} gradient steps in a row were refused (max_bad_steps={max_bad_steps}); the first quantity that was not "
        f"finite is {QUANTITIES[int(guard.first_bad) - 1]!r}. The weights are those from before."
    )


def tree_norm(tree: PyTree) -> Float[Array, ""]:
    """√Σ xᵢ² over all leaves, without the overflow of squaring 1e30; not finite where an entry is not."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree) if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    scale = jnp.where(largest > 0, largest, 1.0)
    return scale * jnp.sqrt(jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf / scale)) for leaf in leaves])))


def clipped(gradients: PyTree, norm: Float[Array, ""], largest: Scalar) -> PyTree:
    """The gradients, scaled down to the norm `largest` where theirs is above it."""
    scale = jnp.where(norm > largest, largest / norm, 1.0)
    return jax.tree.map(lambda g: g * scale, gradients)


def in_float32(tree: PyTree) -> PyTree:
    """Floats narrower than float32 as float32."""

    def widen(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widen, tree)

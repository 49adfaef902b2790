"""The gradient step that agents share: clipped by global norm, Adam, refused where it is not finite."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from polyak.core.struct import struct
from polyak.core.types import PyTree, Scalar


@struct
class Adam:
    """Adam on one raveled vector of parameters; one vector is one fused kernel, where a tree costs one a leaf.

        m ← β₁ m + (1-β₁) g,   v ← β₂ v + (1-β₂) g²,   p ← p - lr · m̂ / (√v̂ + ε)

    Attributes:
        max_grad_norm: the gradient is scaled down to this Euclidean norm; None leaves it alone.
        b1: β₁.
        b2: β₂.
        eps: ε, added after the bias correction (1e-5 is PPO's custom, 1e-8 Optax's default).

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    max_grad_norm: Scalar | None = None
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-5

    def init(self, params: Float[Array, " n"]) -> PyTree:
        """The state before the first step."""
        return self._transform().init(params)

    def step(
        self,
        params: Float[Array, " n"],
        state: PyTree,
        gradient: Float[Array, " n"],
        norm: Float[Array, ""],
        learning_rate: Scalar,
        keep: Bool[Array, ""],
    ) -> tuple[Float[Array, " n"], PyTree]:
        """The parameters and the state after one step, or both unchanged to the bit where `keep` is False.

        Args:
            norm: the `global_norm` of the gradient.
        """
        if self.max_grad_norm is not None:
            gradient = gradient * jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
        # Optax raises a float to the power of an integer count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            _, stepped = self._transform().update(gradient, state)
            # The parameters move by the moments as they are written: by Optax's direction, XLA would compute them once more
            # for that, from copies of the old ones.
            state = jax.lax.optimization_barrier(jax.tree.map(partial(jnp.where, keep), stepped, state))
            mean = optax.tree.bias_correction(state.mu, self.b1, state.count)
            mean_square = optax.tree.bias_correction(state.nu, self.b2, state.count)
        moved = params - learning_rate * (mean / (jnp.sqrt(mean_square) + self.eps))
        return jnp.where(keep, moved, params), state

    def accepts(self, norm: Float[Array, ""]) -> Bool[Array, ""]:
        """A gradient of this norm can be stepped along: its moments are finite. Clipping makes any finite one small enough."""
        return jnp.isfinite(norm if self.max_grad_norm is not None else jnp.square(norm))

    def clipped_norm(self, norm: Float[Array, ""]) -> Float[Array, ""]:
        """The norm of a gradient of this norm after clipping."""
        return norm if self.max_grad_norm is None else jnp.minimum(norm, self.max_grad_norm)

    def _transform(self) -> Any:
        return optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)


def global_norm(gradient: Float[Array, " n"]) -> Float[Array, ""]:
    """√Σ gᵢ² in float32, without the overflow of squaring 1e30 or the underflow of squaring 1e-25. NaN where an entry is.

    By two sums of squares, one of a scaled down gradient, which only norms from 1e7 on need: the largest entry, which one
    could divide by, takes XLA three times as long as a sum.

    Source: Blue 1978, "A portable Fortran program to find the Euclidean norm of a vector", with two accumulators.
    """
    # As constants, XLA would multiply them with each other where the gradient is one number.
    up, down = jax.lax.optimization_barrier((jnp.float32(2.0**40), jnp.float32(2.0**-66)))
    usual = jnp.sum(jnp.square(gradient * up))

    def large(gradient: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(gradient * down))) / down

    norm: Array = jax.lax.cond(usual < jnp.inf, lambda gradient: jnp.sqrt(usual) / up, large, gradient)
    return norm

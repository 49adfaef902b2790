"""Penalties on the mean KL divergence KL(π_old ‖ π) of a policy update."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.types import Scalar

STEP = 1.5
SMALLEST_BETA, LARGEST_BETA = 1e-6, 1e6


def kl_cutoff(mean_kl: Float[Array, ""], *, factor: Scalar, target: Scalar, coef: Scalar) -> Float[Array, ""]:
    """The cutoff penalty coef · max(KL - factor · target, 0)²; 0 up to the limit factor · target.

    Source: Schulman et al. 2017, the authors' code of TRPO and PPO for continuous control; TF-Agents `kl_cutoff_loss`.

    >>> float(kl_cutoff(jnp.float32(0.5), factor=2.0, target=0.125, coef=8.0))
    0.5
    """
    return coef * jnp.square(jnp.maximum(mean_kl - factor * target, 0.0))


def adapted_beta(beta: Float[Array, ""], mean_kl: Float[Array, ""], *, target: Scalar, tolerance: Scalar) -> Float[Array, ""]:
    """The coefficient β of the penalty β · KL for the next update.

        β ← β · 1.5   if KL > (1 + tolerance) · target
        β ← β / 1.5   if KL < (1 - tolerance) · target

    β is clipped to [10⁻⁶, 10⁶]; if KL is NaN or infinite, β is unchanged.

    Source: Schulman et al. 2017, arXiv:1707.06347, section 4 (there with a factor of 2, and 1.5 as the tolerance).
    """
    larger = jnp.where(mean_kl > (1.0 + tolerance) * target, beta * STEP, beta)
    new_beta = jnp.where(mean_kl < (1.0 - tolerance) * target, beta / STEP, larger)
    return jnp.where(jnp.isfinite(mean_kl), jnp.clip(new_beta, SMALLEST_BETA, LARGEST_BETA), beta)

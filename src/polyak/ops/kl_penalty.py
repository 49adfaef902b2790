"""Penalties on how far a policy moves in one update, by the mean KL divergence KL(π_old ‖ π)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.types import Scalar

STEP = 1.5
SMALLEST_BETA, LARGEST_BETA = 1e-6, 1e6


def kl_cutoff(mean_kl: Float[Array, ""], *, factor: Scalar, target: Scalar, coef: Scalar) -> Float[Array, ""]:
    """Coef · max(KL - factor · target, 0)²: nothing within the limit, steep beyond.

    Source: Schulman et al. 2017, the authors' code of TRPO and PPO for continuous control; TF-Agents `kl_cutoff_loss`.

    >>> float(kl_cutoff(jnp.float32(0.5), factor=2.0, target=0.125, coef=8.0))
    0.5
    """
    return coef * jnp.square(jnp.maximum(mean_kl - factor * target, 0.0))


def adapted_beta(beta: Float[Array, ""], mean_kl: Float[Array, ""], *, target: Scalar, tolerance: Scalar) -> Float[Array, ""]:
    """The coefficient β of the penalty β · KL for the next update.

        β ← β · 1.5   if KL > (1 + tolerance) · target
        β ← β / 1.5   if KL < (1 - tolerance) · target

    It stays within 10⁻⁶ and 10⁶; a divergence that is not finite leaves it as it is.

    Source: Schulman et al. 2017, arXiv:1707.06347, section 4 (there with a factor of 2, and 1.5 as the tolerance).
    """
    larger = jnp.where(mean_kl > (1.0 + tolerance) * target, beta * STEP, beta)
    moved = jnp.where(mean_kl < (1.0 - tolerance) * target, beta / STEP, larger)
    return jnp.where(jnp.isfinite(mean_kl), jnp.clip(moved, SMALLEST_BETA, LARGEST_BETA), beta)

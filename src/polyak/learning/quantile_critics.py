"""The quantile loss of critics that return quantiles, of TQC and BRO."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.types import Scalar, Terms
from polyak.learning.actor_critic_updates import critic_terms
from polyak.ops.value_distributions import midpoints, quantile_huber_loss


def quantile_critic_loss(
    quantiles: Float[Array, "B N M"], targets: Float[Array, "B K"], weight: Float[Array, " B"], huber_delta: Scalar
) -> tuple[Float[Array, " B"], Terms]:
    """The loss of each sample, and its terms; `priority` is the mean |δ| of each sample, δ a difference of means.

        Σ_i Σ_m 1/K Σ_k |τ_m - 1{u < 0}| L_κ(u) / κ,    u = y_k - θ_i,m,  τ_m = (2m - 1) / 2M

    Args:
        quantiles: θ_i,m of the N critics.
        targets: y_k, without a gradient.
        weight: weights of the samples in the terms, which sum to 1.
        huber_delta: κ.
    """
    tau = midpoints(quantiles.shape[2])[None]
    each = jax.vmap(lambda theta: quantile_huber_loss(theta, tau, targets, huber_delta), 1, 1)(quantiles)
    q = jnp.mean(quantiles, axis=2)
    return jnp.sum(each, axis=1), critic_terms(q, jnp.mean(targets, axis=1, keepdims=True) - q, weight)

"""Distributions of returns: the categorical projection of C51, and the quantile regression loss."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from polyak.core.types import Scalar


def project_categorical(
    probs: Float[Array, "N K"], values: Float[Array, "N K"], atoms: Float[Array, " M"]
) -> Float[Array, "N M"]:
    """The distribution of `values` with these probabilities, on equally spaced atoms.

        m_i = Σ_j p_j · max(1 - |clip(v_j, z_1, z_M) - z_i| / Δz, 0)

    Each value divides its probability between the two nearest atoms, or gives all of it to an atom that it equals, so the sum
    of probabilities stays 1.

    Args:
        values: v, in any order.
        atoms: z, increasing by Δz.

    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.

    >>> atoms = jnp.linspace(-1.0, 1.0, 5)
    >>> project_categorical(jnp.full((1, 5), 0.2), 0.25 + 0.5 * atoms[None], atoms).round(4)
    Array([[0. , 0.1, 0.4, 0.4, 0.1]], dtype=float32)
    """
    distance = jnp.abs(jnp.clip(values, atoms[0], atoms[-1])[:, None, :] - atoms[None, :, None])
    share = jnp.maximum(1.0 - distance / (atoms[1] - atoms[0]), 0.0)
    return jnp.sum(share * probs[:, None, :], axis=2)


def quantile_huber_loss(
    quantiles: Float[Array, "N K"], tau: Float[Array, "#N K"], targets: Float[Array, "N M"], delta: Scalar
) -> Float[Array, " N"]:
    """The quantile regression loss, summed over quantiles and averaged over targets.

        Σ_i E_j[ |τ_i - 1{u_ij < 0}| · L_κ(u_ij) / κ ],    u_ij = T_j - θ_i

    with L_κ the Huber loss; κ = 0 is the absolute value.

    Args:
        quantiles: θ.
        tau: τ, the fractions of the quantiles, in (0, 1).
        targets: T, samples of the target distribution.
        delta: κ.

    Source: Dabney et al. 2018, arXiv:1710.10044, eq. 10, and arXiv:1806.06923, eq. 3.

    >>> quantile_huber_loss(jnp.array([[-1.0, 0.0, 2.0]]), midpoints(3)[None], jnp.array([[0.0, 1.5]]), 1.0)
    Array([0.59375], dtype=float32)
    """
    error = targets[:, None, :] - quantiles[:, :, None]
    size = jnp.abs(error)
    # As (|u| - q) + q² / 2κ with q = min(|u|, κ): also for κ = 0.
    quadratic = jnp.minimum(size, delta)
    huber = size - quadratic + jnp.square(quadratic) / jnp.maximum(2.0 * delta, float(np.finfo(np.float32).tiny))
    side = jnp.abs(tau[:, :, None] - (error < 0).astype(jnp.float32))
    return jnp.sum(jnp.mean(side * huber, axis=2), axis=1)


def midpoints(count: int) -> Float[Array, " K"]:
    """The fractions (2i - 1) / 2K of K quantiles that divide a distribution into equal parts.

    >>> midpoints(2)
    Array([0.25, 0.75], dtype=float32)
    """
    return (jnp.arange(count, dtype=jnp.float32) + 0.5) / count


def entropy(probs: Float[Array, "N K"]) -> Float[Array, " N"]:
    """-Σ p log p, with 0 log 0 = 0.

    >>> entropy(jnp.array([[0.5, 0.5, 0.0]]))
    Array([0.6931472], dtype=float32)
    """
    return -jnp.sum(probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), axis=1)

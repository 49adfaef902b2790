"""Settings and mathematics of critics of the distribution of returns on fixed atoms, which agents share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from polyak.core.struct import integer, number, struct
from polyak.core.types import Terms
from polyak.core.warn import warn
from polyak.learning.actor_critic_updates import critic_terms
from polyak.ops.value_distributions import entropy


@struct(kw_only=True)
class AtomSettings:
    """The atoms z_1 ... z_K of the distribution of returns.

    Attributes:
        num_atoms: K, number of atoms.
        v_min: z_1, the return of the first atom; smaller returns are clipped to it.
        v_max: z_K, the return of the last atom; larger returns are clipped to it.
    """

    num_atoms: int = integer(default=101, at_least=2)
    v_min: float = number(default=-5.0, static=True)
    v_max: float = number(default=5.0, static=True)

    @property
    def atoms(self) -> Float[Array, " K"]:
        """The atoms z."""
        return jnp.linspace(self.v_min, self.v_max, self.num_atoms, dtype=jnp.float32)

    def check_atoms(self) -> None:
        """Check that the atoms increase, and warn of returns beyond them; called by `check_together`.

        Raises:
            ValueError: they do not increase.
        """
        if self.v_min >= self.v_max:
            raise ValueError(f"{type(self).__name__}: v_min={self.v_min} must be below v_max={self.v_max}")
        settings: Any = self
        bound, scale = settings.max_return, settings.reward_scale
        if bound is None or settings.normalize_reward != "return" or isinstance(scale, jax.core.Tracer):
            return
        if np.any(bound * np.asarray(scale) > max(abs(self.v_min), abs(self.v_max))):
            warn(
                f"{type(self).__name__}: max_return={bound} times reward_scale={scale} lies beyond the atoms, "
                f"v_min={self.v_min} and v_max={self.v_max}; larger returns are clipped to them"
            )

    def min_of_means(self, logits: Float[Array, "B N K"]) -> Float[Array, " B"]:
        """min_i Σ_k z_k p_i,k, the lowest expected return of N critics."""
        return jnp.min(jax.nn.softmax(logits) @ self.atoms, axis=1)

    def lowest_of(self, probs: Float[Array, "B N K"]) -> Float[Array, "B K"]:
        """p_j of the critic j = argmin_i Σ_k z_k p_i,k."""
        lowest = jnp.argmin(probs @ self.atoms, axis=1)
        return jnp.take_along_axis(probs, lowest[:, None, None], axis=1)[:, 0]

    def cross_entropy(
        self, logits: Float[Array, "B N K"], target_probs: Float[Array, "B K"], weight: Float[Array, " B"]
    ) -> tuple[Float[Array, "B N"], Terms]:
        """-Σ_k m_k log p_i,k of each critic, and terms of the loss; `priority` is the mean KL(m ‖ p_i) of each sample.

        Args:
            logits: of the online critics.
            target_probs: m, without a gradient.
            weight: of each sample, for the terms.
        """
        log_probs = jax.nn.log_softmax(logits)
        cross_entropy = -jnp.sum(target_probs[:, None] * log_probs, axis=2)
        q, target_q = jnp.exp(log_probs) @ self.atoms, target_probs @ self.atoms
        kl = jax.lax.stop_gradient(jnp.mean(cross_entropy, axis=1) - entropy(target_probs))
        return cross_entropy, critic_terms(q, target_q[:, None] - q, weight) | {"priority": jnp.maximum(kl, 0.0)}

"""Munchausen reinforcement learning (Vieillard et al. 2020, arXiv:2007.14430), for agents of action values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from polyak.core.struct import choice, number, struct
from polyak.core.types import Scalar
from polyak.ops.distributions.discrete import where_allowed
from polyak.ops.losses import of_action


@struct(kw_only=True)
class MunchausenSettings:
    """Munchausen reinforcement learning: a stochastic policy in the target, whose log-probability is added to the reward.

        y = r + α clip(t log π(a|s), l, 0) + γ^m Σ_b π(b|s') (Q(s', b) - t log π(b|s')),    π = softmax(Q / t)

    with Q of the target network, over allowed actions b. Of n steps, the first has the bonus.

    Attributes:
        munchausen: α (Vieillard et al. 2020, arXiv:2007.14430, who have 0.9); 0 leaves the bonus out, None π too: the target
            then has the best action. With a number `double` is not used.
        munchausen_temperature: t, in the units of values.
        munchausen_clip: l, the lowest bonus before it is weighted.
    """

    double: bool = choice(default=True, choices=(True, False), used_if=("munchausen", None))
    munchausen: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    munchausen_temperature: Scalar = number(default=0.03, above=0, used_if=("munchausen", ...))
    munchausen_clip: Scalar = number(default=-1.0, at_most=0, used_if=("munchausen", ...))

    def munchausen_bonus(
        self, q: Float[Array, "N n"], action: Int32[Array, " N"], mask: Bool[Array, "N n"] | None
    ) -> Float[Array, " N"]:
        """α clip(t log π(a|s), l, 0) of the target network's values at s."""
        log_prob = of_action(q, action) - soft_value(q, self.munchausen_temperature, mask)
        return jnp.asarray(self.munchausen, jnp.float32) * jnp.clip(log_prob, self.munchausen_clip, 0.0)


def soft_value(q: Float[Array, "rows n"], temperature: Scalar, mask: Bool[Array, "rows n"] | None) -> Float[Array, " rows"]:
    """The value t log Σ_b exp(q_b / t) = Σ_b π_b (q_b - t log π_b) of the policy π = softmax(q / t) over the allowed actions.

    >>> soft_value(jnp.array([[0.0, 0.0]]), 1.0, None)
    Array([0.6931472], dtype=float32)
    """
    return temperature * jax.nn.logsumexp(where_allowed(q, mask) / temperature, axis=1)

"""Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269): soft actor-critic with distributions of returns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.quantile_critics import QuantileCriticsAgent
from polyak.agents.sequence_settings import SequenceSettings
from polyak.core.struct import integer, struct
from polyak.core.types import Variables
from polyak.learning.actor_critic_updates import check_critics
from polyak.networks.critics import Critics
from polyak.replay.replay import Transition


@struct(kw_only=True)
class TQC(SequenceSettings, QuantileCriticsAgent):
    """TQC for Box actions: SAC with quantile critics.

        J_Z(θ) = E[ Σ_i 1/M Σ_m 1/K Σ_k |τ_m - 1{u < 0}| L_κ(u) / κ ],    u = y_k - θ_i,m(s, a),  τ_m = (2m - 1) / 2M
        y_k    = r + γ^m (z_k(s', a') - α log π(a'|s')),    a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - 1/NM Σ_i,m θ_i,m(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -log α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. z_1 ≤ ...
    ≤ z_K are the smallest K = N(M - d) of the N·M quantiles of all target critics together; dropping d per critic reduces
    overestimation. A gradient step trains the critics, and the target critics follow; every `policy_delay`-th step then trains
    the actor against the new critics, and α with the new actor.

    Unlike SAC, TQC has no `num_target_critics`: dropping quantiles of all critics replaces the minimum over critics.

    Attributes:
        target_entropy: H̄, the entropy of the policy that a learned α aims at, of actions in [-1, 1]; at most dim A log 2, the
            entropy of random actions. `"auto"`, or None, takes -dim A.
        critics: a network of `(obs, action)` that returns `(quantiles, None)`, quantiles `[B, N, M]`; None takes
            `Critics(num_critics=5)`, after a cell with a built-in recurrent actor; see `replay`. A built-in network gets
            M = `num_quantiles`. Dropout is on in all losses and the target.
            Batch normalization uses the statistics of the batch in the critics' loss, and running ones elsewhere; critics with
            batch normalization have dropout in their own loss alone.
        dropped_quantiles: d, number of the largest quantiles per critic that the target drops.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = TQC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    dropped_quantiles: int = integer(default=2, at_least=0)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        self.set_networks(self.default_actor(), Critics(num_critics=5))
        self.set_outputs_of_critics("num_quantiles", self.num_quantiles)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        if self.dropped_quantiles >= self.num_quantiles:
            raise ValueError(
                f"TQC: dropped_quantiles={self.dropped_quantiles} must be less than num_quantiles={self.num_quantiles}"
            )

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return `num_quantiles` quantiles each."""
        check_critics(self._critics, variables, self.spec_of("critic"), outputs=self.num_quantiles)

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, "B K"]:
        """The targets y_1 ≤ ... ≤ y_K, without a gradient; arguments as for `critic_loss`."""
        action_key, dropout_key = jax.random.split(key)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        quantiles = self.q_values(target, batch.next_obs, draw.action, dropout_key)
        pool = jnp.sort(quantiles.reshape(len(quantiles), -1), axis=1)
        smallest = pool[:, : pool.shape[1] - quantiles.shape[1] * self.dropped_quantiles]
        soft_values = smallest - (alpha * draw.log_prob)[:, None]
        rewards, discounts = self.reward_scale * batch.reward, batch.discount
        return jax.lax.stop_gradient(rewards[:, None] + discounts[:, None] * soft_values)

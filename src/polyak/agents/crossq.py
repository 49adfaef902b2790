"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605v4): soft actor-critic with batch normalization and without target networks."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables
from polyak.core.warn import warn
from polyak.learning.actor_critic_updates import check_critics, critic_terms
from polyak.networks.adapters import has_batch_statistics
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule
from polyak.replay.replay import Transition


@struct(kw_only=True)
class CrossQ(SoftActorAgent):
    """CrossQ for Box actions: SAC whose critics normalize each batch together with its next states and actions.

        [Q_θi(s, a); Q_θi(s', a')] = one forward pass of [s; s'], [a; a'] in training mode,    a' ~ π(·|s')
        y      = r + γ^m (min_i Q_θi(s', a') - α log π(a'|s'))
        J_Q(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² ],    without a gradient in y
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. A gradient
    step trains the critics; every `policy_delay`-th step then trains the actor against the new critics, and α with the new
    actor. The defaults are the authors'.

    Without normalization of the critics over both halves of the batch, which is what replaces the target networks, training
    usually diverges. Actor and critics are in evaluation mode, with their running statistics, wherever they are not trained:
    the actor in y and in J(α), the critics in J_π.

    Differences from the authors' code: weights start as PyTorch's instead of LeCun's; all networks have one
    β₁, which is 0.9 for α there; and J(α) draws actions of the new actor, where theirs has the actions of J_π.

    Attributes:
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor(norm="batch_renorm",
            norm_before="linear")`. In its own loss it is in training mode.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics((2048, 2048),
            norm="batch_renorm", norm_before="linear")`. Dropout is on in the critics' loss, and in the actor's if the critics
            have no batch normalization.
        target_entropy: H̄, the entropy of the policy that a learned α aims at, of actions in [-1, 1]; at most dim A log 2, the
            entropy of random actions. `"auto"`, or None, takes -dim A.
        alpha_loss: `"alpha"`: J(α) as above; `"log_alpha"`: with log α in place of α.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = CrossQ(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> agent.init(jax.random.key(0)).copies.critics.names
    ('online',)
    """

    learning_rate: Schedule = 1e-3
    adam_b1: float = 0.5
    learning_starts: int = 5_000
    alpha_loss: Literal["log_alpha", "alpha"] = "alpha"
    policy_delay: int = 3

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        actor = dataclasses.replace(self.default_actor(), norm="batch_renorm", norm_before="linear")
        self.set_networks(actor, Critics((2048, 2048), norm="batch_renorm", norm_before="linear"))

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return `(q, None)`; warn of critics without batch normalization."""
        check_critics(self._critics, variables, self.spec_of("critic"))
        if not has_batch_statistics(variables):
            warn(
                "CrossQ: critics have no batch normalization, which replaces the target networks; use "
                "polyak.Critics(..., norm='batch_renorm', norm_before='linear')"
            )

    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        actor: Variables,
        alpha: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """J_Q of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; their parameters are not used.
            target: the online critics too, as there are no targets; not used.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', and dropout.
        """
        action_key, dropout_key = jax.random.split(key)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        # One forward pass: the statistics are of the recorded actions and the policy's actions together.
        now, later = (batch.obs, batch.action), (batch.next_obs, draw.action)
        obs, action = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now, later)
        q, stats = self.q_values_in_training(dataclasses.replace(critics, params=params), obs, action, dropout_key)
        q, next_q = jnp.split(q, 2)
        soft_value = jnp.min(next_q, axis=1) - alpha * draw.log_prob
        td_target = jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * soft_value)
        td_error = td_target[:, None] - q
        loss = weighted_sum(jnp.sum(0.5 * jnp.square(td_error), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The minimum of the critics, which the actor maximizes."""
        return jnp.min(q, axis=1)

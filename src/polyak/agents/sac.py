"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with ensembles of critics (REDQ, arXiv:2101.05982)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.sequence_settings import SequenceSettings
from polyak.agents.settings import TargetSettings
from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.spaces import Discrete
from polyak.core.struct import integer, struct
from polyak.core.types import PyTree, Variables
from polyak.learning.actor_critic_updates import (
    check_critics,
    check_num_target_critics,
    check_unit_actions,
    critic_terms,
    min_of_critics,
)
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import of_action, weighted_sum
from polyak.replay.replay import Transition


@struct(kw_only=True)
class SAC(SequenceSettings, TargetSettings, SoftActorAgent):
    """SAC for Box and Discrete actions.

        J_Q(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² ],    y = r + γ^m (min_i Q_target,i(s', a') - α log π(a'|s')),  a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -log α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Box actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. A
    gradient step trains the critics, and the target critics follow; every `policy_delay`-th step then trains the actor against
    the new critics, and α with the new actor.

    With Discrete actions critics return Q(s, a) of all n, and expectations over a and a' are sums Σ_a π(a|s) over the actions
    that the state allows (Christodoulou 2019, arXiv:1910.07207).

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them, or Discrete.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`, with n Discrete actions `[B, N, n]`; None
            takes `Critics()`, which has N = 2, after a cell with a built-in recurrent actor; see `replay`.
            Dropout is on in all losses and the target. Batch normalization uses the statistics of the batch in the critics'
            loss, and running ones elsewhere; critics with batch normalization have dropout in their own loss alone.
        num_target_critics: number of critics sampled for each target, as in REDQ (Chen et al. 2021, arXiv:2101.05982); the
            target takes the minimum of their values, and the actor maximizes the mean over all critics. None takes the minimum
            over all critics, in the target and for the actor.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = SAC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    num_target_critics: int | None = integer(default=None, optional=True)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.set_views()
        if not isinstance(self.spec.action, Discrete):
            check_unit_actions("SAC", self.spec, "PPO takes every space", " or one Discrete")
        self.set_networks(self.default_actor(), Critics())

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return `(q, None)`, and that there are at least `num_target_critics` critics."""
        outputs = self.spec.action.n if isinstance(self.spec.action, Discrete) else None
        num_critics = check_critics(self._critics, variables, self.spec_of("critic"), outputs=outputs)
        check_num_target_critics("SAC", self.num_target_critics, num_critics)

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
            target: the target critics.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', the choice of critics, and dropout.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        q, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        if isinstance(self.spec.action, Discrete):
            q = of_action(jnp.swapaxes(q, 1, 2), batch.action)
        td_error = self.td_target(batch, target=target, actor=actor, alpha=alpha, key=target_key)[:, None] - q
        loss = weighted_sum(jnp.sum(0.5 * jnp.square(td_error), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, " B"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        action_key, subset_key, dropout_key = jax.random.split(key, 3)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        next_q = self.q_values(target, batch.next_obs, draw.action, dropout_key)
        soft_value = draw.mean(min_of_critics(next_q, self.num_target_critics, subset_key) - alpha * draw.log_prob)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * soft_value)

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The minimum of the critics, or the mean of an ensemble of which targets take a subset."""
        return jnp.min(q, axis=1) if self.num_target_critics is None else jnp.mean(q, axis=1)

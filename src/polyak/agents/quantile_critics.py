"""The base of TQC and BRO: soft actor-critics whose critics return quantiles of the return."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.settings import TargetSettings
from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.struct import integer, number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import critic_terms
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.ops.value_distributions import midpoints, quantile_huber_loss
from polyak.replay.replay import Transition


@struct(kw_only=True)
class QuantileCriticsAgent(TargetSettings, SoftActorAgent):
    """A `SoftActorAgent` whose critics return quantiles, and whose actor maximizes their mean.

    A leaf defines `check_critics` and `td_target`.

    Attributes:
        num_quantiles: M, number of quantiles of each critic.
        huber_delta: κ, the error above which the quantile loss is linear.
    """

    averages_quantiles: ClassVar[bool] = True
    """False sums the loss over the quantiles of a critic."""

    num_quantiles: int = integer(default=25)
    huber_delta: Scalar = number(default=1.0, above=0)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks; built-in critics return `num_quantiles` quantiles."""
        super().set_defaults()
        self.set_outputs_of_critics("num_quantiles", self.num_quantiles)

    @abc.abstractmethod
    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, "B K"]:
        """The targets y_1 ... y_K, without a gradient; arguments as for `critic_loss`."""

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
        """J_Z(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample
        over the critics, δ a difference of means.

            J_Z(θ) = E[ Σ_i 1/M Σ_m 1/K Σ_k |τ_m - 1{u < 0}| L_κ(u) / κ ],    u = y_k - θ_i,m(s, a),  τ_m = (2m - 1) / 2M

        Without `averages_quantiles` it is M times as large. Arguments as for `SoftActorAgent.critic_loss`.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        quantiles, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        targets = self.td_target(batch, target=target, actor=actor, alpha=alpha, key=target_key)
        tau = midpoints(quantiles.shape[2])[None]
        each = jax.vmap(lambda theta: quantile_huber_loss(theta, tau, targets, self.huber_delta), 1, 1)(quantiles)
        q, loss = jnp.mean(quantiles, axis=2), jnp.sum(each, axis=1)
        terms = critic_terms(q, jnp.mean(targets, axis=1, keepdims=True) - q, batch.weight)
        loss = loss / self.num_quantiles if self.averages_quantiles else loss
        return weighted_sum(loss, batch.weight), Aux(terms, stats)

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """Q_μ, the mean over the quantiles of all critics."""
        return jnp.mean(q, axis=(1, 2))

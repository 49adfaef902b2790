"""The bases of TD3, TD3+BC and FastTD3: smoothed target actions, and a deterministic actor that learns more rarely."""

import abc
import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.actor_critic import ActorCriticAgent, ActorCriticCopies
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import Box, Leaf, leaf_spaces, map_space
from polyak.core.struct import integer, number, struct
from polyak.core.types import PyTree, Scalar, Terms, Variables
from polyak.learning.actor_critic_updates import critic_terms, join_logs, train_every
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import huber, weighted_sum
from polyak.ops.schedules import Schedule, StepCount
from polyak.replay.replay import Transition


@struct(kw_only=True)
class DelayedActorAgent(TargetSettings, ActorCriticAgent):
    """An agent with a deterministic actor, which takes one gradient step for `policy_delay` of the critics.

    A leaf defines `check_critics`, `critic_loss` and `actor_objective`.

    Attributes:
        policy_delay: gradient steps of the critics for one of the actor.
        target_noise: σ, the standard deviation of the noise on the target actor's actions.
        target_noise_clip: c, the largest magnitude of the noise on the target actor's actions.
    """

    is_deterministic: ClassVar[bool] = True
    has_target_actor: ClassVar[bool] = True
    """False takes the target's actions from the online actor."""

    policy_delay: int = integer(default=2)
    target_noise: Scalar = number(default=0.2, at_least=0)
    target_noise_clip: Scalar = number(default=0.5, at_least=0)
    learning_rate: Schedule = 1e-3
    target_period: int = 2

    @abc.abstractmethod
    def check_critics(self, variables: Variables) -> None:
        """Check the critics' outputs.

        Raises:
            TypeError, ValueError: the losses cannot use the outputs.
        """

    @abc.abstractmethod
    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        target_actor: Variables,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the error of each sample.

        Args:
            params: θ.
            critics: the online critics; their parameters are not used.
            target: the target critics.
            target_actor: the actor that a' is from.
            key: for the noise of a', the choice of critics, and dropout.
        """

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        key: PRNGKeyArray | None = None,
        axis_name: str | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """The actor's loss of a batch whose weights sum to 1, and its terms; see `actor_objective`.

        Args:
            params: φ.
            actor: the actor; its parameters are not used.
            critics: the online critics.
            key: for dropout.
            axis_name: inside `shard_map`, the mesh axis that the batch is split over.
        """
        actor = self.share_encoder(dataclasses.replace(actor, params=params), critics)
        action, stats = self.deterministic_action_in_training(actor, batch.obs, key)
        loss, terms = self.actor_objective(self.q_values(critics, batch.obs, action), action, batch, axis_name)
        return loss, Aux(terms, stats)

    @abc.abstractmethod
    def actor_objective(
        self, q: Float[Array, "B N *M"], action: PyTree, batch: Transition, axis_name: str | None
    ) -> tuple[Float[Array, ""], Terms]:
        """-J(φ) of a batch whose weights sum to 1, and its terms.

        Args:
            q: Q_i(s, a) of the critics, or the logits of their distributions.
            action: a = π_φ(s).
            axis_name: inside `shard_map`, the mesh axis that the batch is split over.
        """

    def create_copies(self, key: PRNGKeyArray) -> ActorCriticCopies:
        """An actor and critics, each with a target unless `has_target_actor` is False."""
        actor, critics, average = self.create_networks(key, actor_target=self.follow() if self.has_target_actor else None)
        self.check_critics(critics.online)
        return ActorCriticCopies(actor, critics, average)

    def train_step(
        self,
        copies: ActorCriticCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[ActorCriticCopies, StepLog]:
        """One gradient step of the critics; every `policy_delay`-th step also one of the actor; and the targets' update."""
        critics_step = self.optimizer_at(env_steps)
        actor_step = self.optimizer_at(env_steps, self.actor_learning_rate)
        actor, critics = copies.actor, copies.critics
        loss = partial(
            self.critic_loss,
            critics=critics.online,
            target=critics.variables("target"),
            target_actor=actor.variables("target") if self.has_target_actor else actor.online,
            key=key,
        )
        critics, critic_log = critics.train(loss, critics_step, batch, enabled=enabled, axis_name=axis_name)
        applied = critic_log.applied.astype(jnp.uint32)
        critics = critics.follow(updates=applied)
        actor_key = jax.random.fold_in(key, 3)
        loss = partial(self.actor_loss, actor=actor.online, critics=critics.online, key=actor_key, axis_name=axis_name)

        def train_actor(actor: NetworkCopies, enabled: Bool[Array, ""]) -> tuple[NetworkCopies, StepLog]:
            return actor.train(loss, actor_step, batch, enabled=enabled, axis_name=axis_name)

        actor, actor_log = train_every(self.policy_delay, critics, critic_log, train_actor, actor)
        actor = dataclasses.replace(actor, online=self.share_encoder(actor.online, critics.online))
        average = self.update_average(copies.average, actor.online, critic_log.applied)
        if self.has_target_actor:
            actor = actor.follow(updates=applied)
        return ActorCriticCopies(actor, critics, average), join_logs(critic=critic_log, actor=actor_log)

    def _smooth(self, action: PyTree, key: PRNGKeyArray) -> PyTree:
        """The actions with clipped noise, inside the bounds."""
        keys = iter(jax.random.split(key, len(list(leaf_spaces(self.spec.action)))))

        def add_noise(leaf: Leaf, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
            assert isinstance(leaf, Box), "checked when the agent was built"
            noise = self.target_noise * jax.random.normal(next(keys), x.shape, x.dtype)
            low, high = (bound[None] for bound in self.spec.action_bounds(leaf))
            return jnp.clip(x + jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip), low, high)

        return map_space(add_noise, self.spec.action, action)


@struct(kw_only=True)
class ValueCriticsAgent(DelayedActorAgent):
    """A `DelayedActorAgent` whose critics return values.

    A leaf defines `check_critics`, `td_target` and `actor_objective`.

    Attributes:
        huber_delta: κ, the error above which the loss is linear; below it is δ²/2. None takes δ² everywhere.
    """

    huber_delta: Scalar | None = number(default=None, above=0, optional=True)

    @abc.abstractmethod
    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""

    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        target_actor: Variables,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ), the Huber loss of y - Q_θi(s, a), and its terms; `priority` is the mean |δ| of each sample."""
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        q, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        td_error = self.td_target(batch, target=target, target_actor=target_actor, key=target_key)[:, None] - q
        loss = weighted_sum(jnp.sum(huber(td_error, self.huber_delta), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971)."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.action_noise import ActionNoiseSettings, ParameterNoiseSettings
from polyak.agents.actor_critic import ActorCriticAgent, ActorCriticCopies
from polyak.agents.off_policy import OffPolicyState
from polyak.agents.sequence_settings import SequenceSettings
from polyak.agents.settings import TargetSettings
from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import check_critics, critic_terms, join_logs
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import huber, weighted_sum
from polyak.ops.schedules import Schedule, StepCount
from polyak.policies.critic_state import WithCriticState
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Transition


@struct(kw_only=True)
class DDPG(SequenceSettings, ParameterNoiseSettings, ActionNoiseSettings, TargetSettings, ActorCriticAgent):
    """DDPG for Box actions.

        L(θ) = E[ huber_κ(y - Q_θ(s, a)) ],    y = r + γ^m Q_target(s', π_target(s'))
        ∇J(φ) = E[ ∇_a Q_θ(s, a) ∇_φ π_φ(s) ],    a = π_φ(s)

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. The actor
    follows the gradient of the new critic.

    Attributes:
        actor: a network that returns `(action_params, value)`, of which tanh(loc) is the action; None takes
            `Actor(std="fixed")`. In its own loss it is in training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, 1]`; None takes `Critics(num_critics=1)`,
            after a cell with a built-in recurrent actor; see `replay`.
            Dropout is on in their loss and target. Batch normalization uses the statistics of the batch in their loss, and
            running ones elsewhere; critics with batch normalization have dropout in their own loss alone.
        huber_delta: κ, the error above which the loss is linear; below it is δ²/2. None takes δ² everywhere.
        max_dqda: clip each number of ∇_a Q to ± this value; None disables clipping.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = DDPG(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    is_deterministic: ClassVar[bool] = True

    huber_delta: Scalar | None = number(default=None, above=0, optional=True)
    max_dqda: Scalar | None = number(default=None, above=0, optional=True)
    learning_rate: Schedule = 1e-3

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        self.set_networks(self.default_actor(), Critics(num_critics=1))

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_no_sde("DDPG", self._actor)
        self.check_noise()
        self.check_parameter_noise(self.actor, ("exploration", "exploration_noise", "theta"))
        if self.replay.draws_sequences and self.exploration == "ou":
            raise ValueError("DDPG: exploration must be 'gaussian' with a SequenceReplay, which stores no noise; got 'ou'")

    def create_copies(self, key: PRNGKeyArray) -> ActorCriticCopies:
        """An actor and critics, each with a target."""
        actor, critics, average = self.create_networks(key, actor_target=self.follow())
        num_critics = check_critics(self._critics, critics.online, self.spec_of("critic"))
        if num_critics != 1:
            raise ValueError(f"DDPG: critics must be one critic, Critics(num_critics=1), got {num_critics}; TD3 takes several")
        return ActorCriticCopies(actor, critics, average)

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | WithCriticState | DiscountedReturn:
        """The actor's action with noise; until `learning_starts` uniformly random actions."""
        policy = self.network_policy(state, state.copies.actor.online)
        explorer = self.add_parameter_noise(policy) or self.add_noise(policy, state.env_steps)
        return self.to_collect(RandomWarmStart(explorer, self.learning_starts, state.env_steps), state)

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
        """One gradient step of the critics, then one of the actor against the new critics, and the targets' update."""
        critics_step = self.optimizer_at(env_steps)
        actor_step = self.optimizer_at(env_steps, self.actor_learning_rate)
        actor, critics = copies.actor, copies.critics
        loss = partial(
            self.critic_loss,
            critics=critics.online,
            target=critics.variables("target"),
            target_actor=actor.variables("target"),
            key=key,
        )
        critics, critic_log = critics.train(loss, critics_step, batch, enabled=enabled, axis_name=axis_name)
        actor_loss = partial(self.actor_loss, actor=actor.online, critics=critics.online, key=jax.random.fold_in(key, 3))
        actor, actor_log = actor.train(actor_loss, actor_step, batch, enabled=enabled, axis_name=axis_name)
        actor = dataclasses.replace(actor, online=self.share_encoder(actor.online, critics.online))
        applied = critic_log.applied.astype(jnp.uint32)
        average = self.update_average(copies.average, actor.online, critic_log.applied)
        copies = ActorCriticCopies(actor.follow(updates=applied), critics.follow(updates=applied), average)
        return copies, join_logs(critic=critic_log, actor=actor_log)

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
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ.
            critics: the online critics; their parameters are not used.
            target: the target critics.
            target_actor: the actor that a' is from.
            key: for dropout.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        q, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        td_error = self.td_target(batch, target=target, target_actor=target_actor, key=target_key)[:, None] - q
        loss = weighted_sum(jnp.sum(huber(td_error, self.huber_delta), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        next_action = self.deterministic_action(target_actor, batch.next_obs)
        next_q = self.q_values(target, batch.next_obs, next_action, key)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q[:, 0])

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """-J(φ) of a batch whose weights sum to 1; no terms.

        With `max_dqda` the loss is -Σ clip(∇_a Q) · π_φ(s), whose gradient is the clipped one.

        Args:
            params: φ.
            actor: the actor; its parameters are not used.
            critics: the online critic.
            key: for dropout.
        """
        actor = self.share_encoder(dataclasses.replace(actor, params=params), critics)
        action, stats = self.deterministic_action_in_training(actor, batch.obs, key)

        def sum_of_q(action: PyTree) -> Float[Array, ""]:
            return jnp.sum(self.q_values(critics, batch.obs, action))

        bound = self.max_dqda
        if bound is None:
            return -weighted_sum(self.q_values(critics, batch.obs, action)[:, 0], batch.weight), Aux({}, stats)
        dqda = jax.lax.stop_gradient(jax.grad(sum_of_q)(action))
        products = jax.tree.map(lambda g, a: jnp.clip(g, -bound, bound) * a, dqda, action)
        each = jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(products)], axis=1)
        return -weighted_sum(jnp.sum(each, axis=1), batch.weight), Aux({}, stats)

"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169), for Box and Discrete actions."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.actor_critic import ActorCriticAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import Discrete
from polyak.core.struct import number, static, struct
from polyak.core.types import Network, PyTree, RecurrentNetwork, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    check_critics,
    check_unit_actions,
    critic_terms,
    feedforward_or_default,
    join_logs,
)
from polyak.networks.actor import Actor
from polyak.networks.adapters import check_network
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP, NatureCNN, complete
from polyak.networks.heads import ValueOnly
from polyak.networks.layers import has_images
from polyak.ops.distributions import Distribution, for_space
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import of_action, weighted_sum
from polyak.ops.schedules import StepCount
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy, add_return
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Transition


@struct
class IQLCopies:
    """The networks of IQL.

    Attributes:
        actor: online only.
        critics: N critics in one network, online and target.
        value: V, online only.
        average: average of the actor, evaluated with `ema_tau`; else None.
    """

    actor: NetworkCopies
    critics: NetworkCopies
    value: NetworkCopies
    average: Variables | None


@struct(kw_only=True)
class IQL(TargetSettings, ActorCriticAgent):
    """IQL for Box and Discrete actions, learned from a data set; see `polyak.train.offline`.

        L_V(ψ) = E[ |τ - 1(u < 0)| u² ],    u = min_i Q_target,i(s, a) - V_ψ(s)
        L_Q(θ) = E[ Σ_i (r + γ^m V_ψ(s') - Q_θi(s, a))² ]
        L_π(φ) = E[ -min(exp(β u), w) log π_φ(a|s) ]

    All expectations are over the data: no value of another action is needed. A gradient step trains V, then the critics
    against the new V, then the actor, with advantages of the target critics and the new V. Box actions are Gaussian with means
    in [-1, 1]: `envs.make(..., action_scaling="rescale")`.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them, or Discrete.
        actor: a network that returns `(action_params, value)`, the value unused; None takes an `Actor` whose mean is squashed
            by tanh and whose standard deviation is a parameter. In its own loss it is in training mode.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`, with n Discrete actions `[B, N, n]`; None
            takes `Critics()`, which has N = 2.
        value: a network that returns `(None, value)`, of what the critics see; None takes an `MLP` with two layers of 256, or a
            `NatureCNN` for images.
        expectile: τ, between the mean of values over the data's actions, 0.5, and their maximum, 1.
        inverse_temperature: β, the inverse temperature of the actor's weights; 0 is behavioral cloning.
        max_weight: w, the largest weight of a sample in the actor's loss.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = IQL(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    value: Network | None = static(default=None)
    expectile: Scalar = number(default=0.7, above=0, at_most=1)
    inverse_temperature: Scalar = number(default=3.0, at_least=0)
    max_weight: Scalar = number(default=100.0, above=0)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.set_views()
        is_discrete = isinstance(self.spec.action, Discrete)
        if not is_discrete:
            check_unit_actions("IQL", self.spec, "BC takes every space", " or one Discrete")
        actor = Actor() if is_discrete else Actor(std="free", squash_mean=True)
        object.__setattr__(self, "actor", actor if self.actor is None else check_network("IQL", self.actor, "actor"))
        critics = feedforward_or_default("IQL", "critics", self.critics, Critics())
        object.__setattr__(self, "critics", critics)
        critic_spec = self.spec_of("critic")
        default = NatureCNN() if has_images(critic_spec.obs) else MLP((256, 256), activation="relu", orthogonal=False)
        value = complete("IQL", default if self.value is None else self.value, critic_spec, ValueOnly(), name="value")
        object.__setattr__(self, "value", value)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        if any(isinstance(network, RecurrentNetwork) for network in (self.actor, self.value)):
            raise ValueError("IQL: actor and value must not be recurrent; BC and DQN train recurrent networks")
        super().check_together()
        check_no_sde("IQL", self._actor)

    def create_copies(self, key: PRNGKeyArray) -> IQLCopies:
        """An actor, critics with a target, and V."""
        key, value_key = jax.random.split(key)
        actor, critics, average = self.create_networks(key, actor_target=None)
        outputs = self.spec.action.n if isinstance(self.spec.action, Discrete) else None
        check_critics(self._critics, critics.online, self.spec_of("critic"), outputs=outputs)
        value = NetworkCopies.create(self._value, value_key, self.spec_of("critic"), optimizer=None, name="value")
        return IQLCopies(actor, critics, value.with_optimizer_state(self.optimizer_at()), average)

    def collect_policy(self, state: OffPolicyState) -> NetworkPolicy | DiscountedReturn:
        """Actions drawn from the actor's distribution."""
        return add_return(self.network_policy(state, state.copies.actor.online), self)

    def train_step(
        self,
        copies: IQLCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[IQLCopies, StepLog]:
        """One gradient step of V, then of the critics, then of the actor, after which the target critics follow."""
        options: dict[str, Any] = {"enabled": enabled, "axis_name": axis_name}
        step, actor_step = self.optimizer_at(env_steps), self.optimizer_at(env_steps, self.actor_learning_rate)
        target, keys = copies.critics.variables("target"), jax.random.split(key, 3)
        value_loss = partial(self.value_loss, value=copies.value.online, target=target, key=keys[0])
        value, value_log = copies.value.train(value_loss, step, batch, **options)
        critic_loss = partial(self.critic_loss, critics=copies.critics.online, value=value.online, key=keys[1])
        critics, critic_log = copies.critics.train(critic_loss, step, batch, **options)
        actor_loss = partial(
            self.actor_loss,
            actor=copies.actor.online,
            critics=critics.online,
            target=target,
            value=value.online,
            key=keys[2],
        )
        actor, actor_log = copies.actor.train(actor_loss, actor_step, batch, **options)
        actor = dataclasses.replace(actor, online=self.share_encoder(actor.online, critics.online))
        average = self.update_average(copies.average, actor.online, critic_log.applied)
        critics = critics.follow(updates=critic_log.applied.astype(jnp.uint32))
        return IQLCopies(actor, critics, value, average), join_logs(critic=critic_log, value=value_log, actor=actor_log)

    def value_loss(
        self, params: PyTree, batch: Transition, *, value: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """L_V(ψ) of a batch whose weights sum to 1, and its terms.

        Args:
            params: ψ.
            value: V; its parameters are not used.
            target: the target critics.
            key: for dropout.
        """
        v, stats = self._values(dataclasses.replace(value, params=params), batch.obs, key, train=True)
        u = self._target_q(target, batch) - v
        loss = weighted_sum(jnp.where(u < 0, 1.0 - self.expectile, self.expectile) * jnp.square(u), batch.weight)
        return loss, Aux({"value": jax.lax.stop_gradient(weighted_sum(v, batch.weight))}, stats)

    def critic_loss(
        self, params: PyTree, batch: Transition, *, critics: Variables, value: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """L_Q(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ.
            critics: the online critics; their parameters are not used.
            value: V.
            key: for dropout.
        """
        q, stats = self.q_values_in_training(dataclasses.replace(critics, params=params), batch.obs, batch.action, key)
        q = self._of_action(q, batch)
        next_value = jax.lax.stop_gradient(self._values(value, batch.next_obs)[0])
        td_error = (self.reward_scale * batch.reward + batch.discount * next_value)[:, None] - q
        loss = weighted_sum(jnp.sum(jnp.square(td_error), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        target: Variables,
        value: Variables,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """L_π(φ) of a batch whose weights sum to 1, and its terms.

        Args:
            params: φ.
            actor: the actor; its parameters are not used.
            critics: the online critics, whose convolutions the actor may share.
            target: the target critics.
            value: V.
            key: for dropout.
        """
        actor = self.share_encoder(dataclasses.replace(actor, params=params), critics)
        distribution, stats = self._distribution(actor, batch, key)
        u = self._target_q(target, batch) - self._values(value, batch.obs)[0]
        weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(self.inverse_temperature * u), self.max_weight))
        loss = -weighted_sum(weight * distribution.log_prob(batch.action), batch.weight)
        terms = {"advantage": weighted_sum(u, batch.weight), "actor_weight": weighted_sum(weight, batch.weight)}
        return loss, Aux(jax.lax.stop_gradient(terms), stats)

    def _target_q(self, target: Variables, batch: Transition) -> Float[Array, " N"]:
        """min_i Q_target,i(s, a), without a gradient."""
        q = self._of_action(self.q_values(target, batch.obs, batch.action), batch)
        return jax.lax.stop_gradient(jnp.min(q, axis=1))

    def _of_action(self, q: Float[Array, "B N *M"], batch: Transition) -> Float[Array, "B N"]:
        """The values of the data's actions, of critics of all Discrete actions too."""
        return of_action(jnp.swapaxes(q, 1, 2), batch.action) if isinstance(self.spec.action, Discrete) else q

    def _values(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None = None, *, train: bool = False
    ) -> tuple[Float[Array, " N"], PyTree]:
        (_, value), _, stats = self._value.apply(variables, self.seen_by("critic", obs), train=train, key=key)
        return value, stats

    def _distribution(self, actor: Variables, batch: Transition, key: PRNGKeyArray | None) -> tuple[Distribution, PyTree]:
        (params, _), _, stats = self._actor.apply(actor, self.seen_by("actor", batch.obs), train=True, key=key)
        return for_space(self.spec.action, params, batch.action_mask), stats

    def network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        """The policy of an actor, without tanh on its samples."""
        return dataclasses.replace(super().network_policy(state, actor), squash=False)

    @property
    def _value(self) -> Network:
        assert self.value is not None, "set_defaults sets it"
        return self.value

"""Flow Q-learning (Park, Li and Levine 2025, arXiv:2502.02538)."""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.actor_critic import ActorCriticAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.struct import choice, integer, number, static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import check_actor, check_critics, critic_terms, feedforward_or_default, join_logs
from polyak.learning.flow_matching import flow_error
from polyak.networks.action_units import from_unit
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.flow import (
    MAX_FLOW_STEPS,
    apply_to_noise,
    check_flow,
    integrate,
    noise_spec,
    sample_noise,
)
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import mean_square, sum_over_devices, weighted_sum
from polyak.ops.schedules import StepCount
from polyak.policies.flow_policy import FlowPolicy
from polyak.policies.network_policy import DiscountedReturn, Greedy, add_return
from polyak.replay.replay import Transition

PAPER_LAYERS = (512, 512, 512, 512)


@struct
class FQLCopies:
    """The networks of FQL.

    Attributes:
        actor: the one-step policy, online only.
        critics: N critics in one network, online and target.
        flow: the velocity of the flow that clones the data's actions, online only.
        average: average of the actor, evaluated with `ema_tau`; else None.
    """

    actor: NetworkCopies
    critics: NetworkCopies
    flow: NetworkCopies
    average: Variables | None


@struct(kw_only=True)
class FQL(TargetSettings, ActorCriticAgent):
    """FQL for Box actions, learned from a data set; see `polyak.train.offline`.

        L_Q(θ) = E[ mean_i (r + γ^m mean_i Q_target,i(s', μ_ω(s', z)) - Q_θi(s, a))² ]
        L_flow(ψ) = E[ |v_ψ(s, x_t, t) - (a - z)|² / dim A ],    x_t = (1 - t) z + t a,    t ~ U(0, 1)
        L_π(ω) = E[ α |μ_ω(s, z) - μ_ψ(s, z)|² / dim A - λ mean_i Q_θi(s, μ_ω(s, z)) ]

    with noise z ~ N(0, I). The flow clones the data's actions, also multimodal ones: μ_ψ(s, z) is the end of the flow from z,
    x_{k+1} = x_k + v_ψ(s, x_k, k / K) / K, clipped to [-1, 1]. The actor is a policy of one step, μ_ω(s, z), which stays near
    the flow and maximizes Q; no gradient passes through the steps of the flow. A gradient step trains the critics, then the
    flow, then the actor against both. Actions lie in [-1, 1], `envs.make(..., action_scaling="rescale")`, and those of the
    actor are clipped to it wherever critics or environment see them, but not in the distance to the flow.

    The authors evaluate actions of new noise, as `predict(obs, deterministic=False, key=...)` returns them. The greedy policy
    is not theirs: it takes, of 31 actions of fixed noise, the one with most others near it, which costs 31 passes of the actor.
    Their code takes the three gradients at the same weights, and normalizes layers of the critics after the activation.

    Attributes:
        actor: the network of μ, which returns `(action_params, value)`, of which `loc` is the action; its observation is a
            Tuple of the observation and z. None takes an `Actor` with four layers of 512 and gelu. In its own loss it is in
            training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics` with N = 2, four layers
            of 512, gelu and layer normalization.
        flow: the network of v, whose observation is a Tuple of the observation, x_t and t `[B, 1]`; None takes another network
            with the settings of `actor`.
        actor_learning_rate: learning rate of the actor and of the flow; None takes `learning_rate`.
        flow_steps: K, number of steps of the flow.
        distill_weight: α, the weight of the distance to the flow; the setting that the paper tunes for each environment.
        q_aggregation: `"mean"` or `"min"` of the target critics.
        normalize_q: λ = 1 / E|mean_i Q_θi(s, μ_ω(s, z))|; False takes λ = 1.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = FQL(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    flow: Network | None = static(default=None)
    flow_steps: int = integer(default=10, at_most=MAX_FLOW_STEPS)
    distill_weight: Scalar = number(default=10.0, at_least=0)
    q_aggregation: Literal["mean", "min"] = choice(default="mean", choices=("mean", "min"))
    normalize_q: bool = choice(default=False, choices=(True, False))

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        critics = Critics(PAPER_LAYERS, activation="gelu", norm="layer")
        self.set_networks(Actor(PAPER_LAYERS, activation="gelu", std="fixed"), critics)
        if self.flow is not None:
            feedforward_or_default("FQL", "flow", self.flow, self._actor)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        for name, network in (("actor", self._actor), ("flow", self._flow)):
            check_flow("FQL", name, network, self.spec)
        super().check_together()
        if self.shared_encoder:
            raise ValueError(
                "FQL: shared_encoder must be False, as actor and flow have other inputs than the critics; got True"
            )

    def create_copies(self, key: PRNGKeyArray) -> FQLCopies:
        """An actor, critics with a target, and the flow."""
        key, flow_key = jax.random.split(key)
        actor_spec = self.spec_of("actor")
        actor, critics, average = self.create_networks(
            key, actor_target=None, actor_spec=noise_spec(actor_spec, has_time=False)
        )
        check_critics(self._critics, critics.online, self.spec_of("critic"))
        flow_spec = noise_spec(actor_spec, has_time=True)
        flow = NetworkCopies.create(self._flow, flow_key, flow_spec, optimizer=None, name="flow")
        check_actor(self._flow, flow.online, flow_spec)
        return FQLCopies(actor, critics, flow.with_optimizer_state(self.optimizer_at()), average)

    def policy(self, state: OffPolicyState) -> Greedy:
        """The densest action of the actor, or of its average if there is one; see `FlowDistribution.mode`."""
        return Greedy(self._one_step_policy(state, self._evaluated_actor(state)))

    def collect_policy(self, state: OffPolicyState) -> FlowPolicy | DiscountedReturn:
        """Actions of the actor and new noise."""
        return add_return(self._one_step_policy(state, state.copies.actor.online), self)

    def train_step(
        self,
        copies: FQLCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[FQLCopies, StepLog]:
        """One gradient step of the critics, then of the flow, then of the actor, after which the target critics follow."""
        options: dict[str, Any] = {"enabled": enabled, "axis_name": axis_name}
        step, actor_step = self.optimizer_at(env_steps), self.optimizer_at(env_steps, self.actor_learning_rate)
        keys = jax.random.split(key, 3)
        critic_loss = partial(
            self.critic_loss,
            critics=copies.critics.online,
            target=copies.critics.variables("target"),
            actor=copies.actor.online,
            key=keys[0],
        )
        critics, critic_log = copies.critics.train(critic_loss, step, batch, **options)
        flow_loss = partial(self.flow_loss, flow=copies.flow.online, key=keys[1])
        flow, flow_log = copies.flow.train(flow_loss, actor_step, batch, **options)
        actor_loss = partial(
            self.actor_loss,
            actor=copies.actor.online,
            flow=flow.online,
            critics=critics.online,
            key=keys[2],
            axis_name=axis_name,
        )
        actor, actor_log = copies.actor.train(actor_loss, actor_step, batch, **options)
        average = self.update_average(copies.average, actor.online, actor_log.applied)
        critics = critics.follow(updates=critic_log.applied.astype(jnp.uint32))
        return FQLCopies(actor, critics, flow, average), join_logs(critic=critic_log, flow=flow_log, actor=actor_log)

    def critic_loss(
        self, params: PyTree, batch: Transition, *, critics: Variables, target: Variables, actor: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """L_Q(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ.
            critics: the online critics; their parameters are not used.
            target: the target critics.
            actor: the one-step policy.
            key: for z and dropout.
        """
        noise_key, dropout_key = jax.random.split(key)
        next_action = from_unit(self.spec, self._one_step(actor, batch.next_obs, self._noise(batch, noise_key))[0])
        aggregate = jnp.mean if self.q_aggregation == "mean" else jnp.min
        next_q = aggregate(self.q_values(target, batch.next_obs, next_action), axis=1)
        y = jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q)
        online = dataclasses.replace(critics, params=params)
        q, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        td_error = y[:, None] - q
        loss = weighted_sum(jnp.mean(jnp.square(td_error), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def flow_loss(
        self, params: PyTree, batch: Transition, *, flow: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """L_flow(ψ) of a batch whose weights sum to 1; no terms.

        Args:
            params: ψ.
            flow: the velocity; its parameters are not used.
            key: for z, t and dropout.
        """
        flow = dataclasses.replace(flow, params=params)
        error, stats = flow_error(self._flow, flow, self.spec, self.seen_by("actor", batch.obs), batch.action, key)
        return weighted_sum(error, batch.weight), Aux({}, stats)

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        flow: Variables,
        critics: Variables,
        key: PRNGKeyArray,
        axis_name: str | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """L_π(ω) of a batch whose weights sum to 1, and its terms.

        Args:
            params: ω.
            actor: the one-step policy; its parameters are not used.
            flow: the velocity.
            critics: the online critics.
            key: for z and dropout.
            axis_name: inside `shard_map`, the mesh axis that the batch is split over.
        """
        noise_key, dropout_key = jax.random.split(key)
        noise = self._noise(batch, noise_key)
        actor = dataclasses.replace(actor, params=params)
        action, stats = self._one_step(actor, batch.obs, noise, train=True, key=dropout_key)
        cloned = integrate(self._flow, flow, self.spec, self.seen_by("actor", batch.obs), noise, self.flow_steps)
        distance = mean_square(action, jax.lax.stop_gradient(from_unit(self.spec, cloned)))
        q = jnp.mean(self.q_values(critics, batch.obs, from_unit(self.spec, action)), axis=1)
        size = sum_over_devices(weighted_sum(jnp.abs(jax.lax.stop_gradient(q)), batch.weight), axis_name)
        scale = size if self.normalize_q else jnp.ones(())
        loss = weighted_sum(self.distill_weight * distance - q / scale, batch.weight)
        return loss, Aux({"distill_loss": jax.lax.stop_gradient(weighted_sum(distance, batch.weight))}, stats)

    def _one_step(
        self, actor: Variables, obs: PyTree, noise: PyTree, *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree]:
        """μ(s, z), not clipped, and the actor's statistics."""
        return apply_to_noise(self._actor, actor, self.spec, (self.seen_by("actor", obs), noise), train=train, key=key)

    def _noise(self, batch: Transition, key: PRNGKeyArray) -> PyTree:
        """A z for each transition."""
        return sample_noise(self.spec.action, len(batch.reward), key)

    def _one_step_policy(self, state: OffPolicyState, actor: Variables) -> FlowPolicy:
        normalizer, spec = state.normalizers.obs, self.spec_of("actor")
        return FlowPolicy(actor, normalizer and normalizer.select_space(spec.obs), self._actor, spec)

    @property
    def _flow(self) -> Network:
        return self._actor if self.flow is None else self.flow

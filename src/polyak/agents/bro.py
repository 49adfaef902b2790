"""BRO (Nauman et al. 2024, arXiv:2405.16158): SAC with large regularized critics and an optimistic second actor."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyState
from polyak.agents.quantile_critics import QuantileCriticsAgent
from polyak.agents.soft_actor import SoftActorCopies
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_unset
from polyak.core.struct import number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    action_dimensions,
    append_logs,
    check_actor,
    check_critics,
    feedforward_or_default,
    join_logs,
)
from polyak.learning.recurrent_replay import apply_to_batch
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.flow import apply_to_noise, noise_spec
from polyak.networks.optimistic import (
    OptimisticActor,
    bounded_exp,
    inverse_bounded_exp,
    join_actors,
    kl_of_shift,
    means,
    shift_params,
)
from polyak.ops.distributions import for_space
from polyak.ops.gradient_step import Aux, StepLog, adam, apply_gradient, clip_and_descend, global_norm, non_finite
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Count, Schedule, StepCount, check_schedule
from polyak.policies.critic_state import WithCriticState
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.repeated_noise import repeat_noise
from polyak.replay.replay import Transition

OPTIMISM_B1 = 0.5
"""Adam's β₁ for the parameters of β and λ, the authors'."""


@struct
class OptimismWeights:
    """The weights of the optimistic actor's loss, β and λ, and the state of their optimizer.

    Attributes:
        params: the numbers of which `bounded_exp` is `"optimism"`, β, and `"kl_weight"`, λ.
        optimizer_state: of Adam.
    """

    params: dict[str, Float[Array, ""]]
    optimizer_state: PyTree

    @property
    def values(self) -> dict[str, Float[Array, ""]]:
        """β and λ."""
        return {name: bounded_exp(x) for name, x in self.params.items()}


@struct
class BROCopies(SoftActorCopies):
    """The networks of BRO, its temperature, and the weights of the optimistic actor's loss.

    Attributes:
        optimistic_actor: f, online only.
        weights: β and λ.
    """

    optimistic_actor: NetworkCopies
    weights: OptimismWeights


@struct(kw_only=True)
class BRO(QuantileCriticsAgent):
    """BRO for Box actions: SAC with quantile critics without pessimism, many gradient steps, resets, and an optimistic actor.

        J_Z(θ) = E[ Σ_i Σ_m 1/M Σ_k |τ_m - 1{u < 0}| L_κ(u) / κ ],    u = y_k - θ_i,m(s, a),  τ_m = (2m - 1) / 2M
        y_k    = r + γ^m (1/N Σ_i θ_target,i,k(s', a') - α log π(a'|s')),    a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - Q_μ(s, a) ],    a ~ π_φ(·|s),    Q_μ = 1/NM Σ_i,m θ_i,m
        J(α)   = E[ -α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. The
    optimistic actor collects the data. It is the actor with shifted means, tanh(u) with u ~ N(μ(s) + f_ψ(s, μ(s)), (c σ(s))²),
    and maximizes an upper bound of the value, near the actor:

        J_o(ψ)  = E[ λ KL(s) - Q_μ(s, a) - β Q_σ(s, a) ],    a ~ π_o(·|s),    KL = Σ_d ½ (f_d / σ_d)²
        Q_σ     = 1/NM Σ_i,m |θ_i,m - 1/N Σ_j θ_j,m|,    ½ |θ_1 - θ_2| of two critics, their standard deviation
        J(β, λ) = (β - λ) (E[KL] / dim A - K)

    KL is the divergence of N(μ + f, σ²) from N(μ, σ²), before the standard deviation is scaled by c. Where it is larger than K,
    optimism β falls and the weight λ grows. Both are exp(-10 + 8.75 (1 + tanh x)) of parameters x, which have an Adam of their
    own. A gradient step trains the critics, and the target critics follow; every `policy_delay`-th step then trains the actor
    against the new critics, and α with the new actor; and each step ends with the optimistic actor, against the new critics and
    near the new actor, and with β and λ, by the divergence in its loss. `policy` is the actor, which is also the policy of y.
    A reset (`reset_period`) renews the optimistic actor, β and λ too.

    The defaults are the authors', for ten gradient steps a step of the environment, but for resets, which presets have:
    `reset_period=2_500_000` gradient steps, 250,000 steps of the environment. Their faster variant takes `updates_per_step=2`;
    with it pass `reset_period=None`, or 500,000 for a reset at the same steps of the environment.

    Differences from the authors' code: they also reset after 15,000 and 50,000 steps of the environment, and their period
    doubles after a million steps, while the faster variant resets after 15,000 alone, where here the periods are equal; their
    resets return to the same initial parameters, where here each draws new ones; the last layer of the actor starts with gain
    0.01 instead of √2, its log σ at -4 in every state, and critics start as PyTorch's instead of orthogonal; the last layer of
    f has a bias; Adam's β₁ is 0.9 for α, where they have 0.5, and log α has the weight decay of the networks; and J(α) draws
    actions of the new actor, where theirs has the actions of J_π.

    Attributes:
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor((256,),
            residual="post_norm", orthogonal=True, squash_log_std=True, log_std=-4.0)`. In its own loss it is in training mode.
        critics: a network of `(obs, action)` that returns `(quantiles, None)`, quantiles `[B, N, M]`, N at least 2; None takes
            `Critics((512, 512), residual="post_norm")`. A built-in network gets M = `num_quantiles`. Dropout is on in all
            losses and the target. Batch normalization uses the statistics of the batch in the critics' loss, and running ones
            elsewhere.
        optimistic_actor: the network of f, which returns `(action_params, value)`, of which `loc` is f; its observation is a
            Tuple of the actor's observation and μ, its standard deviation is not used. None takes the settings of a built-in
            actor, else of the default one. In its own loss it is in training mode. `weight_norm` and `shared_encoder` are not
            for it.
        target_entropy: H̄, the entropy of the policy that a learned α aims at, of actions in [-1, 1]; at most dim A log 2, the
            entropy of random actions. `"auto"`, or None, takes -dim A / 2.
        alpha_loss: `"alpha"`: J(α) as above; `"log_alpha"`: with log α in place of α.
        kl_target: K, the divergence for each dimension of the action that β and λ aim at.
        std_scale: c, the standard deviation of the optimistic actor, in standard deviations of the actor.
        initial_optimism: initial value of β.
        initial_kl_weight: initial value of λ.
        optimism_learning_rate: learning rate of the parameters of β and λ, a number or a schedule such as `Linear`.
        weight_decay: w of Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101): a step with the
            learning rate lr also subtracts lr · w times the weights; 0 disables it. log α decays too, which the authors' code
            does not do: by lr · w · |log α| in each step, 0.05 % of a step of Adam at α = 0.01. β and λ do not decay.
        sde_sample_freq: None: the optimistic actor draws actions independently, or with `max_noise_repeats`.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = BRO(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> agent.critics.num_quantiles
    100
    """

    entropy_of_dimension: ClassVar[float] = -0.5
    averages_quantiles: ClassVar[bool] = False

    updates_per_step: float = 10.0
    batch_size: int = 128
    learning_starts: int = 2_500
    alpha_loss: Literal["log_alpha", "alpha"] = "alpha"
    num_quantiles: int = 100
    optimistic_actor: Network | None = static(default=None)
    kl_target: Scalar = number(default=0.05, above=0)
    std_scale: Scalar = number(default=0.75, above=0)
    initial_optimism: Scalar = number(default=1.0, at_least=1e-4, at_most=1_000)
    initial_kl_weight: Scalar = number(default=0.25, at_least=1e-4, at_most=1_000)
    optimism_learning_rate: Schedule = setting(default=3e-5, check=check_schedule)
    weight_decay: Scalar = number(default=1e-4, at_least=0)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        actor = Actor((256,), residual="post_norm", orthogonal=True, squash_log_std=True, log_std=-4.0)
        self.set_networks(actor, Critics((512, 512), residual="post_norm"))
        self.set_outputs_of_critics("num_quantiles", self.num_quantiles)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        check_unset(self, ("sde_sample_freq",), "must be None, as the features of state-dependent noise are the actor's alone")
        given = self._optimistic_actor
        network = feedforward_or_default("BRO", "optimistic_actor", given, given, has_unit_weights=True)
        if getattr(network, "residual", None) == "hypersphere":
            raise ValueError(
                "BRO: optimistic_actor must not have residual='hypersphere', as weight_norm is not for it; give BRO an "
                f"optimistic_actor with other blocks, got {network!r}"
            )
        super().check_together()
        if self.optimizer is not None:
            check_unset(self, ("weight_decay",), "has no effect with optimizer=...; leave it out and set it in the optimizer")

    def optimizer_at(self, env_steps: Count = 0, learning_rate: Schedule | None = None) -> optax.GradientTransformation:
        """Return `optimizer`, or Adam with weight decay and the learning rate of this step; see `AdamSettings.optimizer_at`."""
        if self.optimizer is not None:
            return self.optimizer
        schedule = self.learning_rate if learning_rate is None else learning_rate
        scale = optax.scale_by_adam(b1=self.adam_b1, eps=self.adam_eps)
        scale = optax.chain(scale, optax.add_decayed_weights(self.weight_decay))
        return clip_and_descend(scale, schedule, env_steps, self.max_grad_norm)

    def create_copies(self, key: PRNGKeyArray) -> BROCopies:
        """An actor, critics with a target, a temperature, the optimistic actor, and β and λ."""
        key, optimistic_key = jax.random.split(key)
        soft, network = super().create_copies(key), self._optimistic_actor
        spec = noise_spec(self.spec_of("actor"), has_time=False)
        optimistic = NetworkCopies.create(network, optimistic_key, spec, optimizer=None, name="optimistic_actor")
        check_actor(network, optimistic.online, spec)
        initial = {"optimism": self.initial_optimism, "kl_weight": self.initial_kl_weight}
        params = {name: inverse_bounded_exp(value) for name, value in initial.items()}
        weights = OptimismWeights(params, self._optimism_optimizer().init(params))
        optimistic = optimistic.with_optimizer_state(self.optimizer_at())
        return BROCopies(**vars(soft), optimistic_actor=optimistic, weights=weights)

    def check_critics(self, variables: Variables) -> None:
        """Check that there are at least two critics, which return `num_quantiles` quantiles each."""
        count = check_critics(self._critics, variables, self.spec_of("critic"), outputs=self.num_quantiles)
        if count < 2:
            raise ValueError(f"BRO: num_critics of critics must be at least 2, as optimism is their difference, got {count}")

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | WithCriticState | DiscountedReturn:
        """The distribution of the optimistic actor, or its noise held; at first uniformly random actions."""
        copies = state.copies
        variables = join_actors(copies.actor.online, copies.optimistic_actor.online, self.std_scale)
        network = OptimisticActor(self._actor, self._optimistic_actor, self.spec_of("actor"))
        policy = dataclasses.replace(self.network_policy(state, variables), network=network)
        explorer = repeat_noise(policy, self.max_noise_repeats)
        return self.to_collect(RandomWarmStart(explorer, self.learning_starts, state.env_steps), state)

    def train_step(
        self,
        copies: SoftActorCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[BROCopies, StepLog]:
        """The step of SAC; then a step of the optimistic actor, and one of β and λ by the divergence in its loss."""
        assert isinstance(copies, BROCopies), "create_copies made them"
        key, optimistic_key = jax.random.split(key)
        soft, log = super().train_step(copies, batch, key, enabled, env_steps=env_steps, axis_name=axis_name)
        weights, values = copies.weights, copies.weights.values
        loss = partial(
            self.optimistic_loss,
            optimistic_actor=copies.optimistic_actor.online,
            actor=soft.actor.online,
            critics=soft.critics.online,
            optimism=values["optimism"],
            kl_weight=values["kl_weight"],
            key=optimistic_key,
        )
        step = self.optimizer_at(env_steps, self.actor_learning_rate)
        optimistic, optimistic_log = copies.optimistic_actor.train(
            loss, step, batch, enabled=log.applied[0], axis_name=axis_name
        )
        value, gradient = jax.value_and_grad(self.weights_loss)(weights.params, optimistic_log.terms["optimistic_kl"])
        aux, before = Aux({"loss": value, "grad_norm": global_norm(gradient)}), Variables(weights.params)
        after, state, weights_log = apply_gradient(
            self._optimism_optimizer(env_steps), before, weights.optimizer_state, gradient, aux, non_finite(aux),
            optimistic_log.applied,
        )  # fmt: skip
        new = BROCopies(**vars(soft), optimistic_actor=optimistic, weights=OptimismWeights(after.params, state))
        return new, append_logs(log, join_logs(optimistic_actor=optimistic_log, optimism_weights=weights_log))

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, "B M"]:
        """The targets y_1 ... y_M, without a gradient; arguments as for `critic_loss`."""
        action_key, dropout_key = jax.random.split(key)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        quantiles = jnp.mean(self.q_values(target, batch.next_obs, draw.action, dropout_key), axis=1)
        soft_values = quantiles - (alpha * draw.log_prob)[:, None]
        rewards, discounts = self.reward_scale * batch.reward, batch.discount
        return jax.lax.stop_gradient(rewards[:, None] + discounts[:, None] * soft_values)

    def disagreement(self, q: Float[Array, "B N M"]) -> Float[Array, " B"]:
        """Q_σ, the mean over quantiles of the critics' mean distance from their mean."""
        # Not their standard deviation, whose gradient is NaN where all are equal; of two critics it is the same number.
        return jnp.mean(jnp.abs(q - jnp.mean(q, axis=1, keepdims=True)), axis=(1, 2))

    def optimistic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        optimistic_actor: Variables,
        actor: Variables,
        critics: Variables,
        optimism: Float[Array, ""],
        kl_weight: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """J_o of a batch whose weights sum to 1, and its terms, `optimistic_kl` and `q_std`, the means of KL / dim A and Q_σ.

        Args:
            params: ψ.
            optimistic_actor: the network of f; its parameters are not used.
            actor: the actor of μ and σ.
            critics: the online critics.
            optimism: β.
            kl_weight: λ.
            key: for the actions, and dropout.
        """
        action_key, shift_key, dropout_key = jax.random.split(key, 3)
        obs, network = self.seen_by("actor", batch.obs), dataclasses.replace(optimistic_actor, params=params)
        (mean_and_std, _), _ = apply_to_batch(self._actor, actor, obs)
        inputs = obs, means(self.spec, mean_and_std)
        shift, stats = apply_to_noise(self._optimistic_actor, network, self.spec, inputs, train=True, key=shift_key)
        shifted = shift_params(self.spec, mean_and_std, shift, self.std_scale)
        action = for_space(self.spec.action, shifted, squash=True).sample(seed=action_key)
        q = self.q_values(critics, batch.obs, action, dropout_key)
        divergence, q_std = kl_of_shift(self.spec, mean_and_std, shift), self.disagreement(q)
        loss = kl_weight * divergence - self.combine_critics(q) - optimism * q_std
        of_batch = {"optimistic_kl": divergence / action_dimensions(self.spec), "q_std": q_std}
        terms = {name: jax.lax.stop_gradient(weighted_sum(x, batch.weight)) for name, x in of_batch.items()}
        return weighted_sum(loss, batch.weight), Aux(terms, stats)

    def weights_loss(self, params: dict[str, Float[Array, ""]], divergence: Float[Array, ""]) -> Float[Array, ""]:
        """J(β, λ) of the parameters of β and λ, at E[KL] / dim A."""
        values = {name: bounded_exp(x) for name, x in params.items()}
        return (values["optimism"] - values["kl_weight"]) * (divergence - self.kl_target)

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """The learning rate, α, β and λ."""
        weights = {f"train/{name}": value for name, value in after.copies.weights.values.items()}
        return super().metrics(before, after) | weights

    @property
    def _optimistic_actor(self) -> Network:
        """The network of f, by default with the layers of the actor."""
        if self.optimistic_actor is not None:
            return self.optimistic_actor
        layers = self.actor if isinstance(self.actor, Actor) else Actor((256,), residual="post_norm", orthogonal=True)
        return dataclasses.replace(layers, std="fixed", log_std=0.0, squash_log_std=False, clip_mean=None)

    def _optimism_optimizer(self, env_steps: Count = 0) -> optax.GradientTransformation:
        return adam(self.optimism_learning_rate, env_steps, b1=OPTIMISM_B1, eps=1e-8, max_grad_norm=None)

"""Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269): soft actor-critic with distributions of returns."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    check_copies,
    check_critics,
    check_shared_encoder,
    check_unit_actions,
    critic_terms,
    evaluated_actor,
    feedforward_or_default,
    has_small_products,
    q_values,
    q_values_in_training,
    share_encoder,
)
from polyak.learning.drawn_batches import draw_batches, return_errors
from polyak.learning.normalizers import check_normalizers
from polyak.learning.off_policy import REPLAY_FIELD, OffPolicyState, check_off_policy, diagnose_off_policy, partition_by_env
from polyak.learning.prefill import add_rollout
from polyak.learning.soft_actor import (
    SoftActorCopies,
    check_target_entropy,
    check_temperature,
    create_soft_actor,
    draw_actions,
    networks_of,
    temperature_loss,
    update_soft_actor,
)
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux, check_optimizer
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule, check_schedule
from polyak.ops.value_distributions import midpoints, quantile_huber_loss
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.sde import check_sde, explore
from polyak.replay.replay import Replay, Transition, check_replay
from polyak.replay.uniform import UniformReplay


@struct
class TQC:
    """TQC for Box actions: SAC with quantile critics.

        J_Z(θ) = E[ Σ_i 1/M Σ_m 1/K Σ_k |τ_m - 1{u < 0}| L_κ(u) / κ ],    u = y_k - θ_i,m(s, a),  τ_m = (2m - 1) / 2M
        y_k    = r + γ^m (z_k(s', a') - α log π(a'|s')),    a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - 1/NM Σ_i,m θ_i,m(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -log α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. z_1 ≤ ...
    ≤ z_K are the smallest K = N(M - d) of the N·M quantiles of all target critics together; dropping d per critic reduces
    overestimation. In a gradient step the critics go first, and in every `policy_delay`-th then the actor against the new
    critics, and α with the new actor; at last the target critics.

    There are no `num_target_critics` as in SAC: dropping quantiles of the whole pool takes the place of a minimum over critics.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor()`. In its own loss it is in
            training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(quantiles, None)`, quantiles `[B, N, M]`; None takes
            `Critics(num_critics=5)`. A built-in one gets M = `num_quantiles`. Dropout is on in all losses and the target.
            Batch normalization uses the statistics of the batch in the critics' loss, and running ones elsewhere; critics with
            batch normalization have dropout in their own loss alone.
        num_quantiles: M, of each critic.
        dropped_quantiles: d, the largest quantiles that each critic drops from the target.
        huber_delta: κ, the error above which the quantile loss is linear.
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per transition, so that it means the same with any number of environments; times
            `num_steps * num_envs` it must be a whole number.
        batch_size: transitions of a gradient step.
        replay: a `UniformReplay`, `PrioritizedReplay`, or a `polyak.replay.Replay` of your own.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        learning_rate: Adam's, a number or a schedule such as `Linear`; that of the critics, and of all where no other is set.
        actor_learning_rate: the actor's.
        alpha_learning_rate: that of α.
        gamma: discount per step.
        n_step: steps that rewards are summed over before bootstrapping.
        reward_scale: factor of all rewards.
        normalize_obs: normalize observations by their running mean and standard deviation (all Boxes but uint8): those of now,
            when acting and when transitions are drawn.
        clip_obs: clip normalized observations to ± this value; None disables clipping.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        shared_encoder: the actor sees images through the convolutions of the critics, which only the loss of the critics trains
            (Yarats et al. 2020, arXiv:1910.01741); False gives it its own.
        alpha: the weight of the entropy; None learns it.
        initial_alpha: where learning α begins.
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) that is drawn anew every this
            number of steps; needs `Actor(std="sde")`, which the default actor then is, with log_std -3. None draws actions
            independently.
        target_entropy: H̄, which the policy's entropy is held at by a learned α, of actions in [-1, 1]; at most dim A log 2, the
            entropy of random ones. `"auto"`, or None, takes -dim A.
        alpha_loss: `"log_alpha"`: J(α) as above; `"alpha"`: the paper's, with α in place of log α.
        policy_delay: gradient steps of the critics for one of the actor and of α.
        tau: fraction by which the target critics move towards the online ones at each target update.
        target_period: gradient steps between target updates.
        max_grad_norm: clip the gradient of each network to this global norm; None disables clipping.
        adam_eps: Adam's ε.
        optimizer: in place of Adam, for each network.
        ema_tau: keep an average of the actor that moves by this fraction towards the online one after every gradient step, and
            evaluate and export that average; None evaluates the online actor.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box
    >>> agent = TQC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    actor: Network | None = static(default=None)
    critics: Network | None = static(default=None)
    num_quantiles: int = integer(default=25)
    dropped_quantiles: int = integer(default=2, at_least=0)
    huber_delta: Scalar = number(default=1.0, above=0)
    num_steps: int = integer(default=1)
    updates_per_step: float = number(default=1.0, above=0, static=True)
    batch_size: int = integer(default=256)
    replay: Replay = setting(default=UniformReplay(1_000_000), check=check_replay)
    learning_starts: int = integer(default=1_000, at_least=0)
    learning_rate: Schedule = setting(default=3e-4, check=check_schedule)
    actor_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    alpha_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    reward_scale: Scalar = number(default=1.0, above=0)
    normalize_obs: bool = choice(default=False, choices=(True, False))
    clip_obs: float | None = number(default=10.0, above=0, optional=True, static=True, used_if=("normalize_obs", True))
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    shared_encoder: bool = choice(default=False, choices=(True, False))
    alpha: Scalar | None = number(default=None, at_least=0, optional=True)
    initial_alpha: Scalar = number(default=1.0, above=0)
    sde_sample_freq: int | None = integer(default=None, optional=True)
    target_entropy: Scalar | Literal["auto"] | None = setting(default=None, check=check_target_entropy)
    alpha_loss: Literal["log_alpha", "alpha"] = choice(default="log_alpha", choices=("log_alpha", "alpha"))
    policy_delay: int = integer(default=1)
    tau: Scalar = number(default=0.005, above=0, at_most=1)
    target_period: int = integer(default=1)
    max_grad_norm: Scalar | None = number(default=None, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    optimizer: optax.GradientTransformation | None = static(default=None)
    ema_tau: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    max_skipped_updates: int = integer(default=10)

    def __post_init__(self) -> None:
        check_env_spec("TQC", self.spec)
        check_unit_actions("TQC", self.spec)
        check_settings(self)
        if isinstance(self.target_entropy, str):
            object.__setattr__(self, "target_entropy", None)  # "auto"; a leaf of a pytree cannot be a str.
        critics = feedforward_or_default("TQC", "critics", self.critics, Critics(num_critics=5))
        if isinstance(critics, Critics):
            if critics.num_quantiles not in (None, self.num_quantiles):
                raise ValueError(
                    f"TQC: num_quantiles={self.num_quantiles} of the agent must be that of its critics, got "
                    f"Critics(num_quantiles={critics.num_quantiles}); leave theirs None"
                )
            critics = dataclasses.replace(critics, num_quantiles=self.num_quantiles)
        object.__setattr__(self, "critics", critics)
        default = Actor() if self.sde_sample_freq is None else Actor(std="sde", log_std=-3.0)
        object.__setattr__(self, "actor", feedforward_or_default("TQC", "actor", self.actor, default))
        check_optimizer(self)
        check_normalizers(self)
        check_shared_encoder(self)
        check_temperature(self)
        check_sde(self, networks_of(self)[0])
        if self.dropped_quantiles >= self.num_quantiles:
            raise ValueError(
                f"TQC: dropped_quantiles={self.dropped_quantiles} must be less than num_quantiles={self.num_quantiles}"
            )

    add = add_rollout
    update = update_soft_actor
    check = check_off_policy
    partition = partition_by_env
    diagnose = diagnose_off_policy
    has_small_products = has_small_products
    replay_field = REPLAY_FIELD
    draw_batches = draw_batches
    return_errors = return_errors
    max_lag = None
    action_scaling = "rescale"
    temperature_loss = temperature_loss

    def init(self, key: PRNGKeyArray) -> OffPolicyState:
        """A new state."""
        state = create_soft_actor(self, key)
        check_critics(networks_of(self)[1], state.copies.critics.online, self.spec, outputs=self.num_quantiles)
        return state

    def policy(self, state: OffPolicyState) -> Greedy:
        """The mode of the actor's distribution, of its average if there is one."""
        check_copies("TQC.policy", state, SoftActorCopies)
        return Greedy(self._network_policy(state, evaluated_actor(self, state.copies.actor, state.copies.average)))

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | DiscountedReturn:
        """The actor's distribution or state-dependent noise; until `learning_starts` uniformly random actions."""
        check_copies("TQC.collect_policy", state, SoftActorCopies)
        explorer = explore(self._network_policy(state, state.copies.actor.online), self.sde_sample_freq)
        policy = RandomWarmStart(explorer, self.learning_starts, state.env_steps)
        return DiscountedReturn(policy, self.gamma) if self.normalize_reward == "return" else policy

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
        """J_Z of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; of their parameters nothing is used.
            target: the target critics.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', and dropout.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        quantiles, stats = q_values_in_training(networks_of(self)[1], online, batch.obs, batch.action, dropout_key)
        targets = self.td_target(batch, target=target, actor=actor, alpha=alpha, key=target_key)
        tau = midpoints(self.num_quantiles)[None]
        each = jax.vmap(lambda theta: quantile_huber_loss(theta, tau, targets, self.huber_delta), 1, 1)(quantiles)
        loss = weighted_sum(jnp.sum(each, axis=1) / self.num_quantiles, batch.weight)
        q = jnp.mean(quantiles, axis=2)
        return loss, Aux(critic_terms(q, jnp.mean(targets, axis=1, keepdims=True) - q, batch.weight), stats)

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, "B K"]:
        """The targets y_1 ≤ ... ≤ y_K, without a gradient; arguments as for `critic_loss`."""
        action_key, dropout_key = jax.random.split(key)
        draw, _ = draw_actions(self, actor, batch.next_obs, batch.next_action_mask, action_key)
        quantiles = q_values(networks_of(self)[1], target, batch.next_obs, draw.action, dropout_key)
        pool = jnp.sort(quantiles.reshape(len(quantiles), -1), axis=1)
        smallest = pool[:, : pool.shape[1] - quantiles.shape[1] * self.dropped_quantiles]
        soft_values = smallest - (alpha * draw.log_prob)[:, None]
        rewards, discounts = self.reward_scale * batch.reward, batch.discount
        return jax.lax.stop_gradient(rewards[:, None] + discounts[:, None] * soft_values)

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        alpha: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """J_π of a batch whose weights sum to 1, and its terms.

        Args:
            params: φ.
            actor: of its parameters nothing is used.
            critics: the online critics.
            alpha: the weight of the entropy.
            key: for the actions, and dropout.
        """
        actor = share_encoder(self, dataclasses.replace(actor, params=params), critics)
        draw, stats = draw_actions(self, actor, batch.obs, batch.action_mask, key, train=True)
        quantiles = q_values(networks_of(self)[1], critics, batch.obs, draw.action, jax.random.fold_in(key, 1))
        q = jnp.mean(quantiles, axis=(1, 2))
        loss = weighted_sum(draw.mean(jax.lax.stop_gradient(alpha) * draw.log_prob - q), batch.weight)
        entropy = weighted_sum(-jax.lax.stop_gradient(draw.mean(draw.log_prob)), batch.weight)
        return loss, Aux({"entropy": entropy}, stats)

    def _network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        return NetworkPolicy(actor, state.normalizers.obs, networks_of(self)[0], self.spec, squash=True)

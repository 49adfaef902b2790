"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with ensembles of critics (REDQ, arXiv:2101.05982)."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Discrete, EnvSpec, check_env_spec
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    check_copies,
    check_critics,
    check_num_target_critics,
    check_shared_encoder,
    check_unit_actions,
    critic_terms,
    evaluated_actor,
    feedforward_or_default,
    has_small_products,
    min_of_critics,
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
from polyak.ops.losses import of_action, weighted_sum
from polyak.ops.schedules import Schedule, check_schedule
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.sde import check_sde, explore
from polyak.replay.replay import Replay, Transition, check_replay
from polyak.replay.uniform import UniformReplay


@struct
class SAC:
    """SAC for Box and Discrete actions.

        J_Q(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² ],    y = r + γ^m (min_i Q_target,i(s', a') - α log π(a'|s')),  a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -log α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. Box actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. In a
    gradient step the critics go first, and in every `policy_delay`-th then the actor against the new critics, and α with the
    new actor; at last the target critics.

    With Discrete actions critics return Q(s, a) of all n, and expectations over a and a' are sums Σ_a π(a|s) over the actions
    that the state allows (Christodoulou 2019, arXiv:1910.07207).

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them, or Discrete.
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor()`. In its own loss it is in
            training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`, with n Discrete actions `[B, N, n]`; None
            takes `Critics()`, which has N = 2.
            Dropout is on in all losses and the target. Batch normalization uses the statistics of the batch in the critics'
            loss, and running ones elsewhere; critics with batch normalization have dropout in their own loss alone.
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
        target_entropy: H̄, which the policy's entropy is held at by a learned α, of actions in [-1, 1]; at most dim A log 2, or
            log n of n Discrete actions, the entropy of random ones. `"auto"`, or None, takes -dim A, or 0.98 log n of n
            Discrete actions that are allowed.
        alpha_loss: `"log_alpha"`: J(α) as above; `"alpha"`: the paper's, with α in place of log α.
        num_target_critics: number of critics that are sampled for each target, as in REDQ (Chen et al. 2021, arXiv:2101.05982),
            of whose values the minimum is taken; the actor then maximizes the mean over all. None takes the minimum over
            all critics, in the target and for the actor.
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
    >>> agent = SAC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    actor: Network | None = static(default=None)
    critics: Network | None = static(default=None)
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
    num_target_critics: int | None = integer(default=None, optional=True)
    policy_delay: int = integer(default=1)
    tau: Scalar = number(default=0.005, above=0, at_most=1)
    target_period: int = integer(default=1)
    max_grad_norm: Scalar | None = number(default=None, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    optimizer: optax.GradientTransformation | None = static(default=None)
    ema_tau: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    max_skipped_updates: int = integer(default=10)

    def __post_init__(self) -> None:
        check_env_spec("SAC", self.spec)
        if not isinstance(self.spec.action, Discrete):
            check_unit_actions("SAC", self.spec, "PPO takes every space", " or one Discrete")
        default = Actor() if self.sde_sample_freq is None else Actor(std="sde", log_std=-3.0)
        object.__setattr__(self, "actor", feedforward_or_default("SAC", "actor", self.actor, default))
        object.__setattr__(self, "critics", feedforward_or_default("SAC", "critics", self.critics, Critics()))
        check_settings(self)
        if isinstance(self.target_entropy, str):
            object.__setattr__(self, "target_entropy", None)  # "auto"; a leaf of a pytree cannot be a str.
        check_optimizer(self)
        check_normalizers(self)
        check_shared_encoder(self)
        check_temperature(self)
        check_sde(self, networks_of(self)[0])

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
        outputs = self.spec.action.n if isinstance(self.spec.action, Discrete) else None
        num_critics = check_critics(networks_of(self)[1], state.copies.critics.online, self.spec, outputs=outputs)
        check_num_target_critics("SAC", self.num_target_critics, num_critics)
        return state

    def policy(self, state: OffPolicyState) -> Greedy:
        """The mode of the actor's distribution, of its average if there is one."""
        check_copies("SAC.policy", state, SoftActorCopies)
        return Greedy(self._network_policy(state, evaluated_actor(self, state.copies.actor, state.copies.average)))

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | DiscountedReturn:
        """The actor's distribution or state-dependent noise; until `learning_starts` uniformly random actions."""
        check_copies("SAC.collect_policy", state, SoftActorCopies)
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
        """J_Q of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; of their parameters nothing is used.
            target: the target critics.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', the choice of critics, and dropout.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        q, stats = q_values_in_training(networks_of(self)[1], online, batch.obs, batch.action, dropout_key)
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
        draw, _ = draw_actions(self, actor, batch.next_obs, batch.next_action_mask, action_key)
        next_q = q_values(networks_of(self)[1], target, batch.next_obs, draw.action, dropout_key)
        soft_value = draw.mean(min_of_critics(next_q, self.num_target_critics, subset_key) - alpha * draw.log_prob)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * soft_value)

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
        q = q_values(networks_of(self)[1], critics, batch.obs, draw.action, jax.random.fold_in(key, 1))
        q = jnp.min(q, axis=1) if self.num_target_critics is None else jnp.mean(q, axis=1)
        loss = weighted_sum(draw.mean(jax.lax.stop_gradient(alpha) * draw.log_prob - q), batch.weight)
        entropy = weighted_sum(-jax.lax.stop_gradient(draw.mean(draw.log_prob)), batch.weight)
        return loss, Aux({"entropy": entropy}, stats)

    def _network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        return NetworkPolicy(actor, state.normalizers.obs, networks_of(self)[0], self.spec, squash=True)

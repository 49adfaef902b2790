"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with ensembles of critics (REDQ, arXiv:2101.05982)."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_state, check_unset
from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Terms, Variables
from polyak.learning.actor_critic import (
    action_dimensions,
    check_critics,
    check_unit_actions,
    create_actor_critic,
    critic_terms,
    feedforward_or_default,
    has_small_products,
    join_logs,
    q_values,
)
from polyak.learning.off_policy import (
    REPLAY_FIELD,
    OffPolicyState,
    add_and_learn,
    check_off_policy,
    create_state,
    diagnose_off_policy,
    partition_by_env,
    train_copies,
)
from polyak.learning.prefill import add_rollout
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.ops.distributions import Distribution, for_space
from polyak.ops.gradient_step import StepLog, check_optimizer, check_optimizer_state, gradient_step, optimizer_of
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule, check_schedule
from polyak.policies.exploration import WarmUp
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.replay.uniform import Transition


@struct
class Temperature:
    """The weight of the entropy, α = e^log_alpha, with the state of its optimizer; fixed where α is a number."""

    log_alpha: Float[Array, ""]
    optimizer_state: PyTree


@struct
class SACCopies:
    """What SAC trains.

    Attributes:
        actor: online only.
        critics: N of them in one network, online and target.
        temperature: α.
    """

    actor: NetworkCopies
    critics: NetworkCopies
    temperature: Temperature


@struct
class SAC:
    """SAC for Box actions in [-1, 1] (`envs.make(..., action_scaling="rescale")`).

        J_Q(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² ],    y = r + γ^m (min_i Q_target,i(s', a') - α log π(a'|s')),  a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -log α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay. In a gradient step the critics go first, then the actor against the new
    critics, α with the new actor, and at last the target critics.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor()`.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics()`, which has N = 2.
            Dropout is on in their loss and target; statistics, such as those of batch normalisation, stay as they were
            initialised.
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per transition, so that it means the same with any number of environments; times
            `num_steps * num_envs` it must be a whole number.
        batch_size: transitions of a gradient step.
        capacity: transitions in the replay, over all environments and devices.
        prioritized: draw transitions in proportion to (|δ| + ε)^α of their last TD error δ, weighted for it (Schaul et al.
            2016, arXiv:1511.05952), instead of uniformly.
        priority_alpha: α, used with `prioritized`; 0 draws uniformly.
        priority_beta: β of the weights (N P(i))^-β, a number or a schedule; None increases it from 0.4 to 1 over the first
            1,000,000 transitions.
        priority_eps: ε.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        learning_rate: Adam's, a number or a schedule such as `Linear`; that of the critics, and of all where no other is set.
        actor_learning_rate: the actor's.
        alpha_learning_rate: that of α.
        gamma: discount per step.
        n_step: steps that rewards are summed over before bootstrapping.
        reward_scale: factor of all rewards.
        alpha: the weight of the entropy; None learns it.
        initial_alpha: where learning α begins.
        target_entropy: H̄, which the policy's entropy is held at by a learned α, of actions in [-1, 1]; None takes -dim A.
        alpha_loss: `"log_alpha"`: J(α) as above; `"alpha"`: the paper's, with α in place of log α.
        subset: critics drawn at random for each target, of whose values the minimum is taken; the actor then follows the mean
            of all. None takes all, and the actor follows their minimum.
        tau: fraction by which the target critics move towards the online ones at each target update.
        period: gradient steps between target updates.
        max_grad_norm: clip the gradient of each network to this global norm; None disables clipping.
        adam_eps: Adam's ε.
        optimizer: in place of Adam, for each network.
        max_bad_steps: stop training after this number of consecutive updates without a finite gradient step.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box
    >>> agent = SAC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), capacity=10_000)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    actor: Network | None = static(default=None)
    critics: Network | None = static(default=None)
    num_steps: int = integer(default=1)
    updates_per_step: float = number(default=1.0, above=0, static=True)
    batch_size: int = integer(default=256)
    capacity: int = integer(default=1_000_000)
    prioritized: bool = choice(default=False, choices=(True, False))
    priority_alpha: Scalar = number(default=0.6, at_least=0)
    priority_beta: Schedule | None = setting(
        default=None, check=partial(check_schedule, optional=True, above=-1.0, at_least=0, at_most=1)
    )
    priority_eps: Scalar = number(default=1e-6, at_least=0)
    learning_starts: int = integer(default=1_000, at_least=0, at_most=2**31)
    learning_rate: Schedule = setting(default=3e-4, check=check_schedule)
    actor_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    alpha_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    reward_scale: Scalar = number(default=1.0, above=0)
    alpha: Scalar | None = number(default=None, at_least=0, optional=True)
    initial_alpha: Scalar = number(default=1.0, above=0)
    target_entropy: Scalar | None = number(default=None, optional=True)
    alpha_loss: Literal["log_alpha", "alpha"] = choice(default="log_alpha", choices=("log_alpha", "alpha"))
    subset: int | None = integer(default=None, optional=True)
    tau: Scalar = number(default=0.005, above=0, at_most=1)
    period: int = integer(default=1)
    max_grad_norm: Scalar | None = number(default=None, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    optimizer: optax.GradientTransformation | None = static(default=None)
    max_bad_steps: int = integer(default=10)

    def __post_init__(self) -> None:
        check_env_spec("SAC", self.spec)
        check_unit_actions("SAC", self.spec)
        object.__setattr__(self, "actor", feedforward_or_default("SAC", self.actor, Actor(), self.spec))
        object.__setattr__(self, "critics", feedforward_or_default("SAC", self.critics, Critics(), self.spec))
        check_settings(self)
        check_optimizer(self)
        if self.alpha is not None:
            unused = "initial_alpha", "target_entropy", "alpha_learning_rate", "alpha_loss"
            check_unset(self, unused, "has no effect with a fixed alpha; leave it out")

    add = add_rollout
    check = check_off_policy
    partition = partition_by_env
    diagnose = diagnose_off_policy
    has_small_products = has_small_products
    replay_field = REPLAY_FIELD
    max_lag = None
    action_scaling = "rescale"

    def init(self, key: PRNGKeyArray) -> OffPolicyState:
        """A new state."""
        networks = self._actor, self._critics
        actor, critics = create_actor_critic(self, self.spec, networks, (None, self._follow), key)
        num_critics = check_critics(self._critics, critics.online, self.spec)
        if self.subset is not None and self.subset > num_critics:
            raise ValueError(f"SAC: subset must be at most the number of critics, {num_critics}, got {self.subset}")
        log_alpha = jnp.log(jnp.asarray(self.initial_alpha, jnp.float32))
        temperature = Temperature(log_alpha, optimizer_of(self).init(jnp.array(log_alpha, copy=True)))
        return create_state(self, SACCopies(actor, critics, temperature))

    def policy(self, state: OffPolicyState) -> Greedy:
        """The mode of the actor's distribution."""
        check_state("SAC.policy", state, OffPolicyState)
        return Greedy(self._network_policy(state))

    def collect_policy(self, state: OffPolicyState) -> WarmUp:
        """The actor's distribution; until `learning_starts` uniformly random actions."""
        return WarmUp(self._network_policy(state), self.learning_starts, state.env_steps)

    def update(
        self, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[OffPolicyState, Metrics]:
        """Add a rollout to the replay, then take gradient steps on transitions drawn from it.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions.
            key: decides the transitions and the actions in the losses.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the rollout does not fit the spec (while tracing).
        """
        rates = self.learning_rate, self.actor_learning_rate, self.alpha_learning_rate
        critics_step, actor_step, alpha_step = (optimizer_of(self, state.env_steps, rate) for rate in rates)

        def train_step(
            copies: SACCopies, batch: Transition, key: PRNGKeyArray, due: Bool[Array, ""]
        ) -> tuple[SACCopies, StepLog]:
            actor, critics, temperature = copies.actor, copies.critics, copies.temperature
            critic_key, actor_key, alpha_key = jax.random.split(key, 3)
            alpha = self._alpha(temperature.log_alpha)
            loss = partial(
                self.critic_loss,
                critics=critics.online,
                target=critics.variables("target"),
                actor=actor.online,
                alpha=alpha,
                key=critic_key,
            )
            critics, critic_log = train_copies(critics, loss, critics_step, batch, due=due, axis_name=axis_name)
            loss = partial(self.actor_loss, actor=actor.online, critics=critics.online, alpha=alpha, key=actor_key)
            actor, actor_log = train_copies(actor, loss, actor_step, batch, due=due, axis_name=axis_name)
            log_alpha, optimizer_state, alpha_log = gradient_step(
                partial(self.temperature_loss, actor=actor.online, key=alpha_key),
                alpha_step,
                temperature.log_alpha,
                temperature.optimizer_state,
                batch,
                due=due & (self.alpha is None),
                axis_name=axis_name,
            )
            critics = critics.follow(updates=critic_log.applied.astype(jnp.uint32))
            copies = SACCopies(actor, critics, Temperature(log_alpha, optimizer_state))
            return copies, join_logs(critic=critic_log, actor=actor_log, alpha=alpha_log)

        # The agent's settings decide how the target follows, also where they were changed after `init`.
        critics = state.copies.critics.with_target_follow(self._follow)
        check_optimizer_state(critics_step, critics.online.params, critics.optimizer_state)
        state = dataclasses.replace(state, copies=dataclasses.replace(state.copies, critics=critics))
        new_state, metrics = add_and_learn(self, state, rollout, key, train_step, axis_name=axis_name)
        return new_state, metrics | {"train/alpha": self._alpha(new_state.copies.temperature.log_alpha)}

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
    ) -> tuple[Float[Array, ""], Terms]:
        """J_Q of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; of their parameters nothing is used.
            target: the target critics.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a' and the choice of critics.
        """
        target_key, dropout_key = jax.random.split(key)
        q = q_values(self._critics, dataclasses.replace(critics, params=params), batch.obs, batch.action, dropout_key)
        td_error = self.td_target(batch, target=target, actor=actor, alpha=alpha, key=target_key)[:, None] - q
        loss = weighted_sum(jnp.sum(0.5 * jnp.square(td_error), axis=1), batch.weight)
        return loss, critic_terms(q, td_error, batch.weight)

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        action_key, subset_key, dropout_key = jax.random.split(key, 3)
        next_action, log_prob = self._distribution(actor, batch.next_obs).sample_and_log_prob(seed=action_key)
        next_q = q_values(self._critics, target, batch.next_obs, next_action, dropout_key)
        if self.subset is not None:
            next_q = jax.random.choice(subset_key, next_q, (self.subset,), replace=False, axis=1)
        soft_value = jnp.min(next_q, axis=1) - alpha * log_prob
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
    ) -> tuple[Float[Array, ""], Terms]:
        """J_π of a batch whose weights sum to 1, and its terms.

        Args:
            params: φ.
            actor: of its parameters nothing is used.
            critics: the online critics.
            alpha: the weight of the entropy.
            key: for the actions.
        """
        distribution = self._distribution(dataclasses.replace(actor, params=params), batch.obs)
        action, log_prob = distribution.sample_and_log_prob(seed=key)
        q = q_values(self._critics, critics, batch.obs, action)
        q = jnp.min(q, axis=1) if self.subset is None else jnp.mean(q, axis=1)
        loss = weighted_sum(jax.lax.stop_gradient(alpha) * log_prob - q, batch.weight)
        return loss, {"entropy": weighted_sum(-jax.lax.stop_gradient(log_prob), batch.weight)}

    def temperature_loss(
        self, log_alpha: Float[Array, ""], batch: Transition, *, actor: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Terms]:
        """J(α) of a batch whose weights sum to 1; no terms."""
        _, log_prob = self._distribution(actor, batch.obs).sample_and_log_prob(seed=key)
        target = -action_dimensions(self.spec) if self.target_entropy is None else self.target_entropy
        weight = log_alpha if self.alpha_loss == "log_alpha" else jnp.exp(log_alpha)
        return weighted_sum(-weight * jax.lax.stop_gradient(log_prob + target), batch.weight), {}

    def _distribution(self, actor: Variables, obs: PyTree) -> Distribution:
        (params, _), _, _ = self._actor.apply(actor, obs)
        return for_space(self.spec.action, params, squash=True)

    def _alpha(self, log_alpha: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.exp(log_alpha) if self.alpha is None else jnp.asarray(self.alpha, jnp.float32)

    def _network_policy(self, state: OffPolicyState) -> NetworkPolicy:
        return NetworkPolicy(state.copies.actor.online, None, self._actor, self.spec, squash=True)

    @property
    def _follow(self) -> Follow:
        return Follow(tau=jnp.asarray(self.tau, jnp.float32), period=self.period)

    @property
    def _actor(self) -> Network:
        assert self.actor is not None, "__post_init__ sets the default"
        return self.actor

    @property
    def _critics(self) -> Network:
        assert self.critics is not None, "__post_init__ sets the default"
        return self.critics

"""The base of agents with a stochastic actor and a weight of the entropy that is learned: SAC, TQC, BRO, CQL, CrossQ, XQC."""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.actor_critic import ActorCriticAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_number, check_unset
from polyak.core.spaces import Discrete
from polyak.core.struct import choice, integer, number, setting, struct
from polyak.core.types import Metrics, PyTree, RecurrentNetwork, Scalar, Variables
from polyak.core.warn import warn
from polyak.learning.actor_critic_updates import action_dimensions, join_logs, train_every
from polyak.learning.recurrent_replay import apply_to_batch
from polyak.networks.actor import Actor
from polyak.ops.distributions import Categorical, Distribution, for_space
from polyak.ops.gradient_step import Aux, StepLog, apply_gradient, compute_gradient, evaluated_params, in_float32, non_finite
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule, StepCount, check_schedule
from polyak.ops.weight_norm import DenseKernels, normalize_weights, on_unit_spheres
from polyak.policies.critic_state import WithCriticState
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.repeated_noise import repeat_noise
from polyak.policies.sde import StateDependentExploration, check_sde
from polyak.replay.replay import Transition

ENTROPY_FRACTION = 0.98
"""Fraction of the largest entropy of Discrete actions, the default target; Christodoulou 2019, arXiv:1910.07207."""

ENTROPY_TOLERANCE = 1e-6
"""Relative tolerance, for a largest entropy that was rounded to float32."""

DROPOUT = 2**31
"""Number folded into the key of the actions for the actor's dropout; the keys of an action's parts use other numbers."""

LEARNED_ALPHA_SETTINGS = ("initial_alpha", "target_entropy", "alpha_learning_rate", "alpha_loss")
"""Settings that have no effect with a fixed `alpha`."""


ActorLoss: TypeAlias = Callable[[PyTree, Transition], tuple[Float[Array, ""], Aux]]


@struct
class Temperature:
    """The weight of the entropy, α = e^log_alpha, with the state of its optimizer; fixed where α is a number."""

    log_alpha: Float[Array, ""]
    optimizer_state: PyTree


@struct
class SoftActorCopies:
    """The networks of an agent with a stochastic actor, and its temperature.

    Attributes:
        actor: online only.
        critics: N critics in one network, online and target.
        temperature: α.
        average: average of the actor, evaluated with `ema_tau`; else None.
    """

    actor: NetworkCopies
    critics: NetworkCopies
    temperature: Temperature
    average: Variables | None


@struct
class ActionDraw:
    """Actions of a policy with their log-probabilities: a sample in each row, or every one of n Discrete actions.

    Attributes:
        action: the sample; None where the rows have every action.
        log_prob: log π, `[B]`, or `[B, n]`, 0 for actions that are not allowed.
        probs: π `[B, n]`, or None for a sample.
    """

    action: PyTree
    log_prob: Float[Array, "..."]
    probs: Float[Array, "..."] | None

    def mean(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """E_a of values of these actions: Σ_a π(a|s) values_a, or the value of the sample."""
        return values if self.probs is None else jnp.sum(self.probs * values, axis=1)


def check_target_entropy(owner: str, name: str, value: Any) -> None:
    """Check that a target entropy is a number, `"auto"` or None.

    Raises:
        TypeError, ValueError: the value is something else.
    """
    if not (isinstance(value, str) and value == "auto"):
        check_number(owner, name, value, optional=True, or_else="'auto'")


def _unit_weights(variables: Variables, kernels: DenseKernels) -> Variables:
    return dataclasses.replace(variables, params=normalize_weights(variables.params, kernels))


@struct(kw_only=True)
class SoftActorAgent(ActorCriticAgent):
    """An agent that maximizes returns and the entropy of its stochastic actor.

        J(α) = E[ -log α (log π(a|s) + H̄) ]

    A leaf defines `critic_loss`, `combine_critics` and `check_critics`.

    Attributes:
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor()`. In its own loss it is in
            training mode (dropout, batch normalization).
        learning_rate: learning rate of the critics, and of the actor and α unless set separately; a number or a schedule such
            as `Linear`.
        alpha_learning_rate: learning rate of α.
        alpha: the weight of the entropy; None learns it.
        initial_alpha: initial value of a learned α.
        target_entropy: H̄, the entropy of the policy that a learned α aims at, of actions in [-1, 1]. At most the entropy of
            random actions: dim A log 2, or log n of n Discrete actions. `"auto"`, or None, takes -dim A, or 0.98 log n of n
            Discrete actions that are allowed.
        alpha_loss: `"log_alpha"`: J(α) as above; `"alpha"`: the paper's loss, with α in place of log α.
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) that is drawn anew every this
            number of steps; needs `Actor(std="sde")`, the default actor then, with log_std -3. None draws actions
            independently.
        max_noise_repeats: explore by actions whose noise is held for k steps of each environment, P(k) ∝ k⁻², k at most this
            number (Kim et al. 2026, arXiv:2604.04539, who have 16). None draws actions independently.
        policy_delay: gradient steps of the critics for one of the actor and of α.
        weight_norm: scale the weight vectors of the dense layers of actor and critics to norm 1, at the start and after each
            gradient step, and of the average of `ema_tau` where it is evaluated; not with `schedule_free`. Only batch
            normalization before the activation, or `residual="hypersphere"` or `"inverted"`, makes their scale irrelevant:
            other layers keep the scale of their biases. Left out are convolutions, layers of standard deviations, and the last
            layer of critics that return values instead of logits, which have the scale of returns. Your own critics call that
            layer `head`. The scales and biases of the normalization of `"inverted"` blocks with d features keep norm √d.
    """

    entropy_of_dimension: ClassVar[float] = -1.0
    """The default target entropy of Box actions, for each of their dimensions."""

    has_categorical_critics: ClassVar[bool] = False
    """True if the critics return logits of atoms, whose scale is not the scale of returns."""

    alpha_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    alpha: Scalar | None = number(default=None, at_least=0, optional=True)
    initial_alpha: Scalar = number(default=1.0, above=0)
    target_entropy: Scalar | Literal["auto"] | None = setting(default=None, check=check_target_entropy)
    alpha_loss: Literal["log_alpha", "alpha"] = choice(default="log_alpha", choices=("log_alpha", "alpha"))
    sde_sample_freq: int | None = integer(default=None, optional=True)
    max_noise_repeats: int | None = integer(default=None, optional=True)
    policy_delay: int = integer(default=1)
    weight_norm: bool = choice(default=False, choices=(True, False))

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
        actor: Variables,
        alpha: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """The critics' loss of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; their parameters are not used.
            target: the target critics, or the online ones of an agent without targets.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', the choice of critics, and dropout.
        """

    @abc.abstractmethod
    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The values of actions that the actor maximizes, of the values of all critics."""

    def create_copies(self, key: PRNGKeyArray) -> SoftActorCopies:
        """An actor, critics, which have a target where `follow` has a rule, and a temperature."""
        actor, critics, average = self.create_networks(key, actor_target=None)
        self.check_critics(critics.online)
        if self.weight_norm:
            self._warn_without_normalization()
            actor, critics = (self._on_unit_spheres(copies) for copies in (actor, critics))
            average = None if average is None else _unit_weights(average, self._dense_kernels("actor"))
        log_alpha = jnp.log(jnp.asarray(self.initial_alpha, jnp.float32))
        temperature = Temperature(log_alpha, self.optimizer_at().init(jnp.array(log_alpha, copy=True)))
        return SoftActorCopies(actor, critics, temperature, average)

    @property
    def has_unit_weights(self) -> bool:
        """True with `weight_norm`."""
        return self.weight_norm

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | WithCriticState | DiscountedReturn:
        """The actor's distribution, with its noise held or dependent on the state; at first uniformly random actions."""
        actor, freq = self.network_policy(state, state.copies.actor.online), self.sde_sample_freq
        explorer = repeat_noise(actor, self.max_noise_repeats) if freq is None else StateDependentExploration(actor, freq)
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
    ) -> tuple[SoftActorCopies, StepLog]:
        """One gradient step of the critics, whose target follows; every `policy_delay`-th step also one of the actor and α.

        The actor's loss uses the new critics. Both losses use the α from before the step; the loss of α uses the new actor.
        """
        actor, critics, temperature = copies.actor, copies.critics, copies.temperature
        rates = self.learning_rate, self.actor_learning_rate, self.alpha_learning_rate
        critics_step, actor_step, alpha_step = (self.optimizer_at(env_steps, rate) for rate in rates)
        if self.weight_norm:
            critics_step = on_unit_spheres(critics_step, self._dense_kernels("critics"))
            actor_step = on_unit_spheres(actor_step, self._dense_kernels("actor"))
        critic_key, actor_key, alpha_key = jax.random.split(key, 3)
        alpha = self._alpha(temperature.log_alpha)
        loss = partial(
            self.critic_loss,
            critics=critics.online,
            target=critics.online if critics.target is None else critics.variables("target"),
            actor=actor.online,
            alpha=alpha,
            key=critic_key,
        )
        critics, critic_log = critics.train(loss, critics_step, batch, enabled=enabled, axis_name=axis_name)
        # Only the targets follow, which the steps of actor and α do not use.
        critics = critics if critics.target is None else critics.follow(updates=critic_log.applied.astype(jnp.uint32))
        actor_loss = self.actor_loss_at(env_steps, actor=actor.online, critics=critics.online, alpha=alpha, key=actor_key)

        def train_actor(
            trained: tuple[NetworkCopies, Temperature], enabled: Bool[Array, ""]
        ) -> tuple[tuple[NetworkCopies, Temperature], dict[str, StepLog]]:
            actor, temperature = trained
            actor, actor_log = actor.train(actor_loss, actor_step, batch, enabled=enabled, axis_name=axis_name)
            if self.alpha is not None:
                return (actor, temperature), {"actor": actor_log}
            loss = partial(self.temperature_loss, actor=self.share_encoder(actor.online, critics.online), key=alpha_key)
            gradient, aux = compute_gradient(loss, temperature.log_alpha, batch, axis_name=axis_name)
            before, state = Variables(temperature.log_alpha), temperature.optimizer_state
            after, state, alpha_log = apply_gradient(alpha_step, before, state, gradient, aux, non_finite(aux), enabled)
            return (actor, Temperature(after.params, state)), {"actor": actor_log, "alpha": alpha_log}

        (actor, temperature), logs = train_every(self.policy_delay, critics, critic_log, train_actor, (actor, temperature))
        actor = dataclasses.replace(actor, online=self.share_encoder(actor.online, critics.online))
        average = self.update_average(copies.average, actor.online, critic_log.applied)
        return SoftActorCopies(actor, critics, temperature, average), join_logs(critic=critic_log, **logs)

    def actor_loss_at(
        self, env_steps: StepCount, *, actor: Variables, critics: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> ActorLoss:
        """The actor's loss of a gradient step at this time, of parameters and a batch; arguments as for `actor_loss`."""
        return partial(self.actor_loss, actor=actor, critics=critics, alpha=alpha, key=key)

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
        """J_π(φ) = E[ α log π_φ(a|s) - Q(s, a) ], a ~ π_φ, of a batch whose weights sum to 1, and its terms.

        Args:
            params: φ.
            actor: the online actor; its parameters are not used.
            critics: the online critics, of whose values `combine_critics` is Q.
            alpha: the weight of the entropy.
            key: for the actions, and dropout.
        """
        actor = self.share_encoder(dataclasses.replace(actor, params=params), critics)
        draw, stats = self.draw_actions(actor, batch.obs, batch.action_mask, key, train=True)
        q = self.combine_critics(self.q_values(critics, batch.obs, draw.action, jax.random.fold_in(key, 1)))
        loss = weighted_sum(draw.mean(jax.lax.stop_gradient(alpha) * draw.log_prob - q), batch.weight)
        entropy = weighted_sum(-jax.lax.stop_gradient(draw.mean(draw.log_prob)), batch.weight)
        return loss, Aux({"entropy": entropy}, stats)

    def temperature_loss(
        self, log_alpha: Float[Array, ""], batch: Transition, *, actor: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """J(α) = E[ -log α (log π(a|s) + H̄) ] of a batch whose weights sum to 1; no terms.

        With `alpha_loss="alpha"` it has α in place of log α.
        """
        draw, _ = self.draw_actions(actor, batch.obs, batch.action_mask, key)
        target = self.target_entropy
        assert not isinstance(target, str), "check_together has None for it"
        excess = draw.mean(draw.log_prob) + (self.default_target_entropy(batch.action_mask) if target is None else target)
        weight = log_alpha if self.alpha_loss == "log_alpha" else jnp.exp(log_alpha)
        return weighted_sum(-weight * jax.lax.stop_gradient(excess), batch.weight), Aux({})

    def draw_actions(
        self, actor: Variables, obs: PyTree, mask: Bool[Array, "B n"] | None, key: PRNGKeyArray, *, train: bool = False
    ) -> tuple[ActionDraw, PyTree]:
        """A sample of Box actions in [-1, 1], or all Discrete actions with probabilities; and the actor's statistics.

        Args:
            train: apply the actor in training mode, for its loss.
        """
        distribution, stats = self.action_distribution(actor, obs, mask, key, train=train)
        if not isinstance(distribution, Categorical):
            return ActionDraw(*distribution.sample_and_log_prob(seed=key), None), stats
        log_prob = distribution.log_probs()
        # Finite for actions that are not allowed: their probability 0 times -inf is NaN.
        return ActionDraw(None, jnp.where(jnp.isfinite(log_prob), log_prob, 0.0), jnp.exp(log_prob)), stats

    def action_distribution(
        self, actor: Variables, obs: PyTree, mask: Bool[Array, "B n"] | None, key: PRNGKeyArray, *, train: bool = False
    ) -> tuple[Distribution, PyTree]:
        """π(·|s), of Box actions in [-1, 1], and the actor's statistics; arguments as for `draw_actions`."""
        dropout_key = jax.random.fold_in(key, DROPOUT) if train else None
        (params, _), stats = apply_to_batch(self._actor, actor, self.seen_by("actor", obs), train=train, key=dropout_key)
        return for_space(self.spec.action, params, mask, squash=True), stats

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """The learning rate, and α."""
        return super().metrics(before, after) | {"train/alpha": self._alpha(after.copies.temperature.log_alpha)}

    def _alpha(self, log_alpha: Float[Array, ""]) -> Float[Array, ""]:
        """α, the learned or the fixed one."""
        return jnp.exp(log_alpha) if self.alpha is None else jnp.asarray(self.alpha, jnp.float32)

    def default_target_entropy(self, mask: Bool[Array, "B n"] | None) -> Float[Array, "#B"]:
        """`entropy_of_dimension` · dim A of Boxes; 0.98 log n of n Discrete actions that the state allows."""
        space = self.spec.action
        if not isinstance(space, Discrete):
            return jnp.full(1, self.entropy_of_dimension * action_dimensions(self.spec), jnp.float32)
        allowed = jnp.full(1, space.n, jnp.int32) if mask is None else jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1)
        return ENTROPY_FRACTION * jnp.log(allowed.astype(jnp.float32))

    def _dense_kernels(self, name: str) -> DenseKernels:
        """The kernels with unit weight vectors of the actor or the critics."""
        if name == "actor":
            return DenseKernels(without=("scales",))
        # The built-in critics are products with a leading axis.
        axes = 2 if getattr(self.critics, "num_critics", None) is None else 3
        return DenseKernels(axes, () if self.has_categorical_critics else ("head",))

    def _evaluated_actor(self, state: OffPolicyState) -> Variables:
        """The actor, or its average if there is one, with unit weight vectors too with `weight_norm`."""
        actor, is_average = super()._evaluated_actor(state), self.ema_tau is not None
        return _unit_weights(actor, self._dense_kernels("actor")) if self.weight_norm and is_average else actor

    def _on_unit_spheres(self, copies: NetworkCopies) -> NetworkCopies:
        """The copies with unit weight vectors.

        Raises:
            ValueError: the network has no dense layer, or critics of values have no layer named `head`, or the optimizer
                evaluates averages of weights, which would leave the spheres.
        """
        params, owner = in_float32(copies.online.params), type(self).__name__
        if evaluated_params(copies.optimizer_state, params) is not params:
            raise ValueError(f"{owner}: weight_norm must be False with schedule_free, whose averages leave the unit spheres")
        kernels = self._dense_kernels(copies.name)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        names = {getattr(entry, "key", None) for path, _ in leaves for entry in path}
        has_head = "head" in names or "head" not in kernels.without
        if not (has_head and any(kernels.has(path, x) for path, x in leaves)):
            layers = "dense layers with weights named kernel, as Flax's,"
            layers += " and a last layer named head" if "head" in kernels.without else ""
            raise ValueError(f"network: weight_norm=True needs {layers} in {copies.name}, got {copies.network!r}")
        target = None if copies.target is None else _unit_weights(copies.target, kernels)
        return dataclasses.replace(copies, online=_unit_weights(copies.online, kernels), target=target)

    def _warn_without_normalization(self) -> None:
        """Warn of built-in networks in which the scale of unit weight vectors counts."""
        for name, network in (("actor", self.actor), ("critics", self.critics)):
            if getattr(network, "norm", "unknown") is None and getattr(network, "residual", None) is None:
                warn(
                    f"{type(self).__name__}: {name} has no normalization, so that weight_norm=True limits the size of its "
                    f"features; use polyak.{type(network).__name__}(..., norm='batch'), got {network!r}"
                )

    def default_actor(self) -> Actor:
        """The actor where none is set; with `sde_sample_freq` for state-dependent noise."""
        return Actor() if self.sde_sample_freq is None else Actor(std="sde", log_std=-3.0)

    def check_together(self) -> None:
        """Check settings that depend on each other; with a fixed α, the settings of a learned α must be left out.

        A `target_entropy` of `"auto"` becomes None.

        Raises:
            ValueError: settings contradict each other, or α would grow without bound; the message names them.
        """
        super().check_together()
        check_sde(self, self._actor)
        if self.sde_sample_freq is not None:
            check_unset(self, ("max_noise_repeats",), "has no effect with sde_sample_freq; leave it out")
        if isinstance(self.actor, RecurrentNetwork):
            check_unset(self, ("max_noise_repeats",), "must be None with a recurrent actor, whose noise is drawn at each step")
        if isinstance(self.target_entropy, str):
            object.__setattr__(self, "target_entropy", None)  # "auto"; a leaf of a pytree cannot be a str.
        if self.alpha is not None:
            check_unset(self, LEARNED_ALPHA_SETTINGS, "has no effect with a fixed alpha; leave it out")
        target, space = self.target_entropy, self.spec.action
        if target is None or isinstance(target, jax.core.Tracer):
            return
        if isinstance(space, Discrete):
            most, form = float(np.log(space.n)), f"log {space.n}"
        else:
            dimensions = action_dimensions(self.spec)
            most, form = dimensions * float(np.log(2.0)), f"{dimensions} log 2"
        # No lower bound: below 0 of Discrete actions, α goes to 0, and the policy becomes greedy.
        values = np.asarray(target, float)
        bad_values = values[~(values <= most * (1 + ENTROPY_TOLERANCE))]
        if bad_values.size:
            raise ValueError(
                f"{type(self).__name__}: target_entropy must be at most {form} = {most:.3f}, "
                f"the entropy of random actions, got {bad_values[0]:.6g}"
            )

"""What agents with a stochastic actor and a learned temperature share: their networks, their gradient steps, and J(α)."""

import dataclasses
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_number, check_unset
from polyak.core.spaces import Discrete
from polyak.core.struct import struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    ActorCriticSettings,
    action_dimensions,
    check_state_of,
    create_actor_critic,
    join_logs,
    share_encoder,
    train_in_turn,
    update_average,
)
from polyak.learning.off_policy import (
    OffPolicySettings,
    OffPolicyState,
    add_and_learn,
    create_state,
    target_follow,
)
from polyak.ops.distributions import Categorical, for_space
from polyak.ops.gradient_step import Aux, StepLog, apply_gradient, compute_gradient, non_finite, optimizer_of
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule
from polyak.replay.replay import Transition

ENTROPY_FRACTION = 0.98
"""Of the largest entropy of Discrete actions, the default target; Christodoulou 2019, arXiv:1910.07207."""

ENTROPY_TOLERANCE = 1e-6
"""Relative, for a largest entropy that was rounded to float32."""

DROPOUT = 2**31
"""Number that makes the key of the actor's dropout from the key of its actions; keys of the parts of an action differ."""

LEARNED_ALPHA_SETTINGS = ("initial_alpha", "target_entropy", "alpha_learning_rate", "alpha_loss")
"""Settings that have no effect with a fixed `alpha`."""


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
        critics: N of them in one network, online and target.
        temperature: α.
        average: of the actor, that is evaluated with `ema_tau`; else None.
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


@runtime_checkable
class SoftActorSettings(OffPolicySettings, ActorCriticSettings, Protocol):
    """The settings of an agent with a learned temperature, and its losses."""

    @property
    def actor_learning_rate(self) -> Schedule | None:
        """The actor's, where it has its own."""
        ...

    @property
    def alpha_learning_rate(self) -> Schedule | None:
        """That of α, where it has its own."""
        ...

    @property
    def alpha(self) -> Scalar | None:
        """The weight of the entropy; None learns it."""
        ...

    @property
    def initial_alpha(self) -> Scalar:
        """Where learning α begins."""
        ...

    @property
    def target_entropy(self) -> Scalar | Literal["auto"] | None:
        """H̄; None takes `default_target_entropy`, and agents have None for `"auto"`."""
        ...

    @property
    def alpha_loss(self) -> Literal["log_alpha", "alpha"]:
        """Whether log α or α stands in J(α)."""
        ...

    @property
    def policy_delay(self) -> int:
        """Gradient steps of the critics for one of the actor and of α."""
        ...

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
        """The loss of critics with these parameters, and its terms."""
        ...

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
        """The loss of an actor with these parameters, and its terms."""
        ...


def check_target_entropy(owner: str, name: str, value: Any) -> None:
    """Check that a target entropy is a number, `"auto"` or None.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not (isinstance(value, str) and value == "auto"):
        check_number(owner, name, value, optional=True, or_else="'auto'")


def check_temperature(settings: SoftActorSettings) -> None:
    """Check that settings of a learned α are left out where it is fixed, and that no target entropy is above the largest one.

    Raises:
        ValueError: one is set, or α would grow without bound; the message names it.
    """
    if settings.alpha is not None:
        check_unset(settings, LEARNED_ALPHA_SETTINGS, "has no effect with a fixed alpha; leave it out")
    target, space = settings.target_entropy, settings.spec.action
    if target is None or isinstance(target, str | jax.core.Tracer):
        return
    if isinstance(space, Discrete):
        most, form = float(np.log(space.n)), f"log {space.n}"
    else:
        dimensions = action_dimensions(settings.spec)
        most, form = dimensions * float(np.log(2.0)), f"{dimensions} log 2"
    # No lower bound: below 0 of Discrete actions, α goes to 0, and the policy becomes greedy.
    values = np.asarray(target, float)
    bad_values = values[~(values <= most * (1 + ENTROPY_TOLERANCE))]
    if bad_values.size:
        raise ValueError(
            f"{type(settings).__name__}: target_entropy must be at most {form} = {most:.3f}, "
            f"the entropy of random actions, got {bad_values[0]:.6g}"
        )


def create_soft_actor(settings: SoftActorSettings, key: PRNGKeyArray) -> OffPolicyState:
    """A new state: an actor, critics with a target, a temperature and an empty replay."""
    follows = None, target_follow(settings)
    actor, critics, average = create_actor_critic(settings, settings.spec, networks_of(settings), follows, key)
    log_alpha = jnp.log(jnp.asarray(settings.initial_alpha, jnp.float32))
    temperature = Temperature(log_alpha, optimizer_of(settings).init(jnp.array(log_alpha, copy=True)))
    return create_state(settings, SoftActorCopies(actor, critics, temperature, average))


def update_soft_actor(
    settings: SoftActorSettings, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
) -> tuple[OffPolicyState, Metrics]:
    """Add a rollout to the replay, then take gradient steps on transitions drawn from it: `update` of SAC and TQC.

    Each is one of the critics; every `policy_delay`-th is then one of the actor, and of α.

    Args:
        state: donate it; nothing of it is needed afterwards.
        rollout: `[T, B]` transitions.
        key: decides the transitions and the actions in the losses.
        axis_name: inside `shard_map`, the mesh axis that environments are split over.

    Raises:
        TypeError, ValueError: the rollout does not fit the spec (while tracing).
    """
    rates = settings.learning_rate, settings.actor_learning_rate, settings.alpha_learning_rate
    optimizers = tuple(optimizer_of(settings, state.env_steps, rate) for rate in rates)
    train_step = partial(train_soft_actor, settings, optimizers, axis_name=axis_name)
    check_state_of(settings, state.copies.critics, state.copies.average)
    new_state, metrics = add_and_learn(settings, state, rollout, key, train_step, axis_name=axis_name)
    return new_state, metrics | {"train/alpha": alpha_of(settings, new_state.copies.temperature.log_alpha)}


def train_soft_actor(
    settings: SoftActorSettings,
    optimizers: tuple[optax.GradientTransformation, ...],
    copies: SoftActorCopies,
    batch: Transition,
    key: PRNGKeyArray,
    enabled: Bool[Array, ""],
    *,
    axis_name: str | None = None,
) -> tuple[SoftActorCopies, StepLog]:
    """One gradient step of the critics, whose target follows; in its turn one of the actor against the new critics, then of α.

    The α in both losses is the one before; its own loss has the new actor.
    """
    actor, critics, temperature = copies.actor, copies.critics, copies.temperature
    critics_step, actor_step, alpha_step = optimizers
    critic_key, actor_key, alpha_key = jax.random.split(key, 3)
    alpha = alpha_of(settings, temperature.log_alpha)
    loss = partial(
        settings.critic_loss,
        critics=critics.online,
        target=critics.variables("target"),
        actor=actor.online,
        alpha=alpha,
        key=critic_key,
    )
    critics, critic_log = critics.train(loss, critics_step, batch, enabled=enabled, axis_name=axis_name)
    # Only the targets follow, which the steps of actor and α do not use.
    critics = critics.follow(updates=critic_log.applied.astype(jnp.uint32))
    actor_loss = partial(settings.actor_loss, actor=actor.online, critics=critics.online, alpha=alpha, key=actor_key)

    def train_actor(
        trained: tuple[NetworkCopies, Temperature], enabled: Bool[Array, ""]
    ) -> tuple[tuple[NetworkCopies, Temperature], dict[str, StepLog]]:
        actor, temperature = trained
        actor, actor_log = actor.train(actor_loss, actor_step, batch, enabled=enabled, axis_name=axis_name)
        loss = partial(temperature_loss, settings, actor=share_encoder(settings, actor.online, critics.online), key=alpha_key)
        if settings.alpha is not None:
            return (actor, temperature), {"actor": actor_log}
        gradient, aux = compute_gradient(loss, temperature.log_alpha, batch, axis_name=axis_name)
        before, state = Variables(temperature.log_alpha), temperature.optimizer_state
        after, state, alpha_log = apply_gradient(alpha_step, before, state, gradient, aux, non_finite(aux), enabled)
        return (actor, Temperature(after.params, state)), {"actor": actor_log, "alpha": alpha_log}

    trained = actor, temperature
    (actor, temperature), logs = train_in_turn(settings.policy_delay, critics, critic_log, train_actor, trained)
    actor = dataclasses.replace(actor, online=share_encoder(settings, actor.online, critics.online))
    average = update_average(settings.ema_tau, copies.average, actor.online, critic_log.applied)
    return SoftActorCopies(actor, critics, temperature, average), join_logs(critic=critic_log, **logs)


def temperature_loss(
    settings: SoftActorSettings, log_alpha: Float[Array, ""], batch: Transition, *, actor: Variables, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Aux]:
    """J(α) = E[ -log α (log π(a|s) + H̄) ] of a batch whose weights sum to 1; no terms.

    With `alpha_loss="alpha"` it has α in place of log α.
    """
    draw, _ = draw_actions(settings, actor, batch.obs, batch.action_mask, key)
    target = settings.target_entropy
    assert not isinstance(target, str), "agents have None for it"
    excess = draw.mean(draw.log_prob) + (default_target_entropy(settings, batch.action_mask) if target is None else target)
    weight = log_alpha if settings.alpha_loss == "log_alpha" else jnp.exp(log_alpha)
    return weighted_sum(-weight * jax.lax.stop_gradient(excess), batch.weight), Aux({})


def default_target_entropy(settings: SoftActorSettings, mask: Bool[Array, "B n"] | None) -> Float[Array, "#B"]:
    """-dim A of Boxes; 0.98 log n of n Discrete actions, where n counts those that the state allows."""
    space = settings.spec.action
    if not isinstance(space, Discrete):
        return jnp.full(1, -action_dimensions(settings.spec), jnp.float32)
    allowed = jnp.full(1, space.n, jnp.int32) if mask is None else jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1)
    return ENTROPY_FRACTION * jnp.log(allowed.astype(jnp.float32))


def draw_actions(
    settings: SoftActorSettings,
    actor: Variables,
    obs: PyTree,
    mask: Bool[Array, "B n"] | None,
    key: PRNGKeyArray,
    *,
    train: bool = False,
) -> tuple[ActionDraw, PyTree]:
    """A sample of Box actions between -1 and 1; of Discrete ones all, with their probabilities; and the actor's statistics.

    Args:
        train: apply the actor in training mode, for its loss.
    """
    network, space = networks_of(settings)[0], settings.spec.action
    (params, _), _, stats = network.apply(actor, obs, train=train, key=jax.random.fold_in(key, DROPOUT) if train else None)
    distribution = for_space(space, params, mask, squash=True)
    if not isinstance(distribution, Categorical):
        return ActionDraw(*distribution.sample_and_log_prob(seed=key), None), stats
    log_prob = distribution.log_probs()
    # Finite for actions that are not allowed: their probability 0 times -inf is NaN.
    return ActionDraw(None, jnp.where(jnp.isfinite(log_prob), log_prob, 0.0), jnp.exp(log_prob)), stats


def alpha_of(settings: SoftActorSettings, log_alpha: Float[Array, ""]) -> Float[Array, ""]:
    """α, the learned or the fixed one."""
    return jnp.exp(log_alpha) if settings.alpha is None else jnp.asarray(settings.alpha, jnp.float32)


def networks_of(settings: SoftActorSettings) -> tuple[Network, Network]:
    """The actor and the critics."""
    assert settings.actor is not None and settings.critics is not None, "agents set the default"
    return settings.actor, settings.critics

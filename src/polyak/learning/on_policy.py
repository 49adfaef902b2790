"""What agents share that take one gradient step on each rollout: their state, its two halves `gradients` and `apply`."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_state, check_unset
from polyak.core.spaces import EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Mean, Metrics, Network, PyTree, Rollout, Scalar, Terms, Variables
from polyak.learning.batch import ActorCriticModel, Batch, network_inputs, normalize_minibatches, sample_weights
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.normalizers import Normalizers, check_created_normalizers, create_normalizers
from polyak.networks.actor_critic import check_actor_critic, check_squashing
from polyak.networks.adapters import warn_of_training_layers
from polyak.networks.layers import MAX_SMALL_BATCH, has_images, is_narrow
from polyak.ops import losses
from polyak.ops.gradient_step import (
    QUANTITIES,
    Aux,
    all_finite,
    check_optimizer,
    check_optimizer_state,
    compute_gradient,
    count_microbatches,
    flag_quantities,
    optimizer_of,
    rmsprop,
)
from polyak.ops.normalize import ObsNormalizer, RewardScaler, check_can_normalize
from polyak.ops.schedules import Schedule, saturating_add, value_at


@runtime_checkable
class OnPolicySettings(Protocol):
    """The settings of an agent that takes one gradient step on each rollout."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's spaces."""
        ...

    @property
    def network(self) -> Network | None:
        """The actor-critic network."""
        ...

    @property
    def num_steps(self) -> int:
        """Rollout length."""
        ...

    @property
    def learning_rate(self) -> Schedule:
        """That of the optimizer."""
        ...

    @property
    def gamma(self) -> Scalar:
        """Discount per step."""
        ...

    @property
    def ent_coef(self) -> Scalar:
        """Coefficient of the entropy bonus."""
        ...

    @property
    def vf_coef(self) -> Scalar:
        """Coefficient of the value loss."""
        ...

    @property
    def max_grad_norm(self) -> Scalar | None:
        """Gradients are clipped to this global norm."""
        ...

    @property
    def normalize_advantage(self) -> bool:
        """Whether advantages of a rollout are normalized."""
        ...

    @property
    def normalize_obs(self) -> bool:
        """Whether observations are."""
        ...

    @property
    def clip_obs(self) -> float | None:
        """Normalized observations are clipped to ± this."""
        ...

    @property
    def normalize_reward(self) -> Literal["return", "reward"] | None:
        """The quantity by whose standard deviation rewards are divided."""
        ...

    @property
    def clip_reward(self) -> Scalar | None:
        """Normalized rewards are clipped to ± this."""
        ...

    @property
    def squash(self) -> bool:
        """Whether Box actions pass through tanh."""
        ...

    @property
    def optimizer_name(self) -> Literal["rmsprop", "adam"]:
        """The optimizer."""
        ...

    @property
    def rms_decay(self) -> Scalar:
        """RMSProp's α."""
        ...

    @property
    def rms_eps(self) -> Scalar:
        """RMSProp's ε."""
        ...

    @property
    def adam_eps(self) -> Scalar:
        """Adam's ε."""
        ...

    @property
    def optimizer(self) -> optax.GradientTransformation | None:
        """In place of the named one."""
        ...

    @property
    def max_skipped_updates(self) -> int:
        """Training stops after this number of consecutive updates without a finite gradient step."""
        ...


@struct
class OnPolicyState:
    """Everything that training changes.

    Attributes:
        copies: of the network: online, and shared where workers send gradients; with the optimizer state and the counts of
            skipped steps.
        obs_normalizer: running statistics of the observations, or None.
        reward_scaler: running statistics that rewards are divided by, or None.
        env_steps: valid transitions learned from; schedules are functions of it.
        updates: rollouts learned from.
    """

    copies: NetworkCopies
    obs_normalizer: ObsNormalizer | None
    reward_scaler: RewardScaler | None
    env_steps: UInt32[Array, ""]
    updates: UInt32[Array, ""]


@struct
class RolloutSummary:
    """What `apply` needs of a rollout besides its gradients.

    Attributes:
        terms: of the loss, with `loss`, `grad_norm` and `explained_variance`.
        bad: which of `polyak.ops.gradient_step.QUANTITIES` were NaN or infinite in the rollout.
        weight: the sum of the transitions' weights; without any there is no step.
        env_steps: valid transitions.
        obs: statistics of the rollout's observations, or None.
        reward: likewise of its rewards.
    """

    terms: Terms
    bad: Bool[Array, " quantities"]
    weight: Float[Array, ""]
    env_steps: UInt32[Array, ""]
    obs: ObsNormalizer | None
    reward: RewardScaler | None


def check_on_policy(settings: OnPolicySettings) -> None:
    """Check what several settings say together.

    Raises:
        TypeError: `optimizer` is no `optax.GradientTransformation`.
        ValueError: there is nothing to normalize or to squash, or a setting of another optimizer is set.
    """
    check_squashing(type(settings).__name__, model_of(settings).network, settings.spec, squash=settings.squash)
    check_optimizer(settings)
    if settings.normalize_obs:
        check_can_normalize(type(settings).__name__, settings.spec.obs)
    if settings.optimizer is None:
        unused = ("adam_eps",) if settings.optimizer_name == "rmsprop" else ("rms_decay", "rms_eps")
        check_unset(settings, unused, f"has no effect with optimizer_name={settings.optimizer_name!r}")


def optimizer_at(settings: OnPolicySettings, env_steps: Array | int = 0) -> optax.GradientTransformation:
    """The agent's optimizer, with the learning rate of this step."""
    if settings.optimizer is not None or settings.optimizer_name == "adam":
        return optimizer_of(settings, env_steps)
    decay, eps, max_norm = settings.rms_decay, settings.rms_eps, settings.max_grad_norm
    return rmsprop(settings.learning_rate, env_steps, decay=decay, eps=eps, max_grad_norm=max_norm)


def create_state(settings: OnPolicySettings, key: PRNGKeyArray) -> OnPolicyState:
    """A new state."""
    spec, network = settings.spec, model_of(settings).network
    copies = NetworkCopies.create(network, key, spec, optimizer=None)
    check_actor_critic(network, copies.online, spec)
    warn_of_training_layers(type(settings).__name__, network, copies.online)
    env_steps, updates = (jnp.zeros((), jnp.uint32) for _ in range(2))
    normalizers = create_normalizers(settings)
    return OnPolicyState(
        copies=copies.with_optimizer_state(optimizer_at(settings)),
        obs_normalizer=normalizers.obs,
        reward_scaler=normalizers.reward,
        env_steps=env_steps,
        updates=updates,
    )


def prefers_single_thread(settings: OnPolicySettings, num_envs: int, devices: int) -> bool:
    """Whether layers are at most 256 wide and, on one device, rollouts have at most 256 samples."""
    is_small = devices > 1 or settings.num_steps * num_envs <= MAX_SMALL_BATCH
    return is_narrow(model_of(settings).network, settings.spec) and is_small


def newest_variables(state: OnPolicyState) -> Variables:
    """The shared copy's where workers send gradients, else the online copy's."""
    shared = state.copies.shared
    return state.copies.online if shared is None else shared.variables


def policy_gradient_loss(
    settings: OnPolicySettings, params: PyTree, batch: Batch, *, variables: Variables
) -> tuple[Float[Array, ""], Aux]:
    """The loss of a batch whose weights sum to 1, and its terms; those of its parts add up to those of the whole.

        L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - V̂)² - c_e H ]

    Args:
        params: θ.
        variables: the network's; of their parameters nothing is used.
    """
    distribution, value = model_of(settings).forward(dataclasses.replace(variables, params=params), batch)
    samples = {
        "policy_gradient_loss": -distribution.log_prob(batch.action) * batch.advantage,
        "value_loss": losses.value_loss(value, batch.value_target),
        "entropy_loss": -distribution.entropy(),
    }
    terms = {name: losses.weighted_sum(x, batch.weight) for name, x in samples.items()}
    policy_and_value = terms["policy_gradient_loss"] + settings.vf_coef * terms["value_loss"]
    return policy_and_value + settings.ent_coef * terms["entropy_loss"], Aux(terms)


def gradients_and_summary(
    settings: OnPolicySettings,
    state: OnPolicyState,
    rollout: Rollout,
    batch: Batch,
    bad_data: Mapping[str, Bool[Array, ""]],
    weight: Float[Array, "T B"],
    axis_name: str | None,
    extra: Terms | None = None,
) -> tuple[PyTree, RolloutSummary]:
    """The gradients of the loss of a whole batch, summed over devices, and the summary of its rollout.

    Args:
        batch: with advantages and value targets.
        bad_data: which of its quantities are not finite.
        weight: of its transitions, see `sample_weights`.
        extra: more terms for the summary.
    """
    online, whole = state.copies.online, jnp.arange(len(batch.weight))[None]
    samples_each = weight.size // len(batch.weight)
    batch, total = normalize_minibatches(batch, whole, "batch" if settings.normalize_advantage else None, axis_name)
    gradients, aux = compute_gradient(
        lambda params, part: policy_gradient_loss(settings, params, part, variables=online),
        online.params,
        batch,
        num_microbatches=count_microbatches(
            len(batch.weight), None, axis_name, samples_each=samples_each, has_images=has_images(settings.spec.obs)
        ),
        axis_name=axis_name,
    )
    variance = losses.explained_variance(batch.value, batch.value_target, batch.weight, axis_name)
    bad = flag_quantities(bad_data)
    counts = ((weight > 0) & ~jnp.any(bad)).astype(jnp.float32)
    normalizer, scaler = state.obs_normalizer, state.reward_scaler
    return gradients, RolloutSummary(
        terms=aux.terms | {"explained_variance": variance, **(extra or {})},
        bad=bad,
        weight=total[0],
        env_steps=losses.sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name),
        obs=normalizer and normalizer.empty().update(rollout.obs, counts, axis_name),
        reward=scaler and scaler.empty().update(rollout, counts, settings.gamma, axis_name),
    )


def apply_gradients(
    settings: OnPolicySettings, state: OnPolicyState, gradients: PyTree, summary: RolloutSummary
) -> tuple[OnPolicyState, Metrics]:
    """The state after one step along the gradients of a rollout, and the metrics.

    Weights and statistics are unchanged to the bit where the rollout, the gradients or the step have NaN or infinity.

    Args:
        state: donate it; nothing of it is needed afterwards.
        gradients: of the agent's `gradients`.
        summary: likewise.
    """
    check_state(f"{type(settings).__name__}.apply", state, OnPolicyState)
    check_applicable(settings, state, state.copies.optimizer_state)
    copies, log = state.copies.step(
        optimizer_at(settings, state.env_steps),
        gradients,
        Aux(summary.terms),
        {
            **dict(zip(QUANTITIES, summary.bad, strict=True)),
            "loss": ~jnp.isfinite(summary.terms["loss"]),
            "gradient": ~all_finite(gradients),
        },
        enabled=summary.weight > 0,
    )
    return after_step(settings, state, copies, summary, counts=True, applied=log.applied)


def evaluate_rollout(
    settings: OnPolicySettings,
    state: OnPolicyState,
    rollout: Rollout,
    weights: Float[Array, "T B"] | Float[Array, " B"] | None,
) -> tuple[Rollout, Float[Array, "T B"], PyTree, PyTree, PyTree, Float[Array, "times B"]]:
    """The rollout as arrays, its weights, the network's inputs `(obs, carry)`, and `(action_params, value)` by the online copy.

    Raises:
        TypeError, ValueError: rollout or weights do not fit the spec or the state the settings (while tracing).
    """
    check_state(f"{type(settings).__name__}.update", state, OnPolicyState)
    check_rollout(rollout, settings.spec)
    rollout, weight = as_arrays(rollout), sample_weights(rollout.valid, weights)
    obs, carry = network_inputs(rollout, state.obs_normalizer, settings.normalize_reward)
    params, value = model_of(settings).evaluate(state.copies.online, obs, rollout.time_steps.first, carry)
    return rollout, weight, obs, carry, jax.tree.map(lambda x: x[:-1], params), value


def scaled_reward(settings: OnPolicySettings, state: OnPolicyState, rollout: Rollout) -> Float[Array, "T B"]:
    """The rewards that the agent learns from."""
    scaler = state.reward_scaler
    return rollout.reward if scaler is None else scaler.scale(rollout.reward, settings.clip_reward)


def model_of(settings: OnPolicySettings) -> ActorCriticModel:
    """The agent's network, with the space of its actions."""
    assert settings.network is not None, "__post_init__ sets the default"
    return ActorCriticModel(settings.network, settings.spec.action, settings.squash, has_images(settings.spec.obs))


def check_applicable(settings: OnPolicySettings, state: OnPolicyState, optimizer_state: PyTree) -> None:
    """Check that the state was created with the same settings: it would silently be used instead of them.

    Raises:
        TypeError, ValueError: it was not; the message names the setting.
    """
    check_created_normalizers(settings, Normalizers(state.obs_normalizer, state.reward_scaler))
    if optimizer_state is not None:
        check_optimizer_state(optimizer_at(settings), state.copies.online.params, optimizer_state)


def after_step(
    settings: OnPolicySettings,
    state: OnPolicyState,
    copies: NetworkCopies,
    summary: RolloutSummary,
    *,
    counts: Bool[Array, ""] | bool,
    applied: Bool[Array, ""],
) -> tuple[OnPolicyState, Metrics]:
    """The state with these copies and, if the rollout counts, its statistics; and the metrics."""
    normalizer, scaler, guard = state.obs_normalizer, state.reward_scaler, copies.guard
    more = jnp.asarray(counts).astype(jnp.uint32)
    merged = OnPolicyState(
        copies=copies,
        obs_normalizer=normalizer and summary.obs and optax.tree.where(counts, normalizer.merge(summary.obs), normalizer),
        reward_scaler=scaler and summary.reward and optax.tree.where(counts, scaler.merge(summary.reward), scaler),
        env_steps=saturating_add(state.env_steps, summary.env_steps * more),
        updates=saturating_add(state.updates, more),
    )
    metrics: Metrics = {f"train/{name}": Mean.of(term, applied) for name, term in summary.terms.items()}
    metrics |= {"train/n_updates": merged.updates, **guard.metrics()}
    if settings.optimizer is None:
        metrics["train/learning_rate"] = value_at(settings.learning_rate, state.env_steps)
    return merged, metrics

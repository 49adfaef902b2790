"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347), with a clipped objective."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyAgent, OnPolicyState
from polyak.copies.follow import Follow
from polyak.core.checks import changed_settings, check_created_with
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, integer, number, setting, struct
from polyak.core.types import Mean, Metrics, PyTree, Rollout, Scalar, Terms, Variables
from polyak.core.warn import warn
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.epochs import check_divides, mean_terms, train_epochs
from polyak.learning.histograms import update_histograms
from polyak.learning.rollout_batch import (
    Batch,
    Weights,
    make_batch,
    network_inputs,
    normalize_minibatches,
    outputs_in_info,
    sample_weights,
)
from polyak.networks.layers import is_narrow
from polyak.networks.pair import ActorAndCritic
from polyak.ops import losses
from polyak.ops.distributions import Distribution
from polyak.ops.gradient_step import ADAM_SETTINGS, Aux, StepLog, accumulate, count_microbatches, flag_quantities
from polyak.ops.normalize import can_normalize
from polyak.ops.returns import advantages_and_targets
from polyak.ops.schedules import Schedule, StepCount, check_schedule, saturating_add, value_at
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy, add_return
from polyak.policies.sde import StateDependentExploration, add_sde, check_sde

# fmt: off
# One minibatch an epoch, and the Adam of TensorFlow 1.
TF_AGENTS: Mapping[str, Any] = {
    "num_epochs": 25, "num_minibatches": 1, "learning_rate": 1e-3, "adam_eps": 1e-8, "max_grad_norm": None,
    "advantages": "monte_carlo", "value_targets": "monte_carlo", "normalize_advantage": "batch",
    "normalize_obs": True, "clip_obs": 5.0, "normalize_reward": "reward",
}
# fmt: on


@struct(kw_only=True)
class PPO(OnPolicyAgent):
    """PPO for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

        L(θ) = E[ -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + c_v (V - V̂)² - c_e H ],    ρ = π_θ(a|s) / π_old(a|s)

    Expectations are over valid transitions. `PPOKL` adds the penalties of TF-Agents: on the KL divergence and on weights.

    Attributes:
        network: an actor-critic network that returns `(action_params, value)`, such as `polyak.MLP((256, 256))`; None takes
            `NatureCNN` for images, else `MLP`. The network is always applied in evaluation mode, because the ratio compares two
            policies: dropout is off, and statistics keep their initial values; `init` warns of such layers. Minibatches of
            recurrent networks (`LSTM`, `GRU`) consist of sequences.
        gae_lambda: trace decay λ of GAE; 0 is the one-step error, 1 the return up to the end of the rollout.
        num_epochs: passes over each rollout.
        num_minibatches: minibatches per epoch; must divide `num_steps * num_envs`, with a recurrent network `num_envs`.
        advantages: `"gae"`, or `"monte_carlo"`: the discounted return minus the value.
        value_targets: targets of the value: `"td_lambda"` (GAE plus value), or `"monte_carlo"`, the discounted return.
        values_when: when old values and action distributions are computed: at `"update"` time, or during `"collect"`.
        recompute_values: recompute advantages and value targets before each epoch, with the values of the current network; of
            one epoch, this changes them only with `values_when="collect"`.
        clip_range: clip the probability ratio to 1 ± this value, a number or a schedule; None disables clipping.
        clip_range_vf: clip the value to ± this value around the old value; None disables clipping.
        clip_log_prob: clip the new log-probabilities to ± this value in the policy loss; None disables clipping.
        target_kl: stop an update when a minibatch's approximate KL divergence exceeds 1.5 times this value; None never stops.
        normalize_advantage: normalize advantages to mean 0 and standard deviation 1 over each `"minibatch"`, over the `"batch"`
            (the rollout), or not (None).
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) that is drawn anew every this
            number of steps; a built-in network without a head gets `PolicyAndValue(std="sde")`. None draws actions
            independently.
        ema_tau: keep a target copy of the network that moves by this fraction towards the online copy after every update, and
            evaluate and export that copy; None evaluates the online copy.
        histograms: add histograms of actions, advantages, values, weights and gradients to the metrics, for TensorBoard.
        microbatch_size: samples (recurrent networks: sequences) of a minibatch whose gradients are computed at a time, which
            limits memory; must divide a minibatch's samples on each device. None chooses a fast size.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = PPO(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    gae_lambda: Scalar = number(default=0.95, at_least=0, at_most=1)
    num_epochs: int = integer(default=10)
    num_minibatches: int = integer(default=32)
    advantages: Literal["gae", "monte_carlo"] = choice(default="gae", choices=("gae", "monte_carlo"))
    value_targets: Literal["td_lambda", "monte_carlo"] = choice(default="td_lambda", choices=("td_lambda", "monte_carlo"))
    values_when: Literal["update", "collect"] = choice(default="update", choices=("update", "collect"))
    recompute_values: bool = choice(default=False, choices=(True, False))
    clip_range: Schedule | None = setting(default=0.2, check=partial(check_schedule, optional=True))
    clip_range_vf: Scalar | None = number(default=None, above=0, optional=True)
    clip_log_prob: Scalar | None = number(default=None, above=0, optional=True)
    target_kl: Scalar | None = number(default=None, above=0, optional=True)
    normalize_advantage: Literal["minibatch", "batch"] | None = choice(
        default="minibatch", choices=("minibatch", "batch", None)
    )
    sde_sample_freq: int | None = integer(default=None, optional=True)
    ema_tau: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    histograms: bool = choice(default=False, choices=(True, False))
    microbatch_size: int | None = integer(default=None, optional=True)

    lag_advice: ClassVar[str] = "values_when='collect', which allows 1"

    @classmethod
    def tf_agents(cls, spec: EnvSpec, **changes: Any) -> Self:
        """Create an agent with the defaults of TF-Agents' `PPOClipAgent`, but a `clip_range` of 0.2; 0 there clips nothing."""
        settings = {**TF_AGENTS, "normalize_obs": can_normalize(spec.obs), **changes}
        # Without effect, and so rejected: settings of Adam with another optimizer, and of normalization without it.
        unused: tuple[str, ...] = ADAM_SETTINGS if settings.get("optimizer") is not None else ()
        unused += () if settings["normalize_obs"] else ("clip_obs",)
        return cls(spec, **{name: value for name, value in settings.items() if name not in unused or name in changes})

    def set_defaults(self) -> None:
        """Complete the network."""
        self.set_network(std="free" if self.sde_sample_freq is None else "sde")

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_sde(self, self._network)
        owner = type(self).__name__
        if self.sde_sample_freq is not None and self.values_when == "collect" and isinstance(self.network, ActorAndCritic):
            raise ValueError(f"{owner}: values_when must be 'update' with sde_sample_freq and an ActorAndCritic, got 'collect'")
        if self.advantages == self.value_targets == "monte_carlo" and changed_settings(self, ("gae_lambda",)):
            others = "advantages='monte_carlo' and value_targets='monte_carlo'"
            warn(f"{owner}: gae_lambda={self.gae_lambda!r:.80} has no effect with {others}")

    def follow(self) -> Follow | None:
        """Return the rule by which the target copy follows the online copy, with `ema_tau`."""
        return None if self.ema_tau is None else Follow(tau=jnp.asarray(self.ema_tau, jnp.float32))

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check that rollouts of this number of environments (on each device) can be split into minibatches.

        Raises:
            ValueError: `num_minibatches` does not divide the samples (recurrent networks: environments), or
                `microbatch_size` a minibatch.
        """
        self._check_divides(self.num_steps, num_envs)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, few samples per gradient computation; see `is_narrow`."""
        samples = self.num_steps * num_envs // self.num_minibatches
        if self.microbatch_size is not None:
            samples = self.microbatch_size * (self.num_steps if self._model.is_recurrent else 1)
        return is_narrow(self._network, self.spec, samples if devices == 1 else 1)

    @property
    def max_lag(self) -> int:
        """1 with `values_when="collect"`: the ratio is to the policy that acted; at `"update"` time it would begin at 1."""
        return 1 if self.values_when == "collect" else 0

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | StateDependentExploration | DiscountedReturn:
        """Return the policy that samples from the online network's distribution."""
        policy = self.network_policy(state, state.copies.online, return_info=self.values_when == "collect")
        return add_return(add_sde(policy, self.sde_sample_freq), self)

    def update(
        self,
        state: OnPolicyState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Weights = None,
        intrinsic_advantage: Float[Array, "T B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[OnPolicyState, Metrics]:
        """Take several epochs of gradient steps on one rollout; then update the statistics.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions collected with `collect_policy(state)`; episodes may begin before and end after it.
            key: decides the minibatches.
            weights: weights of transitions, or of environments, in the loss and the statistics; a weight that is 0 or less, NaN
                or infinite excludes its transitions. Their rewards and values still enter the advantages of earlier steps.
            intrinsic_advantage: added to the advantages, such as RND's; value targets are unchanged.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec, state or minibatches the settings (while tracing).
        """
        self._check_created(state, state.copies.optimizer_state)
        num_steps, num_envs = check_rollout(rollout, self.spec)
        rollout, weight = as_arrays(rollout), sample_weights(rollout.valid, weights)
        self._check_divides(num_steps, num_envs)

        # Old values and action distributions, advantages and value targets.
        batch, bad_data = self._make_batch(state, rollout, weight, axis_name, intrinsic_advantage)

        # Epochs of minibatches: the loss of each, and a gradient step.
        data_is_finite = ~jnp.any(jnp.stack(list(bad_data.values())))
        online = state.copies.online
        loss = partial(self.loss, state=state, axis_name=axis_name)
        copies, log = train_epochs(
            state.copies,
            lambda params, batch, variables, key: loss(params, batch),  # needs no key, and takes statistics from `state`
            self.optimizer_at(state.env_steps),
            partial(self._epoch_batch, state, rollout, batch, intrinsic_advantage),
            key,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            num_microbatches=self._num_microbatches(batch, self.num_minibatches, axis_name),
            rollout_shape=(1 if self._model.is_recurrent else num_steps, num_envs),
            normalize_advantage=self.normalize_advantage,
            early_stop=None if self.target_kl is None else self._early_stop,
            data_is_finite=data_is_finite,
            axis_name=axis_name,
        )

        # Statistics are updated last, so that all epochs see the numbers that the policy acted on.
        counts = ((weight > 0) & data_is_finite).astype(jnp.float32)
        full_batch, _ = normalize_minibatches(batch, jnp.arange(len(batch.weight))[None], self.normalize_advantage, axis_name)
        kl = self._mean_kl(copies.online, full_batch, axis_name)
        skipped, applied = (flags.sum(dtype=jnp.uint32) for flags in (log.skipped, log.applied))
        new_state = dataclasses.replace(
            state,
            copies=copies if self.ema_tau is None else copies.update_target(self.ema_tau),
            obs_normalizer=state.obs_normalizer and state.obs_normalizer.update(rollout.obs, counts, axis_name),
            reward_scaler=state.reward_scaler and state.reward_scaler.update(rollout, counts, self.gamma, axis_name),
            env_steps=state.env_steps + losses.sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name),
            updates=saturating_add(state.updates, jnp.uint32(1)),
            guard=state.guard.after_update(skipped, applied, flag_quantities(bad_data) | log.bad.any((0, 1))),
        )
        metrics: Metrics = {**self._update_metrics(state, new_state, batch, log, axis_name), "train/kl": Mean.of(kl)}
        if self.histograms:
            parts = self._num_microbatches(batch, 1, axis_name)
            metrics |= update_histograms(loss, full_batch, online.params, copies.online.params, parts, axis_name)
        return new_state, metrics

    def loss(
        self, params: PyTree, batch: Batch, state: OnPolicyState, *, axis_name: str | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """Compute the loss of a minibatch, and its terms; the terms of microbatches add up to the terms of the minibatch.

        Args:
            params: θ.
            batch: the minibatch, whose weights sum to 1.
            state: before the update.
            axis_name: the mesh axis that the minibatch is split over.
        """
        # Not in training mode: dropout or a minibatch's own statistics would change the ratio of the two policies.
        distribution, value = self._model.forward(dataclasses.replace(state.copies.online, params=params), batch)
        loss, terms = self.clipped_loss(distribution, value, batch, state.env_steps)
        return loss, Aux(terms)

    def clipped_loss(
        self, distribution: Distribution, value: Float[Array, "*N"], batch: Batch, env_steps: StepCount
    ) -> tuple[Float[Array, ""], Terms]:
        """Compute the loss of the network's outputs for a minibatch, and its terms.

        Args:
            distribution: π_θ.
            value: V.
            env_steps: for schedules.
        """
        log_prob, old_log_prob = distribution.log_prob(batch.action), batch.log_prob

        # Policy: see `policy_loss`
        samples = {"ratio": losses.probability_ratio(log_prob, old_log_prob)}
        samples["policy_gradient_loss"] = self.policy_loss(log_prob, batch, env_steps)
        if self.clip_range is not None:
            samples["clip_fraction"] = losses.clip_fraction(log_prob, old_log_prob, value_at(self.clip_range, env_steps))
        samples["approx_kl"] = losses.approx_kl(log_prob, old_log_prob)

        # Value: (V - V̂)²
        if self.clip_range_vf is None:
            samples["value_loss"] = losses.value_loss(value, batch.value_target)
        else:
            samples["value_loss"] = losses.clipped_value_loss(value, batch.value, batch.value_target, self.clip_range_vf)

        # Entropy: -H
        samples["entropy_loss"] = -distribution.entropy()
        terms = {name: losses.weighted_sum(x, batch.weight) for name, x in samples.items()}
        loss = terms["policy_gradient_loss"] + self.vf_coef * terms["value_loss"] + self.ent_coef * terms["entropy_loss"]
        return loss, terms

    def policy_loss(self, log_prob: Float[Array, "*N"], batch: Batch, env_steps: StepCount) -> Float[Array, "*N"]:
        """Compute -min(ρ A, clip(ρ, 1-ε, 1+ε) A) of each sample, or -ρ A without `clip_range`.

        Args:
            log_prob: log π_θ(a|s), which this method clips to ± `clip_log_prob`; `batch.log_prob` is log π_old(a|s).
            env_steps: for schedules.
        """
        bound = self.clip_log_prob
        log_prob = log_prob if bound is None else jnp.clip(log_prob, -bound, bound)
        if self.clip_range is None:
            return losses.surrogate(log_prob, batch.log_prob, batch.advantage)
        return losses.clipped_surrogate(log_prob, batch.log_prob, batch.advantage, value_at(self.clip_range, env_steps))

    def _check_divides(self, num_steps: int, num_envs: int) -> None:
        sizes, sequences = (num_steps, num_envs, self.num_minibatches), self._model.is_recurrent
        check_divides(type(self).__name__, *sizes, self.microbatch_size, sequences=sequences)

    def _make_batch(
        self, state: OnPolicyState, rollout: Rollout, weight: Array, axis_name: str | None, intrinsic: Array | None = None
    ) -> tuple[Batch, dict[str, Bool[Array, ""]]]:
        """The rollout with old values, old distributions and advantages, and which of its quantities are not finite."""
        obs, carry = network_inputs(rollout, state.obs_normalizer, self.normalize_reward)
        # Outputs computed while collecting are reused; only the last value is computed.
        needed = -1 if self.values_when == "collect" and not self._model.is_recurrent else 0
        new_obs, first = jax.tree.map(lambda x: x[needed:], (obs, rollout.time_steps.first))
        params, value = self._model.evaluate(state.copies.online, new_obs, first, carry, self.microbatch_size)
        params = jax.tree.map(lambda x: x[:-1], params)
        if self.values_when == "collect":
            params, value = outputs_in_info(rollout, value, "values_when='collect'")
        batch, bad_data = make_batch(self._model, rollout, obs, weight, carry, params, value, axis_name)
        return batch.with_advantages(*self.compute_advantages(state, rollout, value), intrinsic), bad_data

    def _epoch_batch(
        self, state: OnPolicyState, rollout: Rollout, batch: Batch, intrinsic: Array | None, params: PyTree
    ) -> Batch:
        """The batch of an epoch that begins with these parameters."""
        if not self.recompute_values:
            return batch
        obs, carry = network_inputs(rollout, state.obs_normalizer, self.normalize_reward)
        variables = dataclasses.replace(state.copies.online, params=params)
        _, value = self._model.evaluate(variables, obs, rollout.time_steps.first, carry, self.microbatch_size)
        return batch.with_advantages(*self.compute_advantages(state, rollout, value), intrinsic)

    def compute_advantages(
        self, state: OnPolicyState, rollout: Rollout, value: Float[Array, "times B"]
    ) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
        """Advantages and value targets of a rollout, from the values of its T + 1 observations."""
        return advantages_and_targets(
            self.scaled_reward(state, rollout),
            value[:-1],
            value[1:],
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            advantages=self.advantages,
            value_targets=self.value_targets,
        )

    def _kl(self, distribution: Distribution, batch: Batch) -> Float[Array, ""]:
        old = self._model.distribution(batch.old_params, batch.action_mask)
        return losses.weighted_sum(old.kl_divergence(distribution), batch.weight)

    def _mean_kl(self, variables: Variables, batch: Batch, axis_name: str | None) -> Float[Array, ""]:
        """E[KL(π_old ‖ π)] over the batch."""

        def kl_of(part: Batch) -> tuple[Float[Array, ""], tuple[()]]:
            return self._kl(self._model.forward(variables, part)[0], part), ()

        return accumulate(kl_of, batch, self._num_microbatches(batch, 1, axis_name), axis_name)[0]

    def _num_microbatches(self, batch: Batch, num_minibatches: int, axis_name: str | None) -> int:
        size, samples_each = len(batch.weight) // num_minibatches, math.prod(batch.weight.shape[1:])
        images = self._model.has_images
        return count_microbatches(size, self.microbatch_size, axis_name, samples_each=samples_each, has_images=images)

    def _early_stop(self, terms: Terms) -> Bool[Array, ""]:
        assert self.target_kl is not None, "asked for with target_kl only"
        return terms["approx_kl"] > 1.5 * self.target_kl

    def _update_metrics(
        self, state: OnPolicyState, new_state: OnPolicyState, batch: Batch, log: StepLog, axis_name: str | None
    ) -> Metrics:
        """Terms averaged over the applied gradient steps, of all epochs and of the last, and quantities of the update."""
        norm = log.terms["grad_norm"]
        max_grad_norm = self.max_grad_norm if self.optimizer is None else None
        clipped = norm if max_grad_norm is None else jnp.minimum(norm, max_grad_norm)
        of_all, of_last = mean_terms(dataclasses.replace(log, terms=log.terms | {"grad_norm_clipped": clipped}))
        metrics: Metrics = {f"train/{name}": mean for name, mean in of_all.items()}
        metrics |= {f"train/last_epoch/{name}": mean for name, mean in of_last.items()}
        explained = losses.explained_variance(batch.value, batch.value_target, batch.weight, axis_name)
        metrics |= {"train/explained_variance": Mean.of(explained), **self.metrics(state, new_state)}
        if self.clip_range is not None:
            metrics["train/clip_range"] = value_at(self.clip_range, state.env_steps)
        return metrics

    def _check_created(self, state: OnPolicyState, optimizer_state: PyTree) -> None:
        super()._check_created(state, optimizer_state)
        check_created_with(self, equal={}, present={"ema_tau": state.copies.target})

"""The base of agents that take one gradient step on each rollout, in two halves: workers may compute the gradients."""

import abc
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.agents.on_policy import OnPolicyAgent, OnPolicyState
from polyak.copies.network_copies import NetworkCopies
from polyak.copies.receive import Push, Senders, receive, worker_copies
from polyak.copies.shared import Shared
from polyak.core.checks import check_unset
from polyak.core.struct import choice, number, struct
from polyak.core.types import Mean, Metrics, PyTree, Rollout, Scalar, Terms
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.rollout_batch import Batch, Weights, make_batch, network_inputs, normalize_minibatches, sample_weights
from polyak.networks.layers import has_images, is_narrow
from polyak.ops import losses
from polyak.ops.gradient_step import (
    QUANTITIES,
    Aux,
    Guard,
    all_finite,
    compute_gradient,
    count_microbatches,
    flag_quantities,
)
from polyak.ops.normalize import ObsNormalizer, RewardScaler
from polyak.ops.rmsprop import rmsprop
from polyak.ops.schedules import Count, Schedule, saturating_add


@struct
class EvaluatedRollout:
    """A rollout with the outputs of the online network.

    Attributes:
        rollout: the rollout as arrays.
        weight: weight of each transition in the loss.
        obs: the network's observations, normalized if the agent normalizes them; one more step than the rollout.
        carry: the network's carry at the first step.
        params: parameters of the action distributions.
        value: values of all observations; one more step than the rollout.
        reward: scaled if the agent scales rewards.
    """

    rollout: Rollout
    weight: Float[Array, "T B"]
    obs: PyTree
    carry: PyTree
    params: PyTree
    value: Float[Array, "times B"]
    reward: Float[Array, "T B"]


@struct
class RolloutSummary:
    """The part of a rollout that `apply` needs besides its gradients.

    Attributes:
        terms: of the loss, with `loss`, `grad_norm` and `explained_variance`.
        bad: flags of `polyak.ops.gradient_step.QUANTITIES` that were NaN or infinite in the rollout.
        weight: the sum of the transitions' weights; without any there is no step.
        env_steps: valid transitions.
        obs: statistics of the rollout's observations, or None.
        reward: statistics of the rollout's rewards, or None.
    """

    terms: Terms
    bad: Bool[Array, " quantities"]
    weight: Float[Array, ""]
    env_steps: UInt32[Array, ""]
    obs: ObsNormalizer | None
    reward: RewardScaler | None


@struct(kw_only=True)
class PolicyGradientAgent(OnPolicyAgent):
    """An actor-critic that takes one gradient step on each rollout.

    `update` is `apply(gradients(...))`. In the asynchronous loop, workers compute `gradients` with the weights that they pulled
    by `worker_state`, and one receiver applies these gradients by `receive`, to a state made by `share`.

    Attributes:
        learning_rate: learning rate of RMSProp or Adam, a number or a schedule such as `Linear`.
        normalize_advantage: normalize the advantages of a rollout to mean 0 and standard deviation 1.
        optimizer_name: `"rmsprop"`, the RMSProp of TensorFlow 1, with which A2C and IMPALA were published, or `"adam"`.
        rms_decay: RMSProp's α, the decay of the mean square.
        rms_eps: RMSProp's ε, inside the square root; at least 10⁻²⁰.
        optimizer: any `optax.GradientTransformation`; replaces RMSProp and Adam, `learning_rate` and `max_grad_norm`.
    """

    learning_rate: Schedule = 7e-4
    normalize_advantage: bool = choice(default=False, choices=(True, False))
    optimizer_name: Literal["rmsprop", "adam"] = choice(default="rmsprop", choices=("rmsprop", "adam"))
    rms_decay: Scalar = number(default=0.99, at_least=0, at_most=1)
    rms_eps: Scalar = number(default=1e-5, at_least=1e-20)

    @abc.abstractmethod
    def gradients(
        self,
        state: OnPolicyState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Weights = None,
        intrinsic_advantage: Float[Array, "T B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[PyTree, RolloutSummary]:
        """Compute the gradients of the loss of a rollout, before clipping, and the summary that `apply` needs too.

        Args:
            rollout: `[T, B]` transitions collected with `collect_policy(state)`; episodes may begin before and end after it.
            key: not used; the loss has nothing random.
            weights: weights of transitions, or of environments, in the loss and the statistics; a weight that is 0 or less, NaN
                or infinite excludes its transitions. Their rewards and values still enter the advantages of earlier steps.
            intrinsic_advantage: added to the advantages, such as RND's; value targets are unchanged.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec or the state the settings (while tracing).
        """

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
        """Take one gradient step on a rollout: `apply(state, *gradients(state, rollout, key))`.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: see `gradients`, also for the other arguments.
        """
        options: Any = {"weights": weights, "intrinsic_advantage": intrinsic_advantage, "axis_name": axis_name}
        return self.apply(state, *self.gradients(state, rollout, key, **options))

    def apply(self, state: OnPolicyState, gradients: PyTree, summary: RolloutSummary) -> tuple[OnPolicyState, Metrics]:
        """Take one step along the gradients of a rollout.

        No bit of weights and statistics changes if the rollout, the gradients or the step have NaN or infinity.

        Args:
            state: donate it; nothing of it is needed afterwards.
            gradients: the first result of `gradients`.
            summary: the second result of `gradients`.
        """
        self._check_created(state, state.copies.optimizer_state)
        optimizer, bad = self.optimizer_at(state.env_steps), dict(zip(QUANTITIES, summary.bad, strict=True))
        bad |= {"loss": ~jnp.isfinite(summary.terms["loss"]), "gradient": ~all_finite(gradients)}
        copies, log = state.copies.step(optimizer, gradients, Aux(summary.terms), bad, enabled=summary.weight > 0)
        guard = state.guard.after_update(log.skipped.astype(jnp.uint32), log.applied.astype(jnp.uint32), log.bad)
        return self._after_step(state, copies, guard, summary, counts=True, applied=log.applied)

    def share(self, state: OnPolicyState, num_workers: int, *, shared_optimizer: bool = True) -> tuple[OnPolicyState, Senders]:
        """Add a shared copy to the state of the receiver of the workers' gradients, and create the workers' counts.

        Args:
            shared_optimizer: True: the shared copy has the only optimizer; False: the receiver holds an optimizer per worker.
        """
        copies, optimizer_state = state.copies, state.copies.optimizer_state
        shared = Shared.init(copies.online, jax.tree.map(jnp.copy, optimizer_state) if shared_optimizer else ())
        senders = Senders.init(num_workers, None if shared_optimizer else optimizer_state)
        copies = dataclasses.replace(copies, shared=shared, optimizer_state=(), shared_optimizer=shared_optimizer)
        return dataclasses.replace(state, copies=copies), senders

    def unshare(self, state: OnPolicyState, senders: Senders) -> OnPolicyState:
        """Convert a state of `share` to a state like `init`'s, with the shared weights as online copy.

        The optimizer state is the shared copy's or, if every worker has its own, the first worker's.

        Raises:
            ValueError: there is no shared copy.
        """
        copies, shared = state.copies, self._shared(state, "unshare")
        first = jax.tree.map(lambda x: x[0], senders.optimizer_state)
        own = dataclasses.replace(
            copies,
            online=shared.variables,
            shared=None,
            optimizer_state=shared.optimizer_state if copies.shared_optimizer else first,
            shared_optimizer=False,
        )
        return dataclasses.replace(state, copies=own)

    def worker_state(self, state: OnPolicyState) -> OnPolicyState:
        """Return the part of the receiver's state that a worker pulls, which `collect_policy` and `gradients` use."""
        return dataclasses.replace(state, copies=worker_copies(state.copies))

    def receive(
        self,
        state: OnPolicyState,
        senders: Senders,
        push: Push,
        gradients: PyTree,
        summary: RolloutSummary,
        *,
        max_staleness: int | None = None,
        max_bad: int = 10,
    ) -> tuple[OnPolicyState, Senders, Metrics]:
        """Apply gradients that a worker sent to the shared copy; see `polyak.copies.receive.receive`.

        Raises:
            ValueError: there is no shared copy, or the gradients have another tree.
        """
        copies, shared = state.copies, self._shared(state, "receive")
        self._check_created(state, shared.optimizer_state if copies.shared_optimizer else None)
        shared, senders, receipt = receive(
            shared,
            senders,
            push,
            gradients,
            optimizer=self.optimizer_at(state.env_steps),
            is_finite=~jnp.any(summary.bad) & jnp.isfinite(summary.terms["loss"]),
            has_samples=summary.weight > 0,
            max_staleness=max_staleness,
            max_bad=max_bad,
        )
        # The first of the causes is reported: a bad step is one of finite gradients.
        causes = {"loss": ~jnp.isfinite(summary.terms["loss"]), "gradient": ~all_finite(gradients), "step": receipt.rejected}
        bad = (summary.bad | flag_quantities(causes)) & receipt.rejected
        applied = receipt.applied.astype(jnp.uint32)
        guard = state.guard.after_update(receipt.rejected.astype(jnp.uint32), applied, bad)
        copies = dataclasses.replace(copies, shared=shared, steps=saturating_add(copies.steps, applied), guard=guard)
        counts = receipt.applied | receipt.empty
        state, metrics = self._after_step(state, copies, guard, summary, counts=counts, applied=receipt.applied)
        return state, senders, metrics

    def optimizer_at(self, env_steps: Count = 0, learning_rate: Schedule | None = None) -> optax.GradientTransformation:
        """Return `optimizer`, or RMSProp or Adam with the learning rate of this step."""
        if self.optimizer is not None or self.optimizer_name == "adam":
            return super().optimizer_at(env_steps, learning_rate)
        decay, eps, max_norm = self.rms_decay, self.rms_eps, self.max_grad_norm
        schedule = self.learning_rate if learning_rate is None else learning_rate
        return rmsprop(schedule, env_steps, decay=decay, eps=eps, max_grad_norm=max_norm)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small rollouts; see `is_narrow`."""
        return is_narrow(self._network, self.spec, self.num_steps * num_envs if devices == 1 else 1)

    def evaluate(self, state: OnPolicyState, rollout: Rollout, weights: Weights) -> EvaluatedRollout:
        """Compute action distributions and values of a rollout by the online network.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec or the state the settings (while tracing).
        """
        check_rollout(rollout, self.spec)
        rollout, weight = as_arrays(rollout), sample_weights(rollout.valid, weights)
        obs, carry = network_inputs(rollout, state.obs_normalizer, self.normalize_reward)
        params, value = self._model.evaluate(state.copies.online, obs, rollout.time_steps.first, carry)
        params, reward = jax.tree.map(lambda x: x[:-1], params), self.scaled_reward(state, rollout)
        return EvaluatedRollout(rollout, weight, obs, carry, params, value, reward)

    def loss(self, params: PyTree, batch: Batch, state: OnPolicyState) -> tuple[Float[Array, ""], Aux]:
        """Compute the loss of a batch whose weights sum to 1, and its terms; terms of microbatches add up to the batch's.

            L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - V̂)² - c_e H ]

        Args:
            params: θ.
            state: before the step.
        """
        distribution, value = self._model.forward(dataclasses.replace(state.copies.online, params=params), batch)
        samples = {
            "policy_gradient_loss": -distribution.log_prob(batch.action) * batch.advantage,
            "value_loss": losses.value_loss(value, batch.value_target),
            "entropy_loss": -distribution.entropy(),
        }
        terms = {name: losses.weighted_sum(x, batch.weight) for name, x in samples.items()}
        policy_and_value = terms["policy_gradient_loss"] + self.vf_coef * terms["value_loss"]
        return policy_and_value + self.ent_coef * terms["entropy_loss"], Aux(terms)

    def _gradients_and_summary(
        self,
        state: OnPolicyState,
        evaluated: EvaluatedRollout,
        advantage: Float[Array, "T B"],
        value_target: Float[Array, "T B"],
        intrinsic_advantage: Float[Array, "T B"] | None,
        axis_name: str | None,
        extra: Terms | None = None,
    ) -> tuple[PyTree, RolloutSummary]:
        """The gradients of the loss of a rollout, summed over devices, and its summary.

        Args:
            evaluated: with the parameters of the distributions that collected it.
            extra: more terms for the summary.
        """
        rollout, weight = evaluated.rollout, evaluated.weight
        batch, bad_data = make_batch(
            self._model, rollout, evaluated.obs, weight, evaluated.carry, evaluated.params, evaluated.value, axis_name
        )
        batch = batch.with_advantages(advantage, value_target, intrinsic_advantage)
        index, samples_each = jnp.arange(len(batch.weight))[None], weight.size // len(batch.weight)
        batch, total = normalize_minibatches(batch, index, "batch" if self.normalize_advantage else None, axis_name)
        gradients, aux = compute_gradient(
            lambda params, part: self.loss(params, part, state),
            state.copies.online.params,
            batch,
            num_microbatches=count_microbatches(
                len(batch.weight), None, axis_name, samples_each=samples_each, has_images=has_images(self.spec.obs)
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
            reward=scaler and scaler.empty().update(rollout, counts, self.gamma, axis_name),
        )

    def _after_step(
        self,
        state: OnPolicyState,
        copies: NetworkCopies,
        guard: Guard,
        summary: RolloutSummary,
        *,
        counts: Bool[Array, ""] | bool,
        applied: Bool[Array, ""],
    ) -> tuple[OnPolicyState, Metrics]:
        """The state with these copies and, if the rollout counts, its statistics; and the metrics."""
        normalizer, scaler = state.obs_normalizer, state.reward_scaler
        more = jnp.asarray(counts).astype(jnp.uint32)
        after = dataclasses.replace(
            state,
            copies=copies,
            obs_normalizer=normalizer and summary.obs and optax.tree.where(counts, normalizer.merge(summary.obs), normalizer),
            reward_scaler=scaler and summary.reward and optax.tree.where(counts, scaler.merge(summary.reward), scaler),
            env_steps=state.env_steps + summary.env_steps * more,
            updates=saturating_add(state.updates, more),
            guard=guard,
        )
        terms: Metrics = {f"train/{name}": Mean.of(term, applied) for name, term in summary.terms.items()}
        return after, terms | self.metrics(state, after)

    def _shared(self, state: OnPolicyState, where: str) -> Shared:
        if state.copies.shared is None:
            raise ValueError(
                f"{type(self).__name__}.{where}: state has no shared copy; create one with share(state, num_workers)"
            )
        return state.copies.shared

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        if self.optimizer is None:
            unused = ("adam_b1", "adam_eps") if self.optimizer_name == "rmsprop" else ("rms_decay", "rms_eps")
            check_unset(self, unused, f"has no effect with optimizer_name={self.optimizer_name!r}")

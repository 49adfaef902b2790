"""PPO with penalties on the KL divergence (Schulman et al. 2017, arXiv:1707.06347, section 4) and on weights."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyState
from polyak.agents.ppo import PPO
from polyak.core.checks import check_created_with, check_unset
from polyak.core.spaces import EnvSpec
from polyak.core.struct import number, struct
from polyak.core.types import Metrics, PyTree, Rollout, Scalar, Terms, Variables
from polyak.learning.rollout_batch import Batch, Weights
from polyak.networks.roles import Role, check_kernels, kernel_roles, sum_of_squares
from polyak.ops import losses
from polyak.ops.gradient_step import Aux
from polyak.ops.schedules import Schedule

# fmt: off
TF_AGENTS_KL: Mapping[str, Any] = {
    "num_epochs": 10, "advantages": "gae", "value_targets": "td_lambda", "normalize_obs": False, "clip_reward": None,
}
# fmt: on


@struct
class PPOKLState(OnPolicyState):
    """Everything that training changes.

    Attributes:
        kl_beta: β of the KL penalty, or None.
    """

    kl_beta: Float[Array, ""] | None = None


@struct(kw_only=True)
class PPOKL(PPO):
    """PPO with an adaptive penalty on the KL divergence in place of the clipped ratio, and the other penalties of TF-Agents.

        L(θ) = E[ -ρ A + c_v (V - V̂)² - c_e H ] + β KL + κ max(KL - f d, 0)² + Σ c_i ‖W_i‖²

    with ρ = π_θ(a|s) / π_old(a|s) and KL = E[KL(π_old ‖ π_θ)]. After each update β is multiplied or divided by 1.5 if KL is
    above or below the target d by more than the tolerance.

    Attributes:
        clip_range: clip the probability ratio too, to 1 ± this value, a number or a schedule; None disables clipping.
        kl_beta: initial coefficient β of the KL penalty, adapted after each update; None disables the penalty.
        kl_target: KL divergence d that an update should have, in nats.
        kl_tolerance: adapt β when the divergence differs from the target by more than this fraction.
        kl_cutoff_coef: coefficient κ of the squared KL divergence beyond the cutoff; None disables this penalty. It needs the
            mean of the minibatch, so `microbatch_size` must be None.
        kl_cutoff_factor: cutoff f, in multiples of `kl_target`.
        l2_policy: L2 coefficient of kernels that only the policy depends on; None disables it.
        l2_value: L2 coefficient of kernels that only the value depends on; None disables it.
        l2_shared: L2 coefficient of kernels that both depend on; None disables it.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = PPOKL(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), kl_target=0.02)
    >>> state = agent.init(jax.random.key(0))
    """

    state_type: ClassVar[type[OnPolicyState]] = PPOKLState
    clip_range: Schedule | None = None
    kl_beta: Scalar | None = number(default=1.0, above=0, optional=True)
    kl_target: Scalar = number(default=0.01, above=0)
    kl_tolerance: Scalar = number(default=0.5, at_least=0, at_most=1, used_if=("kl_beta", ...))
    kl_cutoff_coef: Scalar | None = number(default=None, above=0, optional=True)
    kl_cutoff_factor: Scalar = number(default=2.0, above=0, used_if=("kl_cutoff_coef", ...))
    l2_policy: Scalar | None = number(default=None, at_least=0, optional=True)
    l2_value: Scalar | None = number(default=None, at_least=0, optional=True)
    l2_shared: Scalar | None = number(default=None, at_least=0, optional=True)

    @classmethod
    def tf_agents(cls, spec: EnvSpec, **changes: Any) -> Self:
        """Create an agent with the defaults of TF-Agents' `PPOKLPenaltyAgent`, or the recommendations of its documentation."""
        return super().tf_agents(spec, **{**TF_AGENTS_KL, **changes})

    def init(self, key: PRNGKeyArray) -> PPOKLState:
        """Create a new state."""
        beta = None if self.kl_beta is None else jnp.array(self.kl_beta, jnp.float32, copy=True)
        return PPOKLState(**{**vars(super().init(key)), "kl_beta": beta})

    def update(
        self,
        state: OnPolicyState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Weights = None,
        intrinsic_advantage: Float[Array, "T B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[PPOKLState, Metrics]:
        """Take several epochs of gradient steps on one rollout, as `PPO.update` does; then adapt β."""
        options: Any = {"weights": weights, "intrinsic_advantage": intrinsic_advantage, "axis_name": axis_name}
        after, metrics = super().update(state, rollout, key, **options)
        assert isinstance(after, PPOKLState), "update replaces fields of its state"
        if after.kl_beta is None:
            return after, metrics
        # Without a step, or with an overflow, the divergence tells nothing about β.
        mean: Any = metrics["train/kl"]
        kl = mean.total / mean.count
        adapted = losses.adapt_kl_beta(after.kl_beta, kl, target=self.kl_target, tolerance=self.kl_tolerance)
        beta = jnp.where(after.copies.steps > state.copies.steps, adapted, after.kl_beta)
        return dataclasses.replace(after, kl_beta=beta), metrics | {"train/kl_beta": beta}

    def loss(
        self, params: PyTree, batch: Batch, state: OnPolicyState, *, axis_name: str | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """Compute the loss of a minibatch, and its terms; arguments as for `PPO.loss`."""
        variables = dataclasses.replace(state.copies.online, params=params)
        distribution, value = self._model.forward(variables, batch)
        loss, terms = self.clipped_loss(distribution, value, batch, state.env_steps)

        # Penalties: β KL + κ max(KL - f d, 0)² + Σ c_i ‖W_i‖²
        penalties, beta = {}, self._beta(state)
        if beta is not None or self.kl_cutoff_coef is not None:
            kl = self._kl(distribution, batch)
            if beta is not None:
                penalties["kl_penalty_loss"] = beta * kl
            if self.kl_cutoff_coef is not None:
                penalties["kl_cutoff_loss"] = self._kl_cutoff(kl, batch, axis_name)
        l2_terms = self._l2_penalties(variables, batch)
        loss = sum((*penalties.values(), *l2_terms.values()), loss)
        if l2_terms:
            l2_terms["l2_loss"] = sum(l2_terms.values(), jnp.float32(0.0))
        return loss, Aux(terms | penalties | l2_terms)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        if self.kl_cutoff_coef is not None and self.microbatch_size is not None:
            raise ValueError(
                f"PPOKL: microbatch_size must be None with kl_cutoff_coef, whose penalty needs the mean KL divergence of a "
                f"whole minibatch; got {self.microbatch_size}"
            )
        if self.kl_beta is None and self.kl_cutoff_coef is None:
            check_unset(self, ("kl_target",), "has no effect without kl_beta and kl_cutoff_coef")
        check_kernels("PPOKL", self._network, self.spec, self._l2)

    def _check_created(self, state: OnPolicyState, optimizer_state: PyTree) -> None:
        super()._check_created(state, optimizer_state)
        check_created_with(self, equal={}, present={"kl_beta": self._beta(state)})

    def _beta(self, state: OnPolicyState) -> Float[Array, ""] | None:
        assert isinstance(state, PPOKLState), "init returns it"
        return state.kl_beta

    def _kl_cutoff(self, kl: Float[Array, ""], batch: Batch, axis_name: str | None) -> Float[Array, ""]:
        """κ max(KL - f d, 0)², with the gradient of this device's part of KL."""
        assert self.kl_cutoff_coef is not None, "the caller's condition"
        cutoff = partial(losses.kl_cutoff, factor=self.kl_cutoff_factor, target=self.kl_target, coef=self.kl_cutoff_coef)
        # The value is of the mean over all devices, the gradient of this device's part; the parts are summed later.
        mean_kl = losses.sum_over_devices(jax.lax.stop_gradient(kl), axis_name)
        value, slope = jax.value_and_grad(cutoff)(mean_kl)
        return batch.weight.sum() * value + slope * (kl - jax.lax.stop_gradient(kl))

    def _l2_penalties(self, variables: Variables, batch: Batch) -> Terms:
        """c_i ‖W_i‖² of the policy's, the value's and the shared kernels."""
        kernels = kernel_roles(self._network, variables, self.spec) if self._l2 else ()
        # The weights of a minibatch's parts sum to 1, so the parts of the penalty add up to it.
        total = batch.weight.sum()
        return {
            f"l2_{role}_loss": coef * sum_of_squares(variables.params, kernels, role) * total for role, coef in self._l2.items()
        }

    def _num_microbatches(self, batch: Batch, num_minibatches: int, axis_name: str | None) -> int:
        # The KL cutoff needs the mean of a whole minibatch.
        return 1 if self.kl_cutoff_coef is not None else super()._num_microbatches(batch, num_minibatches, axis_name)

    @property
    def _l2(self) -> dict[Role, Scalar]:
        named: dict[Role, Scalar | None] = {"policy": self.l2_policy, "value": self.l2_value, "shared": self.l2_shared}
        return {role: coefficient for role, coefficient in named.items() if coefficient is not None}

"""IMPALA: actor-critic that corrects for older policies by V-trace (Espeholt et al. 2018, arXiv:1802.01561)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyState
from polyak.agents.policy_gradient import PolicyGradientAgent, RolloutSummary
from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.learning.rollout_batch import Weights, log_probs, outputs_in_info
from polyak.ops.losses import masked_mean_and_variance
from polyak.ops.returns import vtrace
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy, add_return
from polyak.policies.sde import check_no_sde


@struct(kw_only=True)
class IMPALA(PolicyGradientAgent):
    """IMPALA for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

        L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - v)² - c_e H ]

    `polyak.ops.returns.vtrace` computes the value targets v and the advantages A, with the ratio ρ = π(a|s) / μ(a|s) of the
    newest policy to the policy that collected the rollout. Rollouts may be of any age; with equal policies IMPALA is A2C with
    n-step returns (at `gae_lambda=1`). One gradient step is taken on each rollout.

    Attributes:
        gae_lambda: trace decay λ of V-trace; 1 is the n-step return, up to the end of the rollout.
        rho_clip: ρ̄, the upper bound of ρ in the value targets; it decides which policy's values are learned.
        c_clip: c̄, the upper bound of the ratio in the traces; it decides how fast values are learned. At most `rho_clip`.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> import jax
    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = IMPALA(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_steps: int = 20
    gae_lambda: Scalar = number(default=1.0, at_least=0, at_most=1)
    rho_clip: Scalar = number(default=1.0, above=0)
    c_clip: Scalar = number(default=1.0, at_least=0)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_no_sde("IMPALA", self._network)

    @property
    def max_lag(self) -> None:
        """A rollout may be of any age: V-trace corrects for it."""

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | DiscountedReturn:
        """Return the policy that samples from the online network's distribution and stores its parameters."""
        return add_return(self.network_policy(state, state.copies.online, return_info=True), self)

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
        """Compute the gradients of the loss of a rollout, with V-trace; see `PolicyGradientAgent.gradients`."""
        new, model = self.evaluate(state, rollout, weights), self._model
        behaviour_params, _ = outputs_in_info(new.rollout, new.value, "IMPALA")
        old = dataclasses.replace(new, params=behaviour_params)

        # log π(a|s) - log μ(a|s)
        log_rho = log_probs(model, new.rollout, new.params) - log_probs(model, old.rollout, old.params)
        value_target, advantage = vtrace(
            log_rho,
            new.reward,
            new.value[:-1],
            new.value[1:],
            new.rollout.terminated,
            new.rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        rho = jnp.minimum(self.rho_clip, jnp.exp(log_rho))
        intrinsic_advantage = None if intrinsic_advantage is None else rho * intrinsic_advantage
        mean_rho, _ = masked_mean_and_variance(rho, new.weight, axis_name)
        terms = {"rho": mean_rho}
        return self._gradients_and_summary(state, old, advantage, value_target, intrinsic_advantage, axis_name, terms)

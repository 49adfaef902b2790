"""REINFORCE: policy gradients from the returns of whole episodes (Williams 1992), with or without a baseline."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyState
from polyak.agents.policy_gradient import PolicyGradientAgent, RolloutSummary
from polyak.core.struct import choice, number, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.learning.rollout_batch import Weights
from polyak.ops.losses import masked_mean_and_variance
from polyak.ops.returns import discounted_returns
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy, add_return
from polyak.policies.sde import check_no_sde


@struct(kw_only=True)
class REINFORCE(PolicyGradientAgent):
    """REINFORCE for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

        L(θ) = E[ -log π_θ(a|s) (G - b(s)) + c_v (V_θ(s) - G)² - c_e H ],    G_t = Σ_k γ^k r_{t+k} to the end of the episode

    The baseline b is V, constant in the policy's term, or 0 if `vf_coef` is 0. Expectations are over the transitions
    whose episode ends before the rollout does: a return that the rollout cuts short is unknown, and no value continues it.
    Rollouts should thus be much longer than episodes. A truncated episode ends as a terminated one does. One gradient step is
    taken on each rollout with such transitions. `A2C` at `gae_lambda=1` learns from all transitions, by V of the last state.

    Attributes:
        vf_coef: coefficient c_v of the loss of the baseline; 0 disables the baseline.
        normalize_advantage: normalize G - b of a rollout to mean 0 and standard deviation 1.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"; with a
    baseline: Sutton and Barto 2018, section 13.4.

    >>> import jax
    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = REINFORCE(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_steps: int = 1000
    vf_coef: Scalar = number(default=0.2, at_least=0)
    normalize_advantage: bool = choice(default=True, choices=(True, False))

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_no_sde("REINFORCE", self._network)

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | DiscountedReturn:
        """Return the policy that samples from the online network's distribution."""
        return add_return(self.network_policy(state, state.copies.online), self)

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
        """Compute the gradients of the loss of a rollout's complete episodes; see `PolicyGradientAgent.gradients`."""
        old = self.evaluate(state, rollout, weights)
        is_complete = ends_later(old.rollout)
        fraction, _ = masked_mean_and_variance(is_complete.astype(jnp.float32), old.weight, axis_name)
        old = dataclasses.replace(old, weight=jnp.where(is_complete, old.weight, 0.0))

        # G, and G - b(s)
        no_value = jnp.zeros_like(old.reward)
        returns = discounted_returns(old.reward, no_value, old.rollout.terminated, old.rollout.truncated, gamma=self.gamma)
        baseline = jnp.where(self.vf_coef > 0, old.value[:-1], 0.0)
        terms = {"complete_fraction": fraction}
        return self._gradients_and_summary(state, old, returns - baseline, returns, intrinsic_advantage, axis_name, terms)


def ends_later(rollout: Rollout) -> Bool[Array, "T B"]:
    """True for steps after which, or later in the rollout, their environment's episode ends."""
    return jax.lax.cummax((rollout.terminated | rollout.truncated).astype(jnp.int8), axis=0, reverse=True) > 0

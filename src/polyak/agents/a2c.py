"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783): synchronous as A2C, with asynchronous workers as A3C."""

from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyState
from polyak.agents.policy_gradient import PolicyGradientAgent, RolloutSummary
from polyak.core.struct import integer, number, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.learning.rollout_batch import Weights
from polyak.ops.returns import gae
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy, add_return
from polyak.policies.sde import StateDependentExploration, add_sde, check_sde


@struct(kw_only=True)
class A2C(PolicyGradientAgent):
    """A2C for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

    It takes one gradient step on each rollout:

        L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - V̂)² - c_e H ],    V̂ = V(s) + A

    A is the n-step return minus the value, or GAE; it is constant in the gradient. Expectations are over valid transitions.

    Attributes:
        gae_lambda: trace decay λ of GAE; 1 is the n-step return, up to the end of the rollout.
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) that is drawn anew every this
            number of steps; a built-in network without a head gets `PolicyAndValue(std="sde")`. None draws actions
            independently.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> import jax
    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = A2C(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_steps: int = 5
    gae_lambda: Scalar = number(default=1.0, at_least=0, at_most=1)
    sde_sample_freq: int | None = integer(default=None, optional=True)

    def set_defaults(self) -> None:
        """Complete the network."""
        self.set_network(std="free" if self.sde_sample_freq is None else "sde")

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_sde(self, self._network)

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | StateDependentExploration | DiscountedReturn:
        """Return the policy that samples from the online network's distribution."""
        return add_return(add_sde(self.network_policy(state, state.copies.online), self.sde_sample_freq), self)

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
        """Compute the gradients of the loss of a rollout, with GAE as advantages; see `PolicyGradientAgent.gradients`."""
        old = self.evaluate(state, rollout, weights)
        advantage = gae(
            old.reward,
            old.value[:-1],
            old.value[1:],
            old.rollout.terminated,
            old.rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        return self._gradients_and_summary(state, old, advantage, advantage + old.value[:-1], intrinsic_advantage, axis_name)

"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783): synchronous as A2C, with asynchronous workers as A3C."""

from typing import Literal

from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyAgent
from polyak.core.checks import check_state
from polyak.core.spaces import check_env_spec
from polyak.core.struct import check_settings, choice, integer, number, struct
from polyak.core.types import Metrics, PyTree, Rollout, Scalar, Variables
from polyak.learning.asynchronous import receive_gradients, share_copies, state_of_worker, unshare_copies
from polyak.learning.batch import make_batch
from polyak.learning.on_policy import (
    OnPolicyState,
    RolloutSummary,
    apply_gradients,
    check_on_policy,
    create_state,
    evaluate_rollout,
    gradients_and_summary,
    model_of,
    newest_variables,
    prefers_single_thread,
    scaled_reward,
)
from polyak.networks.actor_critic import network_or_default
from polyak.ops.gradient_step import diagnose_skips
from polyak.ops.returns import gae
from polyak.ops.schedules import Schedule
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.sde import StateDependentExploration, check_sde, explore


@struct(kw_only=True)
class A2C(OnPolicyAgent):
    """A2C for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

    It takes one gradient step on each rollout:

        L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - V̂)² - c_e H ],    V̂ = V(s) + A

    A is the n-step return minus the value, or GAE; it is constant in the gradient. Expectations are over valid transitions.

    `update` is `apply(gradients(...))`. For A3C these are two places: workers compute `gradients` with what they pulled by
    `worker_state`, and one receiver applies them by `receive`, to a state made by `share`.

    Attributes:
        learning_rate: the optimizer's, a number or a schedule such as `Linear`.
        gae_lambda: trace decay λ of GAE; 1 is the n-step return, up to the end of the rollout.
        normalize_advantage: normalize the advantages of a rollout to mean 0 and standard deviation 1.
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) that is drawn anew every this
            number of steps; needs a network such as `mlp(std="sde")`, which the default one then is. None draws actions
            independently.
        optimizer_name: `"rmsprop"`, that of TensorFlow 1 with which A2C was published, or `"adam"`.
        rms_decay: RMSProp's α, the decay of the mean square.
        rms_eps: RMSProp's ε, inside the square root.
        optimizer: any `optax.GradientTransformation`, in place of these two, `learning_rate` and `max_grad_norm`.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> import jax
    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = A2C(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_steps: int = 5
    learning_rate: Schedule = 7e-4
    gae_lambda: Scalar = 1.0
    normalize_advantage: bool = choice(default=False, choices=(True, False))
    sde_sample_freq: int | None = integer(default=None, optional=True)
    optimizer_name: Literal["rmsprop", "adam"] = choice(default="rmsprop", choices=("rmsprop", "adam"))
    rms_decay: Scalar = number(default=0.99, at_least=0, at_most=1)
    rms_eps: Scalar = number(default=1e-5, above=0)

    def __post_init__(self) -> None:
        check_env_spec("A2C", self.spec)
        has_sde = self.sde_sample_freq is not None
        object.__setattr__(self, "network", network_or_default("A2C", self.network, self.spec, sde=has_sde))
        check_settings(self)
        check_on_policy(self)
        check_sde(self, model_of(self).network)

    init = create_state
    prefers_single_thread = prefers_single_thread
    apply = apply_gradients
    share = share_copies
    unshare = unshare_copies
    worker_state = state_of_worker
    receive = receive_gradients
    diagnose = diagnose_skips

    def policy(self, state: OnPolicyState) -> Greedy:
        """The most probable action, by the shared copy if there is one."""
        check_state("A2C.policy", state, OnPolicyState)
        return Greedy(self._network_policy(state, newest_variables(state)))

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | StateDependentExploration | DiscountedReturn:
        """A sample from the policy of the online network."""
        check_state("A2C.collect_policy", state, OnPolicyState)
        policy = self._network_policy(state, state.copies.online)
        explorer = explore(policy, self.sde_sample_freq)
        return DiscountedReturn(explorer, self.gamma) if self.normalize_reward == "return" else explorer

    def update(
        self,
        state: OnPolicyState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Float[Array, "T B"] | Float[Array, " B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[OnPolicyState, Metrics]:
        """One gradient step on a whole rollout: `apply(state, *gradients(state, rollout, key))`.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: as of `gradients`, and so are the others.
        """
        return self.apply(state, *self.gradients(state, rollout, key, weights=weights, axis_name=axis_name))

    def gradients(
        self,
        state: OnPolicyState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Float[Array, "T B"] | Float[Array, " B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[PyTree, RolloutSummary]:
        """The gradients of the loss of a rollout, before clipping, and what `apply` needs besides.

        Args:
            rollout: `[T, B]` transitions collected with `collect_policy(state)`; episodes may begin before and end after it.
            key: not used; the loss has nothing random.
            weights: how much transitions, or environments, count; those of 0 or less, or not finite, are left out of the loss
                and the statistics. Their rewards and values still stand in the advantages of the steps before.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec or the state the settings (while tracing).
        """
        rollout, weight, obs, carry, params, value = evaluate_rollout(self, state, rollout, weights)
        batch, bad_data = make_batch(model_of(self), rollout, obs, weight, carry, params, value, axis_name)
        advantage = gae(
            scaled_reward(self, state, rollout),
            value[:-1],
            value[1:],
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        batch = batch.with_advantages(advantage, advantage + value[:-1])
        return gradients_and_summary(self, state, rollout, batch, bad_data, weight, axis_name)

    def _network_policy(self, state: OnPolicyState, variables: Variables) -> NetworkPolicy:
        return NetworkPolicy(variables, state.obs_normalizer, model_of(self).network, self.spec, False, self.squash)

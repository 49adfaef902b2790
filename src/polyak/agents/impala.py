"""IMPALA: actor-critic that corrects for older policies by V-trace (Espeholt et al. 2018, arXiv:1802.01561)."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.on_policy import OnPolicyAgent
from polyak.core.checks import check_state
from polyak.core.spaces import check_env_spec
from polyak.core.struct import check_settings, choice, number, struct
from polyak.core.types import Metrics, PyTree, Rollout, Scalar, Variables
from polyak.learning.asynchronous import receive_gradients, share_copies, state_of_worker, unshare_copies
from polyak.learning.batch import log_probs, make_batch, outputs_in_info
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
from polyak.ops.losses import masked_mean_and_variance
from polyak.ops.returns import vtrace
from polyak.ops.schedules import Schedule
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.sde import check_no_sde


@struct(kw_only=True)
class IMPALA(OnPolicyAgent):
    """IMPALA for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

        L(θ) = E[ -log π_θ(a|s) A + c_v (V_θ(s) - v)² - c_e H ]

    The value targets v and the advantages A are those of `polyak.ops.returns.vtrace`, with the ratio ρ = π(a|s) / μ(a|s) of the
    newest policy to the one that collected the rollout. Rollouts may be of any age; where the policies are equal, it is A2C
    with n-step returns (at `gae_lambda=1`). One gradient step is taken on each rollout.

    Attributes:
        learning_rate: the optimizer's, a number or a schedule such as `Linear`.
        gae_lambda: trace decay λ.
        rho_clip: ρ̄, the most that a transition counts; it decides which policy's values are learned.
        c_clip: c̄, the most that a trace counts; it decides how fast. At most `rho_clip`.
        normalize_advantage: normalize the advantages of a rollout to mean 0 and standard deviation 1.
        optimizer_name: `"rmsprop"`, that of TensorFlow 1 with which IMPALA was published, or `"adam"`.
        rms_decay: RMSProp's α, the decay of the mean square.
        rms_eps: RMSProp's ε, inside the square root.
        optimizer: any `optax.GradientTransformation`, in place of these two, `learning_rate` and `max_grad_norm`.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> import jax
    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = IMPALA(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_steps: int = 20
    learning_rate: Schedule = 7e-4
    gae_lambda: Scalar = 1.0
    rho_clip: Scalar = number(default=1.0, above=0)
    c_clip: Scalar = number(default=1.0, at_least=0)
    normalize_advantage: bool = choice(default=False, choices=(True, False))
    optimizer_name: Literal["rmsprop", "adam"] = choice(default="rmsprop", choices=("rmsprop", "adam"))
    rms_decay: Scalar = number(default=0.99, at_least=0, at_most=1)
    rms_eps: Scalar = number(default=1e-5, above=0)

    def __post_init__(self) -> None:
        check_env_spec("IMPALA", self.spec)
        object.__setattr__(self, "network", network_or_default("IMPALA", self.network, self.spec))
        check_settings(self)
        check_on_policy(self)
        check_no_sde("IMPALA", model_of(self).network)

    init = create_state
    prefers_single_thread = prefers_single_thread
    apply = apply_gradients
    share = share_copies
    unshare = unshare_copies
    worker_state = state_of_worker
    receive = receive_gradients
    diagnose = diagnose_skips

    @property
    def max_lag(self) -> None:
        """A rollout may be of any age: V-trace corrects for it."""

    def policy(self, state: OnPolicyState) -> Greedy:
        """The most probable action, by the shared copy if there is one."""
        check_state("IMPALA.policy", state, OnPolicyState)
        return Greedy(self._network_policy(state, newest_variables(state)))

    def collect_policy(self, state: OnPolicyState) -> NetworkPolicy | DiscountedReturn:
        """A sample from the policy of the online network, whose parameters are stored with it."""
        check_state("IMPALA.collect_policy", state, OnPolicyState)
        policy = self._network_policy(state, state.copies.online, return_info=True)
        return DiscountedReturn(policy, self.gamma) if self.normalize_reward == "return" else policy

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
        behaviour_params, _ = outputs_in_info(rollout, value, "IMPALA")
        model = model_of(self)
        batch, bad_data = make_batch(model, rollout, obs, weight, carry, behaviour_params, value, axis_name)

        # log π(a|s) - log μ(a|s)
        log_rho = log_probs(model, rollout, params) - log_probs(model, rollout, behaviour_params)
        value_target, advantage = vtrace(
            log_rho,
            scaled_reward(self, state, rollout),
            value[:-1],
            value[1:],
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        batch = batch.with_advantages(advantage, value_target)
        rho, _ = masked_mean_and_variance(jnp.minimum(self.rho_clip, jnp.exp(log_rho)), weight, axis_name)
        return gradients_and_summary(self, state, rollout, batch, bad_data, weight, axis_name, {"rho": rho})

    def _network_policy(self, state: OnPolicyState, variables: Variables, *, return_info: bool = False) -> NetworkPolicy:
        return NetworkPolicy(variables, state.obs_normalizer, model_of(self).network, self.spec, return_info, self.squash)

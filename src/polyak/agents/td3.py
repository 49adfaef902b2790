"""Twin delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.action_noise import ParameterNoiseSettings
from polyak.agents.delayed_actor import ValueCriticsAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.agents.sequence_settings import SequenceSettings
from polyak.core.checks import check_unset
from polyak.core.struct import integer, setting, struct
from polyak.core.types import PyTree, Terms, Variables
from polyak.learning.actor_critic_updates import check_critics, check_num_target_critics, min_of_critics
from polyak.networks.actor import Actor
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule, check_schedule, value_at
from polyak.policies.critic_state import WithCriticState
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, NetworkPolicy
from polyak.policies.noise import GaussianNoise
from polyak.policies.sde import StateDependentExploration, check_sde
from polyak.replay.replay import Transition


@struct(kw_only=True)
class TD3(SequenceSettings, ParameterNoiseSettings, ValueCriticsAgent):
    """TD3 for Box actions.

        L(θ) = E[ Σ_i huber_κ(y - Q_θi(s, a)) ],    y = r + γ^m min_i Q_target,i(s', a'),
                                                    a' = clip(π_target(s') + clip(ε, ±c), ±1),  ε ~ N(0, σ²)
        J(φ) = E[ Q_θ1(s, π_φ(s)) ]

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. Every
    `policy_delay`-th gradient step of the critics also takes one of the actor, against the new critics; every
    `target_period`-th one moves the targets of both.

    Attributes:
        actor: a network that returns `(action_params, value)`, of which tanh(loc) is the action; None takes
            `Actor(std="fixed")`. In its own loss it is in training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics()`, which has N = 2,
            after a cell with a built-in recurrent actor; see `replay`.
            Dropout is on in their loss and target. Batch normalization uses the statistics of the batch in their loss, and
            running ones elsewhere; critics with batch normalization have dropout in their own loss alone.
        num_target_critics: number of critics sampled for each target, as in REDQ (Chen et al. 2021, arXiv:2101.05982); the
            target takes the minimum of their values, and the actor maximizes the mean over all critics. None takes the minimum
            over all critics in the target, and the first critic for the actor.
        exploration_noise: standard deviation of the noise on collected actions, a number or a schedule; 0 disables the noise.
        sde_sample_freq: explore by state-dependent noise (Raffin et al. 2020, arXiv:2005.05719) in place of Gaussian noise,
            drawn anew every this number of steps; needs `Actor(std="sde")`, the default actor then, with log_std -3. No loss
            of TD3 has a density, so σ stays e^log_std. None draws noise independently.
        ema_tau: keep an average of the actor that moves by this fraction towards the online actor after every gradient step,
            and evaluate and export that average; None evaluates the online actor. The target actor is another average, as
            fast as the critics need: `tau` and `target_period`.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = TD3(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    num_target_critics: int | None = integer(default=None, optional=True)
    exploration_noise: Schedule = setting(default=0.1, check=partial(check_schedule, above=-1.0, at_least=0))
    sde_sample_freq: int | None = integer(default=None, optional=True)

    def default_actor(self) -> Actor:
        """The actor where none is set; with `sde_sample_freq` for state-dependent noise."""
        return super().default_actor() if self.sde_sample_freq is None else Actor(std="sde", log_std=-3.0)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_sde(self, self._actor)
        if self.sde_sample_freq is not None:
            check_unset(self, ("exploration_noise",), "has no effect with sde_sample_freq; leave it out")
        self.check_parameter_noise(self.actor, ("exploration_noise", "sde_sample_freq"))

    def check_critics(self, variables: Variables) -> None:
        """Check the critics, and that there are at least `num_target_critics`."""
        num_critics = check_critics(self._critics, variables, self.spec_of("critic"))
        check_num_target_critics("TD3", self.num_target_critics, num_critics)

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | WithCriticState | DiscountedReturn:
        """The actor's action with noise; until `learning_starts` uniformly random actions."""
        policy, freq = self.network_policy(state, state.copies.actor.online), self.sde_sample_freq
        # As a number, so that workers evaluate no schedule.
        scale = value_at(self.exploration_noise, state.env_steps)
        on_actions = GaussianNoise(policy, scale) if freq is None else StateDependentExploration(policy, freq)
        explorer = self.add_parameter_noise(policy) or on_actions
        return self.to_collect(RandomWarmStart(explorer, self.learning_starts, state.env_steps), state)

    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        noise_key, dropout_key, subset_key = jax.random.split(key, 3)
        next_action = self._smooth(self.deterministic_action(target_actor, batch.next_obs), noise_key)
        next_q = self.q_values(target, batch.next_obs, next_action, dropout_key)
        value = min_of_critics(next_q, self.num_target_critics, subset_key)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * value)

    def actor_objective(
        self, q: Float[Array, "B N *M"], action: PyTree, batch: Transition, axis_name: str | None
    ) -> tuple[Float[Array, ""], Terms]:
        """-J(φ), of the first critic, or of the mean of an ensemble of which targets take a subset; no terms."""
        return -weighted_sum(q[:, 0] if self.num_target_critics is None else jnp.mean(q, axis=1), batch.weight), {}

    def network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        """The policy of an actor, which is deterministic without `sde_sample_freq`."""
        is_deterministic = self.sde_sample_freq is None
        return dataclasses.replace(super().network_policy(state, actor), is_deterministic=is_deterministic)

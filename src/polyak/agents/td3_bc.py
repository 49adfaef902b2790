"""TD3+BC: TD3 whose actor stays near the actions of the data (Fujimoto and Gu 2021, arXiv:2106.06860)."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.delayed_actor import ValueCriticsAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.core.struct import choice, number, setting, struct
from polyak.core.types import PyTree, Scalar, Terms, Variables
from polyak.learning.actor_critic_updates import action_dimensions, check_critics
from polyak.ops.losses import mean_square, sum_over_devices, weighted_sum
from polyak.ops.schedules import Schedule, check_schedule, value_at
from polyak.policies.critic_state import WithCriticState
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.noise import GaussianNoise
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Transition


@struct(kw_only=True)
class TD3BC(ValueCriticsAgent):
    """TD3+BC for Box actions, learned from a data set; see `polyak.train.offline`.

        L(θ) = E[ Σ_i huber_κ(y - Q_θi(s, a)) ],    y = r + γ^m min_i Q_target,i(s', a'),
                                                    a' = clip(π_target(s') + clip(ε, ±c), ±1),  ε ~ N(0, σ²)
        J(φ) = E[ λ Q_θ1(s, π_φ(s)) - |π_φ(s) - a|² / dim A ],    λ = α / E|Q_θ1(s, π_φ(s))|

    Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. The paper normalizes observations, `normalize_obs=True`
    in the preset.

    ReBRAC (Tarasov et al. 2023, arXiv:2305.09836) has the actor's loss

        E[ β |π_φ(s) - a|² - λ min_i Q_θi(s, π_φ(s)) ],    λ = 1 / E|min_i Q_θi(s, π_φ(s))|

    which is β dim A times the loss here with `q_weight` = 1 / (β dim A) and `actor_q="min"`. Its target has a penalty,
    `critic_penalty` = β_2, of actions that differ from the data's in s', â':

        y = r + γ^m (min_i Q_target,i(s', a') - β_2 |a' - â'|²)

    The rest of it is `critics=Critics((256, 256, 256), norm="layer")`, an actor of three layers, `batch_size=1024`,
    `learning_rate=1e-3` and `normalize_obs=False`. ReBRAC normalizes layers after the activation, `Critics` before it.

    Attributes:
        actor: a network that returns `(action_params, value)`, of which tanh(loc) is the action; None takes
            `Actor(std="fixed")`. In its own loss it is in training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics()`, which has N = 2.
        q_weight: α, the weight of the value against the data's actions.
        normalize_q: False takes λ = α.
        actor_q: the value Q that the actor maximizes: of the `"first"` critic, as TD3's, or the `"min"` of all critics.
        critic_penalty: β_2 of ReBRAC; transitions after which an episode was cut short, whose â' is unknown, have no penalty.
            None takes none.
        exploration_noise: standard deviation of the noise on actions that are collected online, a number or a schedule; 0
            disables the noise.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = TD3BC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    q_weight: Scalar = number(default=2.5, at_least=0)
    normalize_q: bool = choice(default=True, choices=(True, False))
    actor_q: Literal["first", "min"] = choice(default="first", choices=("first", "min"))
    critic_penalty: Scalar | None = number(default=None, at_least=0, optional=True)
    exploration_noise: Schedule = setting(default=0.1, check=partial(check_schedule, above=-1.0, at_least=0))
    learning_rate: Schedule = 3e-4

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_no_sde("TD3BC", self._actor)

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return `(q, None)`."""
        check_critics(self._critics, variables, self.spec_of("critic"))

    def collect_policy(self, state: OffPolicyState) -> GaussianNoise | WithCriticState | DiscountedReturn:
        """The actor's action with Gaussian noise."""
        policy = self.network_policy(state, state.copies.actor.online)
        return self.to_collect(GaussianNoise(policy, value_at(self.exploration_noise, state.env_steps)), state)

    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        noise_key, dropout_key = jax.random.split(key)
        next_action = self._smooth(self.deterministic_action(target_actor, batch.next_obs), noise_key)
        next_q = jnp.min(self.q_values(target, batch.next_obs, next_action, dropout_key), axis=1)
        if self.critic_penalty is not None:
            next_q = next_q - self.critic_penalty * self._distance_to_data(next_action, batch)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q)

    def _distance_to_data(self, next_action: PyTree, batch: Transition) -> Float[Array, " N"]:
        """|a' - â'|² from the actions that the data have in s'; 0 where they have none.

        Raises:
            ValueError: the replay does not return them.
        """
        if batch.next_action is None or batch.has_next_action is None:
            raise ValueError("TD3BC: critic_penalty must be None for a replay whose transitions have no next_action")
        distance = action_dimensions(self.spec) * mean_square(next_action, batch.next_action)
        return jnp.where(batch.has_next_action, distance, 0.0)

    def actor_objective(
        self, q: Float[Array, "B N *M"], action: PyTree, batch: Transition, axis_name: str | None
    ) -> tuple[Float[Array, ""], Terms]:
        """-J(φ), and the distance from the data's actions as `bc_loss`."""
        q = q[:, 0] if self.actor_q == "first" else jnp.min(q, axis=1)
        size = sum_over_devices(weighted_sum(jnp.abs(jax.lax.stop_gradient(q)), batch.weight), axis_name)
        scale = size if self.normalize_q else jnp.ones(())
        distance = mean_square(action, batch.action)
        loss = weighted_sum(distance - self.q_weight / scale * q, batch.weight)
        return loss, {"bc_loss": jax.lax.stop_gradient(weighted_sum(distance, batch.weight))}

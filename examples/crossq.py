"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605v4) as an agent of your own: `python examples/crossq.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import polyak
from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.struct import check_settings, struct
from polyak.learning.actor_critic_updates import check_critics, critic_terms
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum


@struct(kw_only=True)
class CrossQ(SoftActorAgent):
    """SAC without target networks, whose critics normalize each batch together with its next states and actions.

        J_Q(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² ],    y = r + γ^m (min_i Q_θi(s', a') - α log π(a'|s')),  a' ~ π(·|s')

    without a gradient in y.

    Attributes:
        critics: a network with batch normalization; None takes `Critics((512, 512), norm="batch")`.
    """

    policy_delay: int = 3

    def __post_init__(self):
        self._check_boxes()
        self._set_networks(self._default_actor(), polyak.Critics((512, 512), norm="batch"))
        check_settings(self)
        self._check_together()

    def check_critics(self, variables):
        """Check that critics return `(q, None)`."""
        check_critics(self.critics, variables, self.spec)

    def critic_loss(self, params, batch, *, critics, target, actor, alpha, key):
        """J_Q of a batch, and its terms; `target` are the online critics, which are not used."""
        action_key, dropout_key = jax.random.split(key)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        # One forward pass: the statistics are those of the actions that were taken and of those of now together.
        now, later = (batch.obs, batch.action), (batch.next_obs, draw.action)
        both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now, later)
        q, stats = self.q_values_in_training(dataclasses.replace(critics, params=params), *both, dropout_key)
        q, next_q = jnp.split(q, 2)
        soft_value = jnp.min(next_q, axis=1) - alpha * draw.log_prob
        td_target = jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * soft_value)
        td_error = td_target[:, None] - q
        loss = weighted_sum(jnp.sum(0.5 * jnp.square(td_error), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def combine_critics(self, q):
        """The minimum of the critics, which the actor maximizes."""
        return jnp.min(q, axis=1)


def main(env_steps=1_000):
    """Train for a few steps."""
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=1, action_scaling="rescale")
    adam = optax.adam(1e-3, b1=0.5)
    agent = CrossQ(env.spec, optimizer=adam, learning_starts=500, replay=polyak.UniformReplay(20_000))
    return polyak.train.run(agent, env, env_steps=env_steps)


if __name__ == "__main__":
    print(main())

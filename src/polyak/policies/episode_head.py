"""A policy that acts by one of a network's heads, drawn for each episode."""

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from polyak.core.struct import struct
from polyak.core.types import TimeStep
from polyak.ops.distributions import Distribution
from polyak.ops.distributions.combinations import for_values
from polyak.policies.network_policy import BaseNetworkPolicy
from polyak.policies.wrapper import EpisodeDraw, sample_action


@struct
class EpisodeHead(BaseNetworkPolicy):
    """Acts by the action values of one head, drawn uniformly for each environment when an episode begins.

    `distribution` gets no key: at the beginning of an episode, unless `action` or a wrapper's `action` has drawn, it follows
    the first head.

    Attributes:
        network: a network that returns values `[B, n, K]` of K heads.
        noise_key: the key of the network's noise; None applies the network without noise.

    Source: Osband et al. 2016, arXiv:1602.04621.
    """

    noise_key: PRNGKeyArray | None = None

    def initial_state(self, batch_size: int) -> EpisodeDraw:
        """Nothing drawn."""
        return EpisodeDraw.empty(batch_size)

    def distribution(self, time_step: TimeStep, carry: EpisodeDraw) -> tuple[Distribution, EpisodeDraw]:
        """The softmax of the head's values, and the draw that fixes the head until the episode ends."""
        values, _, _ = self.network.apply(self.variables, self.network_obs(time_step), key=self.noise_key)
        number = jnp.where(jnp.asarray(time_step.first) & ~carry.is_drawn, 0.0, carry.number)
        head = jnp.floor(number * values.shape[2]).astype(jnp.int32)
        q = jnp.take_along_axis(values, head[:, None, None], axis=2)[..., 0]
        draw = EpisodeDraw(number, jnp.zeros_like(carry.is_drawn))
        return for_values(self.spec.action, q, time_step.action_mask), draw

    action = sample_action

"""Exploration of agents of action values: epsilon-greedy, Boltzmann, and noise of the network that is new at every step."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from polyak.core.struct import struct
from polyak.core.types import PolicyStep, PyTree, Scalar, TimeStep
from polyak.networks.q_network import is_noisy
from polyak.ops.distributions import Distribution
from polyak.policies.episode_head import EpisodeHead
from polyak.policies.exploration import Boltzmann, EpsilonGreedy
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.wrapper import PolicyWrapper, inner_predict


@struct
class FreshNoise(PolicyWrapper):
    """The inner policy, with new noise of its network at every step and in every row (Fortunato et al. 2018).

    Attributes:
        policy: directly around a `NetworkPolicy` or an `EpisodeHead`, whose network draws noise with the key of `apply`.
    """

    policy: EpsilonGreedy | Boltzmann

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The inner distribution without noise."""
        return self.policy.distribution(time_step, carry)

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner action with noise."""
        noise_key, key = jax.random.split(key)
        network_policy = dataclasses.replace(self.policy.policy, noise_key=noise_key)  # type: ignore[type-var]
        return dataclasses.replace(self.policy, policy=network_policy).action(time_step, carry, key)

    predict = inner_predict


def add_q_exploration(
    policy: NetworkPolicy | EpisodeHead, epsilon: Scalar, temperature: Scalar | None = None
) -> EpsilonGreedy | Boltzmann | FreshNoise:
    """Add exploration to the policy of a network of action values.

    Args:
        epsilon: probability of a random action; has no effect with a temperature.
        temperature: temperature of Boltzmann exploration; None explores epsilon-greedily.
    """
    explorer = EpsilonGreedy(policy, epsilon) if temperature is None else Boltzmann(policy, temperature)
    return FreshNoise(explorer) if is_noisy(policy.network) else explorer

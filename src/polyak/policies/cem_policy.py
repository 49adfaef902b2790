"""A policy that maximizes a network of action values over Box actions by the cross-entropy method."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Leaf, map_space
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, TimeStep
from polyak.networks.flow import sample_noise
from polyak.ops.cross_entropy_method import CEMSettings, cem_maximum
from polyak.ops.distributions.without_density import WithoutDensity
from polyak.policies.network_policy import BaseNetworkPolicy
from polyak.policies.wrapper import sample_action


@struct
class CEMPolicy(BaseNetworkPolicy):
    """Acts by argmax_a min_i Q_i(s, a), which the cross-entropy method finds, for actions in [-1, 1].

    Attributes:
        variables: the arrays of the critics.
        network: the critics, a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`.
        settings: of the cross-entropy method.
    """

    settings: CEMSettings = static()

    def initial_state(self, batch_size: int) -> PyTree:
        """`()`: there is no memory."""
        return ()

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple["CEMDistribution", PyTree]:
        """The distribution over actions, and the carry."""
        return CEMDistribution(self, self.network_obs(time_step)), carry

    action = sample_action

    def best_action(self, obs: PyTree, noise: PyTree) -> PyTree:
        """The best action for normalized observations `[B, ...]`, of samples by noise `[K, N, B, ...]`; see `cem_maximum`."""

        def q(action: PyTree) -> Float[Array, " B"]:
            (q, _), _, _ = self.network.apply(self.variables, (obs, action))
            return jnp.min(q, axis=1)

        # Not as one batch of N B rows: so the convolutions of an image are computed once.
        return cem_maximum(jax.vmap(q), noise, self.settings)


@struct
class CEMDistribution(WithoutDensity):
    """The distribution of the actions of a `CEMPolicy`, by the random numbers of its samples.

    Attributes:
        policy: the policy.
        obs: normalized observations, leaves `[B, ...]`.
    """

    owner: ClassVar[str] = "a policy of the cross-entropy method"

    policy: CEMPolicy
    obs: PyTree

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """The best action of new samples."""
        settings = self.policy.settings
        shape = settings.num_iterations, settings.num_samples, len(jax.tree.leaves(self.obs)[0])
        noise = sample_noise(self.policy.spec.action, math.prod(shape), seed)
        return self.policy.best_action(self.obs, jax.tree.map(lambda z: z.reshape(*shape, *z.shape[1:]), noise))

    def mode(self) -> PyTree:
        """The best action of samples by fixed random numbers, the same in all rows."""
        action, settings, rng = self.policy.spec.action, self.policy.settings, np.random.default_rng(0)
        shape, batch_size = (settings.num_iterations, settings.num_samples, 1), len(jax.tree.leaves(self.obs)[0])

        def draw(leaf: Leaf) -> Array:
            # Of NumPy, so that it is a constant in exported files.
            noise = rng.standard_normal((*shape, *leaf.shape), np.float32)
            return jnp.broadcast_to(noise, (*shape[:2], batch_size, *leaf.shape))

        return self.policy.best_action(self.obs, map_space(draw, action))

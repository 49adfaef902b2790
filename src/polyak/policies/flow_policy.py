"""Policies that make actions of noise: by a flow, or by one step of a network."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec, leaf_spaces, unflatten
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, TimeStep
from polyak.networks.action_units import from_unit
from polyak.networks.flow import apply_to_noise, integrate, sample_noise
from polyak.ops.distributions.without_density import WithoutDensity
from polyak.ops.losses import mean_square
from polyak.policies.network_policy import BaseNetworkPolicy
from polyak.policies.wrapper import sample_action

CANDIDATES = 31
"""Actions of which `FlowDistribution.mode` takes one."""

BANDWIDTH = 0.1
"""Standard deviation of the kernel of `FlowDistribution.mode`, in half ranges of an action."""


@struct
class FlowPolicy(BaseNetworkPolicy):
    """Acts by a network of noise, in actions that are scaled to [-1, 1] and clipped to the bounds of the space.

        a = x_K,    x_{k+1} = x_k + v(s, x_k, k / K) / K,    x_0 = z ~ N(0, I)        with K = `flow_steps`
        a = μ(s, z)                                                                  with `flow_steps` None

    Attributes:
        network: the velocity v or the function μ; see `polyak.networks.flow`.
        flow_steps: K; None for a network that makes actions in one step.
    """

    flow_steps: int | None = static(default=None)

    def initial_state(self, batch_size: int) -> PyTree:
        """`()`: there is no memory."""
        return ()

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple["FlowDistribution", PyTree]:
        """The distribution over actions, and the carry."""
        return FlowDistribution(self, self.network_obs(time_step)), carry

    action = sample_action

    def transform(self, obs: PyTree, noise: PyTree) -> PyTree:
        """The unclipped, unscaled output for normalized observations and noise, leaves `[B, ...]`."""
        if self.flow_steps is None:
            return apply_to_noise(self.network, self.variables, self.spec, (obs, noise))[0]
        return integrate(self.network, self.variables, self.spec, obs, noise, self.flow_steps)


@struct
class FlowDistribution(WithoutDensity):
    """The distribution of the actions of a `FlowPolicy`; it has samples and a mode, but no density.

    Attributes:
        policy: the policy.
        obs: normalized observations, leaves `[B, ...]`.
    """

    owner: ClassVar[str] = "a flow policy"

    policy: FlowPolicy
    obs: PyTree

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """The action of new noise for each row."""
        spec = self.policy.spec
        noise = sample_noise(spec.action, len(jax.tree.leaves(self.obs)[0]), seed)
        return from_unit(spec, self.policy.transform(self.obs, noise))

    def mode(self) -> PyTree:
        """The action with most others near it, of 31 actions of fixed noise: 0, 15 normal draws, and the negatives of these.

            argmax_i Σ_j exp(-|x_i - x_j|² / (2 h² dim A)),    h = 0.1 half ranges

        So it lies in the middle of a unimodal distribution, and near one of the modes of a multimodal one.
        """
        spec, batch_size = self.policy.spec, len(jax.tree.leaves(self.obs)[0])
        noise = jax.tree.map(lambda z: jnp.broadcast_to(z[:, None], (len(z), batch_size, *z.shape[1:])), _fixed_noise(spec))
        x = jax.vmap(lambda z: self.policy.transform(self.obs, z))(noise)
        clipped = jax.tree.map(lambda x: jnp.clip(x, -1.0, 1.0), x)
        distance = jax.vmap(lambda one: jax.vmap(lambda other: mean_square(one, other))(clipped))(clipped)
        density = jnp.sum(jnp.exp(-distance / (2 * BANDWIDTH**2)), axis=1)
        is_best = jnp.arange(CANDIDATES)[:, None] == jnp.argmax(density, axis=0)[None]

        def select_best(x: Float[Array, "K B ..."]) -> Float[Array, "B ..."]:
            return jnp.sum(jnp.where(is_best.reshape(*is_best.shape, *(1,) * (x.ndim - 2)), x, 0.0), axis=0)

        return from_unit(spec, jax.tree.map(select_best, x))


def _fixed_noise(spec: EnvSpec) -> PyTree:
    """Noise `[K, ...]` of the candidates; of NumPy, so that it is a constant in exported files."""
    rng = np.random.default_rng(0)
    shapes = [leaf.shape for _, leaf in leaf_spaces(spec.action)]
    drawn = [rng.standard_normal((CANDIDATES // 2, *shape), np.float32) for shape in shapes]
    return unflatten(spec.action, [np.concatenate([np.zeros_like(z[:1]), z, -z]) for z in drawn])

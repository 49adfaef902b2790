"""Exploration by noise on the parameters of a network, which stays the same for an episode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.core.spaces import Box
from polyak.core.struct import check_settings, number, struct
from polyak.core.types import PolicyStep, PyTree, RecurrentNetwork, Scalar, TimeStep
from polyak.ops.distributions import Distribution, broadcast_params
from polyak.ops.losses import mean_square
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.wrapper import PolicyWrapper, check_wrapped

PERIOD = 50
"""Steps of an environment between two changes of its σ, as in the authors' code."""

FACTOR = 1.01
"""The factor of a change of σ."""

LARGEST = 100.0
"""The largest σ / δ: where no noise moves the actions by δ, σ would grow to infinity."""


@struct
class ParameterNoiseCarry:
    """The noise of each environment.

    Attributes:
        noise: ε ~ N(0, 1) of each of P parameters; 0 for layers of normalization.
        std: σ.
        distance: sum of mean (π(s) - π̃(s))² since σ was last changed.
        steps: steps in this sum; -1 before the first noise is drawn.
    """

    noise: Float[Array, "B P"]
    std: Float[Array, " B"]
    distance: Float[Array, " B"]
    steps: Int32[Array, " B"]


@struct
class ParameterNoise(PolicyWrapper):
    """The action of an actor with noise on its parameters, in each environment its own.

        θ̃ = θ + σ ε,    ε ~ N(0, 1) for each parameter, drawn where an episode begins

    The same state gets the same action until the episode ends, apart from what θ learns. After 50 steps of an environment its
    σ grows by 1 % if the actions of θ̃ were at most δ from the actions of θ, else it shrinks by 1 %:

        √ E[ (π(s) - π̃(s))² / dim A ] ≤ δ,    the mean over these steps

    σ is at most 100 δ. Parameters differ in scale, so the layers should be normalized (`norm="layer"`). Arrays in a layer whose
    name ends with `norm` or `norms`, scale and bias of normalization, get no noise. The noise takes B · P numbers, and each
    environment has its own products of matrices, so this is for small networks.

    `distribution` has the noise so far: wrappers that act by the distribution of their inner policy, such as `GaussianNoise`,
    draw none.

    Attributes:
        policy: the policy of a network with Box actions, not recurrent.
        delta: δ, in the units of agents' actions (`EnvSpec.action_bounds`); also the first σ.

    Raises:
        TypeError, ValueError: `policy` is another policy, its network is recurrent, or `delta` is not above 0.

    Source: Plappert et al. 2018, arXiv:1706.01905, section 3 and appendix C; there σ follows distances in states of a replay.
    """

    policy: NetworkPolicy
    delta: Scalar = number(default=0.2, above=0)

    def __post_init__(self) -> None:
        check_wrapped("ParameterNoise", self.policy, (Box,), every=True, instead="take EpsilonGreedy or noisy layers")
        if not isinstance(self.policy, NetworkPolicy) or isinstance(self.policy.network, RecurrentNetwork):
            raise TypeError(f"ParameterNoise: policy must be a NetworkPolicy without a recurrent network, got {self.policy!r}")
        check_settings(self)

    def initial_state(self, batch_size: int) -> ParameterNoiseCarry:
        """No noise yet.

        Raises:
            ValueError: no parameter of the network would get noise.
        """
        network = self.policy.network
        if not self._has_noise.any():
            raise ValueError(f"ParameterNoise: policy must have parameters outside of normalization, got {network!r}")
        noise = jnp.zeros((batch_size, len(self._has_noise)), jnp.float32)
        std = jnp.full(batch_size, self.delta, jnp.float32)
        return ParameterNoiseCarry(noise, std, jnp.zeros_like(std), jnp.full(batch_size, -1, jnp.int32))

    def distribution(self, time_step: TimeStep, carry: ParameterNoiseCarry) -> tuple[Distribution, ParameterNoiseCarry]:
        """The distribution of the network with the noise so far."""
        variables, network = self.policy.variables, self.policy.network
        vector, unravel = ravel_pytree(variables.params)

        def params_of(noise: Float[Array, " P"], obs: PyTree) -> PyTree:
            noisy = dataclasses.replace(variables, params=unravel(vector + noise.astype(vector.dtype)))
            (params, _), _, _ = network.apply(noisy, jax.tree.map(lambda x: x[None], obs))
            return jax.tree.map(lambda x: x[0], broadcast_params(self.spec.action, params))

        params = jax.vmap(params_of)(carry.std[:, None] * carry.noise, self.policy.network_obs(time_step))
        return self.policy.for_action(self.spec.action, params, time_step.action_mask, squash=self.policy.squash), carry

    def action(self, time_step: TimeStep, carry: ParameterNoiseCarry, key: PRNGKeyArray) -> PolicyStep:
        """The mode with the noise of the episode."""
        is_drawn = jnp.asarray(time_step.first) | (carry.steps < 0)
        noise = jax.lax.cond(jnp.any(is_drawn), self._draw, lambda noise, *_: noise, carry.noise, is_drawn, key)
        carry = dataclasses.replace(carry, noise=noise, steps=jnp.maximum(carry.steps, 0))
        action, (without, _) = self.distribution(time_step, carry)[0].mode(), self.policy.distribution(time_step)
        distance = mean_square(action, without.mode())
        return PolicyStep(action, _adapt(carry, distance, ~jnp.asarray(time_step.last), self.delta))

    def _draw(self, noise: Float[Array, "B P"], is_drawn: Bool[Array, " B"], key: PRNGKeyArray) -> Float[Array, "B P"]:
        """The noise, new in the rows where it is drawn."""
        fresh = jnp.where(jnp.asarray(self._has_noise)[None], jax.random.normal(key, noise.shape, noise.dtype), 0.0)
        return jnp.where(is_drawn[:, None], fresh, noise)

    @property
    def _has_noise(self) -> npt.NDArray[np.bool_]:
        """False for the parameters of layers of normalization; `[P]`, in the order of `ravel_pytree`."""

        def is_normalization(path: tuple[Any, ...]) -> bool:
            layers = jax.tree_util.keystr(path, simple=True, separator="/").lower().split("/")
            # Flax Linen counts layers of a class: `LayerNorm_0`.
            return any(layer.rstrip("_0123456789").endswith(("norm", "norms")) for layer in layers)

        leaves = jax.tree_util.tree_leaves_with_path(self.policy.variables.params)
        return np.concatenate([np.full(jnp.size(x), not is_normalization(path)) for path, x in leaves])


def _adapt(
    carry: ParameterNoiseCarry, distance: Float[Array, " B"], valid: Bool[Array, " B"], delta: Scalar
) -> ParameterNoiseCarry:
    """The carry with the distance of a step, if that is valid, and with another σ after `PERIOD` of them."""
    total, steps = carry.distance + jnp.where(valid, distance, 0.0), carry.steps + valid.astype(jnp.int32)
    is_due = steps >= PERIOD
    grown = jnp.minimum(carry.std * FACTOR, LARGEST * delta)
    std = jnp.where(jnp.sqrt(total / PERIOD) <= delta, grown, carry.std / FACTOR)
    return ParameterNoiseCarry(
        noise=carry.noise,
        std=jnp.where(is_due, std, carry.std),
        distance=jnp.where(is_due, 0.0, total),
        steps=jnp.where(is_due, 0, steps),
    )

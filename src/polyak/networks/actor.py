"""Networks of actors without a critic: the parameters of the action's distribution alone."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.printing import short_repr
from polyak.core.spaces import Box, EnvSpec, Leaf, map_space
from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables
from polyak.networks.adapters import FlaxNNX
from polyak.networks.layers import Activation, PolicyHead, Std, Torso, check_layers

LOG_STD_RANGE = (-20.0, 2.0)
"""Between these the logarithm of a standard deviation is clipped, so that the density of an action stays finite."""


SDE_EPS = 1e-6
"""Added to the variance of state-dependent exploration, which features of 0 make 0."""


@struct
class SDE:
    """What state-dependent exploration needs beside the parameters of an action's distribution.

    Attributes:
        features: z(s).
        std: σ, a row for each feature and a column for each number of the action.
    """

    features: Float[Array, "B F"]
    std: Float[Array, "F A"]


@short_repr()
@dataclass(frozen=True, repr=False)
class Actor:
    """Settings of the built-in network of an actor; its output is `(action_params, None)`, since it has no value.

    With `std="sde"`, for generalised state-dependent exploration, it is `(action_params, SDE(features, std))`: the deviation
    of one Box action is √(z(s)² · σ²), z(s) the features of the last dense layer and σ a matrix of parameters.

    Images pass through the three convolutions of `nature_cnn`; everything else is flattened.

    Attributes:
        hidden: widths of the dense layers.
        activation: after each of them.
        std: the standard deviation of Box actions: `"state"`, an output of the last layer, clipped to [e⁻²⁰, e²]; `"free"`, a
            parameter; `"fixed"`, e^log_std, for a deterministic actor to which noise is added; `"sde"`, see above.
        log_std: the logarithm of that deviation, where it is learned the initial one; with `"sde"` of each number of σ.
        squash_mean: the mean of Box actions is middle + half_range · tanh(x), inside the bounds of the action.
        orthogonal: orthogonal weights with gain √2, 0.01 in the last layer, and biases 0; else as PyTorch's.

    Raises:
        TypeError, ValueError: a setting is out of its range.
        ValueError: when an agent is built, for means to be squashed without a Box or into bounds that are not finite, and for
            `"sde"` with an action that is no Box.

    Source: Raffin et al. 2020, arXiv:2005.05719 (state-dependent exploration).
    """

    hidden: tuple[int, ...] = (256, 256)
    activation: Activation = "relu"
    std: Std = "state"
    log_std: float = 0.0
    squash_mean: bool = False
    orthogonal: bool = False

    def __post_init__(self) -> None:
        check_layers(self, ("free", "state", "fixed", "sde"))

    @property
    def shared_torso(self) -> bool:
        """There is no critic to share with."""
        return False

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers."""
        return self.hidden

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, None), carry, stats)` for obs leaves `[B, ...]`; with `std="sde"` an `SDE` in place of None."""
        return FlaxNNX(self._module).apply(variables, obs, carry, train=train, key=key)

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _ActorModule(self, spec, rngs)


class _ActorModule(nnx.Module):
    """Encoder, dense layers, and the head of the action's distribution."""

    def __init__(self, settings: Actor, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.action = spec.action
        self.actor = Torso(settings, spec, rngs)
        self.policy = PolicyHead(self.actor.features, settings, spec, rngs)
        self.has_sde = settings.std == "sde"
        if self.has_sde:
            if not isinstance(spec.action, Box):
                raise ValueError(f"network: std='sde' needs an action that is one Box, got {spec.action}")
            shape = self.actor.features, int(np.prod(spec.action.shape))
            self.log_std = nnx.Param(jax.device_put(np.full(shape, settings.log_std, np.float32)))

    def __call__(self, obs: PyTree) -> tuple[PyTree, SDE | None]:
        features = self.actor(obs)
        params = self.policy(features)
        if not self.has_sde:
            return map_space(_in_range, self.action, params), None
        std = jnp.exp(jnp.clip(self.log_std[...], *LOG_STD_RANGE))
        variance = jnp.square(features) @ jnp.square(std) + SDE_EPS
        log_scale = 0.5 * jnp.log(variance).reshape(params["loc"].shape)
        return map_space(_in_range, self.action, {"loc": params["loc"], "log_scale": log_scale}), SDE(features, std)


def _in_range(space: Leaf, params: PyTree) -> PyTree:
    if not isinstance(space, Box):
        return params
    return {"loc": params["loc"], "log_scale": jnp.clip(params["log_scale"], *LOG_STD_RANGE)}

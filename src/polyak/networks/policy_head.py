"""The layers that compute the parameters of an action's distribution, and the features of state-dependent exploration."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float

from polyak.core.spaces import (
    Box,
    Discrete,
    EnvSpec,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    leaf_spaces,
    needs_bounds,
    unflatten,
)
from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables
from polyak.networks.adapters import merge
from polyak.networks.heads import PolicySettings
from polyak.networks.layers import Layer, entry_name

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of the log standard deviation of `Actor` and of state-dependent exploration, so that the density of an action stays
finite. `PolicyAndValue` with another `std` does not clip it."""

SDE_EPS = 1e-6
"""Added to the variance of state-dependent exploration, which features of 0 make 0."""


def check_means(settings: PolicySettings, action: Space) -> None:
    """Check that `squash_mean` comes with a Box, and that all Boxes have finite bounds.

    Raises:
        ValueError: there is no Box, or one is unbounded.
    """
    boxes = {path: leaf for path, leaf in leaf_spaces(action) if isinstance(leaf, Box)}
    if settings.squash_mean and not boxes:
        raise ValueError(f"network: squash_mean must be False without a Box action, got {action}")
    for path, leaf in boxes.items():
        if settings.squash_mean and not leaf.bounded:
            raise ValueError(f"network: squash_mean {needs_bounds(leaf, path)}, or set squash_mean=False")


@struct
class SDE:
    """The features and standard deviations of state-dependent exploration.

    Attributes:
        features: z(s).
        std: σ, a row for each feature and a column for each number of the action.

    Source: Raffin et al. 2020, arXiv:2005.05719.
    """

    features: Float[Array, "B F"]
    std: Float[Array, "F A"]

    @property
    def log_scale(self) -> Float[Array, "B A"]:
        """The logarithm of √(z² · σ²), the standard deviation of the sum of independent numbers z_f σ_fa ε_fa."""
        return 0.5 * jnp.log(jnp.square(self.features) @ jnp.square(self.std) + SDE_EPS)


def sde_of(variables: Variables, obs: PyTree) -> SDE:
    """Features and σ of a built-in network with `std="sde"`; in one program with `apply`, XLA computes its layers once."""
    module = merge(variables)
    module.eval()
    return module.policy.sde(module.actor(obs))


class PolicyHead(nnx.Module):
    """One linear layer for all parts of the action, and the logarithm of the standard deviation for Box parts.

    With `std="state"`, the standard deviation starts at the same number in every state: its kernel starts at 0. With `"sde"`
    it is √(z² · σ²), z the features; `learn_features=False` stops the gradient into z.
    """

    def __init__(
        self,
        features: int,
        settings: PolicySettings,
        spec: EnvSpec,
        rngs: nnx.Rngs,
        *,
        orthogonal: bool,
        learn_features: bool = True,
    ) -> None:
        self.spec = spec
        self.has_sde, self.learn_features = settings.std == "sde", learn_features
        if self.has_sde and not isinstance(spec.action, Box):
            raise ValueError(f"network: std='sde' needs an action that is one Box, got {spec.action}")
        check_means(settings, spec.action)
        self.squash_mean = settings.squash_mean
        boxes = [(path, leaf) for path, leaf in leaf_spaces(spec.action) if isinstance(leaf, Box)]
        outputs = sum(_outputs(leaf) for _, leaf in leaf_spaces(spec.action))
        self.linear = Layer(features, outputs, rngs, gain=0.01 if orthogonal else None)
        shapes: dict[str, tuple[int, ...]] = {path: leaf.shape for path, leaf in boxes if settings.std == "free"}
        if self.has_sde:
            shapes = {"": (features, outputs)}
        self.fixed_log_std = settings.log_std
        log_std = {entry_name(path): np.full(shape, settings.log_std, np.float32) for path, shape in shapes.items()}
        self.log_std = nnx.Dict({name: nnx.Param(jax.device_put(array)) for name, array in log_std.items()})
        zeros, constant = nnx.initializers.zeros, nnx.initializers.constant(settings.log_std)
        scale = partial(nnx.Linear, features, kernel_init=zeros, bias_init=constant, rngs=rngs)
        self.scales = nnx.Dict({entry_name(path): scale(_outputs(leaf)) for path, leaf in boxes if settings.std == "state"})

    def __call__(self, hidden: Float[Array, "B features"]) -> PyTree:
        """In the tree of `ops.distributions.parameter_shapes`."""
        leaves = list(leaf_spaces(self.spec.action))
        columns = jnp.split(self.linear(hidden), np.cumsum([_outputs(leaf) for _, leaf in leaves])[:-1], axis=-1)

        def leaf_params(path: str, space: Leaf, column: Array) -> PyTree:
            match space:
                case Box():
                    loc = column.reshape(*column.shape[:-1], *space.shape)
                    return {"loc": self._mean(loc, space), "log_scale": self._log_scale(hidden, path, loc.shape)}
                case MultiBinary():
                    return column.reshape(*column.shape[:-1], *space.shape)
                case _:
                    return column

        return unflatten(self.spec.action, [leaf_params(*leaf, column) for leaf, column in zip(leaves, columns, strict=True)])

    def sde(self, hidden: Float[Array, "B features"]) -> SDE:
        """Features and σ of state-dependent exploration."""
        return SDE(hidden, jnp.exp(jnp.clip(self.log_std[entry_name("")][...], *LOG_STD_RANGE)))

    def _log_scale(self, hidden: Array, path: str, shape: tuple[int, ...]) -> Array:
        if self.has_sde:
            return self.sde(hidden if self.learn_features else jax.lax.stop_gradient(hidden)).log_scale.reshape(shape)
        name = entry_name(path)
        if name in self.scales:
            return self.scales[name](hidden).reshape(shape)
        return jnp.broadcast_to(self.log_std[name][...], shape) if name in self.log_std else jnp.full(shape, self.fixed_log_std)

    def _mean(self, loc: Array, space: Box) -> Array:
        """Squashed, mid + half_range · tanh(loc) with the bounds of the agent's actions."""
        if not self.squash_mean:
            return loc
        middle, half_range = (jnp.asarray(x) for x in range_of_means(self.spec, space))
        return middle + half_range * jnp.tanh(loc)


def range_of_means(spec: EnvSpec, space: Box) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """`(middle, half_range)`, `[1, ...]`, of the bounds of the agent's actions in this part."""
    # Halves first: the range of a wide box overflows.
    low, high = (bound.reshape(1, *space.shape) / 2 for bound in spec.action_bounds(space))
    return high + low, high - low


def _outputs(space: Leaf) -> int:
    """Number of outputs of the linear layer for one part of the action."""
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.nvec)
        case _:
            return int(np.prod(space.shape))

"""The Flax modules that the built-in networks are made of: an observation's way in, dense layers, and the heads."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.spaces import (
    Box,
    Discrete,
    EnvSpec,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    in_action,
    leaf_spaces,
    map_space,
    zeros,
)
from polyak.core.struct import struct
from polyak.core.types import Network, PyTree, Variables
from polyak.kernels.convolution import convolve
from polyak.kernels.matmul import matmul
from polyak.networks.initializers import constant, orthogonal, uniform

Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": nnx.relu,
    "elu": nnx.elu,
    "gelu": nnx.gelu,
    "silu": nnx.silu,
}
Std: TypeAlias = Literal["free", "state", "fixed", "sde"]
MAX_NARROW_WIDTH = 256
MAX_SMALL_BATCH = 256
"""More samples at a time compute faster on several CPU threads."""

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of the log standard deviation of `Actor` and of state-dependent exploration, so that the density of an action stays
finite. `ActorCritic` with another `std` does not clip it."""

SDE_EPS = 1e-6
"""Added to the variance of state-dependent exploration, which features of 0 make 0."""

# Methods and attributes of `nnx.Dict`: an entry of such a name would hide one, or be hidden.
RESERVED_NAMES = frozenset(name.rstrip("_") for name in dir(nnx.Dict()))


@runtime_checkable
class HasLayerWidths(Protocol):
    """The settings of a built-in network, of values or of an actor and a critic."""

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense and recurrent layers."""
        ...


@runtime_checkable
class LayerSettings(Protocol):
    """The settings that all built-in actor-critic networks have."""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the dense layers."""
        ...

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense and recurrent layers of actor and critic."""
        ...

    @property
    def activation(self) -> Activation:
        """After each of them."""
        ...

    @property
    def shared_torso(self) -> bool:
        """Actor and critic share all but the heads."""
        ...

    @property
    def log_std(self) -> float:
        """Initial logarithm of the standard deviation of Box actions."""
        ...

    @property
    def orthogonal(self) -> bool:
        """Orthogonal dense weights with gain √2, 0.01 in the policy's head, 1 in the value's; else as PyTorch's."""
        ...

    @property
    def std(self) -> Std:
        """`"free"`: a parameter, the same in every state; `"state"`: an output of the policy's head; `"fixed"`: a constant.

        `"sde"`: state-dependent exploration, of networks that are not recurrent.
        """
        ...

    @property
    def squash_mean(self) -> bool:
        """The mean of Box actions goes through tanh into the bounds that the agent's actions have."""
        ...


@runtime_checkable
class ValueHeadSettings(Protocol):
    """The setting that all built-in networks of action values have."""

    @property
    def dueling(self) -> bool:
        """Two heads, for the value of the state and the advantages."""
        ...


def check_layers(settings: LayerSettings, stds: tuple[Std, ...] = ("free", "state", "fixed")) -> None:
    """Check the settings of a network; widths become a tuple.

    Raises:
        TypeError, ValueError: a setting is invalid; the message names it.
    """
    object.__setattr__(settings, "hidden", widths("hidden", settings.hidden))
    check_choice("network", "activation", settings.activation, tuple(ACTIVATIONS))
    check_number("network", "log_std", settings.log_std)
    check_choice("network", "std", settings.std, stds)
    for name in ("shared_torso", "orthogonal", "squash_mean"):
        check_choice("network", name, getattr(settings, name), (True, False))


def check_means(settings: LayerSettings, action: Space) -> None:
    """Check that `squash_mean` comes with a Box, and that all Boxes have finite bounds.

    Raises:
        ValueError: there is no Box, or one is unbounded.
    """
    boxes = {path: leaf for path, leaf in leaf_spaces(action) if isinstance(leaf, Box)}
    if settings.squash_mean and not boxes:
        raise ValueError(f"network: squash_mean must be False where no action is a Box, got {action}")
    for path, leaf in boxes.items():
        if settings.squash_mean and not leaf.bounded:
            raise ValueError(f"network: squash_mean needs finite bounds, got {leaf}{in_action(path)}")


MAX_LAYERS, MAX_WIDTH = 256, 2**16
"""The largest network that settings, which may come from a file, can ask for."""


def widths(name: str, value: Any) -> tuple[int, ...]:
    """Widths of layers as a tuple.

    Raises:
        TypeError, ValueError: they are none, by the setting's name.
    """
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise TypeError(f"network: {name} must be widths such as (64, 64), got {value!r}")
    found = tuple(value)
    if len(found) > MAX_LAYERS:
        raise ValueError(f"network: {name} must have at most {MAX_LAYERS} layers, got {len(found)}")
    for width in found:
        check_integer("network", name, width)
        if width > MAX_WIDTH:
            raise ValueError(f"network: {name} must have widths of at most {MAX_WIDTH}, got {width}")
    return found


def is_narrow(network: Network, spec: EnvSpec) -> bool:
    """Whether no layer of a built-in network, nor its input, is wider than 256, and no input is an image.

    Up to that width a second CPU thread costs more than it gains: 2,048 samples in minibatches of 64 take 8.4 ms on one thread
    and 10.0 on two with layers of (64, 64), 62 and 113 with (256, 256).
    """
    if not isinstance(network, HasLayerWidths) or has_images(spec.obs):
        return False
    inputs = sum(math.prod(leaf.shape) for _, leaf in leaf_spaces(spec.obs))
    return max(inputs, *network.layer_widths, 1) <= MAX_NARROW_WIDTH


def has_images(space: Space) -> bool:
    """Whether a part of an observation passes through convolutions."""
    return any(is_image(leaf) for _, leaf in leaf_spaces(space))


def is_image(space: Space) -> TypeGuard[Box]:
    """A uint8 Box of three axes, large enough for the convolutions (36 pixels a side)."""
    if not (isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3):
        return False
    height, width = space.shape[1:] if channels_first(space.shape) else space.shape[:2]
    return min(height, width) >= 36


def channels_first(shape: tuple[int, ...]) -> bool:
    """CHW rather than HWC: the channels are the shorter of the first and the last axis; a tie is HWC."""
    return shape[0] < shape[-1]


class Layer(nnx.Module):
    """A linear layer, which starts orthogonal with a gain, or as PyTorch's."""

    def __init__(self, inputs: int, outputs: int, settings: LayerSettings, gain: float, rngs: nnx.Rngs) -> None:
        as_in_pytorch = uniform(inputs**-0.5)
        kernel, bias = (orthogonal(gain), constant(0.0)) if settings.orthogonal else (as_in_pytorch, as_in_pytorch)
        self.kernel = nnx.Param(kernel(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(bias(rngs.params(), (outputs,), jnp.float32))

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        """What is made of each row, x · W + b."""
        y = matmul(x, self.kernel[...])
        return y + self.bias.reshape(*(1,) * (y.ndim - 1), -1)


class Dense(nnx.Module):
    """Linear layers with an activation after each."""

    def __init__(self, inputs: int, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise((inputs, *settings.hidden))
        self.layers = nnx.List([Layer(a, b, settings, np.sqrt(2.0), rngs) for a, b in pairs])
        # By name: functions of JAX cannot be pickled, and so neither could a policy.
        self.activation = settings.activation

    def __call__(self, x: Float[Array, "B inputs"]) -> Float[Array, "B features"]:
        """The last layer's output."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class Convolutions(nnx.Module):
    """The three convolutions of Mnih et al. 2015 on one image."""

    def __init__(self, space: Box, rngs: nnx.Rngs) -> None:
        shape = space.shape
        self.byte_scale = space.byte_scale
        self.channels_first = channels_first(shape)
        channels = shape[0] if self.channels_first else shape[-1]
        init = orthogonal(np.sqrt(2.0))
        plan = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        self.strides = tuple(stride for *_, stride in plan)
        self.layers: Any = nnx.List(
            [nnx.Conv(i, o, (k, k), strides=(s, s), padding="VALID", kernel_init=init, rngs=rngs) for i, o, k, s in plan]
        )

    def __call__(self, x: Array) -> Float[Array, "B features"]:
        """The features of each image."""
        x = x.astype(jnp.float32) / self.byte_scale
        if self.channels_first:
            x = jnp.moveaxis(x, -3, -1)
        for layer, stride in zip(self.layers, self.strides, strict=True):
            x = nnx.relu(convolve(x, layer.kernel[...], stride) + layer.bias.reshape(1, 1, 1, -1))
        return x.reshape(x.shape[0], -1)


class Encoder(nnx.Module):
    """An observation of any space as one vector: images through convolutions, integers one-hot, all concatenated."""

    def __init__(self, space: Space, rngs: nnx.Rngs) -> None:
        self.space = space
        self.images = nnx.Dict({_name(path): Convolutions(leaf, rngs) for path, leaf in leaf_spaces(space) if is_image(leaf)})

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        """The vector of each observation."""
        vectors = jax.tree.leaves(map_space(_flat, self.space, obs))
        paths = [path for path, _ in leaf_spaces(self.space)]
        parts = [
            self.images[_name(path)](x) if _name(path) in self.images else x for path, x in zip(paths, vectors, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


class Torso(nnx.Module):
    """Encoder and dense layers."""

    def __init__(self, settings: LayerSettings, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(spec.obs, rngs)
        example = jax.tree.map(jnp.asarray, zeros(spec.obs, (1,)))
        inputs = nnx.eval_shape(self.encoder, example).shape[-1]
        self.dense = Dense(inputs, settings, rngs)
        self.features = settings.hidden[-1] if settings.hidden else inputs

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        """The features of each observation."""
        return self.dense(self.encoder(obs))


@struct
class SDE:
    """What state-dependent exploration needs beside the parameters of an action's distribution.

    Attributes:
        features: z(s).
        std: σ, a row for each feature and a column for each number of the action.

    Source: Raffin et al. 2020, arXiv:2005.05719.
    """

    features: Float[Array, "B F"]
    std: Float[Array, "F A"]

    @property
    def log_scale(self) -> Float[Array, "B A"]:
        """The logarithm of √(z² · σ²), the deviation of the sum of independent numbers z_f σ_fa ε_fa."""
        return 0.5 * jnp.log(jnp.square(self.features) @ jnp.square(self.std) + SDE_EPS)


def sde_of(variables: Variables, obs: PyTree) -> SDE:
    """Features and σ of a built-in network with `std="sde"`; in one program with `apply`, XLA computes its layers once."""
    module = nnx.merge(variables.graph, variables.params, variables.stats)
    sde: SDE = module.policy.sde(module.actor(obs))
    return sde


class PolicyHead(nnx.Module):
    """One linear layer for all parts of the action, and the logarithm of the standard deviation for Box parts.

    The deviation that depends on the state starts at the same number in every state: its kernel starts at 0. That of
    state-dependent exploration is √(z² · σ²), of the features z; with `learn_features` False its gradient is that of σ alone.
    """

    def __init__(
        self, features: int, settings: LayerSettings, spec: EnvSpec, rngs: nnx.Rngs, *, learn_features: bool = True
    ) -> None:
        self.spec = spec
        self.has_sde, self.learn_features = settings.std == "sde", learn_features
        if self.has_sde and not isinstance(spec.action, Box):
            raise ValueError(f"network: std='sde' needs an action that is one Box, got {spec.action}")
        check_means(settings, spec.action)
        self.squash_mean = settings.squash_mean
        boxes = [(path, leaf) for path, leaf in leaf_spaces(spec.action) if isinstance(leaf, Box)]
        outputs = sum(_outputs(leaf) for _, leaf in leaf_spaces(spec.action))
        self.linear = Layer(features, outputs, settings, 0.01, rngs)
        shapes: dict[str, tuple[int, ...]] = {path: leaf.shape for path, leaf in boxes if settings.std == "free"}
        if self.has_sde:
            shapes = {"": (features, outputs)}
        self.fixed_log_std = settings.log_std
        self.log_std = nnx.Dict(
            {
                _name(path): nnx.Param(jax.device_put(np.full(shape, settings.log_std, np.float32)))
                for path, shape in shapes.items()
            }
        )
        self.scales = nnx.Dict(
            {
                _name(path): nnx.Linear(
                    features,
                    _outputs(leaf),
                    kernel_init=nnx.initializers.zeros,
                    bias_init=nnx.initializers.constant(settings.log_std),
                    rngs=rngs,
                )
                for path, leaf in boxes
                if settings.std == "state"
            }
        )

    def __call__(self, hidden: Float[Array, "B features"]) -> PyTree:
        """In the tree of `ops.distributions.parameter_shapes`."""
        widths = [_outputs(leaf) for _, leaf in leaf_spaces(self.spec.action)]
        columns = iter(jnp.split(self.linear(hidden), np.cumsum(widths)[:-1], axis=-1))
        paths = iter([path for path, _ in leaf_spaces(self.spec.action)])

        def leaf_params(space: Leaf) -> PyTree:
            column, path = next(columns), next(paths)
            match space:
                case Box():
                    loc = column.reshape(*column.shape[:-1], *space.shape)
                    return {"loc": self._mean(loc, space), "log_scale": self._log_scale(hidden, path, loc.shape)}
                case MultiBinary():
                    return column.reshape(*column.shape[:-1], *space.shape)
                case _:
                    return column

        return map_space(leaf_params, self.spec.action)

    def sde(self, hidden: Float[Array, "B features"]) -> SDE:
        """Features and σ of state-dependent exploration."""
        return SDE(hidden, jnp.exp(jnp.clip(self.log_std[_name("")][...], *LOG_STD_RANGE)))

    def _log_scale(self, hidden: Array, path: str, shape: tuple[int, ...]) -> Array:
        if self.has_sde:
            return self.sde(hidden if self.learn_features else jax.lax.stop_gradient(hidden)).log_scale.reshape(shape)
        name = _name(path)
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
    """`(middle, half_range)`, `[1, ...]`, of the agent's actions in this part of the action, which a squashed mean stays in."""
    # Halves first: the range of a wide box overflows.
    low, high = (bound.reshape(1, *space.shape) / 2 for bound in spec.action_bounds(space))
    return high + low, high - low


def _outputs(space: Leaf) -> int:
    """How many numbers the linear layer gives for one part of the action."""
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.nvec)
        case _:
            return int(np.prod(space.shape))


def _flat(space: Leaf, x: Array) -> Array:
    """`[B, n]` float32 of one part of the observation; an image stays as it is for its convolutions."""
    if is_image(space):
        return x
    match space:
        case Discrete():
            return jax.nn.one_hot(x, space.n)
        case MultiDiscrete():
            return jnp.concatenate([jax.nn.one_hot(x[..., i], n) for i, n in enumerate(space.nvec)], axis=-1)
        case Box() if space.dtype == np.uint8:
            return x.astype(jnp.float32).reshape(x.shape[0], -1) / space.byte_scale
        case _:
            return x.astype(jnp.float32).reshape(x.shape[0], -1)


def _name(path: str) -> str:
    """The part's name in an `nnx.Dict`, where the names of its methods would hide it."""
    return f"{path}_" if path.rstrip("_") in RESERVED_NAMES else path or "all"

"""The Flax modules of the built-in networks: encoders of observations, and dense layers."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiDiscrete, Space, leaf_spaces, map_space, zeros
from polyak.core.types import Network, PyTree
from polyak.core.warn import warn
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
IMAGE = "a uint8 Box of three axes, height and width of at least 36, and channels first or last"
LARGE_BOX = 2048
"""Fewer numbers than in the smallest pictures, and more than in other observations of one Box."""
MAX_NARROW_WIDTH = 256
MAX_SMALL_BATCH = 256
MAX_SMALL_PRODUCT = 2**22
"""Wider layers, more samples at a time, or more multiplications in a product compute faster on several CPU threads."""

# Methods and attributes of `nnx.Dict`: an entry of such a name would hide one, or be hidden.
RESERVED_NAMES = frozenset(name.rstrip("_") for name in dir(nnx.Dict()))


INITIAL_STD = 0.5
"""Initial σ of the noise in a `NoisyLayer` of one input."""

MAX_LAYERS, MAX_WIDTH = 256, 2**16
"""Limits of the networks that settings, which may come from a file, can define."""


def set_widths(settings: Any, name: str) -> None:
    """Convert a setting with the widths of layers to a tuple.

    Raises:
        TypeError, ValueError: the value is no list of widths; the message names the setting.
    """
    owner, value = type(settings).__name__, getattr(settings, name)
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise TypeError(f"{owner}: {name} must be widths such as (64, 64), got {value!r}")
    found = tuple(value)
    if len(found) > MAX_LAYERS:
        raise ValueError(f"{owner}: {name} must have at most {MAX_LAYERS} layers, got {len(found)}")
    for width in found:
        check_integer(owner, name, width)
        if width > MAX_WIDTH:
            raise ValueError(f"{owner}: {name} must have widths of at most {MAX_WIDTH}, got {width}")
    object.__setattr__(settings, name, found)


@dataclass(frozen=True)
class DenseSettings:
    """The settings of dense layers, without None.

    Attributes:
        hidden: widths of the layers.
        activation: activation after each layer.
        orthogonal: orthogonal weights with gain √2 and biases 0; else as PyTorch's.
        norm: `"layer"` normalizes the outputs of each layer before its activation; None does not. `NormalizedDense`
            has the others.
        noisy: use `NoisyLayer`s, also in the head.
    """

    hidden: tuple[int, ...]
    activation: Activation
    orthogonal: bool
    norm: Literal["layer", "batch", "batch_renorm"] | None = None
    noisy: bool = False


def is_narrow(network: Network, spec: EnvSpec, samples: int = 1, others: Iterable[float] = ()) -> bool:
    """Return True for a built-in network that one CPU thread computes as fast as two: narrow, with few samples at a time.

    Two threads were 0.87 times as fast as one with layers of 64 units and 64 samples, 0.96 with 128 units and 128 samples, 0.89
    with 128 and 256; but 1.24 to 1.45 times with 256 units and 128 samples or more.

    Args:
        samples: of a gradient step.
        others: widths of layers of other networks that learn in the same step.
    """
    widths = getattr(network, "layer_widths", None)
    if widths is None or has_images(spec.obs):
        return False
    widest = max(sum(math.prod(leaf.shape) for _, leaf in leaf_spaces(spec.obs)), *widths, *others, 1)
    return widest <= MAX_NARROW_WIDTH and samples <= MAX_SMALL_BATCH and samples * widest**2 <= MAX_SMALL_PRODUCT


def has_images(space: Space) -> bool:
    """Return True if a part of an observation passes through convolutions."""
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


def warn_of_flat_images(owner: str, name: str, network: Network, spec: EnvSpec) -> None:
    """Warn of a default network whose dense layers take a large Box, which may be a picture that is no image."""
    leaves = [leaf for _, leaf in leaf_spaces(spec.obs) if isinstance(leaf, Box) and not is_image(leaf)]
    large = max(leaves, key=lambda leaf: math.prod(leaf.shape), default=None)
    if large is None or math.prod(large.shape) < LARGE_BOX:
        return
    # A key's shape is enough; a key would start JAX before its devices are settled.
    variables: Any = jax.eval_shape(lambda key: network.init(key, spec), jax.eval_shape(lambda: jax.random.key(0)))
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.params))
    warn(
        f"{owner}: {name}=None flattens {large} into dense layers and has {size:,} parameters; convolutions need an image, "
        f"{IMAGE}; set {name} to avoid this warning"
    )


class Layer(nnx.Module):
    """A linear layer with orthogonal initial weights of this gain; None initializes as PyTorch."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, *, gain: float | None) -> None:
        as_in_pytorch = uniform(inputs**-0.5)
        kernel, bias = (as_in_pytorch, as_in_pytorch) if gain is None else (orthogonal(gain), constant(0.0))
        self.kernel = nnx.Param(kernel(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(bias(rngs.params(), (outputs,), jnp.float32))

    def __call__(self, x: Float[Array, "*rows inputs"], key: PRNGKeyArray | None = None) -> Float[Array, "*rows outputs"]:
        """Compute x · W + b for each row; there is no noise to draw with the key."""
        y = matmul(x, self.kernel[...])
        return y + self.bias.reshape(*(1,) * (y.ndim - 1), -1)


class NoisyLayer(nnx.Module):
    """A linear layer with factorized Gaussian noise.

        y = (μ + σ ∘ f(ε_in) f(ε_out)ᵀ) x + μ_b + σ_b ∘ f(ε_out),    f(ε) = sign(ε) √|ε|

    Each row has its own noise. Without a key, σ counts as 0.

    Source: Fortunato et al. 2018, arXiv:1706.10295, eqs. 9 to 11.
    """

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        mean, std = uniform(inputs**-0.5), constant(INITIAL_STD * inputs**-0.5)
        self.kernel = nnx.Param(mean(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(mean(rngs.params(), (outputs,), jnp.float32))
        self.kernel_std = nnx.Param(std(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias_std = nnx.Param(std(rngs.params(), (outputs,), jnp.float32))

    def __call__(self, x: Float[Array, "rows inputs"], key: PRNGKeyArray | None) -> Float[Array, "rows outputs"]:
        """Y of each row."""
        mean = matmul(x, self.kernel[...]) + self.bias[...][None]
        if key is None:
            return mean
        keys = jax.random.split(key)
        noise_in, noise_out = (_noise(key, (len(x), width)) for key, width in zip(keys, self.kernel.shape, strict=True))
        # (σ ∘ f_in f_outᵀ) x = f_out ∘ (σ (f_in ∘ x)): no matrix of noise for each row.
        return mean + noise_out * (matmul(noise_in * x, self.kernel_std[...]) + self.bias_std[...][None])


def split_key(key: PRNGKeyArray | None, count: int) -> list[PRNGKeyArray | None]:
    """Keys of `count` layers; None for each without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _noise(key: PRNGKeyArray, shape: tuple[int, int]) -> Float[Array, "rows width"]:
    noise = jax.random.normal(key, shape, jnp.float32)
    return jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))


def make_layer(inputs: int, outputs: int, settings: DenseSettings, gain: float, rngs: nnx.Rngs) -> Layer | NoisyLayer:
    """Create a layer of a network with these settings; `gain` is the gain of orthogonal weights."""
    if settings.noisy:
        return NoisyLayer(inputs, outputs, rngs)
    return Layer(inputs, outputs, rngs, gain=gain if settings.orthogonal else None)


class Dense(nnx.Module):
    """Linear layers with an activation after each: plain or noisy, with or without normalization."""

    def __init__(self, inputs: int, settings: DenseSettings, rngs: nnx.Rngs) -> None:
        pairs = list(itertools.pairwise((inputs, *settings.hidden)))
        self.layers = nnx.List([make_layer(a, b, settings, np.sqrt(2.0), rngs) for a, b in pairs])
        self.norms: Any = nnx.List([nnx.LayerNorm(b, rngs=rngs) for _, b in pairs] if settings.norm else [])
        # By name: functions of JAX cannot be pickled, and so neither could a policy.
        self.activation = settings.activation
        self.features = (inputs, *settings.hidden)[-1]

    def __call__(self, x: Float[Array, "B inputs"], key: PRNGKeyArray | None = None) -> Float[Array, "B features"]:
        """The last layer's output."""
        norms = self.norms or [lambda x: x] * len(self.layers)
        for layer, norm, layer_key in zip(self.layers, norms, split_key(key, len(self.layers)), strict=True):
            x = ACTIVATIONS[self.activation](norm(layer(x, layer_key)))
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
        images = {entry_name(path): leaf for path, leaf in leaf_spaces(space) if is_image(leaf)}
        self.images = nnx.Dict({name: Convolutions(leaf, rngs) for name, leaf in images.items()})

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        """The vector of each observation."""
        vectors = jax.tree.leaves(map_space(_flat, self.space, obs))
        names = [entry_name(path) for path, _ in leaf_spaces(self.space)]
        parts = [self.images[name](x) if name in self.images else x for name, x in zip(names, vectors, strict=True)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


class Torso(nnx.Module):
    """Encoder and dense layers."""

    def __init__(self, settings: DenseSettings, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(spec.obs, rngs)
        self.dense = Dense(encoded_size(self.encoder, spec), settings, rngs)

    def __call__(self, obs: PyTree, key: PRNGKeyArray | None = None) -> Float[Array, "B features"]:
        """The features of each observation."""
        return self.dense(self.encoder(obs), key)


def encoded_size(encoder: Encoder, spec: EnvSpec) -> int:
    """The length of an encoded observation."""
    example = jax.tree.map(jnp.asarray, zeros(spec.obs, (1,)))
    return int(nnx.eval_shape(encoder, example).shape[-1])


def _flat(space: Leaf, x: Array) -> Array:
    """`[B, n]` float32 of one part of the observation; an image is unchanged."""
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


def entry_name(path: str) -> str:
    """The part's name in an `nnx.Dict`, where the names of its methods would hide it."""
    return f"{path}_" if path.rstrip("_") in RESERVED_NAMES else path or "all"

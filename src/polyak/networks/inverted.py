"""Residual blocks with batch normalization before each activation, whose parameters all have bounded norms, as in FlashSAC."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from polyak.networks.hypersphere import Linear
from polyak.networks.layers import ACTIVATIONS, Activation
from polyak.networks.residual import EXPANSION

MOMENTUM, EPSILON, RMS_EPSILON = 0.99, 1e-5, 1e-6


class InvertedBlocks(nnx.Module):
    """Blocks of two linear layers, each normalized over the batch before its activation, that are added to their inputs.

        x_0     = W_0 norm(inputs)
        x_{i+1} = x_i + f(norm(V_i f(norm(W_i x_i))))
        z       = γ ∘ x_n / √(mean(x_n²) + 10⁻⁶)

    W_i is four times as wide as the blocks, f is the activation, and no linear layer has a bias. The scales and biases of each
    norm, and γ, are one array named `unit_affine`: an agent with `weight_norm` keeps its norm at √features, and the weight
    vectors on the unit sphere.

    Source: Kim et al. 2026, arXiv:2604.04539, and the authors' code.
    """

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], activation: Activation, rngs: nnx.Rngs, *, networks: tuple[int, ...] = ()
    ) -> None:
        width = hidden[0]
        self.input_norm = _BatchNorm(inputs, networks)
        self.first = Linear(inputs, width, rngs, networks)
        self.blocks = nnx.List([_Block(width, activation, rngs, networks) for _ in hidden])
        self.last_norm = _RMSNorm(width, networks)

    def __call__(self, x: Float[Array, "*N B inputs"]) -> Float[Array, "*N B width"]:
        """The features of each row."""
        x = self.first(self.input_norm(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last_norm(x)


class _Block(nnx.Module):
    """The part of a block that is added to its input."""

    def __init__(self, width: int, activation: Activation, rngs: nnx.Rngs, networks: tuple[int, ...]) -> None:
        inner = EXPANSION * width
        self.inner, self.outer = Linear(width, inner, rngs, networks), Linear(inner, width, rngs, networks)
        self.inner_norm, self.outer_norm = _BatchNorm(inner, networks), _BatchNorm(width, networks)
        self.activation = activation

    def __call__(self, x: Float[Array, "*N B width"]) -> Float[Array, "*N B width"]:
        activate = ACTIVATIONS[self.activation]
        return activate(self.outer_norm(self.outer(activate(self.inner_norm(self.inner(x))))))


class _BatchNorm(nnx.Module):
    """Batch normalization of each network's features, with scales and biases in one array."""

    def __init__(self, features: int, networks: tuple[int, ...]) -> None:
        start = jnp.stack([jnp.ones(features, jnp.float32), jnp.zeros(features, jnp.float32)])
        self.unit_affine = nnx.Param(jnp.tile(start, (*networks, 1, 1)))
        self.mean = nnx.BatchStat(jnp.zeros((*networks, 1, features), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((*networks, 1, features), jnp.float32))
        self.use_running_average = False  # `nnx.Module.eval` sets it.

    def __call__(self, x: Float[Array, "*N B features"]) -> Float[Array, "*N B features"]:
        """The features with mean 0 and variance 1 over the batch, or by the running statistics, scaled and shifted."""
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            batch_mean, batch_var = jnp.mean(x, axis=-2, keepdims=True), jnp.var(x, axis=-2, keepdims=True)
            self.mean[...] = MOMENTUM * mean + (1 - MOMENTUM) * jax.lax.stop_gradient(batch_mean)
            self.var[...] = MOMENTUM * var + (1 - MOMENTUM) * jax.lax.stop_gradient(batch_var)
            mean, var = batch_mean, batch_var
        scale, bias = jnp.split(self.unit_affine[...], 2, axis=-2)
        return (x - mean) * jax.lax.rsqrt(var + EPSILON) * scale + bias


class _RMSNorm(nnx.Module):
    """Features divided by the root of their mean square, and scaled."""

    def __init__(self, features: int, networks: tuple[int, ...]) -> None:
        self.unit_affine = nnx.Param(jnp.ones((*networks, 1, features), jnp.float32))

    def __call__(self, x: Float[Array, "*N B features"]) -> Float[Array, "*N B features"]:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + RMS_EPSILON) * self.unit_affine[...]

"""Layers of actors and critics whose features and weight vectors lie on unit spheres, as in SimbaV2."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from polyak.networks.initializers import uniform
from polyak.networks.layers import ACTIVATIONS, Activation
from polyak.networks.residual import EXPANSION

SHIFT = 3.0
"""The number beside the inputs, so that their length is not lost on the sphere."""

EPSILON = 1e-8


class HypersphereBlocks(nnx.Module):
    """Blocks that move features of norm 1 towards the output of two linear layers.

        x_0     = n(s_0 ∘ W_0 n([inputs; 3])),    n(x) = x / ‖x‖
        x_{i+1} = n(x_i + α_i ∘ (n(V_i f(s_i ∘ W_i x_i)) - x_i))
        z       = s ∘ W x_n

    W_i is four times as wide as the blocks. No layer has a bias. The vectors s and α are parameters: s starts at
    √(2 / outputs), and at 1 in the last layer; α starts at 1 / (n + 1) for n blocks. An agent with `weight_norm` keeps the
    weight vectors on the sphere.

    Source: Lee et al. 2025, arXiv:2502.15280, section 4.
    """

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], activation: Activation, rngs: nnx.Rngs, *, networks: tuple[int, ...] = ()
    ) -> None:
        width, scale = hidden[0], math.sqrt(2 / hidden[0])
        self.first = _ScaledLinear(inputs + 1, width, scale, rngs, networks)
        self.blocks = nnx.List([_Block(width, len(hidden), activation, rngs, networks) for _ in hidden])
        self.last = _ScaledLinear(width, width, 1.0, rngs, networks)

    def __call__(self, x: Float[Array, "*N B inputs"]) -> Float[Array, "*N B width"]:
        """The features of each row."""
        x = jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), SHIFT, x.dtype)], axis=-1)
        x = _on_sphere(self.first(_on_sphere(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _Block(nnx.Module):
    """A step on the sphere towards the output of two linear layers."""

    def __init__(self, width: int, num_blocks: int, activation: Activation, rngs: nnx.Rngs, networks: tuple[int, ...]) -> None:
        inner = EXPANSION * width
        self.inner = _ScaledLinear(width, inner, math.sqrt(2 / inner), rngs, networks)
        self.outer = Linear(inner, width, rngs, networks)
        self.step = _Scale(width, 1 / (num_blocks + 1), 1 / math.sqrt(width), networks)
        self.activation = activation

    def __call__(self, x: Float[Array, "*N B width"]) -> Float[Array, "*N B width"]:
        # A small number, as no vector of zeros has a direction.
        y = _on_sphere(self.outer(ACTIVATIONS[self.activation](self.inner(x)) + EPSILON))
        return _on_sphere(x + self.step(y - x))


class Linear(nnx.Module):
    """A linear layer of each network, without a bias."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, networks: tuple[int, ...]) -> None:
        self.kernel = nnx.Param(uniform(inputs**-0.5)(rngs.params(), (*networks, inputs, outputs), jnp.float32))

    def __call__(self, x: Float[Array, "*N B inputs"]) -> Float[Array, "*N B outputs"]:
        """The product of each network's rows."""
        return x @ self.kernel[...]


class _Scale(nnx.Module):
    """A factor of each feature that starts at `start`, as a parameter that starts at `size`, which sets its pace."""

    def __init__(self, width: int, start: float, size: float, networks: tuple[int, ...]) -> None:
        self.scale = nnx.Param(jnp.full((*networks, 1, width), size, jnp.float32))
        self.factor = start / size

    def __call__(self, x: Float[Array, "*N B width"]) -> Float[Array, "*N B width"]:
        return x * (self.factor * self.scale[...])


class _ScaledLinear(nnx.Module):
    """A linear layer, and a factor of each of its outputs."""

    def __init__(self, inputs: int, outputs: int, start: float, rngs: nnx.Rngs, networks: tuple[int, ...]) -> None:
        self.linear = Linear(inputs, outputs, rngs, networks)
        self.scale = _Scale(outputs, start, start, networks)

    def __call__(self, x: Float[Array, "*N B inputs"]) -> Float[Array, "*N B outputs"]:
        return self.scale(self.linear(x))


def _on_sphere(x: Float[Array, "*N B width"]) -> Float[Array, "*N B width"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), EPSILON)

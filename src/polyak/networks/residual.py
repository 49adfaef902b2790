"""Residual blocks of actors and critics, in the two arrangements of SimBa and BRO."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from flax import nnx
from jaxtyping import Array, Float

from polyak.networks.layers import ACTIVATIONS, Activation

Residual: TypeAlias = Literal["pre_norm", "post_norm"]

EXPANSION = 4
"""Width of the inner layer of a block with `"pre_norm"`, in widths of the block."""


class ResidualBlocks(nnx.Module):
    """A linear layer, then blocks of two linear layers that are added to their inputs.

        pre_norm:    x_0 = W_0 s,             x_{i+1} = x_i + V_i f(W_i norm(x_i)),          z = norm(x_n)
        post_norm:   x_0 = f(norm(W_0 s)),    x_{i+1} = x_i + norm(V_i f(norm(W_i x_i))),    z = x_n

    Each linear layer has a bias, each norm its own parameters, and f is the activation. All layers have the width of the
    blocks, but W_i with `"pre_norm"`, which is four times as wide.

    Source: Lee et al. 2024, arXiv:2410.09754, section 4 (`"pre_norm"`, SimBa); Nauman et al. 2024, arXiv:2405.16158, section 3
    (`"post_norm"`, BRO).
    """

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        kind: Residual,
        activation: Activation,
        *,
        linear: Callable[[int, int], Any],
        norm: Callable[[int], Any],
    ) -> None:
        width = hidden[0]
        inner = EXPANSION * width if kind == "pre_norm" else width
        self.kind, self.activation = kind, activation
        self.first = linear(inputs, width)
        self.first_norm = norm(width) if kind == "post_norm" else None
        self.blocks = nnx.List([_Block(width, inner, kind, activation, linear, norm) for _ in hidden])
        self.last_norm = norm(width) if kind == "pre_norm" else None

    def __call__(self, x: Float[Array, "*N B inputs"]) -> Float[Array, "*N B width"]:
        """The features of each row."""
        x = self.first(x)
        if self.first_norm is not None:
            x = ACTIVATIONS[self.activation](self.first_norm(x))
        for block in self.blocks:
            x = x + block(x)
        return x if self.last_norm is None else self.last_norm(x)


class _Block(nnx.Module):
    """The part of a block that is added to its input."""

    def __init__(
        self,
        width: int,
        inner: int,
        kind: Residual,
        activation: Activation,
        linear: Callable[[int, int], Any],
        norm: Callable[[int], Any],
    ) -> None:
        self.kind, self.activation = kind, activation
        self.inner, self.outer = linear(width, inner), linear(inner, width)
        self.inner_norm = norm(width)
        self.outer_norm = norm(width) if kind == "post_norm" else None

    def __call__(self, x: Float[Array, "*N B width"]) -> Float[Array, "*N B width"]:
        activate = ACTIVATIONS[self.activation]
        if self.outer_norm is None:
            return self.outer(activate(self.inner(self.inner_norm(x))))
        return self.outer_norm(self.outer(activate(self.inner_norm(self.inner(x)))))

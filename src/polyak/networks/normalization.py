"""Normalization and residual blocks of actors and critics: their settings, the layers of an actor, batch renormalization."""

import abc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, setting, static, struct
from polyak.core.types import PyTree, Variables
from polyak.core.warn import warn
from polyak.networks.adapters import FlaxNNX
from polyak.networks.hypersphere import HypersphereBlocks
from polyak.networks.inverted import InvertedBlocks
from polyak.networks.layers import ACTIVATIONS, DenseSettings, Encoder, Layer, encoded_size, set_widths
from polyak.networks.residual import EXPANSION, Residual, ResidualBlocks

Norm: TypeAlias = Literal["layer", "batch", "batch_renorm"]
NormPlace: TypeAlias = Literal["activation", "linear"]
Blocks: TypeAlias = Residual | Literal["hypersphere", "inverted"]
RESIDUAL = ("pre_norm", "post_norm", "hypersphere", "inverted", None)
OWN_NORM: dict[str | None, Callable[..., Any]] = {"hypersphere": HypersphereBlocks, "inverted": InvertedBlocks}
"""Residual blocks with a normalization of their own."""

MAX_WARMUP = 2**31 - 1
MOMENTUM, EPSILON, R_MAX, D_MAX = 0.99, 1e-3, 3.0, 5.0


@struct(kw_only=True)
class HiddenLayers(abc.ABC):
    """The base of the networks of an actor and of critics: dense layers, their normalization, and residual blocks.

    Attributes:
        hidden: widths of the dense layers, or the width of each residual block.
        norm: `"layer"`, `"batch"` or `"batch_renorm"`; None disables normalization, and is `"layer"` with the residual blocks
            of the first two kinds. Batch normalization uses the mean and variance of the batch in the network's own loss, and
            running ones elsewhere. Batch renormalization corrects the batch's towards the running ones.
        norm_before: normalize before each `"activation"`; or before each `"linear"` layer, so also the inputs, and the features
            that the last layer sees. With `residual` the blocks have their own places, and `"linear"` normalizes the inputs.
        norm_inputs: normalize the inputs of the first layer too.
        renorm_warmup: gradient steps during which batch renormalization is batch normalization, until its running mean and
            variance are good.
        residual: a linear layer and one residual block for each number in `hidden`, which are then equal, the width of the
            blocks: `"pre_norm"`, x + V f(W norm(x)) with an inner layer four times as wide, the network of SimBa;
            `"post_norm"`, x + norm(V f(norm(W x))), the network of BRO; or, without `norm`, `"hypersphere"`, steps between
            features of norm 1, the network of SimbaV2, for agents with `weight_norm=True`, or `"inverted"`,
            x + f(norm(V f(norm(W x)))) with batch normalization, of the inputs too, and features divided by their root mean
            square at the end, the network of FlashSAC. None: plain layers.
    """

    hidden: tuple[int, ...] = static(default=(256, 256), kw_only=False)
    norm: Norm | None = choice(default=None, choices=("layer", "batch", "batch_renorm", None))
    norm_before: NormPlace = choice(default="activation", choices=("activation", "linear"), used_if=("norm", ...))
    norm_inputs: bool = choice(default=False, choices=(True, False), used_if=("norm", ...))
    renorm_warmup: int = setting(
        default=100_000,
        check=partial(check_integer, at_least=0, at_most=MAX_WARMUP),
        static=True,
        used_if=("norm", "batch_renorm"),
    )
    residual: Blocks | None = choice(default=None, choices=RESIDUAL)

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers."""
        return (*self.hidden, EXPANSION * self.hidden[0]) if self.residual in ("pre_norm", *OWN_NORM) else self.hidden

    @property
    def has_input_norm(self) -> bool:
        """True if the inputs have a normalization of their own; before plain `"linear"` layers it is the first layer's."""
        is_before_linear = self.norm_before == "linear"
        is_of_first_layer = is_before_linear and self.residual is None
        return self.norm is not None and (self.norm_inputs or is_before_linear) and not is_of_first_layer

    @abc.abstractmethod
    def module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        """The layers, of random initial weights."""

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        return FlaxNNX(self.module).init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`; see the class for `obs` and `out`."""
        return FlaxNNX(self.module).apply(variables, obs, carry, train=train, key=key)

    def set_layers(self) -> None:
        """Convert `hidden` to a tuple, and check it; with residual blocks, set the normalization if there is none.

        Raises:
            TypeError, ValueError: `hidden` is no list of widths, or residual blocks have no width, or several.
        """
        set_widths(self, "hidden")
        owner, hidden = type(self).__name__, self.hidden
        check_choice(owner, "residual", self.residual, RESIDUAL)
        if self.residual is None:
            if not hidden and self.norm is not None and self.norm_before == "activation" and not self.norm_inputs:
                warn(f"{owner}: norm={self.norm!r} has no effect with hidden=(), only with layers to normalize")
            return
        if len(set(hidden)) != 1:
            raise ValueError(
                f"{owner}: hidden must have one width for all residual blocks, such as (512, 512) for two blocks, got {hidden}"
            )
        if self.residual in OWN_NORM:
            if self.norm is not None:
                raise ValueError(f"{owner}: norm must be None with residual={self.residual!r}, got {self.norm!r}")
        elif self.norm is None:
            object.__setattr__(self, "norm", "layer")


class BatchRenorm(nnx.Module):
    """Batch normalization with the batch's mean and variance, corrected towards the running ones.

        y = γ (r (x - μ_B) / σ_B + d) + β,    r = clip(σ_B / σ, 1/3, 3),    d = clip((μ_B - μ) / σ, -5, 5)

    in training mode, without gradients in r and d; σ² = variance + 10⁻³. The formula has the running μ and σ² from before
    the batch, which move towards the batch's by 0.01. Where r and d are not clipped, y is what evaluation mode computes,
    y = γ (x - μ) / σ + β. The first `warmup` times, r = 1 and d = 0, as in batch normalization.

    Attributes:
        shape: shape of the statistics, 1 on the axis of the batch, the last but one.
        warmup: number of times in training mode until r and d count.

    Source: Ioffe 2017, arXiv:1702.03275, algorithm 1; the numbers: Bhatt et al. 2024, arXiv:1902.05605v4, and their code.
    """

    def __init__(self, shape: tuple[int, ...], warmup: int) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones(shape, jnp.float32)), nnx.Param(jnp.zeros(shape, jnp.float32))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(shape, jnp.float32)), nnx.BatchStat(jnp.ones(shape, jnp.float32))
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.uint32))
        self.warmup = warmup
        self.use_running_average = False  # `nnx.Module.eval` sets it.

    def __call__(self, x: Float[Array, "*N B features"]) -> Float[Array, "*N B features"]:
        """The features normalized over the batch, scaled and shifted."""
        running_mean, running_std = self.mean[...], jnp.sqrt(self.var[...] + EPSILON)
        if self.use_running_average:
            return (x - running_mean) / running_std * self.scale[...] + self.bias[...]
        mean, var = jnp.mean(x, axis=-2, keepdims=True), jnp.var(x, axis=-2, keepdims=True)
        std = jnp.sqrt(var + EPSILON)
        is_warm = self.steps[...] >= self.warmup
        r = jnp.where(is_warm, jnp.clip(std / running_std, 1 / R_MAX, R_MAX), 1.0)
        d = jnp.where(is_warm, jnp.clip((mean - running_mean) / running_std, -D_MAX, D_MAX), 0.0)
        r, d = jax.lax.stop_gradient((r, d))
        self.mean[...] = MOMENTUM * running_mean + (1 - MOMENTUM) * jax.lax.stop_gradient(mean)
        self.var[...] = MOMENTUM * self.var[...] + (1 - MOMENTUM) * jax.lax.stop_gradient(var)
        self.steps[...] = self.steps[...] + jnp.uint32(1)
        return ((x - mean) / std * r + d) * self.scale[...] + self.bias[...]


class NormalizedTorso(nnx.Module):
    """Encoder, and dense layers with normalization or residual blocks; its parameters of layers are where `Torso` has them."""

    def __init__(self, settings: DenseSettings, norm: HiddenLayers, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(spec.obs, rngs)
        self.dense = NormalizedDense(encoded_size(self.encoder, spec), settings, norm, rngs)

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        """The features of each observation."""
        return self.dense(self.encoder(obs))


class NormalizedDense(nnx.Module):
    """Linear layers with an activation after each, and normalization before the activations or before the linear layers.

    With residual blocks these are its layers.
    """

    def __init__(self, inputs: int, settings: DenseSettings, norm: HiddenLayers, rngs: nnx.Rngs) -> None:
        widths = (inputs, *settings.hidden)
        gain = 2**0.5 if settings.orthogonal else None
        linear, make_norm = partial(Layer, rngs=rngs, gain=gain), partial(_make_norm, settings=norm, rngs=rngs)
        self.features, self.activation, self.norm_before = widths[-1], settings.activation, norm.norm_before
        self.input_norm: Any = make_norm(inputs) if norm.has_input_norm else None
        if norm.residual == "hypersphere" or norm.residual == "inverted":
            self.residual: Any = OWN_NORM[norm.residual](inputs, settings.hidden, settings.activation, rngs)
            return
        if norm.residual is not None:
            of_blocks = norm.residual, settings.activation
            self.residual = ResidualBlocks(inputs, settings.hidden, *of_blocks, linear=linear, norm=make_norm)
            return
        self.residual = None
        self.layers = nnx.List([linear(a, b) for a, b in itertools.pairwise(widths)])
        # Before linear layers there is one more, for the layer that follows.
        self.norms: Any = nnx.List([make_norm(n) for n in widths[norm.norm_before == "activation" :]])

    def __call__(self, x: Float[Array, "B inputs"]) -> Float[Array, "B features"]:
        """The last layer's output, normalized if the linear layers' inputs are."""
        activate = ACTIVATIONS[self.activation]
        x = x if self.input_norm is None else self.input_norm(x)
        if self.residual is not None:
            return self.residual(x)
        if self.norm_before == "activation":
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = activate(norm(layer(x)))
            return x
        for layer, norm in zip(self.layers, self.norms[:-1], strict=True):
            x = activate(layer(norm(x)))
        return self.norms[-1](x)


def _make_norm(features: int, settings: HiddenLayers, rngs: nnx.Rngs) -> nnx.Module:
    if settings.norm == "batch_renorm":
        return BatchRenorm((1, features), settings.renorm_warmup)
    return nnx.BatchNorm(features, rngs=rngs) if settings.norm == "batch" else nnx.LayerNorm(features, rngs=rngs)

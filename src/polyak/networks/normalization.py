"""Normalization of dense layers of actors and critics: its settings, and batch renormalization."""

import itertools
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from polyak.core.checks import check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, setting, struct
from polyak.core.types import PyTree
from polyak.networks.layers import ACTIVATIONS, DenseSettings, Encoder, Layer, encoded_size

Norm: TypeAlias = Literal["layer", "batch", "batch_renorm"]
NormPlace: TypeAlias = Literal["activation", "linear"]

MAX_WARMUP = 2**31 - 1
MOMENTUM, EPSILON, R_MAX, D_MAX = 0.99, 1e-3, 3.0, 5.0


@struct(kw_only=True)
class NormSettings:
    """The normalization of the dense layers of an actor or of critics.

    Attributes:
        norm: `"layer"`, `"batch"` or `"batch_renorm"`; None disables normalization. Batch normalization uses the mean and
            variance of the batch in the network's own loss, and running ones elsewhere. Batch renormalization corrects
            the batch's towards the running ones.
        norm_before: normalize before each `"activation"`; or before each `"linear"` layer, so also the inputs, and the features
            that the last layer sees.
        renorm_warmup: gradient steps during which batch renormalization is batch normalization, until its running mean and
            variance are good.
    """

    norm: Norm | None = choice(default=None, choices=("layer", "batch", "batch_renorm", None))
    norm_before: NormPlace = choice(default="activation", choices=("activation", "linear"), used_if=("norm", ...))
    renorm_warmup: int = setting(
        default=100_000,
        check=partial(check_integer, at_least=0, at_most=MAX_WARMUP),
        static=True,
        used_if=("norm", "batch_renorm"),
    )


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
    """Encoder and dense layers with normalization; its parameters of layers are where `Torso` has them."""

    def __init__(self, settings: DenseSettings, norm: NormSettings, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(spec.obs, rngs)
        self.dense = NormalizedDense(encoded_size(self.encoder, spec), settings, norm, rngs)

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        """The features of each observation."""
        return self.dense(self.encoder(obs))


class NormalizedDense(nnx.Module):
    """Linear layers with an activation after each, and normalization before the activations or before the linear layers."""

    def __init__(self, inputs: int, settings: DenseSettings, norm: NormSettings, rngs: nnx.Rngs) -> None:
        widths = (inputs, *settings.hidden)
        gain = 2**0.5 if settings.orthogonal else None
        self.layers = nnx.List([Layer(a, b, rngs, gain=gain) for a, b in itertools.pairwise(widths)])
        # Before linear layers there is one more, for the layer that follows.
        self.norms: Any = nnx.List([_make_norm(n, norm, rngs) for n in widths[norm.norm_before == "activation" :]])
        self.norm_before, self.activation, self.features = norm.norm_before, settings.activation, widths[-1]

    def __call__(self, x: Float[Array, "B inputs"]) -> Float[Array, "B features"]:
        """The last layer's output, normalized if the linear layers' inputs are."""
        activate = ACTIVATIONS[self.activation]
        if self.norm_before == "activation":
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = activate(norm(layer(x)))
            return x
        for layer, norm in zip(self.layers, self.norms[:-1], strict=True):
            x = activate(layer(norm(x)))
        return self.norms[-1](x)


def _make_norm(features: int, settings: NormSettings, rngs: nnx.Rngs) -> nnx.Module:
    if settings.norm == "batch_renorm":
        return BatchRenorm((1, features), settings.renorm_warmup)
    return nnx.BatchNorm(features, rngs=rngs) if settings.norm == "batch" else nnx.LayerNorm(features, rngs=rngs)

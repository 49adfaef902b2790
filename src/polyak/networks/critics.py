"""Networks of N critics Q_i(s, a), computed together."""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from polyak.core.spaces import Box, Discrete, EnvSpec, in_action, leaf_spaces
from polyak.core.struct import check_settings, choice, integer, number, struct
from polyak.core.types import PyTree
from polyak.networks.initializers import constant, uniform
from polyak.networks.layers import ACTIVATIONS, Activation, Encoder, encoded_size
from polyak.networks.normalization import OWN_NORM, BatchRenorm, HiddenLayers
from polyak.networks.residual import ResidualBlocks


@struct(kw_only=True)
class Critics(HiddenLayers):
    """Settings of the built-in critics: N networks of equal shape that take an observation and an action.

    `apply(variables, (obs, action))`, Box actions between -1 and 1, returns `(q, None)` with q `[B, N]`. With Discrete actions
    it takes no action and returns the values of all n, `[B, N, n]`; with `num_quantiles` = M the quantiles of the return, `[B,
    N, M]`; with `num_atoms` = K the logits of its distribution, `[B, N, K]`. The critics share only the convolutions of images.
    As the head of a recurrent network, `LSTM(head=Critics())`, they see the output of the cell in place of the observation, and
    share the cell.

    Attributes:
        activation: activation after each dense layer.
        num_critics: N.
        dropout: probability with which a unit is dropped while training, after the linear layer.
        num_quantiles: M, number of quantiles of the return; None returns the mean. `TQC` sets it.
        num_atoms: K, number of atoms of the distribution of the return; None returns the mean. `XQC` and `FastTD3` set it.

    Raises:
        TypeError, ValueError: a setting is out of its range.
        ValueError: when an agent is built, for actions that are neither Discrete nor of Boxes.

    Source: Chen et al. 2021, arXiv:2101.05982 (ensembles); Hiraoka et al. 2022, arXiv:2110.02034 (dropout and layer
    normalization); Ioffe and Szegedy 2015, arXiv:1502.03167 (batch normalization); Ioffe 2017, arXiv:1702.03275 (batch
    renormalization); Lee et al. 2024, arXiv:2410.09754, Nauman et al. 2024, arXiv:2405.16158, Lee et al. 2025,
    arXiv:2502.15280, and Kim et al. 2026, arXiv:2604.04539 (residual blocks).
    """

    activation: Activation = choice(default="relu", choices=tuple(ACTIVATIONS))
    num_critics: int = integer(default=2)
    dropout: float = number(default=0.0, at_least=0, at_most=0.99, static=True)
    num_quantiles: int | None = integer(default=None, optional=True)
    num_atoms: int | None = integer(default=None, at_least=2, optional=True)

    def __post_init__(self) -> None:
        self.set_layers()
        check_settings(self)
        if self.dropout > 0 and self.residual in OWN_NORM:
            raise ValueError(f"Critics: dropout must be 0 with residual={self.residual!r}, got {self.dropout}")
        if self.num_quantiles is not None and self.num_atoms is not None:
            raise ValueError(f"Critics: num_atoms must be None with num_quantiles={self.num_quantiles}, got {self.num_atoms}")

    @property
    def outputs(self) -> tuple[str, int | None]:
        """The setting that says how many numbers each critic returns, and its value, None for the mean."""
        return ("num_quantiles", self.num_quantiles) if self.num_atoms is None else ("num_atoms", self.num_atoms)

    def module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        """The layers, of random initial weights."""
        return _CriticsModule(self, spec, rngs)


class _CriticsModule(nnx.Module):
    """One encoder of observations, then the dense layers of all critics as products with a leading axis N."""

    def __init__(self, settings: Critics, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.takes_action = not isinstance(spec.action, Discrete)
        name, of_distribution = settings.outputs
        outputs = spec.action.n if isinstance(spec.action, Discrete) else of_distribution
        boxes = list(leaf_spaces(spec.action)) if self.takes_action else []
        for path, leaf in boxes:
            if not isinstance(leaf, Box):
                raise ValueError(f"network: critics need actions of Boxes or one Discrete, got {leaf}{in_action(path)}")
        if of_distribution is not None and not boxes:
            raise ValueError(f"network: {name} must be None for Discrete actions, got {of_distribution}")
        self.encoder = Encoder(spec.obs, rngs)
        inputs = encoded_size(self.encoder, spec) + sum(math.prod(leaf.shape) for _, leaf in boxes)
        self.input_norm = _make_norm(settings, inputs, rngs) if settings.has_input_norm else None
        self.layers = nnx.List(_make_layers(inputs, settings, rngs))
        features = (inputs, *settings.hidden)[-1]
        is_before_linear = settings.norm_before == "linear" and settings.residual is None
        self.last_norm = _make_norm(settings, features, rngs) if is_before_linear else None
        self.head = _Products(settings.num_critics, features, outputs or 1, rngs)
        self.num_critics = settings.num_critics
        self.has_outputs = outputs is not None

    def __call__(self, obs_and_action: tuple[PyTree, PyTree]) -> tuple[Float[Array, "B N *M"], None]:
        obs, action = obs_and_action
        actions = jax.tree.leaves(action) if self.takes_action else []
        parts = [self.encoder(obs), *(x.reshape(x.shape[0], -1) for x in actions)]
        row = jnp.concatenate(parts, axis=-1)
        x = jnp.broadcast_to(row, (self.num_critics, *row.shape))
        x = x if self.input_norm is None else self.input_norm(x)
        for layer in self.layers:
            x = layer(x)
        q = jnp.moveaxis(self.head(x if self.last_norm is None else self.last_norm(x)), 0, 1)
        return q if self.has_outputs else q[..., 0], None


class _Products(nnx.Module):
    """A linear layer of each critic, which starts as PyTorch's, and dropout."""

    def __init__(self, num_critics: int, inputs: int, outputs: int, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        init = uniform(inputs**-0.5)
        self.kernel = nnx.Param(init(rngs.params(), (num_critics, inputs, outputs), jnp.float32))
        self.bias = nnx.Param(init(rngs.params(), (num_critics, 1, outputs), jnp.float32))
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout > 0 else None

    def __call__(self, x: Float[Array, "N B inputs"]) -> Float[Array, "N B outputs"]:
        """The product of each critic's rows, plus its bias, without the units that are dropped."""
        x = x @ self.kernel[...] + self.bias[...]
        return x if self.dropout is None else self.dropout(x)


class _Layers(nnx.Module):
    """A linear layer of each critic with dropout, and an activation, with the normalization in its place."""

    def __init__(self, inputs: int, outputs: int, settings: Critics, rngs: nnx.Rngs) -> None:
        self.linear = _Products(settings.num_critics, inputs, outputs, rngs, settings.dropout)
        self.norm_before = settings.norm_before
        self.norm = _make_norm(settings, inputs if self.norm_before == "linear" else outputs, rngs)
        self.activation = settings.activation

    def __call__(self, x: Float[Array, "N B inputs"]) -> Float[Array, "N B outputs"]:
        """The activations."""
        x = self.linear(self.norm(x) if self.norm is not None and self.norm_before == "linear" else x)
        x = self.norm(x) if self.norm is not None and self.norm_before == "activation" else x
        return ACTIVATIONS[self.activation](x)


def _make_layers(inputs: int, settings: Critics, rngs: nnx.Rngs) -> list[Any]:
    """The dense layers, or the residual blocks as one."""
    if settings.residual is None:
        return [_Layers(a, b, settings, rngs) for a, b in itertools.pairwise((inputs, *settings.hidden))]
    if settings.residual == "hypersphere" or settings.residual == "inverted":
        blocks = OWN_NORM[settings.residual]
        return [blocks(inputs, settings.hidden, settings.activation, rngs, networks=(settings.num_critics,))]

    def linear(inputs: int, outputs: int) -> _Products:
        return _Products(settings.num_critics, inputs, outputs, rngs, settings.dropout)

    kind, norm = settings.residual, partial(_make_norm, settings, rngs=rngs)
    return [ResidualBlocks(inputs, settings.hidden, kind, settings.activation, linear=linear, norm=norm)]


def _make_norm(settings: Critics, features: int, rngs: nnx.Rngs) -> "_LayerNorm | _BatchNorm | BatchRenorm | None":
    """The normalization of this number of features of each critic."""
    match settings.norm:
        case "layer":
            return _LayerNorm(settings.num_critics, features, rngs)
        case "batch":
            return _BatchNorm(settings.num_critics, features, rngs)
        case "batch_renorm":
            return BatchRenorm((settings.num_critics, 1, features), settings.renorm_warmup)
        case None:
            return None


class _LayerNorm(nnx.Module):
    """Layer normalization with a scale and a bias of each critic."""

    def __init__(self, num_critics: int, features: int, rngs: nnx.Rngs) -> None:
        shape = num_critics, 1, features
        self.scale = nnx.Param(constant(1.0)(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(constant(0.0)(rngs.params(), shape, jnp.float32))

    def __call__(self, x: Float[Array, "N B features"]) -> Float[Array, "N B features"]:
        """The rows with mean 0 and variance 1, scaled and shifted."""
        normal = jax.nn.standardize(x, axis=-1, epsilon=1e-6)
        return normal * self.scale[...] + self.bias[...]


class _BatchNorm(nnx.Module):
    """Batch normalization with running statistics, a scale and a bias of each critic."""

    def __init__(self, num_critics: int, features: int, rngs: nnx.Rngs) -> None:
        # The features of all critics side by side, so that each feature of each critic has a mean and a variance of its own.
        self.norm = nnx.BatchNorm(num_critics * features, rngs=rngs)

    def __call__(self, x: Float[Array, "N B features"]) -> Float[Array, "N B features"]:
        """The features with mean 0 and variance 1 over the batch, scaled and shifted."""
        num_critics, batch_size, features = x.shape
        rows = jnp.moveaxis(x, 0, 1).reshape(batch_size, num_critics * features)
        return jnp.moveaxis(self.norm(rows).reshape(batch_size, num_critics, features), 1, 0)

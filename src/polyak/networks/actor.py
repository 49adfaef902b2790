"""Networks of actors without a critic, which return only the parameters of the action's distribution."""

import math

import jax.numpy as jnp
from flax import nnx

from polyak.core.spaces import Box, EnvSpec, Leaf, map_space
from polyak.core.struct import check_settings, choice, number, struct
from polyak.core.types import PyTree
from polyak.networks.heads import PolicySettings, Std
from polyak.networks.layers import ACTIVATIONS, Activation, DenseSettings, Torso
from polyak.networks.normalization import OWN_NORM, HiddenLayers, NormalizedTorso
from polyak.networks.policy_head import LOG_STD_RANGE, PolicyHead

SQUASHED_RANGE = (-10.0, 2.0)
"""Bounds of the log standard deviation with `squash_log_std`; Lee et al. 2025, arXiv:2502.15280, and Kim et al. 2026."""


@struct(kw_only=True)
class Actor(HiddenLayers, PolicySettings):
    """Settings of the built-in network of an actor; its output is `(action_params, None)`, since it has no value.

    Images pass through the three convolutions of `NatureCNN`; everything else is flattened. As the head of a recurrent network,
    `LSTM(head=Actor())`, it sees the output of the cell in place of the observation.

    Attributes:
        activation: activation after each dense layer.
        std: the standard deviation of Box actions: `"state"`, an output of the last layer, clipped to [e⁻²⁰, e²]; `"free"`, a
            parameter; `"fixed"`, e^log_std, for a deterministic actor to which noise is added; `"sde"`, for state-dependent
            exploration, √(z(s)² · σ²) of one Box action, z(s) the features of the last dense layer and σ a matrix of
            parameters.
        clip_mean: clip the mean of Box actions to ± this value, before the agent's tanh; None disables clipping.
        squash_log_std: the logarithm of the standard deviation is -10 + 6 (1 + tanh(x)), between -10 and 2, with x an output
            of the last layer, instead of a clipped output; for `std="state"`.
        orthogonal: orthogonal weights with gain √2, 0.01 in the last layer, and biases 0; else as PyTorch's. Must be False with
            `"hypersphere"` and `"inverted"`.

    Raises:
        TypeError, ValueError: a setting is out of its range, or two settings do not go together.
        ValueError: when an agent is built, for means to be squashed without a Box or into bounds that are not finite, and for
            `"sde"` with an action that is no Box.

    Source: Raffin et al. 2020, arXiv:2005.05719 (state-dependent exploration); Ioffe 2017, arXiv:1702.03275 (batch
    renormalization); Lee et al. 2024, arXiv:2410.09754, Nauman et al. 2024, arXiv:2405.16158, Lee et al. 2025,
    arXiv:2502.15280, and Kim et al. 2026, arXiv:2604.04539 (residual blocks).
    """

    activation: Activation = choice(default="relu", choices=tuple(ACTIVATIONS))
    std: Std = "state"
    orthogonal: bool = choice(default=False, choices=(True, False))
    clip_mean: float | None = number(default=None, above=0, optional=True, static=True)
    squash_log_std: bool = choice(default=False, choices=(True, False), used_if=("std", "state"))

    def __post_init__(self) -> None:
        self.set_layers()
        check_settings(self)
        if self.squash_mean and self.clip_mean is not None:
            raise ValueError(f"Actor: clip_mean must be None with squash_mean=True, got {self.clip_mean}")
        if self.orthogonal and self.residual in OWN_NORM:
            raise ValueError(f"Actor: orthogonal must be False with residual={self.residual!r}, got True")
        if self.squash_log_std and not SQUASHED_RANGE[0] < self.log_std < SQUASHED_RANGE[1]:
            raise ValueError(f"Actor: log_std must lie between -10 and 2 with squash_log_std=True, got {self.log_std}")

    @property
    def dense(self) -> DenseSettings:
        """The settings of the dense layers."""
        return DenseSettings(self.hidden, self.activation, self.orthogonal, self.norm)

    def module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        """The layers, of random initial weights."""
        return _ActorModule(self, spec, rngs)


class _ActorModule(nnx.Module):
    """Encoder, dense layers, and the head of the action's distribution."""

    def __init__(self, settings: Actor, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.action, self.clip_mean = spec.action, settings.clip_mean
        self.squash_log_std = settings.squash_log_std and settings.std == "state"
        dense = settings.dense
        self.actor = (
            NormalizedTorso(dense, settings, spec, rngs) if settings.norm or settings.residual else Torso(dense, spec, rngs)
        )
        head = _before_squashing(settings) if self.squash_log_std else settings
        self.policy = PolicyHead(self.actor.dense.features, head, spec, rngs, orthogonal=settings.orthogonal)

    def __call__(self, obs: PyTree) -> tuple[PyTree, None]:
        return map_space(self._in_range, self.action, self.policy(self.actor(obs))), None

    def _in_range(self, space: Leaf, params: PyTree) -> PyTree:
        if not isinstance(space, Box):
            return params
        loc, limit = params["loc"], self.clip_mean
        loc = loc if limit is None else jnp.clip(loc, -limit, limit)
        if not self.squash_log_std:
            return {"loc": loc, "log_scale": jnp.clip(params["log_scale"], *LOG_STD_RANGE)}
        low, high = SQUASHED_RANGE
        return {"loc": loc, "log_scale": low + (high - low) / 2 * (1 + jnp.tanh(params["log_scale"]))}


def _before_squashing(settings: Actor) -> PolicySettings:
    """The settings of a head whose output is squashed to `log_std` at the start."""
    low, high = SQUASHED_RANGE
    fraction = (2 * settings.log_std - low - high) / (high - low)
    return PolicySettings(log_std=math.atanh(fraction), std=settings.std, squash_mean=settings.squash_mean)

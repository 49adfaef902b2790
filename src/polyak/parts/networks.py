"""Built-in networks, found from the spec of the environment.

A network for an actor-critic agent answers `(action_params, value)`: the parameters of a distribution over the action space, in
the tree of `ops.distributions.parameter_shapes`, and one value per row.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, Space, leaf_spaces, map_space, zeros
from polyak.core.types import Network, PyTree, Variables
from polyak.parts.adapters import FlaxNNX

Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": nnx.relu,
    "elu": nnx.elu,
    "gelu": nnx.gelu,
    "silu": nnx.silu,
}


@dataclass(frozen=True)
class ActorCritic:
    """Settings of the built-in actor-critic network; `mlp` and `nature_cnn` make them.

    Images (uint8 Boxes of three axes) pass through the three convolutions of `nature_cnn`, everything else is flattened,
    integers as one-hot vectors, and all is concatenated before the dense layers.

    Attributes:
        hidden: widths of the dense layers.
        activation: between layers.
        shared_torso: actor and critic share all but the last layer.
        log_std: initial logarithm of the standard deviation of Box actions, a parameter that is the same in every state.
        orthogonal: orthogonal weights with gain √2, 0.01 in the policy's last layer, 1 in the value's; else LeCun normal.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    shared_torso: bool = False
    log_std: float = 0.0
    orthogonal: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, Iterable) or isinstance(self.hidden, str):
            raise TypeError(f"network: hidden must be widths such as (64, 64), got {self.hidden!r}")
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for width in self.hidden:
            check_integer("network", "hidden", width)
        check_choice("network", "activation", self.activation, tuple(ACTIVATIONS))
        check_number("network", "log_std", self.log_std)
        for name in ("shared_torso", "orthogonal"):
            check_choice("network", name, getattr(self, name), (True, False))

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, value), carry, stats)` for obs leaves `[B, ...]`."""
        return FlaxNNX(self._module).apply(variables, obs, carry, train=train, key=key)

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _ActorCriticModule(self, spec, rngs)


def mlp(
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "tanh",
    *,
    shared_torso: bool = False,
    log_std: float = 0.0,
    orthogonal: bool = True,
) -> ActorCritic:
    """Dense layers for observations that are vectors; separate ones for actor and critic unless `shared_torso`."""
    return ActorCritic(hidden, activation, shared_torso, log_std, orthogonal)


def nature_cnn(hidden: tuple[int, ...] = (512,), *, shared_torso: bool = True, log_std: float = 0.0) -> ActorCritic:
    """The convolutions of Mnih et al. 2015 (32 of 8x8/4, 64 of 4x4/2, 64 of 3x3/1, relu), then dense layers; torso shared."""
    return ActorCritic(hidden, "relu", shared_torso, log_std)


def network_for(spec: EnvSpec) -> ActorCritic:
    """The usual network: `nature_cnn` where the observation holds an image, else `mlp`."""
    return nature_cnn() if any(is_image(leaf) for _, leaf in leaf_spaces(spec.obs)) else mlp()


def check_actor_critic(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Refuse a network that does not answer `(action_params, value)` with one value for each row; nothing is computed.

    Raises:
        TypeError: it answers something else.
        ValueError: the value has another shape than `[B]`.
    """
    rows = 2
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,)))
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"network: must answer (action_params, value), got {jax.tree.map(jnp.shape, out)}")
    if jnp.shape(out[1]) != (rows,):
        raise ValueError(f"network: the value of {rows} observations must have shape ({rows},), got {jnp.shape(out[1])}")


def is_image(space: Space) -> bool:
    """A uint8 Box of three axes, large enough for the convolutions (36 pixels a side)."""
    if not (isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3):
        return False
    height, width = space.shape[1:] if channels_first(space.shape) else space.shape[:2]
    return min(height, width) >= 36


def channels_first(shape: tuple[int, ...]) -> bool:
    """CHW rather than HWC: the channels are the shorter of the first and the last axis; a tie is HWC."""
    return shape[0] < shape[-1]


class _Dense(nnx.Module):
    """Linear layers with an activation after each."""

    def __init__(self, inputs: int, settings: ActorCritic, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.orthogonal(np.sqrt(2.0)) if settings.orthogonal else nnx.initializers.lecun_normal()
        widths = (inputs, *settings.hidden)
        self.layers = nnx.List([nnx.Linear(a, b, kernel_init=init, rngs=rngs) for a, b in itertools.pairwise(widths)])
        self.activation = ACTIVATIONS[settings.activation]

    def __call__(self, x: Float[Array, "B inputs"]) -> Float[Array, "B features"]:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class _Convolutions(nnx.Module):
    """The three convolutions of Mnih et al. 2015 on one image."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.channels_first = channels_first(shape)
        channels = shape[0] if self.channels_first else shape[-1]
        init = nnx.initializers.orthogonal(np.sqrt(2.0))
        plan = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        self.layers = nnx.List(
            [nnx.Conv(i, o, (k, k), strides=(s, s), padding="VALID", kernel_init=init, rngs=rngs) for i, o, k, s in plan]
        )

    def __call__(self, x: Array) -> Float[Array, "B features"]:
        x = x.astype(jnp.float32) / 255.0
        if self.channels_first:
            x = jnp.moveaxis(x, -3, -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x.reshape(x.shape[0], -1)


class _Encoder(nnx.Module):
    """An observation of any space as one vector: images through convolutions, integers one-hot, all concatenated."""

    def __init__(self, space: Space, rngs: nnx.Rngs) -> None:
        self.space = space
        self.images = nnx.Dict(
            {_name(path): _Convolutions(leaf.shape, rngs) for path, leaf in leaf_spaces(space) if is_image(leaf)}
        )

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        vectors = jax.tree.leaves(map_space(_flat, self.space, obs))
        paths = [path for path, _ in leaf_spaces(self.space)]
        parts = [
            self.images[_name(path)](x) if _name(path) in self.images else x for path, x in zip(paths, vectors, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


class _ActorCriticModule(nnx.Module):
    """Encoder, dense layers, one head for the action's distribution and one for the value."""

    def __init__(self, settings: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.actor = _Torso(settings, spec, rngs)
        # One object under two names is one set of parameters to NNX.
        self.critic = self.actor if settings.shared_torso else _Torso(settings, spec, rngs)
        features = self.actor.features
        self.value = nnx.Linear(features, 1, kernel_init=_head_init(settings, 1.0), rngs=rngs)
        self.policy = _PolicyHead(features, settings, spec.action, rngs)

    def __call__(self, obs: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
        hidden = self.actor(obs)
        value = self.value(hidden if self.critic is self.actor else self.critic(obs))
        return self.policy(hidden), value[..., 0]


class _Torso(nnx.Module):
    """Encoder and dense layers."""

    def __init__(self, settings: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.encoder = _Encoder(spec.obs, rngs)
        example = jax.tree.map(jnp.asarray, zeros(spec.obs, (1,)))
        inputs = nnx.eval_shape(self.encoder, example).shape[-1]
        self.dense = _Dense(inputs, settings, rngs)
        self.features = settings.hidden[-1] if settings.hidden else inputs

    def __call__(self, obs: PyTree) -> Float[Array, "B features"]:
        return self.dense(self.encoder(obs))


class _PolicyHead(nnx.Module):
    """One linear layer for all parts of the action, and a free logarithm of the standard deviation for Box parts."""

    def __init__(self, features: int, settings: ActorCritic, space: Space, rngs: nnx.Rngs) -> None:
        self.space = space
        self.widths = tuple(_outputs(leaf) for _, leaf in leaf_spaces(space))
        init = _head_init(settings, 0.01)
        self.linear = nnx.Linear(features, sum(self.widths), kernel_init=init, rngs=rngs)
        boxes = [(path, leaf) for path, leaf in leaf_spaces(space) if isinstance(leaf, Box)]
        self.log_std = nnx.Dict({_name(path): nnx.Param(jnp.full(leaf.shape, settings.log_std)) for path, leaf in boxes})

    def __call__(self, hidden: Float[Array, "B features"]) -> PyTree:
        out = self.linear(hidden)
        starts = np.cumsum((0, *self.widths))
        columns = iter([out[..., a:b] for a, b in itertools.pairwise(starts)])
        paths = iter([path for path, _ in leaf_spaces(self.space)])

        def leaf_params(space: Leaf) -> PyTree:
            column, path = next(columns), next(paths)
            match space:
                case Box():
                    loc = column.reshape(*column.shape[:-1], *space.shape)
                    return {"loc": loc, "log_scale": jnp.broadcast_to(self.log_std[_name(path)][...], loc.shape)}
                case MultiBinary():
                    return column.reshape(*column.shape[:-1], *space.shape)
                case _:
                    return column

        return map_space(leaf_params, self.space)


def _outputs(space: Leaf) -> int:
    """How many numbers the linear layer gives for one part of the action."""
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.nvec)
        case _:
            return int(np.prod(space.shape))


def _head_init(settings: ActorCritic, gain: float) -> nnx.Initializer:
    return nnx.initializers.orthogonal(gain) if settings.orthogonal else nnx.initializers.lecun_normal()


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
            return x.astype(jnp.float32).reshape(x.shape[0], -1) / 255.0
        case _:
            return x.astype(jnp.float32).reshape(x.shape[0], -1)


def _name(path: str) -> str:
    return path or "all"

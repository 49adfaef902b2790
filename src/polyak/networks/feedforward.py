"""The built-in networks without recurrent state, `MLP` and `NatureCNN`, and the fields that all built-in networks have."""

import abc
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Discrete, EnvSpec
from polyak.core.struct import check_settings, choice, setting, static, struct
from polyak.core.types import Network, PyTree, Variables
from polyak.core.warn import warn
from polyak.networks.adapters import FlaxNNX, check_network, merge
from polyak.networks.heads import (
    ActionValueSettings,
    ActorCriticHead,
    Head,
    PolicyAndValue,
    PolicyOnly,
    PolicySettings,
    Quantiles,
    QValues,
    ValueOnly,
)
from polyak.networks.layers import (
    ACTIVATIONS,
    IMAGE,
    Activation,
    Dense,
    DenseSettings,
    Encoder,
    Layer,
    Torso,
    encoded_size,
    has_images,
    make_layer,
    set_widths,
    split_key,
    warn_of_flat_images,
)
from polyak.networks.pair import ActorAndCritic
from polyak.networks.policy_head import PolicyHead


def check_head(owner: str, name: str, head: Any) -> None:
    """Check that a setting is a head, or None.

    Raises:
        TypeError: the value is something else.
    """
    if not isinstance(head, Head | None):
        raise TypeError(f"{owner}: {name} must be a head such as PolicyAndValue(), QValues() or Quantiles(), got {head!r}")


@struct(kw_only=True)
class BuiltInNetwork(abc.ABC):
    """The fields of all built-in networks.

    Images (uint8 Boxes of three axes) pass through three convolutions, everything else is flattened, integers as one-hot
    vectors, and all is concatenated before the dense layers.

    Attributes:
        hidden: widths of the dense layers.
        activation: activation after each dense layer; None is tanh with a head of policies or their values, else relu, also
            with the heads `Actor` and `Critics` of a recurrent network.
        orthogonal: in dense layers, orthogonal weights with gain √2, 0.01 in the policy's last layer, 1 in the last layer of
            values, and biases 0; False: weights and biases uniform within ±1/√inputs, as in PyTorch. None is True with a head
            of policies or their values, else False, also with `Actor` and `Critics`. For the layers of these two their own
            settings count.
        norm: `"layer"` normalizes the outputs of each dense layer before its activation; None does not.
        head: outputs of the network: `PolicyAndValue`, `QValues` or `Quantiles`, or in an `ActorAndCritic` `PolicyOnly` or
            `ValueOnly`. None: the agent sets its head.
    """

    hidden: tuple[int, ...] = static(default=(64,))
    activation: Activation | None = choice(default=None, choices=(None, *ACTIVATIONS))
    orthogonal: bool | None = choice(default=None, choices=(None, True, False))
    norm: Literal["layer"] | None = choice(default=None, choices=(None, "layer"))
    head: Head | None = setting(default=None, check=check_head, static=True)
    usually_shared: ClassVar[bool] = False
    modules: ClassVar[Mapping[type, Any]]

    def __post_init__(self) -> None:
        set_widths(self, "hidden")
        check_settings(self)
        self._check_together()
        if self.norm is not None and not (self.hidden or (self.critic and self.critic.hidden)):
            warn(f"{type(self).__name__}: norm={self.norm!r} has no effect with hidden=(), only with layers to normalize")

    @abc.abstractmethod
    def _check_together(self) -> None:
        """Check that the settings of head and network fit together.

        Raises:
            ValueError: settings contradict each other.
        """

    @property
    def dense(self) -> DenseSettings:
        """The settings of the dense layers, with the head's usual ones where they are None."""
        is_policy = isinstance(self.head, ActorCriticHead)
        activation = self.activation or ("tanh" if is_policy else "relu")
        orthogonal = is_policy if self.orthogonal is None else self.orthogonal
        return DenseSettings(self.hidden, activation, orthogonal, self.norm, self.noisy)

    @property
    def critic(self) -> DenseSettings | None:
        """The settings of the critic's own dense layers; None where it has none."""
        head = self.head
        if not isinstance(head, PolicyAndValue) or (self.usually_shared if head.shared_torso is None else head.shared_torso):
            return None
        hidden = self.hidden if head.value_hidden is None else head.value_hidden
        dense = self.dense
        return dataclasses.replace(dense, hidden=hidden, activation=head.value_activation or dense.activation)

    def split(self) -> tuple["BuiltInNetwork", "BuiltInNetwork"]:
        """The actor and the critic of a network with the head `PolicyAndValue`, as two networks.

        Raises:
            ValueError: they share a torso.
        """
        head = self.head
        assert isinstance(head, PolicyAndValue), "the caller sets it"
        if head.shared_torso:
            name = type(self).__name__
            raise ValueError(f"{name}: actor and critic that see different observations share no torso, got {head!r}")
        policy = PolicyOnly(log_std=head.log_std, std=head.std, squash_mean=head.squash_mean)
        hidden = self.hidden if head.value_hidden is None else head.value_hidden
        norm, activation = self.norm if hidden else None, head.value_activation or self.activation
        critic = dataclasses.replace(self, hidden=hidden, norm=norm, activation=activation, head=ValueOnly())
        return dataclasses.replace(self, norm=self.norm if self.hidden else None, head=policy), critic

    @property
    def noisy(self) -> bool:
        """True if `apply(..., key=key)` draws noise."""
        return isinstance(self.head, ActionValueSettings) and self.head.noisy

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers."""
        cosines = (self.head.num_cosines,) if isinstance(self.head, Quantiles) else ()
        return (*self.hidden, *(self.critic.hidden if self.critic else ()), *cosines)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces.

        Raises:
            ValueError: the network has no head, or one that does not suit the actions.
        """
        return FlaxNNX(self._module).init(key, spec)

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        name = type(self).__name__
        check_images(name, self, spec)
        if self.head is None:
            raise ValueError(f"{name}: head must be set outside of an agent, such as {name}(head=PolicyAndValue()), got None")
        return self.modules[type(self.head)](self, self.head, spec, rngs)

    @abc.abstractmethod
    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`; see the class of the head for `out`.

        Args:
            key: key of the noise, which is drawn for each row; None applies the network without noise.
        """


class QHead(nnx.Module):
    """The values of all actions, `[B, n, K]`; with `dueling` from one layer for the state and one for the advantages."""

    def __init__(
        self, inputs: int, outputs: int, layers: DenseSettings, head: ActionValueSettings, spec: EnvSpec, rngs: nnx.Rngs
    ) -> None:
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"network: a network of action values needs Discrete actions, got {spec.action}")
        self.shape = spec.action.n, outputs
        self.advantage = make_layer(inputs, spec.action.n * outputs, layers, 1.0, rngs)
        self.value = make_layer(inputs, outputs, layers, 1.0, rngs) if head.dueling else None

    def __call__(self, features: Float[Array, "rows features"], key: PRNGKeyArray | None = None) -> Float[Array, "rows n K"]:
        """V + A - mean A, or A."""
        keys = split_key(key, 2)
        q = self.advantage(features, keys[0]).reshape(-1, *self.shape)
        if self.value is None:
            return q
        return self.value(features, keys[1])[:, None] + q - jnp.mean(q, axis=1, keepdims=True)


class _ActorCriticModule(nnx.Module):
    """Encoder, dense layers, one head for the action's distribution and one for the value, or one of them alone."""

    def __init__(self, network: BuiltInNetwork, head: ActorCriticHead, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        dense, critic, gain = network.dense, network.critic, 1.0 if network.dense.orthogonal else None
        torso = Torso(dense, spec, rngs)
        # One object under two names is one set of parameters to NNX.
        self.actor = None if isinstance(head, ValueOnly) else torso
        self.critic = torso if critic is None else Torso(critic, spec, rngs)
        self.value: Any = None if isinstance(head, PolicyOnly) else Layer(self.critic.dense.features, 1, rngs, gain=gain)
        make_policy = partial(PolicyHead, torso.dense.features, spec=spec, rngs=rngs, orthogonal=dense.orthogonal)
        self.policy = None if isinstance(head, ValueOnly) else make_policy(head, learn_features=False)

    def __call__(self, obs: PyTree, key: PRNGKeyArray | None = None) -> tuple[PyTree, Float[Array, " B"] | None]:
        hidden = self.critic(obs) if self.actor is None else self.actor(obs)
        value = None if self.value is None else self.value(hidden if self.critic is self.actor else self.critic(obs))[..., 0]
        return None if self.policy is None else self.policy(hidden), value


class _QModule(Torso):
    """Encoder, dense layers and head."""

    def __init__(self, network: BuiltInNetwork, head: QValues, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        super().__init__(network.dense, spec, rngs)
        self.head = QHead(self.dense.features, head.outputs or 1, network.dense, head, spec, rngs)
        self.is_distribution = head.outputs is not None

    def __call__(self, obs: PyTree, key: PRNGKeyArray | None = None) -> PyTree:
        keys = split_key(key, 2)
        values = self.head(super().__call__(obs, keys[0]), keys[1])
        if self.is_distribution:
            return values
        q = values[..., 0]
        return q, jnp.max(q, axis=-1)


class _QuantileModule(nnx.Module):
    """Encoder, dense layers, embedding of τ, one more dense layer, and the head."""

    def __init__(self, network: BuiltInNetwork, head: Quantiles, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        layers = network.dense
        self.num_cosines, self.num_tau = head.num_cosines, head.num_tau
        before, last = (dataclasses.replace(layers, hidden=hidden) for hidden in (layers.hidden[:-1], layers.hidden[-1:]))
        self.encoder = Encoder(spec.obs, rngs)
        self.state = Dense(encoded_size(self.encoder, spec), before, rngs)
        self.embedding = Layer(head.num_cosines, self.state.features, rngs, gain=1.0)
        self.joint = Dense(self.state.features, last, rngs)
        self.head = QHead(self.joint.features, 1, layers, head, spec, rngs)

    def __call__(self, obs: PyTree, key: PRNGKeyArray | None = None) -> tuple[Float[Array, "B n"], Float[Array, " B"]]:
        midpoints = (jnp.arange(self.num_tau, dtype=jnp.float32) + 0.5) / self.num_tau
        tau = jnp.broadcast_to(midpoints, (len(jax.tree.leaves(obs)[0]), self.num_tau))
        q = self.quantiles(obs, tau, key).mean(axis=2)
        return q, jnp.max(q, axis=-1)

    def quantiles(self, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None) -> Float[Array, "B n K"]:
        """Z(s, a, τ)."""
        keys = split_key(key, 3)
        state = self.state(self.encoder(obs), keys[0])
        cosines = jnp.cos(jnp.pi * jnp.arange(self.num_cosines, dtype=jnp.float32)[None, None] * tau[:, :, None])
        features = state[:, None] * nnx.relu(self.embedding(cosines))
        flat = features.reshape(-1, features.shape[-1])
        values = self.head(self.joint(flat, keys[1]), keys[2])
        return values.reshape(*tau.shape, -1).swapaxes(1, 2)


class FeedForward(BuiltInNetwork):
    """A built-in network without recurrent state."""

    modules: ClassVar = {
        PolicyAndValue: _ActorCriticModule,
        PolicyOnly: _ActorCriticModule,
        ValueOnly: _ActorCriticModule,
        QValues: _QModule,
        Quantiles: _QuantileModule,
    }

    def _check_together(self) -> None:
        """Check that a shared torso has no critic's layers, and that there is a dense layer for quantiles.

        Raises:
            ValueError: the shared torso has a critic's layers, or there is no dense layer.
        """
        head, owner = self.head, type(self).__name__
        if isinstance(head, PolicyAndValue) and self.critic is None:
            for name in ("value_hidden", "value_activation"):
                if getattr(head, name) is not None:
                    raise ValueError(f"{owner}: {name} must be None with a shared torso, got {getattr(head, name)!r}")
        if isinstance(head, Quantiles) and not self.hidden:
            raise ValueError(f"{owner}: hidden must have at least one layer with the head Quantiles, got ()")

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """See `BuiltInNetwork.apply`."""
        return merge(variables)(obs, key), carry, variables.stats

    def quantiles(
        self, variables: Variables, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "B n K"]:
        """Z(s, a, τ) of each action at the fractions of each row, with the head `Quantiles`."""
        return merge(variables).quantiles(obs, tau, key)


@struct(kw_only=True)
class MLP(FeedForward):
    """Dense layers; an actor and a critic have separate ones unless they share a torso.

    Observations are flattened, integers as one-hot vectors; images (uint8 Boxes of three axes) pass through the convolutions of
    `NatureCNN` first.

    Attributes:
        hidden: widths of the dense layers.

    Raises:
        TypeError, ValueError: a setting is out of its range, or does not go with the head; the message names it.

    >>> MLP((256, 256), head=QValues(dueling=True))
    MLP(hidden=(256, 256), head=QValues(dueling=True))
    """

    hidden: tuple[int, ...] = static(default=(64, 64), kw_only=False)


@struct(kw_only=True)
class NatureCNN(FeedForward):
    """The network of Mnih et al. 2015: convolutions of images, then dense layers; an actor and a critic share them.

    Images (uint8 Boxes of three axes) pass through three convolutions (32 of 8x8/4, 64 of 4x4/2, 64 of 3x3/1, relu); everything
    else is flattened and joins them before the dense layers.

    Attributes:
        hidden: widths of the dense layers.

    Raises:
        TypeError, ValueError: a setting is out of its range, or does not go with the head; the message names it.
        ValueError: when a network or an agent is built, for an observation without an image.
    """

    hidden: tuple[int, ...] = static(default=(512,), kw_only=False)
    activation: Activation | None = "relu"
    usually_shared: ClassVar[bool] = True


def check_images(owner: str, network: Any, spec: EnvSpec) -> None:
    """Check that a `NatureCNN` has an image for its convolutions.

    Raises:
        ValueError: no part of the observation is an image.
    """
    if isinstance(network, NatureCNN) and not has_images(spec.obs):
        raise ValueError(f"{owner}: NatureCNN needs an image in the observation, {IMAGE}; got {spec.obs}")


def complete(
    owner: str, network: Any, spec: EnvSpec, head: Head, *, name: str = "network", norm: Literal["layer"] | None = None
) -> Network:
    """The network of an agent: a built-in network without a head gets `head`; None is `NatureCNN` for images, else `MLP`.

    Warns if the default network flattens a large Box.

    Args:
        name: the setting's name, for messages.
        norm: normalization of the default network.

    Raises:
        TypeError: the value is no network.
        ValueError: the network has a head of another class, or is a `NatureCNN` where the observation has no image.
    """
    if network is None:
        network = NatureCNN(norm=norm) if has_images(spec.obs) else MLP(norm=norm)
        warn_of_flat_images(owner, name, dataclasses.replace(network, head=head), spec)
    network = check_network(owner, network, name)
    check_images(owner, network, spec)
    if not isinstance(network, BuiltInNetwork):
        return network
    if network.head is not None and type(network.head) is not type(head):
        raise ValueError(f"{owner}: {name} must have the head {type(head).__name__}, got {network.head!r}")
    return network if network.head is not None else dataclasses.replace(network, head=head)


def policy_settings(network: Network | None) -> PolicySettings | None:
    """The settings of the action's distribution: the head of a built-in network, or an `Actor` itself; None for others."""
    network = network.actor if isinstance(network, ActorAndCritic) else network
    settings: Any = network.head if isinstance(network, BuiltInNetwork) else network
    return settings if isinstance(settings, PolicySettings) else None

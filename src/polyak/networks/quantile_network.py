"""Implicit quantile networks: the quantile of the return of each action, at any fraction τ."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.spaces import Discrete, EnvSpec, check_env_spec, leaf_spaces
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Network, PyTree, Variables
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.adapters import FlaxNNX
from polyak.networks.layers import ACTIVATIONS, Activation, Encoder, Layer, is_image, widths
from polyak.networks.noisy import split_key
from polyak.networks.q_network import QHead, QLayers, QNetwork, encoded_size
from polyak.ops.distributions.combinations import as_discrete
from polyak.ops.value_distributions import midpoints


@runtime_checkable
class QuantileNetwork(Network, Protocol):
    """A network of quantiles; its `apply` returns `(q, value)`, for policies."""

    def quantiles(
        self, variables: Variables, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "B n K"]:
        """The quantiles of the return of each action at the fractions τ."""
        ...


@dataclass(frozen=True)
class IQNetwork:
    """Settings of the built-in implicit quantile network; `iqn_mlp` and `iqn_nature_cnn` make them.

        Z(s, a, τ) = f(ψ(s) ∘ φ(τ))_a,    φ(τ) = relu(W cos(π i τ) + b),  i = 0 ... num_cosines - 1

    ψ is made of the convolutions, or of a vector itself, and all dense layers but the last; f of the last one and the head.

    Attributes:
        hidden: widths of the dense layers.
        activation: after each of them.
        dueling: two heads, as in `QNetwork`.
        noisy: dense layers and heads are `NoisyLayer`s.
        num_cosines: cosines that a fraction is embedded in.
        num_tau: fractions by whose mean a policy chooses actions: the midpoints of as many equal parts.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Dabney et al. 2018, arXiv:1806.06923, eq. 4.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "relu"
    dueling: bool = False
    noisy: bool = False
    num_cosines: int = 64
    num_tau: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", widths("hidden", self.hidden))
        if not self.hidden:
            raise ValueError("network: hidden must have at least one layer, got ()")
        check_choice("network", "activation", self.activation, tuple(ACTIVATIONS))
        for name in ("dueling", "noisy"):
            check_choice("network", name, getattr(self, name), (True, False))
        for name in ("num_cosines", "num_tau"):
            check_integer("network", name, getattr(self, name))

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers."""
        return (*self.hidden, self.num_cosines)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((q, value), carry, stats)` for obs leaves `[B, ...]`; q is the mean over `num_tau` fractions."""
        tau = jnp.broadcast_to(midpoints(self.num_tau)[None], (len(jax.tree.leaves(obs)[0]), self.num_tau))
        q = self.quantiles(variables, obs, tau, key).mean(axis=2)
        return (q, jnp.max(q, axis=-1)), carry, variables.stats

    def quantiles(
        self, variables: Variables, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "B n K"]:
        """Z(s, a, τ) of each action at the fractions of each row."""
        module = nnx.merge(variables.graph, variables.params, variables.stats)
        values: Array = module(obs, tau, key)
        return values

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _IQModule(self, spec, rngs)


@suggest_arguments("iqn_mlp")
def iqn_mlp(
    hidden: tuple[int, ...] = (64, 64), activation: Activation = "relu", *, dueling: bool = False, noisy: bool = False
) -> IQNetwork:
    """Dense layers for observations that are vectors."""
    return IQNetwork(hidden, activation, dueling, noisy)


@suggest_arguments("iqn_nature_cnn")
def iqn_nature_cnn(hidden: tuple[int, ...] = (512,), *, dueling: bool = False, noisy: bool = False) -> IQNetwork:
    """The network of the paper: three convolutions, then a dense layer."""
    return IQNetwork(hidden, "relu", dueling, noisy)


def iqn_network_for(spec: EnvSpec) -> IQNetwork:
    """The default network: `iqn_nature_cnn` if the observation contains an image, else `iqn_mlp`."""
    return iqn_nature_cnn() if any(is_image(leaf) for _, leaf in leaf_spaces(spec.obs)) else iqn_mlp()


def iqn_network_or_default(owner: str, network: Any, spec: Any) -> QuantileNetwork:
    """This network, or `iqn_network_for(spec)` for None.

    Raises:
        TypeError: it has no quantiles.
        ValueError: actions are not Discrete.
    """
    check_env_spec(owner, spec)
    as_discrete(owner, spec)
    if network is None:
        return iqn_network_for(spec)
    if isinstance(network, type) or not isinstance(network, QuantileNetwork):
        raise TypeError(f"{owner}: network must have init, apply and quantiles, such as iqn_mlp(), got {network!r}")
    return network


class _IQModule(nnx.Module):
    """Encoder, dense layers, embedding of τ, one more dense layer, and the head."""

    def __init__(self, settings: IQNetwork, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        assert isinstance(spec.action, Discrete), "agents of action values check it"
        layers = QNetwork(settings.hidden, settings.activation, settings.dueling, noisy=settings.noisy)
        self.num_cosines = settings.num_cosines
        self.encoder = Encoder(spec.obs, rngs)
        self.state = QLayers(encoded_size(self.encoder, spec), settings.hidden[:-1], layers, rngs)
        self.embedding = Layer(settings.num_cosines, self.state.features, ActorCritic(), 1.0, rngs)
        self.joint = QLayers(self.state.features, settings.hidden[-1:], layers, rngs)
        self.head = QHead(settings.hidden[-1], spec.action.n, 1, layers, rngs)

    def __call__(self, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None = None) -> Float[Array, "B n K"]:
        keys = split_key(key, 3)
        state = self.state(self.encoder(obs), keys[0])
        cosines = jnp.cos(jnp.pi * jnp.arange(self.num_cosines, dtype=jnp.float32)[None, None] * tau[:, :, None])
        features = state[:, None] * nnx.relu(self.embedding(cosines))
        flat = features.reshape(-1, features.shape[-1])
        values = self.head(self.joint(flat, keys[1]), keys[2])
        return values.reshape(*tau.shape, -1).swapaxes(1, 2)

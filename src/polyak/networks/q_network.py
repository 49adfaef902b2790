"""Networks of action values Q(s, a) and of their distributions, built from the spec of the environment."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.printing import text_of
from polyak.core.spaces import PROBE_ROWS, Discrete, EnvSpec, check_env_spec, leaf_spaces, zeros
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.adapters import FlaxNNX, check_network
from polyak.networks.layers import ACTIVATIONS, Activation, Encoder, Layer, LayerSettings, is_image, widths
from polyak.networks.noisy import NoisyLayer, split_key
from polyak.ops.distributions.combinations import as_discrete


@runtime_checkable
class HasNoise(Protocol):
    """A network that says whether `apply(..., key=key)` draws noise, so that acting with it needs a key at every step."""

    @property
    def noisy(self) -> bool:
        """True if the key matters."""
        ...


@dataclass(frozen=True)
class QNetwork:
    """Settings of the built-in network of action values; `q_mlp` and `q_nature_cnn` make them.

    Its output is `(q, value)` with q `[B, n]` and the value of the greedy action, max_a q, `[B]`. So the greedy action of a
    `NetworkPolicy` is the best one, and `Boltzmann(policy, temperature)` draws by P(a) ∝ exp(q_a / temperature). With
    `outputs=K` it is `[B, n, K]`: the logits or quantiles of a distribution for each action.

        dueling:  q_a = V + A_a - mean_a A_a

    Attributes:
        hidden: widths of the dense layers.
        activation: after each of them.
        dueling: two heads, for the value V and the advantages A.
        orthogonal: orthogonal weights with gain √2, 1 in the heads, and biases 0; else as PyTorch's.
        noisy: dense layers and heads are `NoisyLayer`s; without a key they apply the means of their weights.
        norm: `"layer"` normalizes the outputs of each dense layer before its activation; None does not.
        outputs: numbers for each action; None is its value. `C51` and `QRDQN` set it.

    Raises:
        TypeError, ValueError: a setting is out of its range.
        ValueError: when an agent is built, for actions that are not Discrete.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9 (dueling).
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "relu"
    dueling: bool = False
    orthogonal: bool = False
    noisy: bool = False
    norm: Literal["layer"] | None = None
    outputs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", widths("hidden", self.hidden))
        check_choice("network", "activation", self.activation, tuple(ACTIVATIONS))
        for name in ("dueling", "orthogonal", "noisy"):
            check_choice("network", name, getattr(self, name), (True, False))
        check_choice("network", "norm", self.norm, ("layer", None))
        check_integer("network", "outputs", self.outputs, optional=True)

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers."""
        return self.hidden

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((q, value), carry, stats)` for obs leaves `[B, ...]`, or `(values, carry, stats)` with `outputs`.

        Args:
            key: of the noise, which is drawn for each row; None applies the network without noise.
        """
        module = nnx.merge(variables.graph, variables.params, variables.stats)
        values = module(obs, key)
        return (values if self.outputs else (values, jnp.max(values, axis=-1))), carry, variables.stats

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)


@suggest_arguments("q_mlp")
def q_mlp(
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "relu",
    *,
    dueling: bool = False,
    orthogonal: bool = False,
    noisy: bool = False,
    norm: Literal["layer"] | None = None,
) -> QNetwork:
    """Dense layers for observations that are vectors."""
    return QNetwork(hidden, activation, dueling, orthogonal, noisy, norm)


@suggest_arguments("q_nature_cnn")
def q_nature_cnn(
    hidden: tuple[int, ...] = (512,), *, dueling: bool = False, noisy: bool = False, norm: Literal["layer"] | None = None
) -> QNetwork:
    """The network of Mnih et al. 2015: three convolutions, then dense layers."""
    return QNetwork(hidden, "relu", dueling, noisy=noisy, norm=norm)


def q_network_for(spec: EnvSpec) -> QNetwork:
    """The default network: `q_nature_cnn` if the observation contains an image, else `q_mlp`."""
    return q_nature_cnn() if any(is_image(leaf) for _, leaf in leaf_spaces(spec.obs)) else q_mlp()


def q_network_or_default(
    owner: str,
    network: Any,
    spec: Any,
    outputs: int | None = None,
    *,
    norm: Literal["layer"] | None = None,
    recurrent: bool = False,
) -> Network:
    """This network, or `q_network_for(spec)` for None; a built-in one with this number of outputs for each action.

    Args:
        norm: the norm of the default network.
        recurrent: whether it may be.

    Raises:
        TypeError: it is no network.
        ValueError: it is recurrent and may not be, or actions are not Discrete and no few combinations of a MultiDiscrete.
    """
    check_env_spec(owner, spec)
    as_discrete(owner, spec)
    default = replace(q_network_for(spec), norm=norm)
    network = default if network is None else check_network(owner, network)
    if isinstance(network, RecurrentNetwork) and not recurrent:
        raise ValueError(f"{owner}: network must not be recurrent, got {network!r}; DQN and PPO train recurrent ones")
    if isinstance(network, LayerSettings):
        raise ValueError(
            f"{owner}: network must return action values, such as polyak.q_mlp(), got an actor-critic: {network!r}"
        )
    return replace(network, outputs=outputs) if isinstance(network, QNetwork) else network


def check_q_network(network: Network, variables: Variables, spec: EnvSpec, outputs: int | None = None) -> None:
    """Check that a network returns `(q, value)`, or `[B, n, outputs]`, in float32; nothing is computed.

    Raises:
        TypeError: it returns something else, or another precision.
        ValueError: q has another shape than `[B, n]`, the value than `[B]`, or the array than `[B, n, outputs]`.
    """
    spec = as_discrete("network", spec)
    assert isinstance(spec.action, Discrete), "it is now"
    rows = PROBE_ROWS
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,)))
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    wanted = {"q": (rows, spec.action.n), "value": (rows,)}
    if outputs is not None:
        out, wanted = (out,), {"values": (rows, spec.action.n, outputs)}
    is_tuple = isinstance(out, tuple) and len(out) == len(wanted)
    if not (is_tuple and all(isinstance(x, jax.ShapeDtypeStruct) for x in out)):
        n, got = spec.action.n, out if outputs is None else out[0]
        pair = f"a tuple (q, value), q [B, {n}] and its maximum as value [B]"
        names = pair if outputs is None else f"an array [B, {n}, {outputs}]"
        raise TypeError(f"network: apply must return {names}; got for B = {rows} {text_of(got)}")
    for x, (name, shape) in zip(out, wanted.items(), strict=True):
        if x.shape != shape:
            raise ValueError(f"network: {name} of {rows} observations must have shape {shape}, got {x.shape}")
        if x.dtype != jnp.float32:
            raise TypeError(f"network: {name} must be float32 (a network of another precision casts it), got {x.dtype}")


@dataclass(frozen=True)
class ExpectedValues:
    """A network of distributions `[B, n, K]` as one of action values, for policies: it returns `(q, value)`.

    Attributes:
        network: returns the logits of K atoms, or K quantiles with equal probabilities, for each action.
        atoms: `(first, last)` of equally spaced atoms, whose mean q is; None for quantiles.
    """

    network: Network
    atoms: tuple[float, float] | None = None

    @property
    def noisy(self) -> bool:
        """As the network."""
        return is_noisy(self.network)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """The network's."""
        return self.network.init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((q, value), carry, stats)` for obs leaves `[B, ...]`."""
        values, carry, stats = self.network.apply(variables, obs, carry, train=train, key=key)
        q = self.q(values)
        return (q, jnp.max(q, axis=-1)), carry, stats

    def q(self, values: Float[Array, "B n K"]) -> Float[Array, "B n"]:
        """The mean of each distribution."""
        if self.atoms is None:
            return jnp.mean(values, axis=-1)
        atoms = jnp.linspace(*self.atoms, values.shape[-1])
        return jnp.sum(jax.nn.softmax(values, axis=-1) * atoms[None, None], axis=-1)


def is_noisy(network: Network) -> bool:
    """Whether the network draws noise with the key of `apply`."""
    return isinstance(network, HasNoise) and network.noisy


class QLayers(nnx.Module):
    """Dense layers with an activation after each: plain or noisy, with or without normalization."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], settings: QNetwork, rngs: nnx.Rngs) -> None:
        pairs = list(itertools.pairwise((inputs, *hidden)))
        self.layers = nnx.List([_layer(a, b, settings, np.sqrt(2.0), rngs) for a, b in pairs])
        norms = [nnx.LayerNorm(b, rngs=rngs) for _, b in pairs] if settings.norm else []
        self.norms: Any = nnx.List(norms)
        self.activation = settings.activation
        self.features = hidden[-1] if hidden else inputs

    def __call__(self, x: Float[Array, "rows inputs"], key: PRNGKeyArray | None) -> Float[Array, "rows features"]:
        """The last layer's output."""
        norms = self.norms or [lambda x: x] * len(self.layers)
        for layer, norm, layer_key in zip(self.layers, norms, split_key(key, len(self.layers)), strict=True):
            x = ACTIVATIONS[self.activation](norm(_apply(layer, x, layer_key)))
        return x


class QHead(nnx.Module):
    """The values of all actions, `[B, n, K]`; with `dueling` from one layer for the state and one for the advantages."""

    def __init__(self, inputs: int, num_actions: int, outputs: int, settings: QNetwork, rngs: nnx.Rngs) -> None:
        self.shape = num_actions, outputs
        self.advantage = _layer(inputs, num_actions * outputs, settings, 1.0, rngs)
        self.value = _layer(inputs, outputs, settings, 1.0, rngs) if settings.dueling else None

    def __call__(self, features: Float[Array, "rows features"], key: PRNGKeyArray | None) -> Float[Array, "rows n K"]:
        """V + A - mean A, or A."""
        keys = split_key(key, 2)
        q = _apply(self.advantage, features, keys[0]).reshape(-1, *self.shape)
        if self.value is None:
            return q
        return _apply(self.value, features, keys[1])[:, None] + q - jnp.mean(q, axis=1, keepdims=True)


class _QModule(nnx.Module):
    """Encoder, dense layers and head."""

    def __init__(self, settings: QNetwork, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"network: a network of action values needs Discrete actions, got {spec.action}")
        self.encoder = Encoder(spec.obs, rngs)
        self.dense = QLayers(encoded_size(self.encoder, spec), settings.hidden, settings, rngs)
        self.head = QHead(self.dense.features, spec.action.n, settings.outputs or 1, settings, rngs)
        self.is_distribution = settings.outputs is not None

    def __call__(self, obs: PyTree, key: PRNGKeyArray | None = None) -> Float[Array, "rows n *K"]:
        keys = split_key(key, 2)
        values = self.head(self.dense(self.encoder(obs), keys[0]), keys[1])
        return values if self.is_distribution else values[..., 0]


def encoded_size(encoder: Encoder, spec: EnvSpec) -> int:
    """The length of an encoded observation."""
    example = jax.tree.map(jnp.asarray, zeros(spec.obs, (1,)))
    return int(nnx.eval_shape(encoder, example).shape[-1])


def _layer(inputs: int, outputs: int, settings: QNetwork, gain: float, rngs: nnx.Rngs) -> Layer | NoisyLayer:
    if settings.noisy:
        return NoisyLayer(inputs, outputs, rngs)
    return Layer(inputs, outputs, ActorCritic(orthogonal=settings.orthogonal), gain, rngs)


def _apply(layer: Layer | NoisyLayer, x: Array, key: PRNGKeyArray | None) -> Array:
    return layer(x, key) if isinstance(layer, NoisyLayer) else layer(x)

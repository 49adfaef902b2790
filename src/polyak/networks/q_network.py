"""Networks of action values Q(s, a), built from the spec of the environment."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice
from polyak.core.spaces import Discrete, EnvSpec, check_env_spec, leaf_spaces, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.actor_critic import ActorCritic, network_or_default
from polyak.networks.adapters import FlaxNNX
from polyak.networks.layers import ACTIVATIONS, Activation, Layer, Torso, is_image, widths


@dataclass(frozen=True)
class QNetwork:
    """Settings of the built-in network of action values; `q_mlp` and `q_nature_cnn` make them.

    Its output is `(q, value)` with q `[B, n]` and the value of the greedy action, max_a q, `[B]`. So the greedy action of a
    `NetworkPolicy` is the best one, and `Boltzmann(policy, temperature)` draws by P(a) ∝ exp(q_a / temperature).

        dueling:  q_a = V + A_a - mean_a A_a

    Attributes:
        hidden: widths of the dense layers.
        activation: after each of them.
        dueling: two heads, for the value V and the advantages A.
        orthogonal: orthogonal weights with gain √2, 1 in the heads, and biases 0; else as PyTorch's.

    Raises:
        TypeError, ValueError: a setting is out of its range.
        ValueError: when an agent is built, for actions that are not Discrete.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9 (dueling).
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "relu"
    dueling: bool = False
    orthogonal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", widths("hidden", self.hidden))
        check_choice("network", "activation", self.activation, tuple(ACTIVATIONS))
        for name in ("dueling", "orthogonal"):
            check_choice("network", name, getattr(self, name), (True, False))

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
        """`((q, value), carry, stats)` for obs leaves `[B, ...]`."""
        return FlaxNNX(self._module).apply(variables, obs, carry, train=train, key=key)

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _QModule(self, spec, rngs)


def q_mlp(
    hidden: tuple[int, ...] = (64, 64), activation: Activation = "relu", *, dueling: bool = False, orthogonal: bool = False
) -> QNetwork:
    """Dense layers for observations that are vectors."""
    return QNetwork(hidden, activation, dueling, orthogonal)


def q_nature_cnn(hidden: tuple[int, ...] = (512,), *, dueling: bool = False) -> QNetwork:
    """The network of Mnih et al. 2015: three convolutions, then dense layers."""
    return QNetwork(hidden, "relu", dueling)


def q_network_for(spec: EnvSpec) -> QNetwork:
    """The default network: `q_nature_cnn` if the observation contains an image, else `q_mlp`."""
    return q_nature_cnn() if any(is_image(leaf) for _, leaf in leaf_spaces(spec.obs)) else q_mlp()


def q_network_or_default(owner: str, network: Any, spec: EnvSpec) -> Network:
    """This network, or `q_network_for(spec)` for None.

    Raises:
        TypeError: it is no network.
        ValueError: it is recurrent, or actions are not Discrete.
    """
    check_env_spec(owner, spec)
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"{owner}: actions must be Discrete, got {spec.action}; PPO takes every space")
    if network is None:
        return q_network_for(spec)
    network = network_or_default(owner, network, spec)
    if isinstance(network, RecurrentNetwork):
        raise ValueError(f"{owner}: network must not be recurrent, got {network!r}; PPO trains recurrent networks")
    return network


def check_q_network(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Check that a network returns `(q, value)` in float32 for the actions of the spec; nothing is computed.

    Raises:
        TypeError: it returns something else, or another precision.
        ValueError: q has another shape than `[B, n]`, or the value than `[B]`.
    """
    assert isinstance(spec.action, Discrete), "agents of action values check it"
    rows = 2
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,)))
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, jax.ShapeDtypeStruct) for x in out)):
        raise TypeError(f"network: apply must return (q, value), got {jax.tree.map(jnp.shape, out)}")
    for name, x, shape in (("q", out[0], (rows, spec.action.n)), ("value", out[1], (rows,))):
        if x.shape != shape:
            raise ValueError(f"network: {name} of {rows} observations must have shape {shape}, got {x.shape}")
        if x.dtype != jnp.float32:
            raise TypeError(f"network: {name} must be float32 (a network of another precision casts it), got {x.dtype}")


class _QModule(nnx.Module):
    """Encoder and dense layers, and a head for the values of all actions; with `dueling` one for the state too."""

    def __init__(self, settings: QNetwork, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"network: a network of action values needs Discrete actions, got {spec.action}")
        layers = ActorCritic(settings.hidden, settings.activation, orthogonal=settings.orthogonal)
        self.dueling = settings.dueling
        self.torso = Torso(layers, spec, rngs)
        self.advantage = Layer(self.torso.features, spec.action.n, layers, 1.0, rngs)
        self.value = Layer(self.torso.features, 1, layers, 1.0, rngs) if settings.dueling else None

    def __call__(self, obs: PyTree) -> tuple[Float[Array, "B n"], Float[Array, " B"]]:
        features = self.torso(obs)
        q = self.advantage(features)
        if self.value is not None:
            q = self.value(features) + q - jnp.mean(q, axis=-1, keepdims=True)
        return q, jnp.max(q, axis=-1)

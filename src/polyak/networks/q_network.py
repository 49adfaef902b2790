"""The networks of agents of action values Q(s, a) and of their distributions, and their checks."""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.printing import text_of
from polyak.core.spaces import PROBE_ROWS, Discrete, EnvSpec, check_env_spec, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.core.warn import warn
from polyak.networks.feedforward import BuiltInNetwork, complete
from polyak.networks.heads import Quantiles, QValues
from polyak.ops.distributions.combinations import as_discrete


@runtime_checkable
class QuantileNetwork(Network, Protocol):
    """A network of quantiles; its `apply` returns `(q, value)`, for policies."""

    def quantiles(
        self, variables: Variables, obs: PyTree, tau: Float[Array, "B K"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "B n K"]:
        """The quantiles of the return of each action at the fractions τ."""
        ...


def q_network_or_default(
    owner: str,
    network: Any,
    spec: Any,
    head: QValues | Quantiles,
    *,
    norm: Literal["layer"] | None = None,
    recurrent: bool = False,
) -> Network:
    """The network of an agent of action values; see `complete`. A built-in one has the `outputs` of this head.

    Args:
        norm: the norm of the default network.
        recurrent: allow a recurrent network.

    Raises:
        TypeError: the value is no network, or the network has no quantiles although the head has.
        ValueError: the network has the head of another agent, is recurrent without being allowed, or actions are neither
            Discrete nor MultiDiscrete with few combinations.
    """
    check_env_spec(owner, spec)
    spec = as_discrete(owner, spec)
    if isinstance(network, RecurrentNetwork) and not recurrent:
        raise ValueError(f"{owner}: network must not be recurrent, got {network!r}; DQN and PPO train recurrent ones")
    network = complete(owner, network, spec, head, norm=norm)
    if isinstance(head, Quantiles) and not isinstance(network, QuantileNetwork):
        raise TypeError(f"{owner}: network must have quantiles, such as MLP(), got {network!r}")
    if isinstance(head, QValues) and isinstance(network, BuiltInNetwork) and isinstance(network.head, QValues):
        if head.outputs is None and network.head.outputs is not None:
            warn(f"{owner}: outputs={network.head.outputs} of the network's head has no effect, only with C51 and QRDQN")
        return dataclasses.replace(network, head=dataclasses.replace(network.head, outputs=head.outputs))
    return network


def check_q_network(network: Network, variables: Variables, spec: EnvSpec, outputs: int | None = None) -> None:
    """Check that a network returns `(q, value)`, or `[B, n, outputs]`, in float32; nothing is computed.

    Raises:
        TypeError: the network returns something else, or another precision.
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
class ValueConverter(abc.ABC):
    """The base of networks that convert the outputs `[B, n, K]` of a network to action values, for policies.

    Attributes:
        network: returns K numbers for each action.
    """

    network: Network

    @property
    def noisy(self) -> bool:
        """True if the wrapped network draws noise."""
        return is_noisy(self.network)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables of the wrapped network."""
        return self.network.init(key, spec)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`, out as by `convert`."""
        values, carry, stats = self.network.apply(variables, obs, carry, train=train, key=key)
        return self.convert(values), carry, stats

    @abc.abstractmethod
    def convert(self, values: Float[Array, "B n K"]) -> tuple[Float[Array, "B n *K"], Float[Array, " B"]]:
        """The output for these numbers: a pair of action values and the value of the observation."""


@dataclass(frozen=True)
class ExpectedValues(ValueConverter):
    """Converts a network of distributions `[B, n, K]` to a network of action values `(q, value)`, for policies.

    Attributes:
        network: returns the logits of K atoms, or K quantiles with equal probabilities, for each action.
        atoms: `(first, last)` of equally spaced atoms, q is their mean; None for quantiles.
    """

    atoms: tuple[float, float] | None = None

    def convert(self, values: Float[Array, "B n K"]) -> tuple[Float[Array, "B n"], Float[Array, " B"]]:
        """The means, and the largest of them."""
        q = self.q(values)
        return q, jnp.max(q, axis=-1)

    def q(self, values: Float[Array, "B n K"]) -> Float[Array, "B n"]:
        """The mean of each distribution."""
        if self.atoms is None:
            return jnp.mean(values, axis=-1)
        atoms = jnp.linspace(*self.atoms, values.shape[-1])
        return jnp.sum(jax.nn.softmax(values, axis=-1) * atoms[None, None], axis=-1)


def is_noisy(network: Network) -> bool:
    """Return True if the network has `noisy=True`: `apply` draws noise with its key, so acting needs a key at every step."""
    return bool(getattr(network, "noisy", False))

"""Recurrent networks of action values: an LSTM or a GRU between the dense layers and the heads."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.printing import short_repr
from polyak.core.spaces import Discrete, EnvSpec
from polyak.core.types import PyTree, Variables
from polyak.networks.adapters import FlaxNNX
from polyak.networks.layers import ACTIVATIONS, Activation, Layer, widths
from polyak.networks.recurrent import CellName, CellStack, RecurrentActorCritic


@short_repr()
@dataclass(frozen=True, repr=False)
class RecurrentQNetwork:
    """Settings of the built-in recurrent network of action values; `q_lstm` and `q_gru` make them.

    Encoder and dense layers, one cell, and heads as of `QNetwork`; the cell and its recurrent state are those of
    `RecurrentActorCritic`.

    Attributes:
        cell: `"lstm"` or `"gru"`.
        width: size of the cell's output.
        hidden: widths of the dense layers before the cell; may be empty.
        activation: after each of these.
        dueling: two heads, for the value V and the advantages A.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Hausknecht & Stone 2015, arXiv:1507.06527; Kapturowski et al. 2019 (R2D2).
    """

    cell: CellName = "lstm"
    width: int = 64
    hidden: tuple[int, ...] = (64,)
    activation: Activation = "relu"
    dueling: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", widths("hidden", self.hidden))
        check_choice("network", "cell", self.cell, ("lstm", "gru"))
        check_integer("network", "width", self.width)
        check_choice("network", "activation", self.activation, tuple(ACTIVATIONS))
        check_choice("network", "dueling", self.dueling, (True, False))

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of the dense layers and of the cell."""
        return (*self.hidden, self.width)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros `[B, width]`: `(c, h)` of an LSTM, `h` of a GRU."""

        # Each its own buffer: a donated carry may not hold one buffer twice.
        def zeros() -> Array:
            return jnp.zeros((batch_size, self.width), jnp.float32)

        return (zeros(), zeros()) if self.cell == "lstm" else zeros()

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((q, value), carry, stats)` after one step, for obs leaves `[B, ...]`; carry `()` is the initial one."""
        if isinstance(carry, tuple) and not carry:
            carry = self.initial_carry(len(jax.tree.leaves(obs)[0]))
        (out, carry), _, stats = FlaxNNX(self._module).apply(variables, (obs, carry), train=train, key=key)
        return out, carry, stats

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _RecurrentQModule(self, spec, rngs)


q_lstm = partial(RecurrentQNetwork, "lstm")
"""Dense layers, an LSTM cell and action values, for partial observations."""

q_gru = partial(RecurrentQNetwork, "gru")
"""`q_lstm` with a GRU cell."""


class _RecurrentQModule(nnx.Module):
    """Encoder, dense layers, a cell, and a head for the values of all actions; with `dueling` one for the state too."""

    def __init__(self, settings: RecurrentQNetwork, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"network: a network of action values needs Discrete actions, got {spec.action}")
        layers = RecurrentActorCritic(settings.cell, settings.width, settings.hidden, settings.activation, orthogonal=False)
        self.stack = CellStack(layers, spec, rngs)
        self.advantage = Layer(settings.width, spec.action.n, layers, 1.0, rngs)
        self.value = Layer(settings.width, 1, layers, 1.0, rngs) if settings.dueling else None

    def __call__(self, inputs: tuple[PyTree, PyTree]) -> tuple[tuple[Float[Array, "B n"], Float[Array, " B"]], PyTree]:
        obs, carry = inputs
        carry, features = self.stack.cell(carry, self.stack.torso(obs))
        q = self.advantage(features)
        if self.value is not None:
            q = self.value(features) + q - jnp.mean(q, axis=-1, keepdims=True)
        return (q, jnp.max(q, axis=-1)), carry

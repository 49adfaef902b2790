"""Recurrent networks: an LSTM or a GRU between the dense layers and the heads, and how they are unrolled."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.printing import short_repr
from polyak.core.spaces import EnvSpec
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.adapters import FlaxNNX
from polyak.networks.layers import Activation, Layer, PolicyHead, Std, Torso, check_layers

CellName: TypeAlias = Literal["lstm", "gru"]


@short_repr()
@dataclass(frozen=True, repr=False)
class RecurrentActorCritic:
    """Settings of the built-in recurrent actor-critic network; `lstm` and `gru` make them.

    Encoder and dense layers as of `ActorCritic`, then one cell, then the heads. Actor and critic have a cell and a recurrent
    state each, unless they share all but the heads. The cells are Flax's: gates in the order i, f, g, o (LSTM) and r, z, n
    (GRU), LeCun normal input kernels, recurrent ones orthogonal over all gates together (as in Keras), and biases 0, but 1 in
    the forget gate, so that a fresh LSTM does not forget. That 1 is a parameter like the others: nothing is added when the
    gate is computed. The recurrent state starts at 0, in float32.

    Attributes:
        cell: `"lstm"` or `"gru"`.
        width: size of the cell's output; the recurrent state of an LSTM is twice as large.
        hidden: widths of the dense layers before the cell; may be empty.
        activation: after each of these.
        shared_torso: one cell, and one stack of layers before it, for both heads.
        log_std: see `ActorCritic`, as the rest.
        orthogonal: of the dense layers and heads.
        std: free, depending on the state, or fixed.
        squash_mean: the mean of Box actions inside their bounds.

    Source: Hochreiter & Schmidhuber 1997 (LSTM); Cho et al. 2014, arXiv:1406.1078 (GRU); Jozefowicz et al. 2015 (the 1).
    """

    cell: CellName = "lstm"
    width: int = 64
    hidden: tuple[int, ...] = (64,)
    activation: Activation = "tanh"
    shared_torso: bool = False
    log_std: float = 0.0
    orthogonal: bool = True
    std: Std = "free"
    squash_mean: bool = False

    def __post_init__(self) -> None:
        check_choice("network", "cell", self.cell, ("lstm", "gru"))
        check_integer("network", "width", self.width)
        check_layers(self)

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of the dense layers and of the cell."""
        return (*self.hidden, self.width)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the spec's spaces."""
        return FlaxNNX(self._module).init(key, spec)

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros `[B, width]` for each cell: `(c, h)` of an LSTM, `h` of a GRU, by the names `actor` and `critic`."""

        # Each its own buffer: a donated carry may not hold one buffer twice.
        def zeros() -> Array:
            return jnp.zeros((batch_size, self.width), jnp.float32)

        names = ("actor",) if self.shared_torso else ("actor", "critic")
        return {name: (zeros(), zeros()) if self.cell == "lstm" else zeros() for name in names}

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, value), carry, stats)` after one step, for obs leaves `[B, ...]`; carry `()` is the initial one."""
        carry = self.initial_carry(len(jax.tree.leaves(obs)[0])) if _is_empty(carry) else carry
        (out, carry), _, stats = FlaxNNX(self._module).apply(variables, (obs, carry), train=train, key=key)
        return out, carry, stats

    def unroll(self, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree) -> tuple[PyTree, PyTree]:
        """See `unroll`; the layers before and after the cells take all steps at once."""
        module: _RecurrentModule = nnx.merge(variables.graph, variables.params, variables.stats)
        module.eval()
        return module.through_time(obs, first, carry)

    def _module(self, spec: EnvSpec, rngs: nnx.Rngs) -> nnx.Module:
        return _RecurrentModule(self, spec, rngs)


lstm = partial(RecurrentActorCritic, "lstm")
"""Dense layers and an LSTM cell, for partial observations; separate ones for actor and critic unless `shared_torso`."""

gru = partial(RecurrentActorCritic, "gru")
"""`lstm` with a GRU cell: a quarter fewer weights, half the recurrent state."""


def reset_carry(network: Network, carry: PyTree, first: Bool[Array, " B"]) -> PyTree:
    """The carry, reset to the initial one where an episode begins; as it is for a network that is not recurrent.

    Earlier values, NaN included, leave no trace. A carry of `()` is the initial one.
    """
    if not isinstance(network, RecurrentNetwork):
        return carry
    initial = network.initial_carry(len(first))
    return _reset(initial, initial if _is_empty(carry) else carry, first)


def unroll(
    network: RecurrentNetwork, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """The network along T time steps of B environments, `(out, carry)`; gradients flow back through time.

        carry_t = initial where first_t else carry_{t-1};    out_t, carry_t = apply(variables, obs_t, carry_t)

    Args:
        network: unrolled as by `apply` step by step, up to rounding.
        variables: its arrays.
        obs: leaves `[T, B, ...]`.
        first: an episode begins: its carry is reset before the step.
        carry: leaves `[B, ...]`, before the first step; `()` is the initial one.

    Returns:
        out leaves `[T, B, ...]`, and the carry after the last step.
    """
    carry = network.initial_carry(first.shape[1]) if _is_empty(carry) else carry
    if isinstance(network, RecurrentActorCritic):
        return network.unroll(variables, obs, first, carry)

    def step(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        obs, first = row
        out, carry, _ = network.apply(variables, obs, reset_carry(network, carry, first))
        return carry, out

    carry, out = jax.lax.scan(step, carry, (obs, first))
    return out, carry


class _RecurrentModule(nnx.Module):
    """Encoder, dense layers, a cell; one head for the action's distribution and one for the value."""

    def __init__(self, settings: RecurrentActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.settings = settings
        self.actor = CellStack(settings, spec, rngs)
        # One object under two names is one set of parameters to NNX.
        self.critic = self.actor if settings.shared_torso else CellStack(settings, spec, rngs)
        self.value = Layer(settings.width, 1, settings, 1.0, rngs)
        self.policy = PolicyHead(settings.width, settings, spec, rngs)

    def __call__(self, inputs: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """`(out, carry)` of one step from `(obs, carry)`."""
        obs, carry = inputs
        carry, outputs = self._step(carry, self._features(obs))
        return self._heads(outputs), carry

    def through_time(self, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree) -> tuple[PyTree, PyTree]:
        """`(out, carry)` of T steps; only the cells go step by step."""
        size = first.shape
        features = _split_steps(self._features(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)), size)
        initial = self.settings.initial_carry(size[1])

        def step(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
            features, first = row
            return self._step(_reset(initial, carry, first), features)

        carry, outputs = jax.lax.scan(step, carry, (features, first))
        out = self._heads(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), outputs))
        return _split_steps(out, size), carry

    def _stacks(self) -> dict[str, "CellStack"]:
        return {"actor": self.actor} if self.critic is self.actor else {"actor": self.actor, "critic": self.critic}

    def _features(self, obs: PyTree) -> PyTree:
        return {name: stack.torso(obs) for name, stack in self._stacks().items()}

    def _step(self, carry: PyTree, features: PyTree) -> tuple[PyTree, PyTree]:
        stepped = {name: stack.cell(carry[name], features[name]) for name, stack in self._stacks().items()}
        return {name: carry for name, (carry, _) in stepped.items()}, {name: out for name, (_, out) in stepped.items()}

    def _heads(self, outputs: PyTree) -> tuple[PyTree, Float[Array, " N"]]:
        value = self.value(outputs["actor" if self.critic is self.actor else "critic"])
        return self.policy(outputs["actor"]), value[..., 0]


class CellStack(nnx.Module):
    """Encoder and dense layers, and the cell after them."""

    def __init__(self, settings: RecurrentActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.torso = Torso(settings, spec, rngs)
        sizes = (self.torso.features, settings.width)
        self.cell: nnx.OptimizedLSTMCell | nnx.GRUCell = (
            nnx.OptimizedLSTMCell(*sizes, gate_fn=_sigmoid, activation_fn=_tanh, bias_init=_open_forget_gate, rngs=rngs)
            if settings.cell == "lstm"
            else nnx.GRUCell(*sizes, gate_fn=_sigmoid, activation_fn=_tanh, rngs=rngs)
        )


# Flax's defaults are functions of JAX, which cannot be pickled, and so neither could a policy.
def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x)


def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


def _open_forget_gate(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
    """Biases of the gates i, f, g, o, one after the other."""
    return jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0], dtype), shape[0] // 4)


def _reset(initial: PyTree, carry: PyTree, first: Bool[Array, " B"]) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old), initial, carry)


def _split_steps(tree: PyTree, size: tuple[int, ...]) -> PyTree:
    """`[T, B, ...]` of `[T * B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]), tree)


def _is_empty(carry: PyTree) -> bool:
    return isinstance(carry, tuple) and not carry

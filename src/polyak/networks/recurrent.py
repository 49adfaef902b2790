"""The built-in recurrent networks: an LSTM or a GRU between the dense layers and the head."""

import abc
import dataclasses
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.spaces import Box, EnvSpec
from polyak.core.struct import integer, setting, static, struct
from polyak.core.types import PyTree, Variables
from polyak.networks.actor import Actor
from polyak.networks.adapters import merge
from polyak.networks.critics import Critics
from polyak.networks.feedforward import BuiltInNetwork, QHead, check_head
from polyak.networks.heads import (
    ActorCriticHead,
    Head,
    PolicyAndValue,
    PolicyOnly,
    PolicySettings,
    Quantiles,
    QValues,
    ValueOnly,
)
from polyak.networks.layers import MAX_WIDTH, Layer, Torso
from polyak.networks.normalization import OWN_NORM
from polyak.networks.policy_head import PolicyHead
from polyak.networks.unroll import is_empty, reset, step_by_step, unroll

Cell: TypeAlias = nnx.OptimizedLSTMCell | nnx.GRUCell


class _ActorCriticModule(nnx.Module):
    """Encoder, dense layers, a cell; one head for the action's distribution and one for the value, or one of them alone."""

    def __init__(self, network: "Recurrent", head: ActorCriticHead, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.network, orthogonal = network, network.dense.orthogonal
        stack = _CellStack(network, spec, rngs)
        # One object under two names is one set of parameters to NNX.
        self.actor = None if isinstance(head, ValueOnly) else stack
        self.critic = stack if network.critic is None else _CellStack(network, spec, rngs)
        gain, width = 1.0 if orthogonal else None, network.width
        self.value = None if isinstance(head, PolicyOnly) else Layer(width, 1, rngs, gain=gain)
        self.policy = None if isinstance(head, ValueOnly) else PolicyHead(width, head, spec, rngs, orthogonal=orthogonal)

    def __call__(self, inputs: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """`(out, carry)` of one step from `(obs, carry)`."""
        obs, carry = inputs
        carry, outputs = self._step(carry, self._features(obs))
        return self._heads(outputs), carry

    def through_time(self, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree) -> tuple[PyTree, PyTree]:
        """`(out, carry)` of T steps; only the cells go step by step."""
        size = first.shape
        features = _split_steps(self._features(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)), size)
        initial = self.network.initial_carry(size[1])

        def step(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
            features, first = row
            return self._step(reset(initial, carry, first), features)

        carry, outputs = jax.lax.scan(step, carry, (features, first))
        out = self._heads(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), outputs))
        return _split_steps(out, size), carry

    def _stacks(self) -> dict[str, "_CellStack"]:
        critic = {} if self.critic is self.actor else {"critic": self.critic}
        return critic if self.actor is None else {"actor": self.actor, **critic}

    def _features(self, obs: PyTree) -> PyTree:
        return {name: stack.torso(obs) for name, stack in self._stacks().items()}

    def _step(self, carry: PyTree, features: PyTree) -> tuple[PyTree, PyTree]:
        stepped = {name: stack.cell(carry[name], features[name]) for name, stack in self._stacks().items()}
        return {name: carry for name, (carry, _) in stepped.items()}, {name: out for name, (_, out) in stepped.items()}

    def _heads(self, outputs: PyTree) -> tuple[PyTree, Float[Array, " N"] | None]:
        policy = None if self.policy is None else self.policy(outputs["actor"])
        value = None if self.value is None else self.value(outputs.get("critic", outputs.get("actor")))[..., 0]
        return policy, value


class _QModule(QHead):
    """Encoder, dense layers, a cell, and the layers of the head."""

    def __init__(self, network: "Recurrent", head: QValues, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.stack = _CellStack(network, spec, rngs)
        super().__init__(network.width, 1, network.dense, head, spec, rngs)

    def __call__(self, inputs: Any, key: PRNGKeyArray | None = None) -> Any:
        """`((q, value), carry)` of one step from `(obs, carry)`."""
        obs, carry = inputs
        carry, features = self.stack(obs, carry)
        q = super().__call__(features)[..., 0]
        return (q, jnp.max(q, axis=-1)), carry


class _OnCell(nnx.Module):
    """Encoder, dense layers, a cell, and an actor or critics that see the cell's output in place of an observation."""

    def __init__(self, network: "Recurrent", head: Actor | Critics, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.stack = _CellStack(network, spec, rngs)
        self.on_cell: Any = head.module(dataclasses.replace(spec, obs=Box(-np.inf, np.inf, (network.width,))), rngs)


class _ActorOnCell(_OnCell):
    def __call__(self, inputs: Any) -> tuple[PyTree, PyTree]:
        """`((action_params, None), carry)` of one step from `(obs, carry)`."""
        carry, features = self.stack(*inputs)
        return self.on_cell(features), carry


class _CriticsOnCell(_OnCell):
    def __call__(self, inputs: Any) -> tuple[PyTree, PyTree]:
        """`((q, None), carry)` of one step from `((obs, action), carry)`; the carry is a function of observations alone."""
        (obs, action), carry = inputs
        carry, features = self.stack(obs, carry)
        return self.on_cell((features, action)), carry


class _CellStack(nnx.Module):
    """Encoder and dense layers, and the cell after them."""

    def __init__(self, network: "Recurrent", spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.torso = Torso(network.dense, spec, rngs)
        self.cell = network._make_cell(self.torso.dense.features, rngs)

    def __call__(self, obs: PyTree, carry: PyTree) -> tuple[PyTree, Float[Array, "B width"]]:
        """`(carry, output)` of one step."""
        stepped: tuple[PyTree, Array] = self.cell(carry, self.torso(obs))
        return stepped

    def through_time(
        self, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree, initial: PyTree
    ) -> tuple[PyTree, Float[Array, "T B width"]]:
        """`(carry, outputs)` of T steps; only the cell goes step by step."""
        features = _split_steps(self.torso(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)), first.shape)

        def step(carry: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, Array]:
            features, first = row
            stepped: tuple[PyTree, Array] = self.cell(reset(initial, carry, first), features)
            return stepped

        return jax.lax.scan(step, carry, (features, first))


def _check_head(owner: str, name: str, head: Any) -> None:
    if not isinstance(head, Actor | Critics):
        check_head(owner, name, head)


@struct
class Recurrent(BuiltInNetwork):
    """A built-in network with a cell between the dense layers and the head.

    Attributes:
        width: size of the cell's output.
        hidden: widths of the dense layers before the cell; may be empty.
        head: outputs of the network: `PolicyAndValue`, `QValues`, or of off-policy actor-critics an `Actor` or `Critics`, which
            see the cell's output in place of the observation, and have settings of their own for their layers. None: the agent
            sets its head.
    """

    width: int = integer(default=64, at_most=MAX_WIDTH)
    _: dataclasses.KW_ONLY
    head: Head | Actor | Critics | None = setting(  # type: ignore[assignment]
        default=None, check=_check_head, static=True
    )
    modules: ClassVar = {
        PolicyAndValue: _ActorCriticModule,
        PolicyOnly: _ActorCriticModule,
        ValueOnly: _ActorCriticModule,
        QValues: _QModule,
        Actor: _ActorOnCell,
        Critics: _CriticsOnCell,
    }

    def _check_together(self) -> None:
        """Check that the head has no setting that a recurrent network does not support.

        Raises:
            ValueError: the head has such a setting.
        """
        owner = type(self).__name__
        match self.head:
            case PolicySettings(std="sde"):
                raise ValueError(f"{owner}: std must be 'free', 'state' or 'fixed' in a recurrent network, got 'sde'")
            case PolicyAndValue(value_hidden=hidden, value_activation=activation) if (hidden, activation) != (None, None):
                got = f"got {hidden} and {activation!r}"
                raise ValueError(f"{owner}: value_hidden and value_activation must be None in a recurrent network, {got}")
            case QValues(noisy=True) | QValues(outputs=int()) | Quantiles():
                raise ValueError(f"{owner}: a recurrent network has no noise, outputs or quantiles, got {self.head!r}")
            case Actor(norm=norm, residual=residual) | Critics(norm=norm, residual=residual) if (
                norm not in (None, "layer") or residual in OWN_NORM
            ):
                wanted = "neither batch normalization nor 'hypersphere' or 'inverted' blocks"
                raise ValueError(f"{owner}: the head of a recurrent network must have {wanted}, got {self.head!r}")
            case Critics(dropout=dropout) if dropout > 0:
                raise ValueError(f"{owner}: dropout must be 0 in the critics of a recurrent network, got {dropout}")

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of the dense layers and of the cell, and of the layers of an `Actor` or of `Critics` after it."""
        return (*self.hidden, self.width, *(self.head.layer_widths if isinstance(self.head, Actor | Critics) else ()))

    @property
    def core(self) -> "RecurrentCore":
        """The network without its `Actor` or `Critics`."""
        return RecurrentCore(self)

    @abc.abstractmethod
    def _make_cell(self, inputs: int, rngs: nnx.Rngs) -> Cell:
        """The cell, of random initial weights."""

    @abc.abstractmethod
    def _cell_carry(self, batch_size: int) -> PyTree:
        """The recurrent state of one cell: zeros `[B, width]`, each a buffer of its own, which a donated carry needs."""

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros `[B, width]`: `(c, h)` of an LSTM, `h` of a GRU; with `PolicyAndValue` by the names `actor` and `critic`."""
        if isinstance(self.head, QValues | Actor | Critics):
            return self._cell_carry(batch_size)
        names = ("critic",) if isinstance(self.head, ValueOnly) else ("actor", "critic") if self.critic else ("actor",)
        return {name: self._cell_carry(batch_size) for name in names}

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` after one step, for obs leaves `[B, ...]`; carry `()` is the initial one.

        With the head `Critics`, `obs` is `(obs, action)`; the carry is a function of the observations alone.
        """
        carry = self.initial_carry(len(jax.tree.leaves(obs)[0])) if is_empty(carry) else carry
        out, carry = merge(variables)((obs, carry))
        return out, carry, variables.stats

    def critic_values(self, variables: Variables, features: Float[Array, "B width"], action: PyTree) -> Float[Array, "B N *M"]:
        """The values of `Critics` from outputs of the cell, as `core` returns them, and actions."""
        q, _ = merge(variables).on_cell((features, action))
        return q


@struct
class RecurrentCore:
    """A recurrent network without its `Actor` or `Critics`, with the variables of the whole: it returns the cell's output.

    Attributes:
        network: the whole network.
    """

    network: Recurrent = static()

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create the whole network's variables."""
        return self.network.init(key, spec)

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros, as of the whole network."""
        return self.network.initial_carry(batch_size)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(output, carry, stats)` after one step, for obs leaves `[B, ...]`, with the output `[B, width]`."""
        carry = self.initial_carry(len(jax.tree.leaves(obs)[0])) if is_empty(carry) else carry
        carry, output = merge(variables).stack(obs, carry)
        return output, carry, variables.stats


@struct
class LSTM(Recurrent):
    """Dense layers and an LSTM cell, for partial observations.

    With `PolicyAndValue` actor and critic have a cell and a recurrent state each, unless they share a torso. The cell is Flax's
    cell: gates in the order i, f, g, o, LeCun normal input kernels, recurrent kernels orthogonal over all gates together (as in
    Keras), and biases 0, but 1 in the forget gate, so that a new LSTM does not forget. This bias is an ordinary parameter:
    nothing is added when the gate is computed. The recurrent state, c and h, starts at 0, in float32.

    Raises:
        TypeError, ValueError: a setting is out of its range, or does not go with the head; the message names it.

    Source: Hochreiter & Schmidhuber 1997; Jozefowicz et al. 2015 (the 1); Hausknecht & Stone 2015, arXiv:1507.06527 (of action
    values).
    """

    def _make_cell(self, inputs: int, rngs: nnx.Rngs) -> Cell:
        """The cell of Flax with an open forget gate."""
        return nnx.OptimizedLSTMCell(
            inputs, self.width, gate_fn=_sigmoid, activation_fn=_tanh, bias_init=_open_forget_gate, rngs=rngs
        )

    def _cell_carry(self, batch_size: int) -> PyTree:
        """The pair `(c, h)`."""
        return _zeros(batch_size, self.width), _zeros(batch_size, self.width)


@struct
class GRU(Recurrent):
    """`LSTM` with a GRU cell: a quarter fewer weights, half the recurrent state.

    The gates of Flax's cell are in the order r, z, n, with biases 0.

    Raises:
        TypeError, ValueError: a setting is out of its range, or does not go with the head; the message names it.

    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    def _make_cell(self, inputs: int, rngs: nnx.Rngs) -> Cell:
        """The cell of Flax."""
        return nnx.GRUCell(inputs, self.width, gate_fn=_sigmoid, activation_fn=_tanh, rngs=rngs)

    def _cell_carry(self, batch_size: int) -> PyTree:
        """The state h."""
        return _zeros(batch_size, self.width)


@unroll.register(Recurrent)
def _unroll(
    network: Recurrent, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """`unroll` of an actor-critic with its layers applied to all steps at once, except the cells."""
    if isinstance(network.head, QValues | Critics):
        return step_by_step(network, variables, obs, first, carry)
    if isinstance(network.head, Actor):
        features, carry = unroll(network.core, variables, obs, first, carry)
        rows = features.reshape(-1, network.width)
        return _split_steps(merge(variables).on_cell(rows), first.shape), carry
    carry = network.initial_carry(first.shape[1]) if is_empty(carry) else carry
    module: _ActorCriticModule = merge(variables)
    return module.through_time(obs, first, carry)


@unroll.register(RecurrentCore)
def _unroll_core(
    network: RecurrentCore, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """`unroll` with the dense layers applied to all steps at once."""
    initial = network.initial_carry(first.shape[1])
    stack: _CellStack = merge(variables).stack
    carry, outputs = stack.through_time(obs, first, initial if is_empty(carry) else carry, initial)
    return outputs, carry


def _zeros(batch_size: int, width: int) -> Float[Array, "B width"]:
    return jnp.zeros((batch_size, width), jnp.float32)


# Flax's defaults are functions of JAX, which cannot be pickled, and so neither could a policy.
def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x)


def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


def _open_forget_gate(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
    """Concatenated biases of the gates i, f, g, o."""
    return jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0], dtype), shape[0] // 4)


def _split_steps(tree: PyTree, size: tuple[int, ...]) -> PyTree:
    """`[T, B, ...]` of `[T * B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(*size, *x.shape[1:]), tree)

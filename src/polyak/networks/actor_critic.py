"""Built-in networks, built from the spec of the environment.

A network for an actor-critic agent returns `(action_params, value)`: the parameters of a distribution over the action space, in
the tree of `ops.distributions.parameter_shapes`, and one value per row.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice
from polyak.core.printing import short_repr
from polyak.core.spaces import PROBE_ROWS, Box, EnvSpec, leaf_spaces, zeros
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Network, PyTree, Variables
from polyak.networks.adapters import FlaxNNX, check_network
from polyak.networks.layers import (
    ACTIVATIONS,
    Activation,
    Layer,
    LayerSettings,
    PolicyHead,
    Std,
    Torso,
    ValueHeadSettings,
    check_layers,
    check_means,
    has_images,
    widths,
)
from polyak.ops.distributions import for_space


@short_repr()
@dataclass(frozen=True, repr=False)
class ActorCritic:
    """Settings of the built-in actor-critic network; `mlp` and `nature_cnn` make them.

    Images (uint8 Boxes of three axes) pass through the three convolutions of `nature_cnn`, everything else is flattened,
    integers as one-hot vectors, and all is concatenated before the dense layers.

    Attributes:
        hidden: widths of the dense layers.
        activation: between layers.
        shared_torso: actor and critic share all but the last layer.
        log_std: initial logarithm of the standard deviation of Box actions.
        orthogonal: in dense layers, orthogonal weights with gain √2, 0.01 in the policy's last layer, 1 in the value's, and
            biases 0; else weights and biases uniform within ±1/√inputs, as PyTorch has them.
        std: `"free"`: that logarithm is a parameter, the same in every state; `"state"`: an output of the policy's last layer,
            which starts at `log_std`; `"fixed"`: it is `log_std`; `"sde"`: for state-dependent exploration of one Box action,
            that of √(z(s)² · σ²), z(s) the features of the last dense layer, which get no gradient of it, and σ a matrix of
            parameters, whose logarithms start at `log_std`.
        squash_mean: the mean of Box actions is middle + half_range · tanh(x), inside the bounds of the action.
        value_hidden: widths of the critic's dense layers; None: those of the actor.
        value_activation: between the critic's layers; None: as between the actor's.

    Raises:
        TypeError, ValueError: a setting out of its range, by name; one of the critic's with a shared torso.
        ValueError: where an agent is built, for means to be squashed without a Box or into bounds that are not finite.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    shared_torso: bool = False
    log_std: float = 0.0
    orthogonal: bool = True
    std: Std = "free"
    squash_mean: bool = False
    value_hidden: tuple[int, ...] | None = None
    value_activation: Activation | None = None

    def __post_init__(self) -> None:
        check_layers(self, ("free", "state", "fixed", "sde"))
        for name in ("value_hidden", "value_activation"):
            if self.shared_torso and getattr(self, name) is not None:
                raise ValueError(f"network: {name} must be None where shared_torso is True, got {getattr(self, name)!r}")
        if self.value_hidden is not None:
            object.__setattr__(self, "value_hidden", widths("value_hidden", self.value_hidden))
        check_choice("network", "value_activation", self.value_activation, (None, *ACTIVATIONS))

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Widths of all dense layers of actor and critic."""
        return (*self.hidden, *(self.value_hidden or ()))

    @property
    def of_critic(self) -> "ActorCritic":
        """The same settings with the critic's layers."""
        hidden = self.hidden if self.value_hidden is None else self.value_hidden
        activation = self.activation if self.value_activation is None else self.value_activation
        return replace(self, hidden=hidden, activation=activation)

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


@suggest_arguments("mlp")
def mlp(
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "tanh",
    *,
    shared_torso: bool = False,
    log_std: float = 0.0,
    orthogonal: bool = True,
    std: Std = "free",
    squash_mean: bool = False,
    value_hidden: tuple[int, ...] | None = None,
    value_activation: Activation | None = None,
) -> ActorCritic:
    """Dense layers for observations that are vectors; separate ones for actor and critic unless `shared_torso`."""
    return ActorCritic(hidden, activation, shared_torso, log_std, orthogonal, std, squash_mean, value_hidden, value_activation)


@suggest_arguments("nature_cnn")
def nature_cnn(
    hidden: tuple[int, ...] = (512,),
    *,
    shared_torso: bool = True,
    log_std: float = 0.0,
    std: Std = "free",
    squash_mean: bool = False,
) -> ActorCritic:
    """The convolutions of Mnih et al. 2015 (32 of 8x8/4, 64 of 4x4/2, 64 of 3x3/1, relu), then dense layers; torso shared."""
    return ActorCritic(hidden, "relu", shared_torso, log_std, std=std, squash_mean=squash_mean)


def network_for(spec: EnvSpec) -> ActorCritic:
    """The default network: `nature_cnn` where the observation holds an image, else `mlp`."""
    return nature_cnn() if has_images(spec.obs) else mlp()


def network_or_default(owner: str, network: Any, spec: EnvSpec, *, sde: bool = False) -> Network:
    """This network, or the default one for None.

    Args:
        sde: the default has `std="sde"`.

    Raises:
        TypeError: it is no network.
        ValueError: it is one of action values, whose outputs have the same shapes.
    """
    if network is None:
        return replace(network_for(spec), std="sde") if sde else network_for(spec)
    if isinstance(network, ValueHeadSettings):
        raise ValueError(
            f"{owner}: network must return (action_params, value), such as polyak.mlp(), got one of action values: {network!r}"
        )
    return check_network(owner, network)


def check_squashing(owner: str, network: Network, spec: EnvSpec, *, squash: bool) -> None:
    """Check that a tanh over actions, or over a built-in network's means, is possible, and applied once.

    Raises:
        ValueError: actions are not rescaled, none is a Box or one has no bounds for its mean, or both squash.
    """
    if isinstance(network, LayerSettings):
        check_means(network, spec.action)
    if not squash:
        return
    if spec.action_scaling != "rescale":
        raise ValueError(f"{owner}: squash must be False unless the spec's action_scaling is 'rescale', got 'clip'")
    if isinstance(network, LayerSettings) and network.squash_mean:
        raise ValueError(f"{owner}: squash must be False where the network has squash_mean=True, which squashes already")
    if not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(spec.action)):
        raise ValueError(f"{owner}: squash must be False where no action is a Box, got {spec.action}")


def check_actor_critic(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Check that a network returns `(action_params, value)` in float32 with the batch size of its input; nothing is computed.

    Raises:
        TypeError: it returns something else, or another precision.
        ValueError: the value has another shape than `[B]`, or the action parameters are not those of B actions.
    """
    rows = PROBE_ROWS
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,)))
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"network: apply must return (action_params, value), got {jax.tree.map(jnp.shape, out)}")
    if jnp.shape(out[1]) != (rows,):
        raise ValueError(f"network: the value of {rows} observations must have shape ({rows},), got {jnp.shape(out[1])}")
    for path, leaf in jax.tree_util.tree_leaves_with_path({"action_params": out[0], "value": out[1]}):
        if leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"network: {name} must be float32 (a network that computes in another precision casts it), got {leaf.dtype}"
            )
    try:
        mode = jax.eval_shape(lambda params: for_space(spec.action, params).mode(), out[0])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"network: its action_params do not fit {spec.action}: {error}") from error
    got, wanted = (jax.tree.map(jnp.shape, tree) for tree in (mode, zeros(spec.action, (rows,))))
    if got != wanted:
        raise ValueError(
            f"network: actions for {rows} observations must have the shapes {wanted}, its action_params give {got}"
        )


class _ActorCriticModule(nnx.Module):
    """Encoder, dense layers, one head for the action's distribution and one for the value."""

    def __init__(self, settings: ActorCritic, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.actor = Torso(settings, spec, rngs)
        # One object under two names is one set of parameters to NNX.
        self.critic = self.actor if settings.shared_torso else Torso(settings.of_critic, spec, rngs)
        self.value = Layer(self.critic.features, 1, settings, 1.0, rngs)
        self.policy = PolicyHead(self.actor.features, settings, spec, rngs, learn_features=False)

    def __call__(self, obs: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
        hidden = self.actor(obs)
        value = self.value(hidden if self.critic is self.actor else self.critic(obs))
        return self.policy(hidden), value[..., 0]

"""The networks of actor-critic agents and their checks.

Such a network returns `(action_params, value)`: the parameters of a distribution over the action space, in the tree of
`ops.distributions.parameter_shapes`, and one value per row.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.spaces import PROBE_ROWS, Box, EnvSpec, leaf_spaces, zeros
from polyak.core.types import Network, RecurrentNetwork, Variables
from polyak.networks.feedforward import BuiltInNetwork, complete, policy_settings
from polyak.networks.heads import PolicyAndValue, PolicyOnly, Std, ValueOnly
from polyak.networks.pair import ActorAndCritic, RecurrentActorAndCritic
from polyak.networks.policy_head import check_means
from polyak.ops.distributions import for_space


def network_or_default(
    owner: str, network: Any, spec: EnvSpec, *, std: Std, views: Mapping[str, tuple[str, ...] | None]
) -> Network:
    """The network of an actor-critic agent, an `ActorAndCritic` where a half of it sees only a part; see `complete`.

    Args:
        std: `std` of the head that a built-in network without a head gets.
        views: the entries of the observation that `"actor"` and `"critic"` see; None: all.

    Raises:
        TypeError: the value is no network.
        ValueError: the network has the head of another agent, cannot be split, or its blocks need unit weights.
    """
    has_views = any(entries is not None for entries in views.values())
    if network is None and has_views:
        network = ActorAndCritic()
    if not isinstance(network, ActorAndCritic):
        network = complete(owner, network, spec, PolicyAndValue(std=std))
        if not has_views:
            return network
        network = _split(owner, network)
    elif not has_views and (network.actor_obs, network.critic_obs) != (None, None):
        raise ValueError(f"{owner}: actor_obs and critic_obs are set in the agent, not in the network, got {network!r}")
    of_actor, of_critic = (spec.select_entries(entries) for entries in (views["actor"], views["critic"]))
    actor = complete(owner, network.actor, of_actor, PolicyOnly(std=std))
    check_blocks(owner, "actor", actor)
    critic = complete(owner, network.critic, of_critic, ValueOnly())
    is_recurrent = isinstance(actor, RecurrentNetwork) or isinstance(critic, RecurrentNetwork)
    pair = RecurrentActorAndCritic if is_recurrent else ActorAndCritic
    return pair(actor, critic, actor_obs=views["actor"], critic_obs=views["critic"])


def check_blocks(owner: str, name: str, network: Any) -> None:
    """Check that the network of an agent whose weight vectors keep no norm has no `"hypersphere"` blocks.

    Raises:
        ValueError: it has them.
    """
    if getattr(network, "residual", None) == "hypersphere":
        needed = "weight_norm=True, a setting of SAC, TQC, BRO, CrossQ, CQL and XQC"
        raise ValueError(f"{owner}: {name} with residual='hypersphere' needs {needed}, got {network!r}")


def _split(owner: str, network: Network) -> ActorAndCritic:
    """The halves of a built-in network."""
    if not isinstance(network, BuiltInNetwork):
        raise ValueError(
            f"{owner}: network must be built-in, or an ActorAndCritic, for an actor and a critic that see different entries, "
            f"got {network!r}"
        )
    return ActorAndCritic(*network.split())


def check_squashing(owner: str, network: Network, spec: EnvSpec, *, squash: bool) -> None:
    """Check that a tanh over actions, or over a built-in network's means, is possible, and applied once.

    Raises:
        ValueError: actions are not rescaled, no action is a Box, a mean has no bounds, or agent and network both squash.
    """
    settings = policy_settings(network)
    if settings is not None:
        check_means(settings, spec.action)
    if not squash:
        return
    if spec.action_scaling != "rescale":
        raise ValueError(f"{owner}: squash must be False unless the spec's action_scaling is 'rescale', got 'clip'")
    if settings is not None and settings.squash_mean:
        raise ValueError(f"{owner}: squash must be False with a network that has squash_mean=True")
    if not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(spec.action)):
        raise ValueError(f"{owner}: squash must be False without a Box action, got {spec.action}")


def check_actor_critic(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Check that a network returns `(action_params, value)` in float32 with the batch size of its input; nothing is computed.

    Raises:
        TypeError: the network returns something else, or another precision.
        ValueError: the value has another shape than `[B]`, or the action parameters do not fit B actions.
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
        raise ValueError(f"network: actions for {rows} observations must have the shapes {wanted}, action_params give {got}")

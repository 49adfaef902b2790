"""Extracts the NumPy arrays of a policy of dense layers: weights, normalization and action scaling."""

from typing import Any

import numpy.typing as npt

from polyak.core.spaces import EnvSpec
from polyak.export.numpy_format import describe_spaces
from polyak.networks.actor import Actor
from polyak.networks.feedforward import FeedForward, policy_settings
from polyak.networks.layers import is_image
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.policies.numpy_network import has_plain_layers, network_arrays


def numpy_weights(policy: Any, spec: EnvSpec) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return `(about, arrays)`, the settings and arrays from which `polyak.policies.numpy_reader` computes the greedy action.

    Raises:
        ValueError: the policy is not an `MLP` or `Actor` from one vector to one Discrete or Box action.
    """
    inner: Any = policy.policy if isinstance(policy, Greedy) else policy
    try:
        network = _mlp_of(inner, spec)
        describe_spaces(spec, squash_mean=False)
    except ValueError as error:
        raise ValueError(
            f"export: format numpy takes an MLP or Actor from one vector to one Discrete or Box action; {error}"
        ) from None
    arrays = network_arrays(network, inner.variables.params, inner.normalizer, spec)
    settings = policy_settings(network)
    squash_mean = settings is not None and settings.squash_mean
    about, bounds = describe_spaces(spec, squash_mean=squash_mean)
    about |= {"layers": len(network.hidden), "activation": network.dense.activation, "squash_mean": squash_mean}
    about["tanh"] = inner.squash or squash_mean
    return about, arrays | bounds


def _mlp_of(policy: Any, spec: EnvSpec) -> FeedForward | Actor:
    reason = None
    if type(policy) is not NetworkPolicy:
        reason = f"the policy is a {type(policy).__name__}"
    elif not isinstance(policy.network, FeedForward | Actor):
        reason = f"the network is {policy.network!r}"
    elif not has_plain_layers(policy.network):
        reason = f"the network is {policy.network!r}, whose layers are not plain"
    elif not policy.network.hidden:
        reason = "the network has no hidden layer"
    elif policy.squash and (settings := policy_settings(policy.network)) and settings.squash_mean:
        reason = "squash and squash_mean are both on"
    elif is_image(spec.obs):
        reason = f"the observation is {spec.obs}"
    if reason is not None:
        raise ValueError(reason[:300])
    network: FeedForward | Actor = policy.network
    return network

"""NumPy arrays of a policy that is a stack of dense layers: its weights, normalisation and action scaling."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import EnvSpec
from polyak.export.numpy_format import describe_spaces
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.layers import is_image
from polyak.policies.network_policy import Greedy, NetworkPolicy


def numpy_weights(policy: Any, spec: EnvSpec) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """`(about, arrays)`, the settings and arrays from which `polyak.export.numpy_reader` computes the greedy action.

    Raises:
        ValueError: the policy is not an `mlp` from one vector to one Discrete or Box action, and why.
    """
    inner: Any = policy.policy if isinstance(policy, Greedy) else policy
    try:
        network = _mlp_of(inner, spec)
        describe_spaces(spec, squash_mean=False)
    except ValueError as error:
        raise ValueError(f"export: format numpy takes an mlp from one vector to one Discrete or Box action; {error}") from None
    params = jax.tree.map(np.asarray, inner.variables.params)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i in range(len(network.hidden)):
        layer = params["actor"]["dense"]["layers"][i]
        arrays |= {f"kernel{i}": layer["kernel"], f"bias{i}": layer["bias"]}
    head = params["policy"]["linear"]
    arrays |= {"head_kernel": head["kernel"], "head_bias": head["bias"]} | _scaling(inner)
    about, bounds = describe_spaces(spec, squash_mean=network.squash_mean)
    about |= {"layers": len(network.hidden), "activation": network.activation, "squash_mean": network.squash_mean}
    about["tanh"] = inner.squash or network.squash_mean
    return about, arrays | bounds


def _scaling(policy: NetworkPolicy) -> dict[str, npt.NDArray[Any]]:
    if policy.normalizer is None or policy.normalizer.stats is None:
        return {}
    stats, clip = policy.normalizer.stats, policy.normalizer.clip
    parts = {"mean": stats.mean, "mean_rest": stats.mean_rest, "deviation": stats.stddev()}
    rows = {name: np.asarray(x).reshape(1, -1) for name, x in parts.items()}
    return {**rows, "clip": np.array([np.inf if clip is None else clip], np.float32)}


def _mlp_of(policy: Any, spec: EnvSpec) -> ActorCritic:
    reason = None
    if type(policy) is not NetworkPolicy:
        reason = f"the policy is a {type(policy).__name__}"
    elif not isinstance(policy.network, ActorCritic):
        reason = f"the network is {policy.network!r}"
    elif policy.squash and policy.network.squash_mean:
        reason = "squash and squash_mean are both on"
    elif is_image(spec.obs):
        reason = f"the observation is {spec.obs}"
    if reason is not None:
        raise ValueError(reason[:300])
    network: ActorCritic = policy.network
    return network

"""The weights of a policy that is a plain stack of dense layers, with what stands before and after them, as NumPy arrays."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.parts.modules import is_image
from polyak.parts.networks import ActorCritic
from polyak.parts.policies import Greedy, NetworkPolicy


def plain_weights(policy: Any, spec: EnvSpec) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """`(about, arrays)` from which `polyak.io.numpy_reader` finds the greedy action.

    Raises:
        ValueError: the policy is not an `mlp` from one vector to one Discrete or Box action; which part of it is not.
    """
    inner: Any = policy.policy if isinstance(policy, Greedy) else policy
    network = _plain_network(inner, spec)
    params = jax.tree.map(np.asarray, inner.variables.params)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i in range(len(network.hidden)):
        layer = params["actor"]["dense"]["layers"][i]
        arrays |= {f"kernel{i}": layer["kernel"], f"bias{i}": layer["bias"]}
    head = params["policy"]["linear"]
    arrays |= {"head_kernel": head["kernel"], "head_bias": head["bias"]} | _scaling(inner)
    divide = 255.0 if isinstance(spec.obs, Box) and spec.obs.dtype == np.uint8 else 1.0
    about: dict[str, Any] = {"layers": len(network.hidden), "activation": network.activation, "divide": divide}
    if isinstance(spec.action, Discrete):
        return {**about, "action": "discrete", "start": spec.action.start}, arrays
    action = spec.action
    assert isinstance(action, Box), "as was checked"
    arrays |= {name: x.astype(np.float32).reshape(1, -1) for name, x in (("low", action.low), ("high", action.high))}
    about |= {"action": "box", "shape": list(action.shape), "dtype": str(action.dtype), "tanh": inner.squash}
    return {**about, "rescale": spec.action_scaling == "rescale"}, arrays


def _scaling(policy: NetworkPolicy) -> dict[str, npt.NDArray[Any]]:
    if policy.normalizer is None or policy.normalizer.stats is None:
        return {}
    stats, clip = policy.normalizer.stats, policy.normalizer.clip
    parts = {"mean": stats.mean, "mean_rest": stats.mean_rest, "deviation": stats.stddev()}
    rows = {name: np.asarray(x).reshape(1, -1) for name, x in parts.items()}
    return {**rows, "clip": np.array([np.inf if clip is None else clip], np.float32)}


def _plain_network(policy: Any, spec: EnvSpec) -> ActorCritic:
    why = None
    if type(policy) is not NetworkPolicy:
        why = f"the policy is a {type(policy).__name__}"
    elif not isinstance(policy.network, ActorCritic) or policy.network.squash_mean:
        why = f"the network is {policy.network!r}"
    elif not isinstance(spec.obs, Box) or is_image(spec.obs):
        why = f"the observation is {spec.obs}"
    elif not isinstance(spec.action, Box | Discrete):
        why = f"the action is {spec.action}"
    elif spec.has_action_mask:
        why = "the environment has action masks"
    if why is not None:
        raise ValueError(f"export: format numpy takes an mlp from one vector to one Discrete or Box action; {why[:300]}")
    network: ActorCritic = policy.network
    return network

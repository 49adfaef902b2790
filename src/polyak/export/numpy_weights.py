"""The weights of a policy that is a plain stack of dense layers, with what stands before and after them, as NumPy arrays."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.layers import is_image
from polyak.policies.network_policy import Greedy, NetworkPolicy


def plain_weights(policy: Any, spec: EnvSpec) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """`(about, arrays)` from which `polyak.export.numpy_reader` finds the greedy action.

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
    about, bounds = _of_spaces(spec, squash_mean=network.squash_mean)
    about |= {"layers": len(network.hidden), "activation": network.activation, "squash_mean": network.squash_mean}
    about["tanh"] = inner.squash or network.squash_mean
    return about, arrays | bounds


def check_plain_weights(spec: EnvSpec, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """That they are what `plain_weights` gives for these spaces, whatever the numbers.

    Raises:
        ValueError: which part of them is not.
    """
    decided, bounds = _of_spaces(spec, squash_mean=about.get("squash_mean") is True)
    wrong = [name for name, value in decided.items() if about.get(name) != value]
    wrong += [name for name, x in bounds.items() if not np.array_equal(arrays.get(name, ()), x)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} are not those of the spaces")
    layers = about.get("layers")
    if type(layers) is not int or not 0 <= layers < len(arrays):
        raise ValueError(f"layers is {layers!r}")
    width = math.prod(spec.obs.shape) if isinstance(spec.obs, Box) else 0
    wanted = {name: x.shape for name, x in bounds.items()}
    if "deviation" in arrays:
        wanted |= {**dict.fromkeys(("mean", "mean_rest", "deviation"), (1, width)), "clip": (1,)}
    for name in (*map(str, range(layers)), "head"):
        kernel, bias = ("head_kernel", "head_bias") if name == "head" else (f"kernel{name}", f"bias{name}")
        columns = arrays[kernel].shape[-1] if kernel in arrays else 0
        wanted |= {kernel: (width, columns), bias: (columns,)}
        width = columns
    ends = spec.action.n if isinstance(spec.action, Discrete) else math.prod(bounds["low"].shape)
    got = {name: x.shape for name, x in arrays.items()}
    if got != wanted or width != ends or any(x.dtype != np.float32 for x in arrays.values()):
        raise ValueError(f"its arrays are {str(got)[:300]}, wanted {str(wanted)[:300]}, {ends} columns at the end, all float32")


def _of_spaces(spec: EnvSpec, *, squash_mean: bool) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What of `plain_weights` the spaces decide, and that the network's means stay in them."""
    why = _why_not(spec)
    if why is not None:
        raise ValueError(why[:300])
    divide = 255.0 if isinstance(spec.obs, Box) and spec.obs.dtype == np.uint8 else 1.0
    if isinstance(spec.action, Discrete):
        return {"divide": divide, "action": "discrete", "start": spec.action.start}, {}
    action = spec.action
    assert isinstance(action, Box), "as was checked"
    if squash_mean and not action.bounded:
        raise ValueError(f"squash_mean needs finite bounds, got {action}")
    about = {"action": "box", "shape": list(action.shape), "dtype": str(action.dtype), "divide": divide}
    bounds = {name: x.astype(np.float32).reshape(1, -1) for name, x in (("low", action.low), ("high", action.high))}
    # Means squashed into the bounds are means squashed into ±1 and scaled to the bounds.
    return {**about, "rescale": squash_mean or spec.action_scaling == "rescale"}, bounds


def _scaling(policy: NetworkPolicy) -> dict[str, npt.NDArray[Any]]:
    if policy.normalizer is None or policy.normalizer.stats is None:
        return {}
    stats, clip = policy.normalizer.stats, policy.normalizer.clip
    parts = {"mean": stats.mean, "mean_rest": stats.mean_rest, "deviation": stats.stddev()}
    rows = {name: np.asarray(x).reshape(1, -1) for name, x in parts.items()}
    return {**rows, "clip": np.array([np.inf if clip is None else clip], np.float32)}


def _plain_network(policy: Any, spec: EnvSpec) -> ActorCritic:
    why = _why_not(spec)
    if type(policy) is not NetworkPolicy:
        why = f"the policy is a {type(policy).__name__}"
    elif not isinstance(policy.network, ActorCritic):
        why = f"the network is {policy.network!r}"
    elif policy.squash and policy.network.squash_mean:
        why = "squash and squash_mean are both on"
    if why is not None:
        raise ValueError(f"export: format numpy takes an mlp from one vector to one Discrete or Box action; {why[:300]}")
    network: ActorCritic = policy.network
    return network


def _why_not(spec: EnvSpec) -> str | None:
    if not isinstance(spec.obs, Box) or is_image(spec.obs):
        return f"the observation is {spec.obs}"
    if not isinstance(spec.action, Box | Discrete):
        return f"the action is {spec.action}"
    return "the environment has action masks" if spec.has_action_mask else None

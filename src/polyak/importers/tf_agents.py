"""PPO policies of TF-Agents, from the arrays of their variables."""

import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, EnvSpec
from polyak.importers.imported_weights import check_spaces, make_policy, read_arrays, torso, widths
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.layers import Activation
from polyak.ops.normalize import ObsNormalizer, RunningStats
from polyak.policies.network_policy import NetworkPolicy

OWNER = "from_tf_agents"
ACTOR, CRITIC = "ActorDistributionNetwork", "ValueNetwork"
LAYER = re.compile(rf"({ACTOR}|{CRITIC})/EncodingNetwork/dense(?:_(\d+))?/kernel")
VALUE = re.compile(rf"({CRITIC}/dense(?:_\d+)?)/kernel")
# Keras numbers all layers of one name in a process; only the order of dense layers matters.
COUNTER = re.compile(r"(?<!dense)_\d+(?=/)")
NORMALIZER = ("avg_0", "count_0", "m2_0", "m2_carry_0")

# TF-Agents adds the first to the variance and clips at the second; `RunningStats.normalize` adds the third.
VARIANCE_EPSILON, CLIP_OBS, OWN_EPSILON = 1e-3, 5.0, 1e-8


def from_tf_agents(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    activation: Activation = "relu",
    value_activation: Activation | None = None,
) -> NetworkPolicy:
    """The policy of TF-Agents' PPO with an `ActorDistributionNetwork` and a `ValueNetwork` of dense layers.

    TensorFlow writes the file from the SavedModel of `PolicySaver`; polyak needs neither TensorFlow nor TF-Agents:

        model = tf.saved_model.load("policy")
        np.savez("policy.npz", **{variable.name: variable.numpy() for variable in model.model_variables})

    Observations are normalized by the statistics in the file, if there are some: (x - mean) / √(variance + 10⁻³), clipped to
    ±5. The mean of Box actions is squashed into their bounds with tanh, and the standard deviation is the softplus of a
    parameter, as TF-Agents' networks have it by default.

    Args:
        path: the `.npz` file. Pickled objects in it are never loaded.
        spec: the environment's; a Box observation, not of uint8, and Discrete or Box actions that are clipped to their bounds.
        activation: `activation_fn` of the `ActorDistributionNetwork`, which is not in the file.
        value_activation: `activation_fn` of the `ValueNetwork`; None takes `activation`.

    Returns:
        A policy that samples as the saved policy does; `predict(obs)` returns the greedy action.

    Raises:
        ValueError: the file is no such archive or damaged, or its network does not fit the spec; by name.
        TypeError: `spec` is not an `EnvSpec`.
    """
    check_spaces(OWNER, spec)
    left = _read_arrays(path)
    normalizer = _normalizer(left, spec, path)
    actor, critic = _dense(left, ACTOR), _dense(left, CRITIC)
    params = {
        "actor": torso(actor),
        "critic": torso(critic),
        "policy": _policy_head(left, spec, path),
        "value": _layer(left, next((found[1] for name in left if (found := VALUE.fullmatch(name))), CRITIC), path),
    }
    if left:
        raise ValueError(f"{OWNER}: {path} has {min(left)!r}, which polyak's dense networks do not have")
    hidden, value_hidden = widths(actor), widths(critic)
    head = PolicyAndValue(
        squash_mean=isinstance(spec.action, Box),
        value_hidden=None if value_hidden == hidden else value_hidden,
        value_activation=value_activation,
    )
    return make_policy(OWNER, str(path), spec, MLP(hidden, activation=activation, head=head), params, normalizer)


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The arrays by the names of their variables, without `:0` and Keras' numbers."""
    arrays = read_arrays(OWNER, path)
    numbers = {
        COUNTER.sub("", name.removesuffix(":0")): array.astype(np.float32)
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    }
    if not any(name.startswith(ACTOR) for name in numbers):
        raise ValueError(f"{OWNER}: {path} has no variable of an {ACTOR}; got {', '.join(sorted(arrays))[:200] or 'none'}")
    return numbers


def _dense(left: dict[str, Any], network: str) -> list[dict[str, Any]]:
    """The dense layers of a network, in the order of the numbers that Keras gave them."""
    found = [match for name in left if (match := LAYER.fullmatch(name)) and match[1] == network]
    ordered = sorted(found, key=lambda match: int(match[2] or 0))
    return [_layer(left, match[0].removesuffix("/kernel"), "the file") for match in ordered]


def _layer(left: dict[str, Any], name: str, path: object) -> dict[str, Any]:
    return {"kernel": _take(left, f"{name}/kernel", path), "bias": _take(left, f"{name}/bias", path)}


def _policy_head(left: dict[str, Any], spec: EnvSpec, path: object) -> dict[str, Any]:
    """The logits of Discrete actions; of a Box the means before tanh, and log softplus of the parameter of the deviation."""
    if not isinstance(spec.action, Box):
        return {"linear": _layer(left, f"{ACTOR}/CategoricalProjectionNetwork/logits", path)}
    projection = f"{ACTOR}/NormalProjectionNetwork"
    std = np.logaddexp(0.0, _take(left, f"{projection}/bias_layer/bias", path))
    linear = _layer(left, f"{projection}/means_projection_layer", path)
    return {"linear": linear, "log_std": {"all": np.log(std)}}


def _normalizer(left: dict[str, Any], spec: EnvSpec, path: object) -> ObsNormalizer | None:
    """The running statistics, with the difference of the two epsilons as a part of the variance."""
    if not any(name in left for name in NORMALIZER):
        return None
    obs: Any = spec.obs
    mean, count, squares, _ = (_take(left, name, path) for name in NORMALIZER)
    if mean.shape != obs.shape:
        raise ValueError(f"{OWNER}: avg_0 of {path} has shape {mean.shape}, the spec needs {obs.shape}")
    variance = squares / count + np.float32(VARIANCE_EPSILON - OWN_EPSILON)
    entries = np.uint32(np.clip(np.max(count), 1, 2**32 - 2**10))
    stats = RunningStats(*map(jnp.asarray, (entries, mean, np.zeros_like(mean), variance)))
    return ObsNormalizer(stats, spec.obs, CLIP_OBS)


def _take(left: dict[str, Any], name: str, path: object) -> Any:
    if name not in left:
        raise ValueError(f"{OWNER}: {path} has no variable {name!r}, as TF-Agents' PPO has for these spaces")
    return left.pop(name)

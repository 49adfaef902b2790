"""PPO policies of Brax, from the arrays of its parameters."""

import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, EnvSpec
from polyak.importers.imported_weights import check_spaces, make_policy, read_arrays, torso, widths
from polyak.networks.actor import Actor
from polyak.networks.layers import Activation
from polyak.ops.normalize import ObsNormalizer, RunningStats
from polyak.policies.network_policy import Greedy

OWNER = "from_brax"
POLICY = "1/params/"

# `RunningStats.normalize` adds it to the variance; Brax adds nothing.
OWN_EPSILON = 1e-8


def from_brax(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    activation: Activation = "silu",
    normalize_obs: bool = True,
    obs_key: str = "state",
) -> Greedy:
    """The greedy policy of the tanh-normal PPO that Brax trains, in MuJoCo Playground too.

    Python with Brax writes the file from the parameters that `ppo.train` returns; polyak needs no Brax:

        leaves = jax.tree_util.tree_leaves_with_path(params)
        np.savez("policy.npz", **{jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves})

    Args:
        path: the `.npz` file. Pickled objects in it are never loaded.
        spec: the environment's, as the policy sees it; a Box observation, not of uint8, and Box actions that are rescaled
            (`action_scaling="rescale"`).
        activation: activation of the policy's network, which is not in the file; swish is `"silu"`.
        normalize_obs: `normalize_observations` of `ppo.train`, which is not in the file.
        obs_key: `policy_obs_key` of the networks, for environments whose observation is a dict.

    Returns:
        The policy of the most probable action, as `make_policy(params, deterministic=True)` of Brax. The standard deviation is
        left out.

    Raises:
        ValueError: the file is no such archive or damaged, or its network does not fit the spec; by name.
        TypeError: `spec` is not an `EnvSpec`.
    """
    check_spaces(OWNER, spec, "rescale")
    if not isinstance(spec.action, Box):
        raise ValueError(f"{OWNER}: action must be a Box, got {spec.action}")
    arrays = read_arrays(OWNER, path)
    names = {name.removeprefix(POLICY) for name in arrays if name.startswith(POLICY)}
    count = len(names) // 2
    if count < 2 or names != {f"hidden_{i}/{part}" for i in range(count) for part in ("kernel", "bias")}:
        got = sorted(names) or sorted(arrays)
        raise ValueError(f"{OWNER}: {path} has no tanh-normal policy of dense layers, got {got!s:.300}")
    layers = [
        {part: arrays[f"{POLICY}hidden_{i}/{part}"].astype(np.float32) for part in ("kernel", "bias")} for i in range(count)
    ]
    *dense, last = layers
    # The last layer has the means, and then the parameters of the standard deviations.
    linear = {part: array[..., : array.shape[-1] // 2] for part, array in last.items()}
    params: dict[str, Any] = {"actor": torso(dense), "policy": {"linear": linear}}
    network = Actor(widths(dense), activation=activation, std="fixed")
    normalizer = _normalizer(arrays, spec, path, obs_key) if normalize_obs else None
    return Greedy(make_policy(OWNER, str(path), spec, network, params, normalizer, squash=True))


def _normalizer(arrays: dict[str, Any], spec: EnvSpec, path: object, obs_key: str) -> ObsNormalizer:
    """The running statistics of the policy's observation."""
    obs: Any = spec.obs
    found = {}
    for part in ("mean", "std"):
        name = f"0/{part}" if f"0/{part}" in arrays else f"0/{part}/{obs_key}"
        shape = arrays[name].shape if name in arrays else None
        if shape != obs.shape:
            raise ValueError(f"{OWNER}: {name} of {path} has shape {shape}, the spec needs {obs.shape}")
        found[part] = arrays[name].astype(np.float32)
    mean, variance = found["mean"], np.square(found["std"]) - np.float32(OWN_EPSILON)
    # Of the count only matters that it is not 0.
    stats = RunningStats(*map(jnp.asarray, (np.uint32(2**31), mean, np.zeros_like(mean), variance)))
    return ObsNormalizer(stats, spec.obs, None)

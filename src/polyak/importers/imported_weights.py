"""Policies with weights that another library saved: supported spaces, and checks of the arrays."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Discrete, EnvSpec, check_env_spec
from polyak.core.types import Variables
from polyak.networks.actor import Actor
from polyak.networks.feedforward import MLP
from polyak.ops.normalize import ObsNormalizer
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.numpy_reader import array_of


def check_spaces(owner: str, spec: EnvSpec, action_scaling: Literal["clip", "rescale"] = "clip") -> None:
    """Check that observations are vectors and actions Discrete or a Box.

    Observations of uint8 are rejected: polyak's networks scale them, and the saved network may have received them as
    they are.

    Args:
        action_scaling: `"clip"` or `"rescale"`: samples are clipped to the bounds, or rescaled to them from [-1, 1].

    Raises:
        TypeError: `spec` is not an `EnvSpec`.
        ValueError: `spec` has another space.
    """
    check_env_spec(owner, spec)
    if not isinstance(spec.obs, Box):
        raise ValueError(f"{owner}: obs must be a Box of numbers, got {spec.obs}")
    if spec.obs.dtype == np.uint8:
        raise ValueError(
            f"{owner}: obs must not be uint8, which polyak's networks scale, got {spec.obs}; convert observations "
            "to the float32 numbers that the saved network received"
        )
    if not isinstance(spec.action, Discrete | Box):
        raise ValueError(f"{owner}: action must be Discrete or a Box, got {spec.action}")
    if spec.action_scaling != action_scaling:
        raise ValueError(
            f"{owner}: action_scaling must be {action_scaling!r}, as in the library that saved the policy, got "
            f"{spec.action_scaling!r}"
        )


def read_arrays(owner: str, path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an `.npz` file by name; pickled objects in it are never loaded.

    Raises:
        ValueError: the file is damaged, or no such archive.
    """
    data = Path(path).read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > len(data):
                raise ValueError("its arrays are compressed, or together larger than the file; write it with np.savez")
            return {name.removesuffix(".npy"): array_of(archive.read(name)) for name in archive.namelist()}
    except (zipfile.BadZipFile, EOFError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{owner}: {path} is not an archive of arrays that np.savez wrote: {error}") from error


def torso(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters of these dense layers in polyak's tree."""
    return {"dense": {"layers": dict(enumerate(layers))}}


def widths(layers: list[dict[str, Any]]) -> tuple[int, ...]:
    """The outputs of each layer."""
    return tuple(int(layer["bias"].size) for layer in layers)


def make_policy(
    owner: str,
    path: str,
    spec: EnvSpec,
    network: MLP | Actor,
    params: Any,
    normalizer: ObsNormalizer | None = None,
    *,
    squash: bool = False,
) -> NetworkPolicy:
    """The policy of a network with these parameters; with `squash` its Box actions pass through tanh.

    Raises:
        ValueError: names or shapes of the parameters do not fit the network for the spec.
    """
    example = jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    got, wanted = (
        {jax.tree_util.keystr(keys, simple=True, separator="/"): np.shape(leaf) for keys, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (params, example.params))
    )
    for name in sorted(got.keys() | wanted.keys()):
        if got.get(name) != wanted.get(name):
            shapes = f"has shape {got.get(name)}, the spec needs {wanted.get(name)}"
            raise ValueError(f"{owner}: {name} of {path} {shapes}")
    return NetworkPolicy(
        Variables(jax.device_put(params), example.stats, example.graph), normalizer, network, spec, squash=squash
    )

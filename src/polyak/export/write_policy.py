"""Writes a policy to one file: StableHLO, ONNX or NumPy weights."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy.typing as npt

from polyak.core.checks import check_choice
from polyak.core.policy_faults import python_calls_in
from polyak.core.spaces import EnvSpec, leaf_spaces
from polyak.core.types import Policy
from polyak.export.archive import Export, ExportError, make_header, replace_file, to_members, write_export
from polyak.export.numpy_format import describe_spaces
from polyak.export.policy_function import export_function
from polyak.export.stablehlo import MEMBER, program
from polyak.networks.actor import Actor
from polyak.networks.feedforward import FeedForward, policy_settings
from polyak.networks.layers import has_images
from polyak.policies import numpy_reader
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.policies.numpy_network import has_plain_layers, network_arrays
from polyak.storage.files import read_bytes

Format = Literal["stablehlo", "onnx", "numpy"]
SUFFIXES: dict[str, str] = {"stablehlo": ".stablehlo", "onnx": ".onnx", "numpy": ".npz"}
READER = "numpy_reader.py"
_READER_SOURCE = Path(numpy_reader.__file__)
MAX_READER_BYTES = 2**20


def write_policy(
    policy: Policy, spec: EnvSpec, kind: Format, path: str | os.PathLike[str], about: Mapping[str, Any] = MappingProxyType({})
) -> list[Path]:
    """Write a policy to a file for deployment; returns the files. `polyak.load_policy` loads StableHLO and NumPy files.

    The file has the mode of the policy's distribution. `Result.export` and `polyak export` write the policy of a training.

    Args:
        policy: a policy in JAX that the format supports, such as the policy of a training loop by hand.
        spec: the environment's; a policy with a spec of its own, which may see fewer entries of the observation, uses that.
        kind: `"stablehlo"`, `"onnx"` or `"numpy"`, which also writes `numpy_reader.py` next to the file.
        path: the file, replaced if it exists.
        about: names and numbers for the file's header.

    Raises:
        ExportError, ValueError: the format is unknown or does not support the policy, the suffix is another format's, the file
            cannot be written, or a `numpy_reader.py` that polyak has not written would be replaced.
        ImportError: the extra `onnx` is missing.
    """
    check_choice("export", "kind", kind, tuple(SUFFIXES))
    output, about = Path(path), dict(about)
    if output.suffix in set(SUFFIXES.values()) - {SUFFIXES[kind]}:
        raise ExportError(f"{output}: has the suffix of another format; a file of {kind} ends with {SUFFIXES[kind]}")
    spec = getattr(policy, "spec", spec)
    if calls := python_calls_in(policy):
        raise ValueError(f"export: the policy must be in JAX, got one that calls Python: {calls[0]!r}")
    step = export_function(policy, spec)
    if kind == "numpy":
        needs, arrays = _numpy_weights(policy, spec)
        reader = _reader_path(output)
        write_export(output, Export(kind, spec, step.inputs, step.outputs, about | needs, to_members(arrays)))
        replace_file(reader, _READER_SOURCE.read_bytes())
        return [output, reader]
    if kind == "stablehlo":
        members = {MEMBER: program(step.function, step.inputs)}
        write_export(output, Export(kind, spec, step.inputs, step.outputs, about, members))
        return [output]
    header = {"polyak": json.dumps(make_header(Export(kind, spec, step.inputs, step.outputs, about, {})))}
    actions = zip(step.outputs, leaf_spaces(spec.action), strict=False)
    native = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, (_, leaf) in actions}
    replace_file(output, _onnx_model()(step.function, step.inputs, {**step.outputs, **native}, header))
    return [output]


def _numpy_weights(policy: Any, spec: EnvSpec) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
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
    elif has_images(spec.obs):
        reason = f"the observation is {spec.obs}"
    if reason is not None:
        raise ValueError(reason[:300])
    network: FeedForward | Actor = policy.network
    return network


def _reader_path(output: Path) -> Path:
    """Return the path of the reader, next to the weights; only an earlier reader may be replaced."""
    reader = output.with_name(READER)
    if reader == output:
        raise ExportError(f"{output}: the reader of the weights is written there; choose another --output")
    if not os.path.lexists(reader):
        return reader
    try:
        found = read_bytes(reader, limit=MAX_READER_BYTES)
    except (OSError, ValueError) as error:
        raise ExportError(f"{reader}: the reader of the weights is written there, but {error}") from None
    if found.splitlines()[:1] != _READER_SOURCE.read_bytes().splitlines()[:1]:
        raise ExportError(f"{reader}: is not polyak's; the reader of the weights would replace it; choose another --output")
    return reader


def _onnx_model() -> Any:
    try:
        from polyak.export.onnx import model
    except ModuleNotFoundError as error:
        raise ImportError(f"format onnx needs {error.name}: pip install 'polyak[onnx]'") from None
    return model

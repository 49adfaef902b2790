"""PPO policies that Stable-Baselines3 saved, read without running anything that is in the file."""

import io
import itertools
import json
import math
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polyak.core.spaces import EnvSpec
from polyak.networks.actor_critic import ActorCritic, mlp
from polyak.policies.imported_weights import check_spaces, make_policy
from polyak.policies.network_policy import NetworkPolicy

MAX_BYTES = 2**30
MAX_PICKLE_BYTES = 2**20
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    json.JSONDecodeError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
)
STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2"}
ACTIVATIONS: dict[str, Literal["tanh", "relu", "elu", "silu"]] = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu"}


def from_stable_baselines3(path: str | os.PathLike[str], spec: EnvSpec) -> NetworkPolicy:
    """The policy of a PPO model with an `MlpPolicy` that Stable-Baselines3 saved with `model.save(path)`.

    Neither Stable-Baselines3 nor PyTorch is needed. Of the saved model only arrays and the activation's name are read: pickled
    objects are never loaded, and the index of the arrays can name nothing but arrays. Statistics of `VecNormalize` are in
    another file, so a policy that was trained with it needs its normalised observations.

    Args:
        path: the `.zip` file.
        spec: the environment's; a Box observation, and Discrete or Box actions that are clipped to their bounds.

    Returns:
        A policy that samples as the model does; `predict(obs)` returns the greedy action.

    Raises:
        ValueError: the file is no such model or damaged, or its network does not fit the spec; by name.
        TypeError: `spec` is not an `EnvSpec`.
    """
    check_spaces("from_stable_baselines3", spec)
    try:
        settings, tensors = _read_model(Path(path))
    except DAMAGED as error:
        raise ValueError(f"from_stable_baselines3: {path} is not a model of Stable-Baselines3: {error}") from error
    if settings.get("use_sde"):
        raise ValueError(f"from_stable_baselines3: {path} was trained with use_sde=True; models with gSDE cannot be imported")
    network, params = _network_and_params(str(path), settings, tensors)
    return make_policy("from_stable_baselines3", str(path), spec, network, params)


def _network_and_params(
    path: str, settings: Mapping[str, Any], tensors: dict[str, npt.NDArray[Any]]
) -> tuple[ActorCritic, dict[str, Any]]:
    """The network with the widths and the activation of the model, and its parameters in polyak's tree."""
    left = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}

    def layer(name: str) -> dict[str, Any]:
        try:
            return {"kernel": left.pop(f"{name}.weight").T.copy(), "bias": left.pop(f"{name}.bias")}
        except KeyError as error:
            raise ValueError(f"from_stable_baselines3: {path} has no {error}, as an MlpPolicy of PPO has") from None

    def dense(name: str) -> dict[str, Any]:
        # Every second module is an activation.
        indices = itertools.takewhile(lambda i: f"{name}.{2 * i}.weight" in left, itertools.count())
        return {"dense": {"layers": {i: layer(f"{name}.{2 * i}") for i in indices}}}

    params: dict[str, Any] = {
        "actor": dense("mlp_extractor.policy_net"),
        "critic": dense("mlp_extractor.value_net"),
        "policy": {"linear": layer("action_net")},
        "value": layer("value_net"),
    }
    if "log_std" in left:
        params["policy"]["log_std"] = {"all": left.pop("log_std")}
    if left:
        raise ValueError(f"from_stable_baselines3: {path} has {min(left)!r}, which is in no MlpPolicy of PPO")
    actor, critic = (
        tuple(int(part["bias"].size) for part in params[name]["dense"]["layers"].values()) for name in ("actor", "critic")
    )
    return mlp(actor, _activation(path, settings), value_hidden=None if critic == actor else critic), params


def _activation(path: str, settings: Mapping[str, Any]) -> Literal["tanh", "relu", "elu", "silu"]:
    """The activation that `policy_kwargs` names by its class, such as `<class 'torch.nn.modules.activation.ReLU'>`."""
    described = dict(settings.get("policy_kwargs") or {}).get("activation_fn", "Tanh")
    name = str(described).rpartition(".")[2].removesuffix("'>")
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"from_stable_baselines3: activation_fn of {path} must be one of {known}, got {name[:80]!r}")
    return ACTIVATIONS[name]


def _read_model(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The model's settings as JSON has them, and the tensors of its policy."""
    with zipfile.ZipFile(path) as model:
        settings = json.loads(_read(model, "data", MAX_BYTES))
        weights = _read(model, "policy.pth", MAX_BYTES)
    with zipfile.ZipFile(io.BytesIO(weights)) as archive:
        index = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(index) != 1:
            raise ValueError(f"from_stable_baselines3: policy.pth of {path} is not an archive that PyTorch 1.6 or newer wrote")
        root = index[0].removesuffix("/data.pkl")
        if f"{root}/byteorder" in archive.namelist() and _read(archive, f"{root}/byteorder", 16) != b"little":
            raise ValueError(f"from_stable_baselines3: policy.pth of {path} must be little-endian")
        tensors = _TensorReader(archive, root).load()
    if not isinstance(tensors, dict) or not all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        raise ValueError(f"from_stable_baselines3: policy.pth of {path} is not a state_dict")
    return settings, dict(tensors)


def _read(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    if archive.getinfo(name).file_size > limit:
        raise ValueError(f"from_stable_baselines3: {name} is larger than {limit:,} bytes")
    return archive.read(name)


class _TensorReader(pickle.Unpickler):
    """Reads a `state_dict` as NumPy arrays; a pickle that names anything but tensors is rejected before it can be used."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(_read(archive, f"{root}/data.pkl", MAX_PICKLE_BYTES)))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            # A new function, for a pickle may set attributes of what it names.
            return lambda *arguments: _tensor(*arguments)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"policy.pth names {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or dtype not in STORAGES.values() or not str(key).isdecimal():
            raise pickle.UnpicklingError(f"policy.pth has a storage {pid!r:.80}")
        return np.frombuffer(_read(self._archive, f"{self._root}/data/{key}", MAX_BYTES), dtype)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> npt.NDArray[Any]:
    """PyTorch's `_rebuild_tensor_v2` in NumPy: strides count elements."""
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, np.ndarray) or not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(strides):
        raise pickle.UnpicklingError("policy.pth has a malformed tensor")
    end = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    if 0 in shape or math.prod(shape) > storage.size or end > storage.size:
        raise pickle.UnpicklingError(f"policy.pth has a tensor of shape {shape} beyond its storage of {storage.size} numbers")
    steps = tuple(stride * storage.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps).copy()

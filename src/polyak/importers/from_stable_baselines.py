"""Policies that Stable-Baselines3 saved, read without running anything that is in the file."""

import functools
import io
import itertools
import json
import math
import os
import pickle
import pickletools
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.importers.imported_weights import check_spaces, make_policy, torso, widths
from polyak.networks.actor import Actor
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue, Std
from polyak.networks.policy_head import LOG_STD_RANGE
from polyak.policies.network_policy import NetworkPolicy

OWNER = "from_stable_baselines3"
MAX_BYTES = 2**30
MAX_PICKLE_BYTES = 2**20
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
SUPPORTED = "models of PPO, A2C, SAC, TQC, TD3 and DDPG with an MlpPolicy can be imported"
NOT_OF_POLICY = ("critic.", "critic_target.", "actor_target.")
CLIP_MEAN = 2.0
"""The default of `clip_mean`, a limit of the mean that SAC and TQC have with gSDE."""

STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2"}
ACTIVATIONS: dict[str, Literal["tanh", "relu", "elu", "silu"]] = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu"}


def from_stable_baselines3(path: str | os.PathLike[str], spec: EnvSpec) -> NetworkPolicy:
    """The policy of a model with an `MlpPolicy` that Stable-Baselines3 or its contrib package saved with `model.save(path)`.

    Supports PPO, A2C, SAC, TQC, TD3 and DDPG, also with gSDE. Neither Stable-Baselines3 nor PyTorch is needed. Only arrays and
    plain settings of the saved model are read: pickled objects are never loaded, and the index of the arrays can name nothing
    but arrays. The statistics of `VecNormalize` are in another file, so a policy that was trained with `VecNormalize` needs
    normalized observations.

    Args:
        path: the `.zip` file.
        spec: the environment's; a Box observation, not of uint8, and Discrete or Box actions. Box actions must be
            rescaled (`action_scaling="rescale"`) if the model squashes them, as SAC, TQC, TD3 and DDPG do, else clipped.

    Returns:
        A policy that samples as the model does; `predict(obs)` returns the greedy action. With gSDE every sample has new noise;
        `StateDependentExploration(policy, sample_freq)` keeps it for some steps.

    Raises:
        ValueError: the file is no such model or damaged, or its network does not fit the spec; by name.
        TypeError: `spec` is not an `EnvSpec`.
    """
    check_env_spec(OWNER, spec)
    try:
        policy_kwargs, tensors = _read_model(Path(path))
    except DAMAGED as error:
        raise ValueError(f"{OWNER}: {path} is not a model of Stable-Baselines3 that can be read: {error!s:.300}") from error
    remaining = {name: x.astype(np.float32) for name, x in tensors.items() if not name.startswith(NOT_OF_POLICY)}
    has_actor = any(name.startswith("actor.") for name in remaining)
    squash = has_actor or bool(policy_kwargs.get("squash_output"))
    check_spaces(OWNER, spec, "rescale" if squash else "clip")
    try:
        network, params = (_actor if has_actor else _actor_critic)(_Weights(remaining), policy_kwargs)
        if remaining:
            raise ValueError(f"{min(remaining)!r} is unexpected; {SUPPORTED}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{OWNER}: {path}: {error}") from error
    return make_policy(OWNER, str(path), spec, network, params, squash=squash)


@dataclass(frozen=True)
class _Weights:
    """The tensors of a model; a method that returns some of them removes them.

    Attributes:
        remaining: by name.
    """

    remaining: dict[str, npt.NDArray[np.float32]]

    def take_layer(self, name: str) -> dict[str, npt.NDArray[np.float32]]:
        """A linear layer."""
        try:
            weight, bias = (self.remaining.pop(f"{name}.{part}") for part in ("weight", "bias"))
        except KeyError as error:
            raise ValueError(f"{error} is missing; {SUPPORTED}") from None
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            shapes = f"got shapes {weight.shape} and {bias.shape}"
            raise ValueError(f"{name} must have a weight [outputs, inputs] and a bias [outputs], {shapes}")
        return {"kernel": weight.T.copy(), "bias": bias}

    def take_layers(self, name: str) -> list[dict[str, npt.NDArray[np.float32]]]:
        """Linear layers, with an activation between each two."""
        indices = itertools.takewhile(lambda i: f"{name}.{2 * i}.weight" in self.remaining, itertools.count())
        return [self.take_layer(f"{name}.{2 * i}") for i in indices]

    def take_log_sigma(
        self, name: str, policy_kwargs: Mapping[str, Any], head: Mapping[str, npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        """The logarithm of gSDE's σ, `[features, actions]`, which the model may have in one column, or as expln⁻¹(σ).

        Args:
            head: the layer from the features to the mean of the action.
        """
        log_sigma, (features, actions) = self.remaining.pop(name), head["kernel"].shape
        # Before one column is repeated: a small file must not ask for a large array.
        if log_sigma.shape not in ((features, 1), (features, actions)):
            raise ValueError(f"{name} must have shape {features, actions}, got {log_sigma.shape}")
        if policy_kwargs.get("use_expln"):
            log_sigma = np.where(log_sigma > 0, np.log1p(np.log1p(np.maximum(log_sigma, 0))), log_sigma)
        return np.repeat(log_sigma, actions, axis=1) if log_sigma.shape[1] == 1 else log_sigma


def _actor_critic(weights: _Weights, policy_kwargs: Mapping[str, Any]) -> tuple[MLP, dict[str, Any]]:
    """The network of PPO and A2C, with the widths and the activation of the model, and its parameters in polyak's tree."""
    actor, critic = (weights.take_layers(f"mlp_extractor.{name}") for name in ("policy_net", "value_net"))
    policy: dict[str, Any] = {"linear": weights.take_layer("action_net")}
    log_std = weights.remaining.get("log_std")
    std: Std = "free"
    if log_std is not None and log_std.ndim == 2:
        std = "sde"
        policy["log_std"] = {"all": weights.take_log_sigma("log_std", policy_kwargs, policy["linear"])}
    elif log_std is not None:
        policy["log_std"] = {"all": weights.remaining.pop("log_std")}
    params = {"actor": torso(actor), "critic": torso(critic), "policy": policy, "value": weights.take_layer("value_net")}
    hidden, value_hidden = widths(actor), widths(critic)
    activation = _activation(policy_kwargs, "Tanh")
    head = PolicyAndValue(std=std, value_hidden=None if hidden == value_hidden else value_hidden)
    return MLP(hidden, activation=activation, head=head), params


def _actor(weights: _Weights, policy_kwargs: Mapping[str, Any]) -> tuple[Actor, dict[str, Any]]:
    """The actor of SAC and TQC, or the deterministic actor of TD3 and DDPG, and its parameters in polyak's tree."""
    activation = _activation(policy_kwargs, "ReLU")
    if not any(name.startswith("actor.log_std") for name in weights.remaining):
        *layers, head = weights.take_layers("actor.mu") or [weights.take_layer("actor.mu.0")]
        # Without a distribution of its own, its samples are the greedy action.
        network = Actor(widths(layers), activation=activation, std="fixed", log_std=LOG_STD_RANGE[0])
        return network, {"actor": torso(layers), "policy": {"linear": head}}
    layers = weights.take_layers("actor.latent_pi")
    has_sde = "actor.log_std" in weights.remaining
    has_limit = "actor.mu.0.weight" in weights.remaining
    policy: dict[str, Any] = {"linear": weights.take_layer("actor.mu.0" if has_limit else "actor.mu")}
    if has_sde:
        policy["log_std"] = {"all": weights.take_log_sigma("actor.log_std", policy_kwargs, policy["linear"])}
    else:
        policy["scales"] = {"all": weights.take_layer("actor.log_std")}
    limit = policy_kwargs.get("clip_mean", CLIP_MEAN) if has_limit else None
    network = Actor(widths(layers), activation=activation, std="sde" if has_sde else "state", clip_mean=limit)
    return network, {"actor": torso(layers), "policy": policy}


def _activation(policy_kwargs: Mapping[str, Any], default: str) -> Literal["tanh", "relu", "elu", "silu"]:
    """The activation that `policy_kwargs` names by its class, such as `<class 'torch.nn.modules.activation.ReLU'>`."""
    name = str(policy_kwargs.get("activation_fn", default)).rpartition(".")[2].removesuffix("'>")
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation_fn must be one of {known}, got {name[:80]!r}")
    return ACTIVATIONS[name]


def _read_model(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The model's `policy_kwargs` as JSON has them, and the tensors of its policy."""
    with zipfile.ZipFile(path) as model:
        policy_kwargs = _policy_kwargs(_read(model, "data", MAX_BYTES))
        weights = _read(model, "policy.pth", MAX_BYTES)
    with zipfile.ZipFile(io.BytesIO(weights)) as archive:
        index = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(index) != 1:
            raise ValueError("policy.pth is not an archive that PyTorch 1.6 or newer wrote")
        root = index[0].removesuffix("/data.pkl")
        if f"{root}/byteorder" in archive.namelist() and _read(archive, f"{root}/byteorder", 16) != b"little":
            raise ValueError("policy.pth must be little-endian")
        tensors = _TensorReader(archive, root).load()
    if not isinstance(tensors, dict) or not all(isinstance(x, np.ndarray) for x in tensors.values()):
        raise ValueError("policy.pth is not a state_dict")
    if not all(isinstance(name, str) for name in tensors):
        raise ValueError("policy.pth is not a state_dict")
    # One tensor may have many names.
    functools.reduce(_add_bytes, tensors.values(), 0)
    return policy_kwargs, dict(tensors)


def _policy_kwargs(data: bytes) -> dict[str, Any]:
    settings = json.loads(data)
    if not isinstance(settings, dict):
        raise ValueError(f"data must be a JSON object, got {settings!r:.80}")
    policy_kwargs = settings.get("policy_kwargs") or {}
    if not isinstance(policy_kwargs, dict):
        raise ValueError(f"policy_kwargs must be a JSON object, got {policy_kwargs!r:.80}")
    return policy_kwargs


def _read(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    member = archive.getinfo(name)
    if member.file_size > limit:
        raise ValueError(f"{name} is larger than {limit:,} bytes")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} must be stored or deflated, got compression {member.compress_type}")
    return archive.read(name)


class _TensorReader(pickle.Unpickler):
    """Reads a `state_dict` as NumPy arrays; a pickle that names anything but tensors is rejected before it can be used."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        index = _read(archive, f"{root}/data.pkl", MAX_PICKLE_BYTES)
        _check_memo(index)
        super().__init__(io.BytesIO(index))
        self._archive, self._root = archive, root
        self._storage_bytes = self._tensor_bytes = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            # A new function, because a pickle may set attributes of the objects that it names.
            return lambda *arguments: self._tensor(*arguments)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"policy.pth names {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or dtype not in STORAGES.values() or not str(key).isdecimal():
            raise pickle.UnpicklingError(f"policy.pth has a storage {pid!r:.80}")
        numbers = np.frombuffer(_read(self._archive, f"{self._root}/data/{key}", MAX_BYTES), dtype)
        self._storage_bytes = _add_bytes(self._storage_bytes, numbers)
        return numbers

    def _tensor(self, *arguments: Any) -> npt.NDArray[Any]:
        tensor = _tensor(*arguments)
        self._tensor_bytes = _add_bytes(self._tensor_bytes, tensor)
        return tensor


def _check_memo(index: bytes) -> None:
    """Reject a memo with an index beyond the pickle's size: `pickle` makes a list of that length."""
    for opcode, argument, _ in pickletools.genops(index):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(index):
            raise pickle.UnpicklingError(f"policy.pth has a memo of {argument:,} objects")


def _add_bytes(total: int, array: npt.NDArray[Any]) -> int:
    """The bytes of all storages, or all tensors: several tensors may be of one storage, which is read for each."""
    total += array.nbytes
    if total > MAX_BYTES:
        raise pickle.UnpicklingError(f"policy.pth has more than {MAX_BYTES:,} bytes of tensors")
    return total


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

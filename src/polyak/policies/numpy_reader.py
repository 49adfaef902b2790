"""Acts with the weights that `polyak export RUN --format numpy` wrote; needs only NumPy, so copy this file with the weights."""

import hashlib
import io
import json
import zipfile
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

# Each may write over its argument. gelu is the approximation by tanh, as Flax has it.
ACTIVATIONS: dict[str, Any] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(x / 2)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
}


def load(path: Any) -> "Policy":
    """Load the policy in a file; no code in it is run, and memory stays below a few times the file's size."""
    with open(path, "rb") as file:
        data = file.read()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(member.file_size for member in archive.infolist()) > len(data):
            raise ValueError(f"{path}: its members are compressed, or together larger than the file")
        header = json.loads(archive.read("header.json"))
        if (header.get("polyak_export"), header.get("kind")) != (1, "numpy"):
            raise ValueError(f"{path}: is no policy that polyak export --format numpy of this version wrote")
        about = header["about"]
        if about["action"] == "box" and np.dtype(about["dtype"]).kind not in "fiub":
            raise ValueError(f"{path}: its actions are {about['dtype']}, which are no numbers")
        members = {name: archive.read(name) for name in archive.namelist() if name != "header.json"}
        hashes = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()}
        if hashes != header["files"]:
            raise ValueError(f"{path}: is damaged: its members do not have the SHA-256 that its header gives")
        has_mask = any(array["name"] == "action_mask" for array in header["inputs"])
        return Policy(about, {name.removesuffix(".npy"): array_of(data) for name, data in members.items()}, has_mask)


def array_of(npy: bytes) -> Any:
    """A view of the array in a `.npy` file; objects, and a size that differs from the file's, are errors."""
    file = io.BytesIO(npy)
    read_magic(file)
    shape, is_fortran, dtype = read_array_header_1_0(file)
    return np.frombuffer(npy, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")


def make_network(arrays: Any, layers: int, activation: str, rows: int | None = None) -> Any:
    """`network(x)` for float32 arrays `[N, ...]`: normalization, dense layers, and a linear layer, clipped to ± `clip_mean`.

    With `rows`, products are of that many vectors each, so that the others of a batch do not change how one is rounded.
    """
    normalize = None
    if "deviation" in arrays:
        mean, rest, std, clip = (arrays[name] for name in ("mean", "mean_rest", "deviation", "clip"))
        normalize = lambda x: np.clip((x - mean - rest) / std, -clip, clip)  # noqa: E731
    dense = [(arrays[f"kernel{i}"], arrays[f"bias{i}"]) for i in range(layers)]
    head, head_bias, activate = arrays["head_kernel"], arrays["head_bias"], ACTIVATIONS[activation]
    limit = arrays.get("clip_mean")

    def network(x: Any) -> Any:
        count = len(x)
        x = x.reshape(count, -1)
        if rows is not None:
            if missing := -count % rows:
                x = np.concatenate([x, np.zeros((missing, x.shape[1]), x.dtype)])
            x = x.reshape(-1, rows, x.shape[1]) if len(x) > rows else x
        if normalize is not None:
            x = normalize(x)
        for kernel, bias in dense:
            x = x @ kernel
            x += bias
            x = activate(x)
        x = x @ head
        x += head_bias
        x = x.reshape(-1, x.shape[-1])[:count]
        return x if limit is None else np.clip(x, -limit, limit)

    return network


class Policy:
    """The greedy policy; `about` describes the layers and the scaling of observations and actions.

    With `has_mask`, calls need an `action_mask`.
    """

    def __init__(self, about: Any, arrays: Any, has_mask: bool = False) -> None:
        self.about, self.arrays, self.has_mask = about, arrays, has_mask

    def __call__(self, obs: Any, action_mask: Any = None) -> Any:
        """The environment's actions for observations `[N, ...]`; `action_mask` `[N, n]` is True where an action is allowed.

        Raises `ValueError` for observations of another size, such as one without the axis N, and for a mask that is missing,
        has another shape, or allows no action in some row.
        """
        about, a = self.about, self.arrays
        x = np.asarray(obs).astype(np.float32).reshape(len(obs), -1) / np.float32(about["divide"])
        width = (a["kernel0"] if about["layers"] else a["head_kernel"]).shape[0]
        if x.shape[1] != width:
            raise ValueError(f"obs must be observations [N, ...] of {width} numbers each, got shape {np.shape(obs)}")
        x = make_network(a, about["layers"], about["activation"])(x)
        if action_mask is None and self.has_mask:
            raise ValueError(
                "action_mask must be given, as the environment has action masks; pass the mask of the observations"
            )
        if action_mask is not None and about["action"] != "discrete":
            raise ValueError("action_mask must be None, for a Box has no mask")
        if action_mask is not None:
            flags = np.asarray(action_mask, bool)
            if flags.shape != x.shape:
                raise ValueError(f"action_mask must have shape {x.shape}, got {flags.shape}")
            if not flags.any(axis=1).all():
                raise ValueError(f"action_mask allows no action in some row; got {action_mask}")
            x = np.where(flags, x, -np.inf)
        if about["action"] == "discrete":
            return (x.argmax(axis=1) + about["start"]).astype(np.int32)
        if about["tanh"]:
            x = np.tanh(x)
        low, high = a["low"], a["high"]
        if about["rescale"]:
            unit = (np.clip(x, -1, 1) + 1) / 2
            x = (1 - unit) * low + unit * high
        x = np.clip(x, low, high) if about["dtype"].startswith("float") else np.rint(np.clip(x, low, high))
        return x.astype(about["dtype"]).reshape(-1, *about["shape"])

"""Files of arrays: .npz, and HDF5 in D4RL's layout; reading one never runs code that it holds."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.space_check import obs_specs, read_leaves
from polyak.core.spaces import EnvSpec, Space, leaf_keys, unflatten
from polyak.data.arrays import (
    ACTION,
    DONE,
    FINAL,
    LOG_PROB,
    NEXT,
    OBS,
    REWARD,
    TERMINATED,
    TRUNCATED,
    from_arrays,
    warn_of_unread,
)
from polyak.data.content import native_action_specs
from polyak.data.data_set import DataSet, same_spaces
from polyak.loops.replay_memory import available_memory
from polyak.storage.config import SPEC_CLASSES, ConfigError, from_json, to_json
from polyak.storage.files import dump_json, open_regular, parse_json, write_file

ARRAYS = (OBS, ACTION, REWARD, NEXT, FINAL, LOG_PROB, *TERMINATED, *TRUNCATED, *DONE)
SPEC = "spec"
ESCAPES = str.maketrans({character: f"%{ord(character):02X}" for character in "%/\\\0"})
"""Characters of keys that a path in an archive cannot have."""

FORMAT_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError)
DAMAGE = (*FORMAT_ERRORS, LookupError, AssertionError, RuntimeError, MemoryError)
"""Errors of zipfile, NumPy and h5py for files that are cut or damaged; NotImplementedError is a RuntimeError."""


class UnsafeFile(ValueError):
    """A file that could be read, but has links, or more than memory holds."""


@contextmanager
def name_damage(owner: str, kind: str) -> Iterator[None]:
    """Raise errors of reading a file as one `ValueError`.

    Args:
        owner: the function that reads, and the file.
        kind: the format.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except UnsafeFile as error:
        raise ValueError(f"{owner}: {error}") from None
    except DAMAGE as error:
        raise ValueError(f"{owner}: the file is cut, damaged or not {kind}: {error}") from None


def check_fits(size: int) -> None:
    """Check that arrays of `size` bytes fit into memory.

    Raises:
        UnsafeFile: they do not.
    """
    available = available_memory()
    if available is not None and size > available:
        raise UnsafeFile(f"its arrays have {size:,} bytes, of which {available:,} fit into memory; divide the file by episode")


def read_npz(owner: str, path: Path, spec: EnvSpec | None) -> DataSet:
    """Read a file of `save_npz`, or of `np.savez` with the arrays of D4RL's layout.

    Raises:
        ValueError: the file is damaged, larger than memory, or the data are; see `from_arrays`.
    """
    owner = f"{owner}: {path}"
    with name_damage(owner, "an .npz file of arrays"), open_regular(path.resolve()) as file:
        named = _read_members(owner, file)
    if SPEC not in named:
        return from_arrays(owner, _as_trees(owner, named), spec, path.name)
    stored = _stored_spec(owner, named.pop(SPEC))
    trees = dict(named)
    for name, space in ((OBS, stored.obs), (FINAL, stored.obs), (ACTION, stored.action)):
        paths = _paths(name, space)
        if missing := [path for path in paths if path not in named]:
            raise ValueError(f"{owner}: {missing[0]} is missing, which its spec has")
        trees[name] = unflatten(space, [named[path] for path in paths])
    return from_arrays(owner, trees, same_spaces(owner, stored, spec, path.name), path.name)


def _read_members(owner: str, file: Any) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by path, at most as large as the file states, without pickled objects."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("two arrays have the same name")
        warn_of_unread(owner, list(dict.fromkeys(name.split("/")[0] for name in members)))
        members = {name: info for name, info in members.items() if name.split("/")[0] in (*ARRAYS, SPEC)}
        check_fits(sum(info.file_size for info in members.values()))
        arrays = {}
        for name, info in members.items():
            with archive.open(info) as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays


def _stored_spec(owner: str, text: Any) -> EnvSpec:
    try:
        spec = from_json(parse_json(str(text).encode(), f"{owner}: {SPEC}"), SPEC_CLASSES, what=f"{owner}: {SPEC}")
    except (ConfigError, ValueError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(spec, EnvSpec):
        raise ValueError(f"{owner}: {SPEC} must be an EnvSpec, got {type(spec).__name__}")
    return spec


def save_npz(data: DataSet, path: Path) -> None:
    """Write the arrays of a data set and its spaces."""
    last = data.starts[1:] - 1
    final = data.starts[1:] + np.arange(data.num_episodes)
    flags = np.zeros((2, data.num_transitions), bool)
    flags[0, last], flags[1, last] = data.terminated, data.truncated
    obs = read_leaves(OBS, obs_specs(data.spec.obs), data.obs)
    action = read_leaves(ACTION, native_action_specs(data.spec), data.action)
    arrays = {
        **dict(zip(_paths(OBS, data.spec.obs), [np.delete(x, final, axis=0) for x in obs], strict=True)),
        **dict(zip(_paths(FINAL, data.spec.obs), [x[final] for x in obs], strict=True)),
        **dict(zip(_paths(ACTION, data.spec.action), action, strict=True)),
        REWARD: data.reward,
        TERMINATED[0]: flags[0],
        TRUNCATED[0]: flags[1],
        SPEC: np.array(dump_json(to_json(data.spec), "spec", indent=None).decode()),
    }
    if data.log_prob is not None:
        arrays[LOG_PROB] = data.log_prob
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_file(path, buffer.getvalue(), shared=True)


def _paths(name: str, space: Space) -> list[str]:
    """The path of each array of a space in a file."""
    return ["/".join([name, *(str(key).translate(ESCAPES) for key in keys)]) for keys, _ in leaf_keys(space)]


def _as_trees(owner: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts of arrays, from arrays by path: `observations/camera`.

    Raises:
        ValueError: a path names an array and a dict.
    """
    trees: dict[str, Any] = {}
    for path, array in named.items():
        *keys, last = path.split("/")
        node = trees
        for key in keys:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(f"{owner}: {path} must not be beside an array or a group of the same name")
        node[last] = array
    return {name: _with_tuples(node) for name, node in trees.items()}


def _with_tuples(node: Any) -> Any:
    """The tree with tuples in place of dicts whose keys count from 0."""
    if not isinstance(node, dict):
        return node
    parts = {key: _with_tuples(part) for key, part in node.items()}
    numbers = [str(i) for i in range(len(parts))]
    return tuple(parts[number] for number in numbers) if set(numbers) == set(parts) else parts


def read_hdf5(owner: str, path: Path, spec: EnvSpec | None) -> DataSet:
    """Read an HDF5 file in D4RL's layout.

    Raises:
        ImportError: h5py is not installed.
        ValueError: the file is damaged, larger than memory, or has links; or the data are, see `from_arrays`.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"{owner}: HDF5 files need h5py: pip install 'polyak[data]' ({error})") from None
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: {path}: there is no such file")
    owner = f"{owner}: {path}"
    with name_damage(owner, "HDF5"), h5py.File(path, "r") as file:
        warn_of_unread(owner, list(file))
        arrays = list_arrays(file, ARRAYS)
        named = {name: array[()] for name, array in arrays.items() if array.dtype.kind in "fiub"}
    if others := [name for name in arrays if name not in named]:
        raise TypeError(f"{owner}: {others[0]} must be numbers, got {arrays[others[0]]}")
    return from_arrays(owner, _as_trees(owner, named), spec, path.name)


def list_arrays(file: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The arrays of an HDF5 file by path, which fit into memory together.

    Args:
        names: entries of the file to list; None is all.

    Raises:
        UnsafeFile: an entry is a link, stored in another file, a group that is its own member, or no array; or memory is
            too small.
    """
    arrays = dict(_walk(file, "", names, set()))
    check_fits(sum(array.nbytes for array in arrays.values()))
    return arrays


def _walk(group: Any, prefix: str, names: tuple[str, ...] | None, visited: set[Any]) -> Iterator[tuple[str, Any]]:
    import h5py

    visited.add(group)
    for key in group:
        name = prefix + key
        if names is not None and key not in names:
            continue
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise UnsafeFile(f"{name} is a link; copy its array into the file")
        node = group[key]
        if isinstance(node, h5py.Group):
            if node in visited:
                raise UnsafeFile(f"{name} is a group that is in the file twice")
            yield from _walk(node, f"{name}/", None, visited)
        elif not isinstance(node, h5py.Dataset) or node.external or node.is_virtual:
            raise UnsafeFile(f"{name} is no array, or is stored in another file")
        else:
            yield name, node

"""Files of data sets: .npz, HDF5 in D4RL's layout, and Minari's; reading one never runs code that it holds."""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyak.core import spaces
from polyak.core.gymnasium_spaces import from_gymnasium, to_gymnasium
from polyak.core.space_check import obs_specs
from polyak.core.spaces import EnvSpec, unflatten
from polyak.core.types import PyTree
from polyak.data.arrays import ACTION, FINAL, NEXT, OBS, REWARD, TERMINATED, TRUNCATED, from_arrays
from polyak.data.content import create_data_set, join_trees, native_action_specs, read_arrays
from polyak.data.data_set import DataSet
from polyak.storage.config import ConfigError, from_json, to_json
from polyak.storage.files import dump_json, open_regular, parse_json, write_file

ARRAYS = (OBS, ACTION, REWARD, NEXT, FINAL, *TERMINATED, *TRUNCATED, "dones")
SPEC = "spec"
SPEC_CLASSES = {
    cls.__name__: cls
    for cls in (
        *(spaces.EnvSpec, spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple),
    )
}
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, OSError, ValueError, RuntimeError)


def read_npz(owner: str, path: Path, spec: EnvSpec | None) -> DataSet:
    """Read a file of `save_npz`, or of `np.savez` with the arrays of D4RL's layout.

    Raises:
        ValueError: the file is damaged, or the data are; see `from_arrays`.
    """
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            named = {name: archive[name] for name in archive.files if name.split("/")[0] in (*ARRAYS, SPEC)}
        if others := [name for name, value in named.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"{others[0]} is no array")
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ValueError(f"{owner}: {path} cannot be read: {error}; it is cut, or no .npz file of arrays") from None
    stored = _stored_spec(owner, path, named.pop(SPEC, None))
    return from_arrays(owner, _as_trees(named), spec if stored is None else stored, path.name, has_spaces=stored is not None)


def _stored_spec(owner: str, path: Path, text: Any) -> EnvSpec | None:
    if text is None:
        return None
    try:
        spec = from_json(parse_json(str(text).encode(), f"{path}: {SPEC}"), SPEC_CLASSES, what=f"{path}: {SPEC}")
    except (ConfigError, ValueError) as error:
        raise ValueError(f"{owner}: {error}") from None
    if not isinstance(spec, EnvSpec):
        raise ValueError(f"{owner}: {path}: {SPEC} must be an EnvSpec, got {type(spec).__name__}")
    return spec


def save_npz(data: DataSet, path: Path) -> None:
    """Write the arrays of a data set and its spaces."""
    last = data.starts[1:] - 1
    final = data.starts[1:] + np.arange(data.num_episodes)
    flags = np.zeros((2, data.num_transitions), bool)
    flags[0, last], flags[1, last] = data.terminated, data.truncated
    arrays = {
        **_by_path(OBS, jax.tree.map(lambda x: np.delete(x, final, axis=0), data.obs)),
        **_by_path(FINAL, jax.tree.map(lambda x: x[final], data.obs)),
        **_by_path(ACTION, data.action),
        REWARD: data.reward,
        TERMINATED[0]: flags[0],
        TRUNCATED[0]: flags[1],
        SPEC: np.array(dump_json(to_json(data.spec), "spec", indent=None).decode()),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_file(path, buffer.getvalue(), shared=True)


def _by_path(name: str, tree: PyTree) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {path: x for key, part in tree.items() for path, x in _by_path(f"{name}/{key}", part).items()}
    if isinstance(tree, tuple):
        return {path: x for i, part in enumerate(tree) for path, x in _by_path(f"{name}/{i}", part).items()}
    return {name: tree}


def _as_trees(named: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts of arrays, from arrays by path: `observations/camera`."""
    trees: dict[str, Any] = {}
    for path, array in named.items():
        *keys, last = path.split("/")
        node = trees
        for key in keys:
            node = node.setdefault(key, {})
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
        ValueError: the file is damaged, or refers to other files; or the data are, see `from_arrays`.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"{owner}: HDF5 files need h5py: pip install 'polyak[data]' ({error})") from None
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: {path}: there is no such file")

    def read(node: Any, name: str) -> Any:
        if isinstance(node, h5py.Dataset):
            if node.external or node.is_virtual:
                raise ValueError(f"{name} is stored in another file")
            return node[()]
        return {key: read(_follow(h5py, node, key, f"{name}/{key}"), f"{name}/{key}") for key in node}

    try:
        with h5py.File(path, "r") as file:
            arrays = {name: read(_follow(h5py, file, name, name), name) for name in ARRAYS if name in file}
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"{owner}: {path} cannot be read: {error}; it is cut, or no HDF5 file of D4RL's layout") from None
    return from_arrays(owner, arrays, spec, path.name, has_spaces=False)


def _follow(h5py: Any, group: Any, key: str, name: str) -> Any:
    """An entry of a group, unless it is a link to another file."""
    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is a link")
    return group[key]


def open_minari(owner: str, name: str) -> Any:
    """A data set of Minari that was downloaded.

    Raises:
        ImportError: minari is not installed.
        ValueError: there is no such data set, or it is damaged.
    """
    try:
        import minari
    except ImportError as error:
        raise ImportError(f"{owner}: data sets need minari: pip install 'polyak[data]' ({error})") from None
    try:
        return minari.load_dataset(name)
    except FileNotFoundError:
        raise ValueError(f"{owner}: there is no data set {name!r}; download it with: minari download {name}") from None
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{owner}: the data set {name!r} cannot be read: {error}") from None


def read_minari(owner: str, name: str, spec: EnvSpec | None) -> DataSet:
    """Read a downloaded data set of Minari, with its spaces."""
    loaded = open_minari(owner, name)
    env_spec = loaded.env_spec
    stored = EnvSpec(
        from_gymnasium(loaded.observation_space, f"observation space of {name}"),
        from_gymnasium(loaded.action_space, f"action space of {name}", is_action=True),
        id=name if env_spec is None else env_spec.id,
    )
    try:
        return from_episodes(owner, loaded, stored if spec is None else spec, name)
    except (OSError, KeyError) as error:
        raise ValueError(f"{owner}: the data set {name!r} cannot be read: {error}") from None


def from_episodes(owner: str, recorded: Any, spec: EnvSpec, name: str) -> DataSet:
    """The data set of an object whose `iterate_episodes()` yields episodes as Minari does.

    Raises:
        TypeError, ValueError: an array does not fit the spaces.
    """
    episodes = [_read_episode(owner, episode, spec) for episode in recorded.iterate_episodes()]
    if not episodes:
        raise ValueError(f"{owner}: {name} has no episode")
    obs, action, reward = (join_trees([episode[i] for episode in episodes]) for i in range(3))
    lengths = np.array([len(episode[2]) for episode in episodes])
    terminated = np.array([episode[3] for episode in episodes])
    return create_data_set(
        owner, spec, obs=obs, action=action, reward=reward, lengths=lengths, terminated=terminated, name=name
    )


def _read_episode(owner: str, episode: Any, spec: EnvSpec) -> tuple[PyTree, PyTree, Any, bool]:
    """Observations, actions, rewards, and whether the episode terminated."""
    terminated, truncated = (np.array(x, bool) for x in (episode.terminations, episode.truncations))
    length = terminated.size
    which = f"of an episode of {length} steps"
    for name, x in (("terminations", terminated), ("truncations", truncated), ("rewards", episode.rewards)):
        if np.shape(x) != (length,) or not length:
            raise ValueError(f"{owner}: {name} {which} must be [{max(length, 1)}], got {np.shape(x)}")
    if (terminated | truncated)[:-1].any():
        raise ValueError(f"{owner}: terminations and truncations {which} must be False before its last step")
    obs = read_arrays(f"{owner}: observations {which}", obs_specs(spec.obs), episode.observations, length + 1, checked=False)
    specs = native_action_specs(spec)
    action = read_arrays(f"{owner}: actions {which}", specs, episode.actions, length, checked=False)
    return unflatten(spec.obs, obs), unflatten(spec.action, action), np.asarray(episode.rewards), bool(terminated[-1])


def save_minari(data: DataSet, name: str) -> None:
    """Write a data set of Minari, into the directory of its data sets.

    Raises:
        ImportError: minari is not installed.
        ValueError: the data set exists already, or the name is none of Minari's.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise ImportError(f"data.save: data sets of Minari need minari: pip install 'polyak[data]' ({error})") from None
    if name in minari.list_local_datasets():
        raise ValueError(f"data.save: the data set {name!r} exists already; delete it with: minari delete {name}")
    buffers = []
    for i, episode in enumerate(data.episodes):
        ends = np.arange(len(episode)) == len(episode) - 1
        buffers.append(
            EpisodeBuffer(
                id=i,
                observations=episode.obs,
                actions=episode.action,
                rewards=list(map(float, episode.reward)),
                terminations=list(ends & episode.terminated),
                truncations=list(ends & episode.truncated),
                infos={},
            )
        )
    env = _registered_env(data.spec)
    minari.create_dataset_from_buffers(
        name,
        buffers,
        env=env,
        observation_space=to_gymnasium(data.spec.obs),
        action_space=to_gymnasium(data.spec.action),
        algorithm_name=data.name,
        author="polyak",
        author_email="unknown",
        code_permalink="unknown",
        jpeg_encoding=False,
    )


def _registered_env(spec: EnvSpec) -> str | None:
    """The name of the environment if Gymnasium has one of this name, which Minari stores."""
    import gymnasium

    return spec.id if spec.id in gymnasium.registry else None

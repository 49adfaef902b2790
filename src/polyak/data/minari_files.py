"""Reads and writes data sets of Minari, whose files never run code."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyak.core.gymnasium_spaces import from_gymnasium, to_gymnasium
from polyak.core.spaces import EnvSpec, leaf_keys
from polyak.core.types import PyTree
from polyak.core.warn import warn
from polyak.data.content import (
    check_no_masks,
    new_data_set,
    read_action,
    read_obs,
    read_reward,
    warn_of_lost_changes,
)
from polyak.data.data_set import DataSet, same_spaces
from polyak.data.files import list_arrays, name_damage


def open_minari(owner: str, name: str) -> Any:
    """A data set of Minari that was downloaded.

    Raises:
        ImportError: minari is not installed.
        ValueError: there is no such data set, it is damaged, has links, or is larger than memory.
    """
    try:
        import minari
    except ImportError as error:
        raise ImportError(f"{owner}: data sets need minari: pip install 'polyak[data]' ({error})") from None
    try:
        with name_damage(f"{owner}: {name}", "a data set of Minari"):
            loaded = minari.load_dataset(name)
            path = Path(loaded.storage.data_path) / "main_data.hdf5"
            if path.is_file():
                import h5py

                with h5py.File(path, "r") as file:
                    list_arrays(file)
    except FileNotFoundError:
        raise ValueError(f"{owner}: there is no data set {name!r}; download it with: minari download {name}") from None
    return loaded


def read_minari(owner: str, name: str, spec: EnvSpec | None) -> DataSet:
    """Read a downloaded data set of Minari, with its spaces or those of an equal environment."""
    loaded = open_minari(owner, name)
    env_spec = loaded.env_spec
    stored = EnvSpec(
        from_gymnasium(loaded.observation_space, f"observation space of {name}"),
        from_gymnasium(loaded.action_space, f"action space of {name}", is_action=True),
        id=name if env_spec is None else env_spec.id,
    )
    return from_episodes(owner, loaded, same_spaces(owner, stored, spec, name), name)


def from_episodes(owner: str, recorded: Any, spec: EnvSpec, name: str) -> DataSet:
    """The data set of an object whose `iterate_episodes()` yields episodes as Minari does.

    Raises:
        TypeError, ValueError: an array does not fit the spaces.
    """
    check_no_masks(owner, spec)
    episodes = [_read_episode(owner, episode, spec) for episode in _episodes(f"{owner}: {name}", recorded)]
    if not episodes:
        raise ValueError(f"{owner}: {name} has no episode")
    obs, action, reward = (jax.tree.map(lambda *x: np.concatenate(x), *[episode[i] for episode in episodes]) for i in range(3))
    warn_of_lost_changes(f"{owner}: observations", spec, obs)
    lengths = np.array([len(episode[2]) for episode in episodes])
    terminated = np.array([episode[3] for episode in episodes])
    return new_data_set(spec, obs=obs, action=action, reward=reward, lengths=lengths, terminated=terminated, name=name)


def _episodes(owner: str, recorded: Any) -> Any:
    """Yield the episodes; an error of Minari's names the data set."""
    episodes = iter(recorded.iterate_episodes())
    while True:
        with name_damage(owner, "a data set of Minari"):
            episode = next(episodes, None)
        if episode is None:
            return
        yield episode


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
    obs = read_obs(f"{owner}: observations {which}", spec, episode.observations, length + 1)
    action = read_action(f"{owner}: actions {which}", spec, episode.actions, length)
    return obs, action, read_reward(f"{owner}: rewards {which}", episode.rewards, length), bool(terminated[-1])


def check_new_minari(owner: str, name: str, spec: EnvSpec | None) -> None:
    """Check that a data set can be written into the directory of Minari's data sets.

    Raises:
        ImportError: minari is not installed.
        ValueError: the data set exists already, the name is none of Minari's, or HDF5 cannot have a key of the spaces.
    """
    for space in () if spec is None else (spec.obs, spec.action):
        for key in (key for keys, _ in leaf_keys(space) for key in keys):
            if key in ("", ".") or set(str(key)) & {"/", "\0"}:
                raise ValueError(f"{owner}: Minari's files cannot have the key {key!r}; rename it, or save to a .npz file")
    try:
        import minari
        from minari.dataset.minari_dataset import parse_dataset_id
    except ImportError as error:
        raise ImportError(f"{owner}: data sets of Minari need minari: pip install 'polyak[data]' ({error})") from None
    try:
        parse_dataset_id(name)
    except (ValueError, TypeError) as error:  # the second without a version
        raise ValueError(f"{owner}: {name!r} is no name of Minari's, such as 'pendulum/human-v0': {error}") from None
    if name in minari.list_local_datasets():
        raise ValueError(f"{owner}: the data set {name!r} exists already; delete it with: minari delete {name}")


def save_minari(data: DataSet, name: str) -> None:
    """Write a data set of Minari, into the directory of its data sets.

    Raises:
        ImportError, ValueError: see `check_new_minari`.
    """
    check_new_minari("data.save", name, data.spec)
    import gymnasium
    import minari
    from minari.data_collector import EpisodeBuffer

    if data.log_prob is not None:
        warn(f"data.save: {name!r} is saved without log_probs, for which Minari has no place; a file .npz has them")
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
    minari.create_dataset_from_buffers(
        name,
        buffers,
        env=data.spec.id if data.spec.id in gymnasium.registry else None,
        observation_space=to_gymnasium(data.spec.obs),
        action_space=to_gymnasium(data.spec.action),
        algorithm_name=data.name,
        author="polyak",
        author_email="unknown",
        code_permalink="unknown",
        jpeg_encoding=False,
    )

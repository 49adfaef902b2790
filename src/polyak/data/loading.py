"""Reads a data set from Minari, a file, a run directory, or arrays in memory; and writes one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.types import Rollout
from polyak.core.warn import warn
from polyak.data.arrays import from_arrays
from polyak.data.data_set import DataSet
from polyak.data.files import read_hdf5, read_npz, save_npz
from polyak.data.minari_files import check_new_minari, from_episodes, open_minari, read_minari, save_minari
from polyak.data.run_replay import read_run

MINARI = "minari:"
HDF5 = (".hdf5", ".h5")


def load(source: str | os.PathLike[str] | Mapping[str, Any], *, spec: EnvSpec | None = None) -> DataSet:
    """Load a data set; all content is checked, and no file runs code.

    Arrays and D4RL's files have one row for each step: `observations`, `actions`, `rewards`, `terminations` (or `terminals`),
    `truncations` (or `timeouts`), and final observations in `next_observations` (one for each step) or `final_observations`
    (one for each episode). Without them, the last step of an episode that did not terminate only gives the final observation
    of the step before. Where `next_observations` differs from the next row, an episode was cut short. `dones` of Gym's old
    interface are True at both kinds of ends; beside them one of the two flags is enough. `log_probs` are optional:
    log-probabilities with which the actions were chosen, for `polyak.evaluate_offline`.

    Args:
        source: `"minari:NAME"`, a data set of Minari that was downloaded (`minari download NAME`); a file `.npz`, `.hdf5` or
            `.h5`; a run directory, whose newest checkpoint has the replay of its agent; or arrays by name.
        spec: the environment's spaces (`env.spec`); None takes the spaces of the source, or infers them from the arrays: floats
            are a Box, actions one in [-1, 1], integers a Discrete up to the largest.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the extra `data` is missing.
        TypeError, ValueError: the file is damaged, of another format or larger than memory, arrays are missing or have other
            lengths, values are text, NaN, infinite or outside of their space, or the data are of another environment than
            `spec`.
        RunError, ConfigError, CheckpointError: the run directory cannot be read.
    """
    if spec is not None:
        check_env_spec("data.load", spec)
    if isinstance(source, Mapping):
        return from_arrays("data.load", source, spec, "arrays")
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"data.load: source must be 'minari:NAME', a path or arrays by name, got {type(source).__name__}")
    text = os.fspath(source)
    if text.startswith(MINARI):
        return read_minari("data.load", text.removeprefix(MINARI), spec)
    if not text:
        raise ValueError("data.load: source must be 'minari:NAME', a path or arrays by name, got an empty path")
    path = Path(text)
    if path.is_dir():
        if (path / "data").is_dir():
            raise ValueError(f"data.load: {path} is no run directory; Minari's data sets are 'minari:NAME'")
        return read_run("data.load", path, spec)
    if not path.exists():
        raise FileNotFoundError(f"data.load: {path}: there is no such file or run directory; Minari's are 'minari:NAME'")
    if path.suffix == ".npz":
        return read_npz("data.load", path, spec)
    if path.suffix in HDF5:
        return read_hdf5("data.load", path, spec)
    raise ValueError(f"data.load: {path} must be a run directory or end with .npz, {' or '.join(HDF5)}")


def save(data: DataSet, destination: str | os.PathLike[str]) -> None:
    """Write a data set: to a file `.npz`, which replaces an existing one, or to Minari's directory as `"minari:NAME"`.

    Raises:
        ValueError: the destination is neither, or Minari has such a data set already.
        ImportError: the extra `data` is missing.

    Warns of episodes that lack their beginnings, which files do not tell from others.
    """
    text = _check_destination("data.save", destination)
    if data.has_beginning is not None and not data.has_beginning.all():
        warn(
            f"data.save: {np.sum(~data.has_beginning)} episodes lack their beginnings, which {text} does not tell; "
            "data.select(data.has_beginning) leaves them out"
        )
    if text.startswith(MINARI):
        save_minari(data, text.removeprefix(MINARI))
    else:
        save_npz(data, Path(text))


def check_new(owner: str, destination: str | os.PathLike[str], spec: EnvSpec | None) -> None:
    """Check that a new data set can be saved, before anything is recorded.

    Args:
        owner: the function that records, for errors.
        destination: see `save`; it must not exist.
        spec: the environment's spaces; None checks the destination alone.

    Raises:
        ValueError: see `save`; or the file exists, or its directory does not.
        PermissionError: the directory cannot be written to.
        ImportError: the extra `data` is missing.
    """
    text = _check_destination(owner, destination)
    path = Path(text)
    if text.startswith(MINARI):
        check_new_minari(owner, text.removeprefix(MINARI), spec)
    elif path.exists():
        raise ValueError(f"{owner}: {path} exists already; choose another name, or delete it")
    elif not path.parent.is_dir():
        raise ValueError(f"{owner}: {path.parent} is no directory; create it first")
    elif not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{owner}: {path}: no permission to write in {path.parent}")


def _check_destination(owner: str, destination: str | os.PathLike[str]) -> str:
    text = os.fspath(destination)
    if not text.startswith(MINARI) and not text.endswith(".npz"):
        raise ValueError(f"{owner}: destination must end with .npz or be 'minari:NAME', got {text!r}")
    return text


def from_minari(dataset: Any, spec: EnvSpec, *, num_envs: int = 1, num_steps: int = 1) -> Rollout:
    """The episodes of a Minari data set as one rollout `[T, num_envs]` of NumPy arrays, for `agent.add`.

    Each episode is appended to the shortest of `num_envs` streams, as environments that reset on the next step return them. All
    streams are cut to the shortest one, T a multiple of `num_steps`. An episode that neither terminated nor was truncated was
    cut off by the recording: it counts as truncated. `load("minari:NAME").rollout(...)` does the same.

    Args:
        dataset: the name of a downloaded data set (`minari download`), such as `"D4RL/door/human-v2"`; or a data set that
            `minari.load_dataset` returned.
        spec: the environment's spaces; observations and actions are converted to the agent's. It must not have action masks,
            because data sets have none.
        num_envs: environments of the run that learns from the data set.
        num_steps: the agent's `num_steps`.

    Raises:
        ImportError: `dataset` is a name and minari is not installed.
        TypeError, ValueError: the arrays of `dataset` do not fit the spec, there are fewer episodes than
            environments, or streams shorter than `num_steps`.
    """
    check_env_spec("from_minari", spec)
    is_name = isinstance(dataset, str)
    loaded = open_minari("from_minari", dataset) if is_name else dataset
    data = from_episodes("from_minari", loaded, spec, dataset if is_name else "the data set")
    return data.rollout(spec, num_envs=num_envs, num_steps=num_steps)

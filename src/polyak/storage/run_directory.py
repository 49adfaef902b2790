"""A run directory: settings, metrics, checkpoints and system information of one training run, with one writer at a time."""

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from filelock import BaseFileLock, FileLock

from polyak.core.warn import warn
from polyak.storage.files import dump_json
from polyak.storage.json import finite_or_none
from polyak.storage.lock import LockedError, acquire
from polyak.storage.run_files import (
    RunError,
    append_row,
    drop_incomplete_line,
    drop_rows_after,
    make_directory,
    read_events,
    read_object,
    read_rows,
    write_object,
)

__all__ = [
    "Run",
    "RunError",
    "create",
    "describe_system",
    "is_run_file",
    "library_version",
    "machine_shape",
    "open_for_parent",
    "open_run",
    "package_version",
]

CONFIG, METRICS, SYSTEM, SUMMARY = "config.json", "metrics.jsonl", "system.json", "summary.json"
WORKERS, WORKER_OUTPUT, TRACKING = "workers.jsonl", "workers", "tracking.json"
CHECKPOINTS, BEST, TENSORBOARD, VIDEOS, LOCK = "checkpoints", "best", "tb", "videos", "run.lock"

KILLED = "killed"
"""`stopped` in the summary of a resumed run until that run writes its next summary."""

# Files that a killed `create` may leave; a directory without a config is no run yet.
_LEFTOVERS = {CHECKPOINTS, TENSORBOARD, LOCK, SYSTEM, f".{SYSTEM}.aside", f".{CONFIG}.aside"}

_SHA256 = "sha256"

_PACKAGES = ("polyak", "jax", "jaxlib", "numpy", "flax", "optax", "gymnasium")


@dataclass(frozen=True)
class Run:
    """A run directory, opened by `create` or `open_run`; a context manager that closes it.

    Attributes:
        directory: absolute path of the directory.
        lock: lock of the writer; None if the run was opened for reading.
        lock_inode: inode number of the lock's file.
    """

    directory: Path
    lock: BaseFileLock | None = None
    lock_inode: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.lock is not None:
            object.__setattr__(self, "lock_inode", self._find_lock_inode())

    @property
    def checkpoints(self) -> Path:
        """The directory for `polyak.storage.checkpoint`."""
        return self.directory / CHECKPOINTS

    @property
    def best(self) -> Path:
        """The directory of the checkpoint with the best evaluation so far."""
        return self.directory / BEST

    @property
    def tensorboard(self) -> Path:
        """The directory for TensorBoard's event files."""
        return self.directory / TENSORBOARD

    @property
    def videos(self) -> Path:
        """The directory of videos, `ENV_STEPS.mp4`."""
        return self.directory / VIDEOS

    @property
    def metrics(self) -> Path:
        """The file of metrics, one JSON object a line."""
        return self.directory / METRICS

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that another process can write; a second call does nothing."""
        if self.lock is not None:
            self.lock.release()

    def require_writer(self) -> None:
        """Check that this process may write, and that the directory is still in its place.

        Raises:
            RunError: the run was opened for reading, or its directory was moved, removed or replaced.
        """
        if self.lock is None:
            raise RunError(f"{self.directory}: opened for reading; open_run(..., write=True) to write")
        if self.lock_inode is None or self._find_lock_inode() != self.lock_inode:
            raise RunError(
                f"{self.directory}: was moved, removed or replaced while it was open for writing, or its {LOCK}; nothing more "
                "is written there; if it was moved, polyak resume continues it from its new place"
            )

    def _find_lock_inode(self) -> int | None:
        try:
            return os.stat(self.directory / LOCK).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_config(self, *, verify: bool = True) -> dict[str, Any]:
        """Read the config that was passed to `create`.

        Args:
            verify: compare the config with the hash in the file; files of older versions have no hash.

        Raises:
            RunError: the file is missing, or was damaged or edited.
        """
        path = self.directory / CONFIG
        config = read_object(path)
        sha256 = config.pop(_SHA256, None)
        if verify and sha256 not in (None, _config_hash(config)):
            raise RunError(
                f"{path}: was edited or damaged since it was written (its sha256 differs); restore it, or accept it with "
                f"polyak resume {shlex.quote(str(self.directory))} --force"
            )
        return config

    def accept_config(self) -> None:
        """Accept an edited config: store its hash.

        Raises:
            RunError: it cannot be read or written.
        """
        self.require_writer()
        self._write_config(self.read_config(verify=False))

    def change_config(self, **changes: Any) -> None:
        """Replace fields of the config; a kill at any moment leaves the old file or the new file.

        Raises:
            RunError: the config cannot be read or written, or has no such field.
        """
        self.require_writer()
        config = self.read_config()
        unknown = [name for name in changes if name not in config]
        if unknown:
            raise RunError(f"{self.directory / CONFIG}: has no field {unknown[0]!r} to change")
        if config != config | changes:
            self._write_config(config | changes)

    def _write_config(self, config: dict[str, Any]) -> None:
        write_object(self.directory / CONFIG, config | {_SHA256: _config_hash(config)})

    def read_summary(self) -> dict[str, Any]:
        """Read the results that `write_summary` wrote.

        Raises:
            RunError: the file is missing (the run has not ended) or damaged.
        """
        return read_object(self.directory / SUMMARY)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace the results at the end of the run; NaN and infinities become null.

        Raises:
            RunError: it cannot be written, or is not JSON data.
        """
        self.require_writer()
        write_object(self.directory / SUMMARY, finite_or_none(summary))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the rows of the metrics file, each with its `env_steps`; an incomplete last line is skipped.

        Raises:
            RunError: a line is damaged.
        """
        return read_rows(self.metrics)

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after a step, before training resumes from its checkpoint, so that no row is written twice.

        Damaged lines (a power cut leaves some) are dropped too, with a warning. An earlier summary is marked as `KILLED`, which
        it stays if this process is killed before it writes its own.

        Raises:
            RunError: the file cannot be read or written.
        """
        self.require_writer()
        drop_rows_after(self.metrics, env_steps)
        if os.path.lexists(self.directory / SUMMARY):
            with contextlib.suppress(RunError):  # damaged: it is replaced at the end
                self.write_summary(self.read_summary() | {"stopped": KILLED})

    def read_worker_events(self) -> list[dict[str, Any]]:
        """Read the events of the workers; [] for a run without workers.

        Raises:
            RunError: a line is damaged.
        """
        return read_events(self.directory / WORKERS)

    def append_worker_event(self, row: Mapping[str, Any]) -> None:
        """Append an event of a worker, with its time in seconds since 1970."""
        self.require_writer()
        append_row(self.directory / WORKERS, row)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one row; NaN and infinities become null, so that any JSON reader can read it.

        Raises:
            OSError: for example, the disk is full; the file is unchanged.
        """
        self.require_writer()
        append_row(self.metrics, row)


def directory_path(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a directory of runs.

    Raises:
        RunError: the name is empty, whose path would be the working directory.
    """
    if not os.fspath(directory):
        raise RunError("the name of a run directory must not be empty")
    return Path(directory)


def create(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
    """Create a run directory, for the owner only (0700), and lock it for writing.

    The directory has `config.json` (all settings), `system.json` (versions, machine, command line), and later
    `metrics.jsonl`, `tb/`, `checkpoints/` and `summary.json`.

    Args:
        directory: path of the directory; missing parents are created. An existing empty directory keeps its mode.
        config: JSON data, e.g. of `polyak.storage.config.to_json`.

    Raises:
        RunError: the directory holds a run or other files, or is a file or a link; another process is creating it; no
            permission.
        TypeError: `config` is not JSON data.
        ValueError: `config` holds a bare NaN or infinity.
    """
    path = directory_path(directory)
    dump_json(dict(config), CONFIG)
    _check_vacant(path)
    make_directory(path)
    _warn_about_permissions(path)
    # Resolved: an environment may change the working directory.
    run = Run(path.resolve(), _acquire(path))
    try:
        if os.path.lexists(path / CONFIG):
            raise RunError(f"{path}: another process has just created a run here; choose another directory")
        make_directory(run.checkpoints)
        write_object(path / SYSTEM, describe_system())
        run._write_config(dict(config))
    except BaseException:
        run.close()
        raise
    return run


def runs_in(directory: Path) -> list[Path]:
    """Return the run directories up to four levels below a directory, sorted by name and number; [] for a run.

    Links are not followed, and directories that begin with a dot are skipped.
    """
    # `os.path` does not raise for names that are too long.
    if os.path.lexists(directory / CONFIG) or not os.path.isdir(directory):
        return []
    found = [Path(run) for run in _search_runs(str(directory), depth=1)]
    parts = {run: re.split(r"(\d+)", str(run.relative_to(directory))) for run in found}
    return sorted(found, key=lambda run: [int(part) if part.isdecimal() else part for part in parts[run]])


_MAX_DEPTH = 4

_MOST_NAMES = 10
"""Maximum number of runs that an error lists."""


def _search_runs(directory: str, depth: int) -> Iterator[str]:
    """Yield the runs below a directory, and directories without permission, as they may hold runs. A run holds no runs."""
    try:
        entries = [entry for entry in os.scandir(directory) if not entry.name.startswith(".")]
        inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except PermissionError:
        yield directory
        return
    except OSError:  # it was removed meanwhile
        return
    for path in inside:
        # Other programs have a config.json too: a damaged run is found on the first level only.
        if os.path.lexists(f"{path}/{CONFIG}") and (depth == 1 or os.path.lexists(f"{path}/{SYSTEM}")):
            yield path
        elif depth < _MAX_DEPTH:
            yield from _search_runs(path, depth + 1)


def open_run(directory: str | os.PathLike[str], *, write: bool = False) -> Run:
    """Open an existing run directory.

    Args:
        directory: its path.
        write: lock the run for writing, to resume training; `system.json` records this machine and command line too (not the
            devices: JAX is not started).

    Raises:
        RunError: the directory has no run, or has links; or another process, which the message names, is writing.
    """
    path = directory_path(directory)
    # Not by pathlib, which raises for names that are too long.
    if not os.path.isdir(path):
        why = "not a directory" if os.path.exists(path) else "there is no such directory"
        raise RunError(f"{path}: {why}; a run was expected")
    if not os.path.lexists(path / CONFIG):
        if path.parent.name == CHECKPOINTS and os.path.lexists(path.parent.parent / CONFIG):
            raise RunError(
                f"{path}: is a checkpoint; give the run, {path.parent.parent}, whose newest valid checkpoint is used"
            )
        inside = runs_in(path)
        names = ", ".join(map(str, inside[:_MOST_NAMES])) + (f" and {len(inside):,} in all" if inside[_MOST_NAMES:] else "")
        raise RunError(f"{path}: holds no run (it has no {CONFIG})" + (f"; give one of {names}" if inside else ""))
    for name in (CHECKPOINTS, BEST, TENSORBOARD, VIDEOS):
        if (path / name).is_symlink():
            raise RunError(f"{path / name}: is a symbolic link; a run keeps its files inside its own directory")
    _warn_about_permissions(path)
    run = Run(path.resolve(), _acquire(path) if write else None)
    if write:
        try:
            make_directory(run.checkpoints)
            _record_resumption(run.directory / SYSTEM)
            drop_incomplete_line(run.metrics)
        except BaseException:
            run.close()
            raise
    return run


def open_for_parent(directory: Path) -> Run:
    """Open a run directory for writing in a child process; the parent process holds the lock, and does not write meanwhile."""
    return Run(directory, FileLock(directory / LOCK, thread_local=False))


def is_run_file(path: Path) -> bool:
    """Return True if a run writes this path. A run has config.json and system.json; other programs may have the first."""
    own = {CONFIG, METRICS, WORKERS, WORKER_OUTPUT, TRACKING, SYSTEM, SUMMARY, LOCK, CHECKPOINTS, BEST, TENSORBOARD}
    real = Path(os.path.realpath(path))
    runs = [root for root in real.parents if all(os.path.lexists(root / name) for name in (CONFIG, SYSTEM))]
    names = [real.relative_to(root).parts[0] for root in runs]
    return any(name in own or name.endswith(".aside") for name in names)


@cache
def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_version() -> str:
    """Return the version of polyak."""
    return package_version("polyak") or "unknown"


def machine_shape() -> dict[str, Any]:
    """Return platform and number of devices and processes, on which the bits of a result may depend."""
    return {"platform": jax.default_backend(), "devices": jax.device_count(), "processes": jax.process_count()}


def describe_system(*, devices: bool = True) -> dict[str, Any]:
    """Return versions, machine and command line as JSON data, without environment variables.

    Args:
        devices: include JAX's devices. This starts JAX, after which their number can no longer be set.
    """
    system = {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "cpu": platform.machine(),
        "cpu_count": os.cpu_count(),
        "command_line": sys.argv,
    }
    if devices:
        system |= machine_shape() | {"device_kinds": sorted({device.device_kind for device in jax.devices()})}
    return system


def _config_hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _check_vacant(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
        names = set(os.listdir(path)) if stat.S_ISDIR(mode) else set()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path}: cannot be created: {error.strerror}") from error
    if stat.S_ISLNK(mode):
        raise RunError(f"{path}: is a symbolic link; give the directory itself")
    if not stat.S_ISDIR(mode):
        raise RunError(f"{path}: is a file; a run needs a directory")
    if CONFIG in names:
        command = f"polyak resume {shlex.quote(str(path))}"
        raise RunError(f"{path}: holds a run already; resume it ({command}) or choose another directory")
    if names - _LEFTOVERS:
        raise RunError(f"{path}: is not empty (it has {sorted(names)[0]!r}); choose another directory")


def _record_resumption(path: Path) -> None:
    """Add this process to system.json; a damaged file is replaced, with a warning."""
    try:
        system = read_object(path)
    except RunError as error:
        warn(f"{error}; a new record begins")
        system = {}
    before = system.get("resumed")
    write_object(path, system | {"resumed": [*(before if isinstance(before, list) else []), describe_system(devices=False)]})


def _acquire(path: Path) -> BaseFileLock:
    try:
        return acquire(path / LOCK)
    except LockedError as error:
        raise RunError(f"{path}: is being written {error}; wait for it, or choose another directory") from None
    except OSError as error:
        raise RunError(f"{path / LOCK}: cannot be locked: {error.strerror}") from error


def _warn_about_permissions(path: Path) -> None:
    status, parent = os.stat(path), os.stat(path.parent)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        warn(f"{path.parent}: everyone on this machine may replace what is in it; chmod o-w it")
    if status.st_mode & stat.S_IWOTH:
        warn(f"{path}: everyone on this machine may write here; chmod 700 it")
    if status.st_uid not in (os.geteuid(), 0):
        warn(f"{path}: belongs to another user (uid {status.st_uid})")

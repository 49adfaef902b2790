"""A run directory: the settings, metrics, checkpoints and circumstances of one training, with one writer at a time."""

import json
import math
import os
import platform
import shlex
import stat
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from filelock import BaseFileLock

from polyak.storage.files import append, dump_json, parse_json, read_bytes, write_file
from polyak.storage.lock import LockedError, acquire

MAX_JSON_BYTES = 16 * 2**20
"""The largest config, summary or system file that is read."""

MAX_METRICS_BYTES = 2**31

CONFIG, METRICS, SYSTEM, SUMMARY = "config.json", "metrics.jsonl", "system.json", "summary.json"
CHECKPOINTS, TENSORBOARD, LOCK = "checkpoints", "tb", "run.lock"

# What a killed `create` may leave before there is a config, and so a run.
_BEFORE_CONFIG = {CHECKPOINTS, TENSORBOARD, LOCK, SYSTEM, f".{SYSTEM}.aside", f".{CONFIG}.aside"}


_PACKAGES = ("polyak", "jax", "jaxlib", "numpy", "flax", "optax", "gymnasium")


class RunError(Exception):
    """A run directory cannot be made, opened, read or written: which, and why."""


@dataclass(frozen=True)
class Run:
    """A run directory, opened by `create` or `open_run`; a context manager that closes it.

    Attributes:
        directory: where it is.
        lock: held by its one writer; None when it was opened for reading.
    """

    directory: Path
    lock: BaseFileLock | None = None

    @property
    def checkpoints(self) -> Path:
        """The directory for `polyak.storage.checkpoint`."""
        return self.directory / CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """The directory for TensorBoard's event files."""
        return self.directory / TENSORBOARD

    @property
    def metrics(self) -> Path:
        """The file of metrics, one JSON object a line."""
        return self.directory / METRICS

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write; a second call does nothing."""
        if self.lock is not None:
            self.lock.release()

    def require_writer(self) -> None:
        """Fail unless this process may write.

        Raises:
            RunError: the run was opened for reading.
        """
        if self.lock is None:
            raise RunError(f"{self.directory}: opened for reading; open_run(..., write=True) to write")

    def read_config(self) -> dict[str, Any]:
        """What `create` was given.

        Raises:
            RunError: the file is missing or damaged.
        """
        return _read_object(self.directory / CONFIG)

    def change_config(self, **changes: Any) -> None:
        """Replace fields of what `create` was given, as a whole: a kill at any moment leaves the old file or the new one.

        Raises:
            RunError: it cannot be read or written, or has no such field.
        """
        self.require_writer()
        config = self.read_config()
        unknown = [name for name in changes if name not in config]
        if unknown:
            raise RunError(f"{self.directory / CONFIG}: has no field {unknown[0]!r} to change")
        if config != config | changes:
            _write_object(self.directory / CONFIG, config | changes)

    def read_summary(self) -> dict[str, Any]:
        """What `write_summary` was given.

        Raises:
            RunError: the file is missing (the run has not ended) or damaged.
        """
        return _read_object(self.directory / SUMMARY)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace the results at the end of the run; NaN and infinities become null.

        Raises:
            RunError: it cannot be written, or is not JSON data.
        """
        self.require_writer()
        _write_object(self.directory / SUMMARY, {name: finite_or_none(value) for name, value in summary.items()})

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of the metrics file; a last line that a kill cut short is left out.

        Raises:
            RunError: a line is damaged.
        """
        return [_parse(line, f"{self.metrics}, line {n}") for n, line in enumerate(self._metrics_lines(), start=1)]

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after this step, before training goes on from a checkpoint of it, so that none is there twice.

        Lines that are damaged (a power cut leaves some) are dropped too, with a warning.

        Raises:
            RunError: the file cannot be read or written.
        """
        self.require_writer()
        kept, damaged = [], []
        for number, line in enumerate(self._metrics_lines(), start=1):
            try:
                kept += [line] if _env_steps(line, f"line {number}") <= env_steps else []
            except RunError as error:
                damaged.append(str(error))
        if damaged:
            warnings.warn(f"{self.metrics}: damaged lines were dropped: {'; '.join(damaged[:10])}", stacklevel=2)
        if os.path.lexists(self.metrics):
            _write(self.metrics, b"".join(line + b"\n" for line in kept))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one row; NaN and infinities become null, so that any JSON reader can read it.

        Raises:
            OSError: the disk is full, say; the file is as it was.
        """
        self.require_writer()
        values = {name: finite_or_none(value) for name, value in row.items()}
        append(self.metrics, dump_json(values, METRICS, indent=None))

    def _metrics_lines(self) -> list[bytes]:
        if not os.path.lexists(self.metrics):
            return []
        return _read(self.metrics, MAX_METRICS_BYTES).split(b"\n")[:-1]


def create(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
    """Make a run directory, for the owner only (0700), and become its writer.

    It holds `config.json` (everything needed to run again), `system.json` (versions, machine, command line), and room for
    `metrics.jsonl`, `tb/`, `checkpoints/` and `summary.json`.

    Args:
        directory: where; missing parents are made. An empty directory is taken, with the mode it has.
        config: JSON data, e.g. of `polyak.storage.config.to_json`.

    Raises:
        RunError: there is a run already, or a file, a link or something else; another process is making it; no permission.
        TypeError: `config` is not JSON data.
        ValueError: `config` holds a bare NaN or infinity.
    """
    path = Path(directory)
    data = dump_json(dict(config), CONFIG)
    _refuse_taken(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be created: {error.strerror}") from error
    _warn_of_strangers(path)
    # Resolved: an environment may change the working directory.
    run = Run(path.resolve(), _acquire(path))
    try:
        if os.path.lexists(path / CONFIG):
            raise RunError(f"{path}: another process has just made a run here; choose another directory")
        make_directory(run.checkpoints)
        _write_object(path / SYSTEM, describe_system())
        _write(path / CONFIG, data)
    except BaseException:
        run.close()
        raise
    return run


def open_run(directory: str | os.PathLike[str], *, write: bool = False) -> Run:
    """Open a run directory that exists.

    Args:
        directory: where.
        write: become its writer, to go on training; `system.json` records this machine and command line too (not the
            devices: JAX is not started).

    Raises:
        RunError: no run is there; links or foreign parts in it; another process writes it (named).
    """
    path = Path(directory)
    if not path.is_dir():
        raise RunError(f"{path}: {'not a directory' if path.exists() else 'there is no such directory'}; a run was expected")
    if not os.path.lexists(path / CONFIG):
        inside = sorted(str(config.parent) for config in path.glob(f"*/{CONFIG}"))
        raise RunError(f"{path}: holds no run (it has no {CONFIG})" + (f"; give one of {', '.join(inside)}" if inside else ""))
    for name in (CHECKPOINTS, TENSORBOARD):
        if (path / name).is_symlink():
            raise RunError(f"{path / name}: is a symbolic link; a run keeps its files inside its own directory")
    _warn_of_strangers(path)
    run = Run(path.resolve(), _acquire(path) if write else None)
    if write:
        try:
            make_directory(run.checkpoints)
            _record_resumption(run.directory / SYSTEM)
            _drop_torn_line(run)
        except BaseException:
            run.close()
            raise
    return run


@cache
def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_version() -> str:
    """The version of polyak itself."""
    return package_version("polyak") or "unknown"


def machine_shape() -> dict[str, Any]:
    """What the bits of a result may depend on: the platform and the number of devices and processes."""
    return {"platform": jax.default_backend(), "devices": jax.device_count(), "processes": jax.process_count()}


def describe_system(*, devices: bool = True) -> dict[str, Any]:
    """Versions, machine and command line, as JSON data.

    Args:
        devices: JAX's too, which starts JAX: after that, how many there are can no longer be set.
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


def finite_or_none(value: Any) -> Any:
    """`value` for a JSON file that others read: NaN and infinities, also inside lists and dicts, become None."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_kept(path: Path) -> bool:
    """A run keeps that path for itself, be it there yet or not; other programs have a config.json too, but no system.json."""
    own = {CONFIG, METRICS, SYSTEM, SUMMARY, LOCK, CHECKPOINTS, TENSORBOARD}
    found = Path(os.path.realpath(path))
    within = [found.relative_to(root).parts[0] for root in found.parents if _is_run(root)]
    return any(name in own or name.endswith(".aside") for name in within)


def _is_run(directory: Path) -> bool:
    return all(os.path.lexists(directory / name) for name in (CONFIG, SYSTEM))


def _refuse_taken(path: Path) -> None:
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
        raise RunError(
            f"{path}: holds a run already; resume it (polyak resume {shlex.quote(str(path))}) or choose another directory"
        )
    if names - _BEFORE_CONFIG:
        raise RunError(f"{path}: is not empty (it has {sorted(names)[0]!r}); choose another directory")


def make_directory(path: Path) -> None:
    """Create a directory for the owner only (0700), unless it is there.

    Raises:
        RunError: a file is there, or it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be created: {error.strerror}") from error


def _record_resumption(path: Path) -> None:
    """Add this process to the record; a record that was lost does not keep anyone from training on."""
    try:
        system = _read_object(path)
    except RunError as error:
        warnings.warn(f"{error}; a new record begins", stacklevel=3)
        system = {}
    before = system.get("resumed")
    _write_object(path, system | {"resumed": [*(before if isinstance(before, list) else []), describe_system(devices=False)]})


def _drop_torn_line(run: Run) -> None:
    """Cut off the beginning of a row that a killed writer left, so that the next row starts a line."""
    if os.path.lexists(run.metrics):
        data = _read(run.metrics, MAX_METRICS_BYTES)
        os.truncate(run.metrics, data.rfind(b"\n") + 1)


def _acquire(path: Path) -> BaseFileLock:
    try:
        return acquire(path / LOCK)
    except LockedError as error:
        raise RunError(f"{path}: is being written {error}; wait for it, or choose another directory") from None
    except OSError as error:
        raise RunError(f"{path / LOCK}: cannot be locked: {error.strerror}") from error


def _warn_of_strangers(path: Path) -> None:
    status, parent = os.stat(path), os.stat(path.parent)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        warnings.warn(f"{path.parent}: everyone on this machine may replace what is in it; chmod o-w it", stacklevel=3)
    if status.st_mode & stat.S_IWOTH:
        warnings.warn(f"{path}: everyone on this machine may write here; chmod 700 it", stacklevel=3)
    if status.st_uid not in (os.geteuid(), 0):
        warnings.warn(f"{path}: belongs to another user (uid {status.st_uid})", stacklevel=3)


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_bytes(path, limit=limit)
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(data, what)
    except ValueError as error:
        raise RunError(str(error)) from None
    if not isinstance(value, dict):
        raise RunError(f"{what}: a JSON object was expected, got {json.dumps(value)[:40]}")
    return value


def _env_steps(line: bytes, what: str) -> int:
    steps = _parse(line, what).get("env_steps")
    if not isinstance(steps, int):
        raise RunError(f"{what}: env_steps is {json.dumps(steps)[:40]}; wanted an integer")
    return steps


def _read_object(path: Path) -> dict[str, Any]:
    return _parse(_read(path, MAX_JSON_BYTES), str(path))


def _write(path: Path, data: bytes) -> None:
    try:
        write_file(path, data)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def _write_object(path: Path, value: Mapping[str, Any]) -> None:
    try:
        data = dump_json(dict(value), path.name)
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: {error}") from None
    _write(path, data)

"""JAX's persistent compilation cache for trainings and the command line, in the user's cache directory.

The cached files are executables, so the directory must be private to the user. JAX writes files in place, so each process uses
a separate directory with hard links to the shared files, and links its new files into the shared directory at the end of a
training: no process reads a file that another process is writing, or was killed while writing. JAX's
`jax_compilation_cache_max_size` is no replacement: a truncated file is never written again, and makes every write fail until it
is read.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from polyak.core.warn import warn
from polyak.storage.user_cache import cache_directory, open_directory
from polyak.train.devices import threads_setting

MAX_BYTES = 2**30
"""Of the files for one processor and number of threads."""
SESSION = "session-"
SWITCH = "POLYAK_COMPILATION_CACHE"


@dataclass
class _Process:
    """The cache of this process: trainings in several threads, and one after another, share it.

    Attributes:
        users: number of blocks that are running.
        configured: restores JAX's settings and publishes new files; closed after the last block.
        directories: the shared directory and the process' own, once they were opened; None if they cannot be used.
        pid: the process, as a forked one inherits this object.
    """

    users: int = 0
    configured: ExitStack = field(default_factory=ExitStack)
    directories: "tuple[Path, Path] | None" = None
    was_opened: bool = False
    pid: int = field(default_factory=os.getpid)


_lock = threading.Lock()
_process = _Process()


@contextmanager
def compilation_cache(
    enabled: bool, threads: int | None = None, note: Callable[[str], None] = lambda text: warn(f"train: {text}")
) -> Iterator[None]:
    """Cache compiled programs while the block runs, unless the user has configured a cache, or turned it off.

    `POLYAK_COMPILATION_CACHE=0` turns this cache off, and `JAX_ENABLE_COMPILATION_CACHE=0` every cache of JAX.

    Args:
        enabled: False caches nothing.
        threads: number of XLA threads, on which programs depend; None is the number of the environment, or XLA's default. The
            first block of a process decides.
        note: called with the reason if the cache directory cannot be used, once in a process.
    """
    is_used = enabled and os.environ.get(SWITCH) != "0" and _enter(threads, note)
    try:
        yield
    finally:
        if is_used:
            _leave()


def _enter(threads: int | None, note: Callable[[str], None]) -> bool:
    """Configure JAX, unless another block has; returns False without a cache of polyak."""
    global _process
    with _lock:
        if _process.pid != os.getpid():
            _process = _Process()
        values = jax.config.values
        if _process.users == 0 and (values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]):
            return False
        if not _process.was_opened:
            _process.was_opened = True
            try:
                _process.directories = _open(threads)
            except OSError as error:
                note(f"compilation cache is off: {error}")
        if _process.directories is None:
            return False
        if _process.users == 0:
            shared, session = _process.directories
            _process.configured.callback(_publish, session, shared)
            _process.configured.enter_context(_configured(session))
        _process.users += 1
        return True


def _leave() -> None:
    with _lock:
        _process.users -= 1
        if _process.users == 0:
            _process.configured.close()


def _open(threads: int | None) -> tuple[Path, Path]:
    """Return the shared directory, and a directory of this process, which is deleted at its end."""
    shared = open_directory(cache_directory()) / _machine(threads)
    kept, pid = ExitStack(), os.getpid()
    session = kept.enter_context(_session(shared))
    # A forked process must not delete the directory of its parent.
    atexit.register(lambda: kept.close() if os.getpid() == pid else None)
    return shared, session


def _machine(threads: int | None) -> str:
    """Return a name for the processor and the number of threads, on which programs depend and which JAX's keys lack."""
    processor = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
        processor += "".join(sorted(line for line in lines if line.startswith(("flags", "Features", "model name"))))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{hashlib.sha256(processor.encode()).hexdigest()[:16]}-{threads or threads_setting() or f'auto{cores}'}"


@contextmanager
def _session(shared: Path) -> Iterator[Path]:
    """Create a directory with links to all cached files."""
    shared.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        with _locked(shared):
            _remove_ended_sessions(shared)
            session = Path(tempfile.mkdtemp(prefix=SESSION, dir=shared))
            stack.callback(shutil.rmtree, session, ignore_errors=True)
            stack.enter_context(_locked(session))
        for path in _files(shared):
            # Another process may delete an old file.
            with contextlib.suppress(FileNotFoundError):
                os.link(path, session / path.name)
        yield session


@contextmanager
def _configured(directory: Path) -> Iterator[None]:
    options = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX decides at the first program that it compiles whether there is a cache.
    reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file()]


def _publish(session: Path, shared: Path) -> None:
    """Link new files into the shared directory, then delete its oldest files beyond 1 GiB."""
    with contextlib.suppress(OSError):
        new = [entry for entry in os.scandir(session) if entry.is_file() and entry.stat().st_nlink == 1]
        for entry in new:
            with contextlib.suppress(FileExistsError):
                os.link(entry.path, shared / entry.name)
        total = 0
        for path in sorted(_files(shared) if new else [], key=lambda path: path.stat().st_mtime_ns, reverse=True):
            total += path.stat().st_size
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a directory; the end of the process releases the lock too.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _remove_ended_sessions(shared: Path) -> None:
    """Delete the directories of runs that were killed."""
    for directory in shared.glob(f"{SESSION}*"):
        with contextlib.suppress(OSError), _locked(directory, wait=False):
            shutil.rmtree(directory, ignore_errors=True)

"""JAX's persistent compilation cache for trainings and the command line, in the user's cache directory.

The cached files are executables, so the directory must be private to the user. JAX writes files in place, so each run uses a
separate directory with hard links to the shared files, and moves new files into the shared directory at the end: no run reads a
file that another run is writing, or was killed while writing. JAX's `jax_compilation_cache_max_size` is no replacement: a
truncated file is never written again, and makes every write fail until it is read.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from polyak.storage.user_cache import cache_directory, open_directory
from polyak.train.devices import threads_setting

MAX_BYTES = 2**30
SESSION = "session-"
SWITCH = "POLYAK_COMPILATION_CACHE"


@contextmanager
def compilation_cache(
    enabled: bool, threads: int | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Cache compiled programs while the block runs, unless the user has configured a cache, or turned it off.

    `POLYAK_COMPILATION_CACHE=0` turns this cache off, and `JAX_ENABLE_COMPILATION_CACHE=0` every cache of JAX.

    Args:
        enabled: False caches nothing.
        threads: number of XLA threads, on which programs depend; None is the number of the environment, or XLA's default.
        note: called with the reason if the cache directory cannot be used.
    """
    if (
        not enabled
        or os.environ.get(SWITCH) == "0"
        or jax.config.values["jax_compilation_cache_dir"]
        or not jax.config.values["jax_enable_compilation_cache"]
    ):
        yield
        return
    with ExitStack() as stack:
        try:
            session = stack.enter_context(_session(open_directory(cache_directory()) / _machine(threads)))
        except OSError as error:
            note(f"compilation cache is off: {error}")
        else:
            stack.enter_context(_configured(session))
        yield


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
    """Create a directory with links to all cached files; new files are moved into the shared directory at the end."""
    shared.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        with _locked(shared):
            _remove_ended_sessions(shared)
            session = Path(tempfile.mkdtemp(prefix=SESSION, dir=shared))
            stack.callback(shutil.rmtree, session, ignore_errors=True)
            stack.enter_context(_locked(session))
        for path in _files(shared):
            os.link(path, session / path.name)
        try:
            yield session
        finally:
            with contextlib.suppress(OSError):
                _publish(session, shared)


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
    """Move new files into the shared directory, then delete the oldest files beyond 1 GiB."""
    for path in _files(session):
        os.replace(path, shared / path.name)
    total = 0
    for path in sorted(_files(shared), key=lambda path: path.stat().st_mtime_ns, reverse=True):
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

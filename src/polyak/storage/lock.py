"""A lock that allows one writer for a directory, on a file that names the process that holds the lock."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from polyak.storage.files import parse_json, read_bytes

_MAX_OWNER_BYTES = 4096

SECONDS_OF_TESTS = 0.2
"""Time for which a lock may be tested by others, which is no reason to give up."""


class LockedError(Exception):
    """Another process holds the lock; the message names the process."""


def acquire(path: Path) -> BaseFileLock:
    """Take the lock, and write pid, host and time into its file. The lock of a killed process is free.

    Raises:
        LockedError: another process, or this process, holds the lock.
        OSError: the file cannot be opened, is a symbolic link, or its file system has no locks.
    """
    lock: BaseFileLock = FileLock(path, mode=0o600, thread_local=False)
    try:
        # `is_locked` of another process shares the lock for some microseconds.
        lock.acquire(timeout=SECONDS_OF_TESTS, poll_interval=SECONDS_OF_TESTS / 10)
    except Timeout:
        raise LockedError(_describe_owner(path)) from None
    # On a file system without flock, filelock turns this into a SoftFileLock, which writes its own data into the file.
    if type(lock) is FileLock:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
    return lock


def is_locked(path: Path) -> bool:
    """Return True if a process holds the lock; False if there is no such file, or if its file system has no locks.

    The test takes a shared lock for some microseconds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _describe_owner(path: Path) -> str:
    try:
        owner = parse_json(read_bytes(path, limit=_MAX_OWNER_BYTES), path.name)
        # Quoted: another user may have written the file, and terminals interpret control characters.
        return f"by process {owner['pid']!r} on host {owner['host']!r}, since {owner['since']!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return "by another process"

"""One writer for a directory: a lock that names its owner, and that no dead process keeps."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

from polyak.storage.files import dump_json, parse_json, try_lock

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWNER_LIMIT = 4096


class LockedError(Exception):
    """Another process writes here; the message names it."""


class Lock:
    """Held from `acquire` until `release`, or until the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let the next writer in; a second call does nothing."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            # Unlocked, not only closed: a forked child may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def acquire(path: Path) -> Lock:
    """Take the lock and write into its file who holds it: pid, host, boot, start time.

    The kernel's file lock decides, so a killed owner's is free at once. Two cases need the written owner: a forked child
    that outlived its dead parent still holds the kernel's lock (the parent is seen to be gone, and the lock is taken
    over), and file systems without locks.

    Raises:
        LockedError: a living process holds it.
        OSError: the file cannot be opened.
    """
    for _ in range(3):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            taken = _take(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        if taken:
            return Lock(descriptor)
        os.close(descriptor)
    raise LockedError("by several processes that start at the same time")


def _take(descriptor: int, path: Path) -> bool:
    """Become the owner; False if the path led to another file meanwhile, or does so now."""
    held, owner = try_lock(descriptor), _read_owner(descriptor)
    if (held is False and not _is_gone(owner)) or (held is None and not _is_stale(owner)):
        raise LockedError(_describe(owner))
    if held is False:
        path.unlink(missing_ok=True)
        return False
    if not _is_still_there(descriptor, path):
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, dump_json(_this_process(), path.name, indent=None), 0)
    return True


def _this_process() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "start": _start(os.getpid()), "since": since}


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _start(pid: int) -> int:
    """When the process started, in the kernel's ticks since boot: a pid that was given out again has another; 0 if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _read_owner(descriptor: int) -> dict[str, Any]:
    try:
        owner = parse_json(os.pread(descriptor, _OWNER_LIMIT, 0), "lock")
        kinds = {"pid": int, "host": str, "boot": str, "start": int, "since": str}
        return owner if all(type(owner[name]) is kind for name, kind in kinds.items()) else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _is_gone(owner: dict[str, Any]) -> bool:
    """The owner ran on this machine since its last start, and runs no more."""
    if not owner or (owner["host"], owner["boot"]) != (socket.gethostname(), _boot()):
        return False
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # Somebody else's process lives; its start tells whether it is the owner.
    started: int = owner["start"]
    return _start(owner["pid"]) != started


def _is_stale(owner: dict[str, Any]) -> bool:
    """Without the kernel's word: nobody, gone, or from before this machine was started."""
    return not owner or _is_gone(owner) or bool(owner["host"] == socket.gethostname() and owner["boot"] != _boot())


def _is_still_there(descriptor: int, path: Path) -> bool:
    """The path still leads to the file that we locked, so nobody took it over in between."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "by another process"
    # Quoted: another user may have written the file, and terminals obey control characters.
    return f"by process {owner['pid']} on host {owner['host']!r}, since {owner['since']!r}"

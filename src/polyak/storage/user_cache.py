"""The user's cache directory: compiled programs, and hashes of exported programs that were read."""

import contextlib
import os
import stat
import sys
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/polyak` if set, else `~/.cache/polyak`, or on macOS `~/Library/Caches/polyak`.

    Raises:
        FileNotFoundError: the user has no home directory, and `XDG_CACHE_HOME` is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "polyak"
    try:
        return Path("~/Library/Caches/polyak" if sys.platform == "darwin" else "~/.cache/polyak").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError("the user has no home directory; set XDG_CACHE_HOME") from error


def open_directory(directory: Path) -> Path:
    """Create the directory with mode 0700 if it does not exist.

    Raises:
        PermissionError: the directory does not belong to the user, or other users may enter it.
        OSError: the directory cannot be created.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} must be a directory that you own, with mode 0700, as its files are trusted; got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        )
    return directory

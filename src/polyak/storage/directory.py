"""The directory of checkpoints: names, atomic replacement and pruning; a kill at any moment leaves complete checkpoints."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polyak.core.warn import warn
from polyak.storage.files import sync_directory
from polyak.storage.leaves import CheckpointError
from polyak.storage.lock import LockedError, acquire

ARRAYS, MANIFEST, COMMIT = "arrays.safetensors", "manifest.json", "COMMIT"

_NAME = re.compile(r"\d{12,}\Z", re.ASCII)
_STAGING, _REPLACED = ".tmp-", ".replaced-"


def directory_name(step: int) -> str:
    """Return the name of a checkpoint's directory; names sort as steps do."""
    return f"{step:012d}"


def step_of(path: Path) -> str:
    """Return the name of a checkpoint, also while it is being replaced."""
    return path.name.removeprefix(_REPLACED)


def find(root: Path) -> dict[int, Path]:
    """Return every path named like a checkpoint, by step; a checkpoint in replacement counts until its successor exists.

    Raises:
        CheckpointError: the directory cannot be read; a missing directory has no checkpoints.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error}") from error
    replaced = {name.removeprefix(_REPLACED): name for name in names if name.startswith(_REPLACED)}
    paths = replaced | {name: name for name in names}
    return {int(n): root / path for n, path in paths.items() if _NAME.match(n) and directory_name(int(n)) == n}


def describe_steps(root: Path, found: Iterable[int]) -> str:
    """Describe the found steps, for an error."""
    steps = ", ".join(map(str, sorted(found)))
    return (
        f"there are steps {steps}" if steps else "there are no checkpoints" if root.is_dir() else "there is no such directory"
    )


def is_complete(path: Path) -> bool:
    """Return True if the directory has the three files of a checkpoint, none of which is a link."""
    files = (path / name for name in (ARRAYS, MANIFEST, COMMIT))
    return path.is_dir() and not path.is_symlink() and all(f.is_file() and not f.is_symlink() for f in files)


def has_only_checkpoint_files(path: Path) -> bool:
    """Return True if the directory has only files of a checkpoint, so that its removal loses no other file."""
    return path.is_dir() and not path.is_symlink() and set(os.listdir(path)) <= {ARRAYS, MANIFEST, COMMIT}


@contextmanager
def lock_directory(root: Path) -> Iterator[None]:
    """Lock the directory for one save, and remove the remains of killed saves.

    Raises:
        CheckpointError: another save is running.
    """
    try:
        lock = acquire(root / ".lock")
    except LockedError as error:
        raise CheckpointError(f"{root}: is being saved into {error}; give each run its own directory") from None
    try:
        _remove_leftovers(root)
        yield
    finally:
        lock.release()


def _remove_leftovers(root: Path) -> None:
    for name in os.listdir(root):
        successor = root / name.removeprefix(_REPLACED)
        if name.startswith(_REPLACED) and not successor.exists():
            os.rename(root / name, successor)
        elif name.startswith((_STAGING, _REPLACED)):
            shutil.rmtree(root / name, ignore_errors=True)


@contextmanager
def staged_directory(root: Path, step: int) -> Iterator[Path]:
    """Create a directory, which is renamed to its final name if the block succeeds, and removed if the block fails."""
    path = _staging_path(root, step)
    try:
        path.mkdir(mode=0o700)
        yield path
        sync_directory(path)
        _publish(path, root / directory_name(step))
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _staging_path(root: Path, step: int) -> Path:
    return root / f"{_STAGING}{directory_name(step)}-{secrets.token_hex(4)}"


def _publish(path: Path, final: Path) -> None:
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        os.rename(final, replaced)
    os.rename(path, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(root: Path, step: int, keep: int, is_valid: Callable[[Path], bool]) -> None:
    """Keep the newest `keep` undamaged checkpoints up to a step; later checkpoints were overwritten or are damaged."""
    found = find(root)
    valid = sorted((s for s, path in found.items() if s <= step and is_valid(path)), reverse=True)
    oldest = valid[:keep][-1]
    for number, path in found.items():
        try:
            if (number > step or number < oldest) and has_only_checkpoint_files(path):
                # Rename first: a kill during the deletion leaves no partial checkpoint under its name.
                staging = _staging_path(root, number)
                os.rename(path, staging)
                shutil.rmtree(staging)
        except OSError as error:
            warn(f"{path}: this old checkpoint could not be removed: {error}")

"""Where the checkpoints of a run lie, and how they come and go, so that a kill at any moment leaves whole ones only."""

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polyak.storage.files import sync_directory
from polyak.storage.leaves import CheckpointError
from polyak.storage.lock import LockedError, acquire

ARRAYS, MANIFEST, COMMIT = "arrays.safetensors", "manifest.json", "COMMIT"

_NAME = re.compile(r"\d{12,}\Z", re.ASCII)
_ASIDE, _REPLACED = ".tmp-", ".replaced-"


def directory_name(step: int) -> str:
    """The name of a checkpoint's directory; names sort as steps do."""
    return f"{step:012d}"


def step_of(path: Path) -> str:
    """The name under which a checkpoint was saved, also while it is being replaced."""
    return path.name.removeprefix(_REPLACED)


def find(root: Path) -> dict[int, Path]:
    """Everything named like a checkpoint, by step; one that was being replaced stands in until its successor is there.

    Raises:
        CheckpointError: the directory cannot be read; one that does not exist has no checkpoints.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error}") from error
    stand_ins = {name.removeprefix(_REPLACED): name for name in names if name.startswith(_REPLACED)}
    paths = stand_ins | {name: name for name in names}
    return {int(n): root / path for n, path in paths.items() if _NAME.match(n) and directory_name(int(n)) == n}


def listing(root: Path, found: Iterable[int]) -> str:
    """What is there, in words."""
    steps = ", ".join(map(str, sorted(found)))
    return f"there are steps {steps}" if steps else "no checkpoint is there" if root.is_dir() else "there is no such directory"


def looks_complete(path: Path) -> bool:
    """A directory with the three files of a checkpoint, none of them a link."""
    files = (path / name for name in (ARRAYS, MANIFEST, COMMIT))
    return path.is_dir() and not path.is_symlink() and all(f.is_file() and not f.is_symlink() for f in files)


def is_ours(path: Path) -> bool:
    """A directory that holds nothing but (parts of) a checkpoint, so that removing it loses nothing of anyone else's."""
    return path.is_dir() and not path.is_symlink() and set(os.listdir(path)) <= {ARRAYS, MANIFEST, COMMIT}


@contextmanager
def one_saver(root: Path) -> Iterator[None]:
    """The directory to ourselves, tidied of what killed saves left; a killed saver holds nothing.

    Raises:
        CheckpointError: another save is under way.
    """
    try:
        lock = acquire(root / ".lock")
    except LockedError as error:
        raise CheckpointError(f"{root}: is being saved into {error}; give each run its own directory") from None
    try:
        _tidy(root)
        yield
    finally:
        lock.release()


def _tidy(root: Path) -> None:
    for name in os.listdir(root):
        successor = root / name.removeprefix(_REPLACED)
        if name.startswith(_REPLACED) and not successor.exists():
            os.rename(root / name, successor)
        elif name.startswith((_ASIDE, _REPLACED)):
            shutil.rmtree(root / name, ignore_errors=True)


@contextmanager
def aside(root: Path, step: int) -> Iterator[Path]:
    """A fresh directory to write into; when the block is left well it takes its place, else it is removed."""
    path = _aside_path(root, step)
    try:
        path.mkdir(mode=0o700)
        yield path
        sync_directory(path)
        _put_in_place(path, root / directory_name(step))
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _aside_path(root: Path, step: int) -> Path:
    return root / f"{_ASIDE}{directory_name(step)}-{secrets.token_hex(4)}"


def _put_in_place(path: Path, final: Path) -> None:
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        os.rename(final, replaced)
    os.rename(path, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(root: Path, step: int, keep: int, is_whole: Callable[[Path], bool]) -> None:
    """Keep the newest `keep` that are whole up to this step; what is later was overwritten, or is damaged."""
    found = find(root)
    whole = sorted((s for s, path in found.items() if s <= step and is_whole(path)), reverse=True)
    oldest = whole[:keep][-1]
    for number, path in found.items():
        try:
            if (number > step or number < oldest) and is_ours(path):
                # Renamed first: a kill while deleting leaves no half a checkpoint under its name.
                gone = _aside_path(root, number)
                os.rename(path, gone)
                shutil.rmtree(gone)
        except OSError as error:
            warnings.warn(f"{path}: this old checkpoint could not be removed: {error}", stacklevel=2)

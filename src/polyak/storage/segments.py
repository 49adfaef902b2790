"""Segments: parts of large arrays, in files that are named by the hash of their content and shared by checkpoints.

A part that has not changed since the last checkpoint already has a file, and is not written again.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.storage.files import new_file, open_regular, sync_directory
from polyak.storage.leaves import Leaf

SEGMENTS = "segments"

SEGMENT_BYTES = 4 * 2**20
"""Bytes of a segment; the last segment of an array is shorter."""

MIN_BYTES = 4096
"""Minimum bytes of an array to be written in segments."""

_NAME = re.compile(r"\.?[0-9a-f]{64}(\.[0-9a-f]{8})?\Z")


def write_segments(root: Path, data: npt.NDArray[Any]) -> tuple[str, ...]:
    """Write the parts of an array that have no file yet; returns the names of all parts. `sync_segments` syncs the names.

    An existing file is compared with the part, and replaced if it is damaged.

    Raises:
        OSError: for example, the disk is full.
    """
    folder = root / SEGMENTS
    if folder.is_symlink():
        raise OSError(f"{folder} is a symbolic link; must be a directory")
    folder.mkdir(mode=0o700, exist_ok=True)
    view = data.reshape(-1).view(np.uint8).data
    parts = [view[start : start + SEGMENT_BYTES] for start in range(0, len(view), SEGMENT_BYTES)]
    return tuple(_write(folder, part) for part in parts)


def _write(folder: Path, part: memoryview) -> str:
    name = hashlib.sha256(part).hexdigest()
    if not _is_stored(folder / name, part):
        aside = folder / f".{name}.{secrets.token_hex(4)}"
        with new_file(aside) as file:
            file.write(part)
        os.replace(aside, folder / name)
    return name


def _is_stored(path: Path, part: memoryview) -> bool:
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size == len(part) and file.read(len(part)) == part
    except (OSError, ValueError):
        return False


def sync_segments(root: Path) -> None:
    """Sync the names of segments to the disk, before a manifest lists them."""
    if (root / SEGMENTS).is_dir():
        sync_directory(root / SEGMENTS)


def read_segments(root: Path, leaf: Leaf, segment_bytes: int) -> npt.NDArray[np.uint8]:
    """Read the bytes of an array, and verify each segment.

    Raises:
        ValueError: a segment is missing or damaged; the message names its file.
    """
    check_segments(root, [leaf], segment_bytes)
    data, start = np.empty(leaf.data_nbytes, np.uint8), 0
    for name, size in _sizes(leaf, segment_bytes):
        part, path = data[start : start + size].data, root / SEGMENTS / name
        start += size
        with open_regular(path) as file:
            if file.readinto(part) != size or hashlib.sha256(part).hexdigest() != name:
                raise ValueError(f"{path} has another SHA-256 than its name; leaf {leaf.path} is damaged")
    return data


def check_segments(root: Path, leaves: Iterable[Leaf], segment_bytes: int) -> None:
    """Check that every segment exists, with the size that the leaves declare, without reading its content.

    Raises:
        ValueError: a segment is missing, or has another size.
    """
    for leaf in leaves:
        for name, size in _sizes(leaf, segment_bytes):
            path = root / SEGMENTS / name
            try:
                with open_regular(path) as file:
                    found = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}; leaf {leaf.path} is damaged") from None
            if found != size:
                raise ValueError(f"{path} has {found} bytes instead of {size}; leaf {leaf.path} is damaged")


def _sizes(leaf: Leaf, segment_bytes: int) -> list[tuple[str, int]]:
    """Return name and bytes of each segment; empty for a leaf in the file of arrays."""
    if not leaf.segments:
        return []
    starts = range(0, leaf.data_nbytes, segment_bytes)
    return [(name, min(segment_bytes, leaf.data_nbytes - start)) for name, start in zip(leaf.segments, starts, strict=True)]


def remove_unlisted(root: Path, listed: set[str]) -> None:
    """Remove the segments that no checkpoint lists, and the remains of killed saves."""
    folder = root / SEGMENTS
    if folder.is_dir() and not folder.is_symlink():
        for name in set(os.listdir(folder)) - listed:
            if _NAME.match(name):
                (folder / name).unlink(missing_ok=True)
        if not os.listdir(folder):
            folder.rmdir()

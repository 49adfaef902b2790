"""Checkpoints: a pytree and plain data, saved atomically, and read back only if every byte is right.

Unlike Orbax, every file is hashed, no data from a file can name code, and a save survives a kill at any moment.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_integer
from polyak.core.warn import warn
from polyak.storage import directory as layout
from polyak.storage import leaves as codec
from polyak.storage.directory import ARRAYS, COMMIT, MANIFEST
from polyak.storage.files import new_file, open_regular, read_bytes
from polyak.storage.leaves import CheckpointError, Leaf
from polyak.storage.manifest import (
    FORMAT,
    MAX_BYTES,
    WHOLE,
    Damage,
    Manifest,
    arrays_header,
    encode_meta,
    read_manifest_json,
    write_manifest,
)
from polyak.storage.run_directory import library_version, machine_shape
from polyak.storage.segments import (
    MIN_BYTES,
    SEGMENT_BYTES,
    check_segments,
    read_segments,
    remove_unlisted,
    sync_segments,
    write_segments,
)

__all__ = ["CheckpointError", "Manifest", "Restored", "read_manifest", "restore", "save", "steps"]

T = TypeVar("T")

_CHUNK = 32 * 2**20


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint.

    Attributes:
        tree: the saved leaves, in the structure of `like`; skipped leaves are the leaves of `like`.
        meta: the plain data passed to `save`.
        step: the step of the checkpoint.
        is_complete: False if the checkpoint has no leaves under `optional`.
    """

    tree: Any
    meta: dict[str, Any]
    step: int
    is_complete: bool = True


def save(
    directory: str | os.PathLike[str],
    tree: Any,
    *,
    step: int,
    meta: dict[str, Any],
    keep: int = 3,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    finite: str | None = None,
    segmented: str | None = None,
    omitted: str | None = None,
) -> Path:
    """Write `<directory>/<step>/` with every leaf of the tree; the files are synced to the disk on return.

    Files are written to a temporary directory, synced and renamed, so a kill, a full disk or a power cut at any moment leaves
    older checkpoints unchanged; the next save removes remains. Files are for the owner only (0600 in 0700).

    Large arrays that change little, such as a replay, can be `segmented`: their parts are files in
    `<directory>/segments/`, which checkpoints share, and only changed parts are written. A part is removed with the last
    checkpoint that lists it.

    Args:
        directory: holds the checkpoints of one run; created if missing, without its parents.
        tree: leaves are JAX or NumPy arrays of any JAX dtype, typed PRNG keys, Python bools, ints and floats.
        step: names the checkpoint; must be greater than existing ones.
        meta: plain data (dicts, lists, tuples, numbers, strings, bools, None, NumPy arrays), at most 32 MiB as JSON.
        keep: number of checkpoints to keep; older checkpoints are removed after the save.
        overwrite: replace a checkpoint of the same step, and all later checkpoints.
        allow_nonfinite: save NaN and infinity too; otherwise a float leaf with NaN or infinity is an error, so that a bad
            checkpoint never replaces the last good one.
        finite: the path of the subtree that must be finite, e.g. `".agent"` or `"['a'].b"`; the whole tree if it is None or
            has no leaves.
        segmented: the path of the subtree whose large arrays are written in segments.
        omitted: the path of a subtree that is not saved.

    Raises:
        CheckpointError: the checkpoint cannot be saved; existing checkpoints are unchanged.
        TypeError: `step` or `keep` is no integer.
        ValueError: `step` is negative, or `keep` below 1.
    """
    check_integer("save", "step", step, at_least=0)
    check_integer("save", "keep", keep)
    root = Path(directory)
    leaves, _ = codec.flatten(tree, concrete=True)
    leaves = [(leaf, value) for leaf, value in leaves if omitted is None or not _under(leaf.path, _path(omitted))]
    encode_meta(meta)
    must_be_finite = set() if allow_nonfinite else _subtree(leaves, finite)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        with layout.lock_directory(root), ExitStack() as stack:
            stack.callback(_remove_unlisted, root)
            _check_conflicts(root, step, overwrite)
            if segmented is not None:
                leaves = _write_segments(root, leaves, _path(segmented), step, must_be_finite)
            with layout.staged_directory(root, step) as path:
                _write(path, leaves, step, meta, must_be_finite)
            final = root / layout.directory_name(step)
            _read_manifest(final)
            layout.prune(root, step, keep, lambda path: not _is_damaged(path, hashes=False))
    except OSError as error:
        raise CheckpointError(f"{root}: step {step} was not saved: {error}") from error
    return final


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of all checkpoints with complete files, in order; `restore` checks the hashes.

    Raises:
        CheckpointError: the directory cannot be read; a missing one has no steps.
    """
    return sorted(step for step, path in layout.find(Path(directory)).items() if layout.is_complete(path))


def read_manifest(directory: str | os.PathLike[str], *, step: int | None = None) -> Manifest:
    """Return the manifest of the checkpoint of a step, or of the newest valid checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or has a newer format.
    """
    return _newest(Path(directory), step, _read_manifest)


def restore(
    directory: str | os.PathLike[str],
    like: Any,
    *,
    step: int | None = None,
    prefix: str | None = None,
    skip: str | None = None,
    optional: str | None = None,
) -> Restored:
    """Read a checkpoint into the structure of `like`, every byte verified.

    Without `step`, the newest valid checkpoint is read; a warning names each damaged checkpoint that was skipped.
    Leaves become JAX arrays on the default device, or typed keys, where `like` has a JAX array, keys or a
    `ShapeDtypeStruct`, and NumPy arrays or Python scalars where `like` has these. Dtypes never change.

    Args:
        directory: the directory passed to `save`.
        like: a tree of arrays or `ShapeDtypeStruct`s (from `jax.eval_shape`); values are ignored.
        step: read the checkpoint of this step; damage is an error.
        prefix: restore only the subtree under this path, e.g. `".agent"` or `"['a'].b"` (a name without prefix is an
            attribute); `like` has the structure of this subtree.
        skip: the path of a subtree that is not read; the result has the leaves of `like` there.
        optional: the path of a subtree that the checkpoint may lack; the result then has the leaves of `like` there.

    Raises:
        CheckpointError: no valid checkpoint; a newer format; or `like` differs, with every difference in one message.
    """
    prefix = None if prefix is None else _path(prefix)
    requested, structure = codec.flatten(like, prefix or "")

    def load(path: Path) -> Restored:
        manifest = _read_manifest(path)
        without = [] if skip is None else [_path(skip)]
        is_complete = optional is None or any(_under(leaf.path, _path(optional)) for leaf in manifest.leaves)
        without += [] if optional is None or is_complete else [_path(optional)]
        saved = [leaf for leaf in manifest.leaves if not _is_in(leaf.path, without)]
        wanted = [(leaf, value) for leaf, value in requested if not _is_in(leaf.path, without)]
        _check_leaves(path, saved, wanted, prefix)
        found = dict(zip([leaf.path for leaf, _ in wanted], _read_arrays(path, manifest, wanted), strict=True))
        values = [found.get(leaf.path, value) for leaf, value in requested]
        return Restored(jax.tree_util.tree_unflatten(structure, values), manifest.meta, manifest.step, is_complete)

    return _newest(Path(directory), step, load)


def _newest(root: Path, step: int | None, load: Callable[[Path], T]) -> T:
    """Return the result of `load` for the checkpoint of a step, or for the newest undamaged checkpoint."""
    found = layout.find(root)
    if step is not None and step not in found:
        raise CheckpointError(f"{root}: no checkpoint of step {step}; {layout.describe_steps(root, found)}")
    damage: list[str] = []
    for number in sorted(found, reverse=True) if step is None else [step]:
        try:
            result = load(found[number])
        except Damage as error:
            damage.append(str(error))
            continue
        if damage:
            warn(f"using the checkpoint of step {number}; damaged: {'; '.join(damage)}")
        return result
    raise CheckpointError("; ".join([f"{root}: no valid checkpoint", *damage, layout.describe_steps(root, found)]))


def _check_conflicts(root: Path, step: int, overwrite: bool) -> None:
    found = layout.find(root)
    if step in found and not layout.has_only_checkpoint_files(found[step]):
        raise CheckpointError(f"{found[step]}: exists and is not a polyak checkpoint; nothing was saved")
    later = [s for s, path in found.items() if s >= step and not overwrite and not _is_damaged(path)]
    if later:
        raise CheckpointError(
            f"{root}: step {step} must be greater than the saved step {max(later)}; "
            "save a later step, or pass overwrite=True to replace it"
        )


def _subtree(leaves: Sequence[tuple[Leaf, Any]], prefix: str | None) -> set[str]:
    """Return the paths of the leaves under the prefix, or of all leaves if there are none."""
    paths = {leaf.path for leaf, _ in leaves}
    return paths if prefix is None else {path for path in paths if _under(path, _path(prefix))} or paths


def _write_segments(
    root: Path, leaves: Sequence[tuple[Leaf, Any]], prefix: str, step: int, finite: set[str]
) -> list[tuple[Leaf, Any]]:
    """Write the large arrays under the prefix; returns all leaves, the large arrays with the names of their segments."""
    written = []
    for leaf, value in leaves:
        if leaf.is_array and leaf.data_nbytes >= MIN_BYTES and _under(leaf.path, prefix):
            data = codec.to_host(value)
            _check_finite(step, [leaf.path] if leaf.path in finite and not codec.is_finite(data) else [])
            leaf = dataclasses.replace(leaf, segments=write_segments(root, data))
        written.append((leaf, value))
    sync_segments(root)
    return written


def _remove_unlisted(root: Path) -> None:
    """Remove segments that no checkpoint lists."""
    # Only complete checkpoints list segments.
    paths = [path for path in layout.find(root).values() if layout.is_complete(path)]
    try:
        manifests = [_read_manifest(path) for path in paths]
    except CheckpointError:
        return  # It may be of a newer version, which can read it; a damaged one is pruned later.
    try:
        remove_unlisted(root, {name for manifest in manifests for leaf in manifest.leaves for name in leaf.segments})
    except OSError as error:
        warn(f"{root}: old segments could not be removed: {error}")


def _check_finite(step: int, bad: Sequence[str]) -> None:
    if bad:
        names = ", ".join(codec.leaf_name(path) for path in bad)
        raise CheckpointError(f"step {step}: NaN or infinity in {names}; nothing was saved")


def _write(directory: Path, leaves: Sequence[tuple[Leaf, Any]], step: int, meta: dict[str, Any], finite: set[str]) -> None:
    """Write the three files of a checkpoint into an empty directory; leaves whose paths are in `finite` must be finite."""
    described = tuple(leaf for leaf, _ in leaves)
    header = arrays_header(described)
    digest = hashlib.sha256(header)
    bad = [leaf.path for leaf in described if leaf.kind == "float" and leaf.path in finite and not np.isfinite(leaf.value)]
    with new_file(directory / ARRAYS) as file:
        file.write(header)
        for leaf, value in leaves:
            if leaf.in_file:
                data = codec.to_host(value)
                bad += [leaf.path] if leaf.path in finite and not codec.is_finite(data) else []
                _write_hashed(file, digest, data)
    _check_finite(step, bad)
    size = len(header) + sum(leaf.nbytes for leaf in described)
    version, segment_bytes = (FORMAT, SEGMENT_BYTES) if any(leaf.segments for leaf in described) else (WHOLE, 0)
    sha256, machine = digest.hexdigest(), machine_shape()
    text = write_manifest(
        Manifest(version, library_version(), step, described, size, sha256, machine, meta, segment_bytes=segment_bytes)
    )
    with new_file(directory / MANIFEST) as file:
        file.write(text)
    with new_file(directory / COMMIT) as file:
        file.write(_commitment(text))


def _commitment(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def _write_hashed(file: BinaryIO, digest: Any, data: npt.NDArray[Any]) -> None:
    view = data.reshape(-1).view(np.uint8).data
    for start in range(0, len(view), _CHUNK):
        part = view[start : start + _CHUNK]
        digest.update(part)
        file.write(part)


@contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    """Open the directory of a checkpoint, which must be no link; yields a descriptor. Errors in the block become `Damage`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise Damage(f"{path}: is a symbolic link, or no directory that can be read: {error}") from None
    try:
        yield descriptor
    except FileNotFoundError as error:
        raise Damage(f"{path}: has no {error.filename}; damaged, or not a polyak checkpoint") from None
    except (OSError, ValueError) as error:
        raise Damage(f"{path}: {error}") from None
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> Manifest:
    with _open_directory(path) as directory:
        text = read_bytes(MANIFEST, limit=MAX_BYTES, dir_fd=directory)
        commit = read_bytes(COMMIT, limit=1024, dir_fd=directory)
        with open_regular(ARRAYS, dir_fd=directory) as file:
            size = os.fstat(file.fileno()).st_size
    if commit != _commitment(text):
        raise Damage(f"{path}: {MANIFEST} does not match {COMMIT}")
    manifest = read_manifest_json(text, str(path), library_version())
    if size != manifest.size:
        raise Damage(f"{path}: {ARRAYS} has {size} bytes, {MANIFEST} says {manifest.size}")
    if layout.directory_name(manifest.step) != layout.step_of(path):
        raise Damage(f"{path}: {MANIFEST} belongs to step {manifest.step}")
    return manifest


def _read_arrays(path: Path, manifest: Manifest, wanted: Sequence[tuple[Leaf, Any]]) -> list[Any]:
    """Read the wanted leaves; hashes the complete file of arrays, one leaf at a time, and the wanted segments."""
    like = {leaf.path: value for leaf, value in wanted}
    values = {leaf.path: leaf.value for leaf in manifest.leaves}
    with _open_directory(path) as directory, open_regular(ARRAYS, dir_fd=directory) as file:
        header = arrays_header(manifest.leaves)
        digest = hashlib.sha256(header)
        if file.read(len(header)) != header:
            raise Damage(f"{path}: the header of {ARRAYS} does not match {MANIFEST}")
        for leaf in manifest.leaves:
            data = _read_hashed(file, digest, leaf.nbytes, keep=leaf.path in like)
            if leaf.path in like and leaf.in_file:
                array = data.view(leaf.data_dtype).reshape(leaf.data_shape)
                values[leaf.path] = codec.from_host(leaf, array, like[leaf.path])
        if file.read(1) or digest.hexdigest() != manifest.sha256:
            raise Damage(f"{path}: {ARRAYS} has another SHA-256 than {MANIFEST} says")
        for leaf in manifest.leaves:
            if leaf.segments and leaf.path in like:
                data = read_segments(path.parent, leaf, manifest.segment_bytes).view(leaf.data_dtype)
                values[leaf.path] = codec.from_host(leaf, data.reshape(leaf.data_shape), like[leaf.path])
    return [values[leaf.path] for leaf, _ in wanted]


def _read_hashed(file: BufferedReader, digest: Any, size: int, *, keep: bool) -> npt.NDArray[Any]:
    """Read and hash the next `size` bytes; with `keep=False` the bytes are only hashed, through one small buffer."""
    data = np.empty(size if keep else min(size, _CHUNK), np.uint8)
    for start in range(0, size, _CHUNK):
        offset = start if keep else 0
        part = data[offset : offset + min(_CHUNK, size - start)].data
        if file.readinto(part) != len(part):
            raise ValueError(f"{ARRAYS} ends early")
        digest.update(part)
    return data


def _is_damaged(path: Path, *, hashes: bool = True) -> bool:
    """Return True if no version can use the checkpoint; a checkpoint of a newer format is not damaged."""
    try:
        manifest = _read_manifest(path)
        check_segments(path.parent, manifest.leaves, manifest.segment_bytes)
        if hashes:
            _read_arrays(path, manifest, [])
            for leaf in filter(lambda leaf: leaf.segments, manifest.leaves):
                read_segments(path.parent, leaf, manifest.segment_bytes)
    except (Damage, ValueError):
        return True
    except CheckpointError:
        return False
    return False


def _check_leaves(path: Path, saved: Sequence[Leaf], wanted: Sequence[tuple[Leaf, Any]], prefix: str | None) -> None:
    found = [leaf for leaf in saved if prefix is None or _under(leaf.path, prefix)]
    if prefix and not found:
        tops = sorted({re.split(r"(?<=.)[.\[]", leaf.path)[0] for leaf in saved})
        raise CheckpointError(f"{path}: has no leaves under {prefix!r}; the top level has {', '.join(tops)}")
    lines = codec.differences(found, wanted)
    if lines:
        raise CheckpointError(f"{path} does not match the requested tree:\n  " + "\n  ".join(lines))


def _path(prefix: str) -> str:
    """Return the prefix as a path; a bare name is the name of an attribute."""
    return prefix if not prefix or prefix[0] in ".[" else f".{prefix}"


def _is_in(path: str, prefixes: Sequence[str]) -> bool:
    return any(_under(path, prefix) for prefix in prefixes)


def _under(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", ".", "[")

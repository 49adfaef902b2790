"""A trained policy as one file: a zip archive with the files of a run directory, of which one checkpoint without replay."""

import io
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polyak.storage.files import write_file
from polyak.storage.run_directory import CONFIG, METRICS, SUMMARY, SYSTEM
from polyak.storage.run_files import RunError

CARD = "README.md"

MAX_PACK_BYTES = 2**32
"""Maximum number of bytes of the unpacked files."""

_MEMBERS = re.compile(
    rf"{re.escape(CARD)}|{CONFIG}|{SYSTEM}|{SUMMARY}|{METRICS}|curve\.svg|video\.(mp4|gif)"
    r"|checkpoints/\d{12,20}/(arrays\.safetensors|manifest\.json|COMMIT)",
    re.ASCII,
)
_TIME = (1980, 1, 1, 0, 0, 0)
_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError, OSError)

_MAX_MEMBERS = 16


def write_pack(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a pack, replaced if it exists; equal members give equal bytes.

    Args:
        members: content of the files by name.

    Raises:
        RunError: the file cannot be written, or the members have more than 4 GiB.
    """
    if sum(map(len, members.values())) > MAX_PACK_BYTES:
        raise RunError(f"{path}: cannot be written: a pack has at most {MAX_PACK_BYTES:,} bytes")
    assert all(_MEMBERS.fullmatch(name) for name in members), members.keys()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED)
    try:
        write_file(path, packed.getvalue(), shared=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def is_pack(path: Path) -> bool:
    """Return True for a file whose name ends with .zip, and for a pack of another name; exported policies are no packs."""
    if path.suffix == ".zip" and path.is_file():
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return CONFIG in archive.namelist()
    except _DAMAGE:
        return False


@contextmanager
def unpack(path: Path) -> Iterator[Path]:
    """Unpack into a temporary run directory, which is removed at the end of the block.

    Raises:
        RunError: the file is missing or damaged, has files that no pack has, or more than 4 GiB.
    """
    with tempfile.TemporaryDirectory(prefix="polyak-") as temporary:
        directory = Path(temporary)
        try:
            with zipfile.ZipFile(path) as archive:
                for member in _check_members(archive):
                    target = directory / member.filename
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    # At most the size that the archive names, a block at a time.
                    with archive.open(member) as data, open(target, "xb") as file:
                        while block := data.read(2**20):
                            file.write(block)
        except _DAMAGE as error:
            raise RunError(f"{path}: is no pack of polyak, or is damaged: {error}") from error
        try:
            yield directory
        except Exception as error:  # A message names the file, not the temporary directory.
            error.args = tuple(arg.replace(temporary, str(path)) if isinstance(arg, str) else arg for arg in error.args)
            if isinstance(error, OSError) and error.filename is not None:
                error.filename = str(error.filename).replace(temporary, str(path))
            raise


def _check_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members, after a check of their number, names, sizes and compression.

    Raises:
        ValueError: a check fails.
    """
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise ValueError(f"has {len(members):,} files, at most {_MAX_MEMBERS}")
    names = [member.filename for member in members]
    for name in names:
        if not _MEMBERS.fullmatch(name):
            raise ValueError(f"has the file {name[:80]!r}")
    if len(set(names)) < len(names):
        raise ValueError("has a file twice")
    # Python reads other compressions without a bound of memory.
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("has a file with another compression than deflate")
    if sum(member.file_size for member in members) > MAX_PACK_BYTES:
        raise ValueError(f"has more than {MAX_PACK_BYTES:,} bytes")
    return members

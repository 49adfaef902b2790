"""Packs: only the files of a pack are unpacked, into a directory that is removed again."""

import zipfile

import pytest

from polyak.storage.pack import is_pack, unpack, write_pack
from polyak.storage.run_directory import RunError

FILES = {"README.md": b"card", "config.json": b"{}", "checkpoints/000000000001/COMMIT": b"x" * 100_000}


@pytest.fixture
def path(tmp_path):
    write_pack(tmp_path / "a.zip", FILES)
    return tmp_path / "a.zip"


def test_files_come_back_and_are_removed(path):
    with unpack(path) as directory:
        assert {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()} == FILES
    assert not directory.exists()


def test_an_error_names_the_file_and_not_the_temporary_directory(path):
    with pytest.raises(RunError, match=r"^\S*/a\.zip/config\.json: is damaged$"), unpack(path) as directory:
        raise RunError(f"{directory}/config.json: is damaged")


def test_equal_files_give_equal_packs(path, tmp_path):
    write_pack(tmp_path / "b.zip", FILES)
    assert (tmp_path / "b.zip").read_bytes() == path.read_bytes()
    assert len(path.read_bytes()) < 10_000


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/tmp/config.json", "checkpoints/../../x/COMMIT", "checkpoints/000000000001/evil.py", "run.lock", "x/"],
)
def test_a_file_that_no_pack_has_is_rejected(path, name, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"evil")
    with pytest.raises(RunError, match="has the file"), unpack(path):
        pass
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_rejected(path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("config.json", b"{1}")
    with pytest.raises(RunError, match="twice"), unpack(path):
        pass


def test_a_pack_that_grows_beyond_the_limit_is_rejected_before_it_is_unpacked(path, monkeypatch):
    monkeypatch.setattr("polyak.storage.pack.MAX_PACK_BYTES", 100_000)
    with pytest.raises(RunError, match="more than 100,000 bytes"), unpack(path):
        pass


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_python_reads_without_a_bound_of_memory_is_rejected(path, compression):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("README.md", b"0" * 1000)
    with pytest.raises(RunError, match="another compression"), unpack(path):
        pass


def test_a_pack_of_many_empty_files_is_rejected(path):
    with zipfile.ZipFile(path, "a") as archive:
        for n in range(2, 20):
            archive.writestr(f"checkpoints/{n:012d}/COMMIT", b"")
    with pytest.raises(RunError, match="21 files, at most 16"), unpack(path):
        pass


def test_a_pack_too_large_to_unpack_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("polyak.storage.pack.MAX_PACK_BYTES", 100_000)
    with pytest.raises(RunError, match="at most 100,000 bytes"):
        write_pack(tmp_path / "b.zip", FILES)
    assert not list(tmp_path.iterdir())


def test_every_cut_is_an_error(path):
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(RunError, match="damaged"), unpack(path):
            pass


def test_a_changed_byte_is_an_error_or_changes_no_file(path):
    data = path.read_bytes()
    errors = 0
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            with unpack(path) as directory:
                there = [name for name in FILES if (directory / name).exists()]
                assert all((directory / name).read_bytes() == FILES[name] for name in there)
        except RunError:
            errors += 1
    assert errors > 100


def test_packs_are_told_from_exported_policies(path, tmp_path):
    path.rename(tmp_path / "pack")
    with zipfile.ZipFile(tmp_path / "weights.npz", "w") as archive:
        archive.writestr("weights.npy", b"")
    assert is_pack(tmp_path / "pack") and not is_pack(tmp_path / "weights.npz")
    assert not is_pack(tmp_path) and not is_pack(tmp_path / "nowhere.zip")

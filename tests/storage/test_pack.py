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
        assert directory.name == "a"
    assert not directory.parent.exists()


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


def test_every_cut_is_an_error_and_no_other_archive_is_a_pack(path, tmp_path):
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert not is_pack(path)
        with pytest.raises(RunError, match="damaged"), unpack(path):
            pass
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("weights.npy", b"")
    assert not is_pack(tmp_path / "other.zip") and not is_pack(tmp_path) and not is_pack(tmp_path / "nowhere")


def test_a_changed_byte_is_an_error(path):
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("README.md").header_offset + 30 + len("README.md")
    data[at + 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunError, match="damaged"), unpack(path):
        pass

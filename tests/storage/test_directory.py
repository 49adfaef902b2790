import os
import shutil
import stat

import pytest

from polyak.storage import directory as layout
from polyak.storage.leaves import CheckpointError


def plant(root, name, files=(layout.ARRAYS, layout.MANIFEST, layout.COMMIT)):
    (root / name).mkdir()
    for file in files:
        (root / name / file).write_bytes(b"x")


def names(root):
    return sorted(name for name in os.listdir(root) if name != ".lock")


def test_only_names_that_a_save_gives_are_found(tmp_path):
    for name in ("000000000009", "9", "0000000000010", "00000000000x", "1234567890123", ".tmp-000000000009-ab", "٠" * 12):
        plant(tmp_path, name)
    assert sorted(layout.find(tmp_path)) == [9, 1234567890123]
    assert layout.find(tmp_path / "none") == {}


def test_replaced_checkpoint_counts_until_its_successor_exists(tmp_path):
    plant(tmp_path, ".replaced-000000000003")
    assert layout.find(tmp_path) == {3: tmp_path / ".replaced-000000000003"}
    plant(tmp_path, "000000000003")
    assert layout.find(tmp_path) == {3: tmp_path / "000000000003"}


def test_next_save_removes_leftovers_of_a_killed_one(tmp_path):
    plant(tmp_path, ".tmp-000000000004-ab")
    plant(tmp_path, ".replaced-000000000003")
    plant(tmp_path, ".replaced-000000000002")
    plant(tmp_path, "000000000002")
    with layout.lock_directory(tmp_path):
        assert names(tmp_path) == ["000000000002", "000000000003"]


def test_two_savers_at_once_are_rejected(tmp_path):
    with (
        layout.lock_directory(tmp_path),
        pytest.raises(CheckpointError, match="is being saved into by process"),
        layout.lock_directory(tmp_path),
    ):
        pass
    with layout.lock_directory(tmp_path):
        pass


def test_staged_directory_appears_whole_or_not_at_all(tmp_path):
    with layout.staged_directory(tmp_path, 5) as path:
        (path / "a").write_bytes(b"x")
        assert layout.find(tmp_path) == {}
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (tmp_path / "000000000005" / "a").read_bytes() == b"x"
    with pytest.raises(KeyboardInterrupt), layout.staged_directory(tmp_path, 6):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["000000000005"]


def test_a_successor_takes_the_place_of_the_old(tmp_path):
    plant(tmp_path, "000000000005")
    with layout.staged_directory(tmp_path, 5) as path:
        (path / "a").write_bytes(b"x")
    assert os.listdir(tmp_path / "000000000005") == ["a"]
    assert names(tmp_path) == ["000000000005"]


def test_killed_between_the_two_renames_the_old_one_is_still_found(tmp_path, monkeypatch):
    plant(tmp_path, "000000000005")
    rename, calls = os.rename, []

    def killed_at_the_second(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt), layout.staged_directory(tmp_path, 5):
        pass
    assert layout.is_complete(layout.find(tmp_path)[5])


def test_pruning_keeps_the_newest_whole_ones(tmp_path):
    for step in range(1, 8):
        plant(tmp_path, layout.directory_name(step))
    (tmp_path / "000000000002" / "mine.txt").write_bytes(b"x")
    layout.prune(tmp_path, 6, 3, lambda path: not path.name.endswith("5"))
    # 5 is damaged and does not count; 2 holds something that is not ours; 7 lies beyond.
    assert [int(name) for name in names(tmp_path)] == [2, 3, 4, 5, 6]


def test_killed_while_deleting_no_half_checkpoint_keeps_its_name(tmp_path, monkeypatch):
    for step in range(1, 5):
        plant(tmp_path, layout.directory_name(step))

    def killed_half_way(path):
        os.unlink(path / layout.ARRAYS)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        layout.prune(tmp_path, 4, 2, lambda path: True)
    assert all(layout.is_complete(path) for path in layout.find(tmp_path).values())
    assert {3, 4} <= set(layout.find(tmp_path))


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    for step in range(1, 3):
        plant(tmp_path, layout.directory_name(step))

    def refuse(path):
        raise PermissionError("no")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="000000000001: this old checkpoint could not be removed: no"):
        layout.prune(tmp_path, 2, 1, lambda path: True)


def test_a_link_is_no_checkpoint(tmp_path):
    plant(tmp_path, "target")
    (tmp_path / "000000000001").symlink_to(tmp_path / "target")
    plant(tmp_path, "000000000002", files=(layout.MANIFEST, layout.COMMIT))
    (tmp_path / "000000000002" / layout.ARRAYS).symlink_to(tmp_path / "target" / layout.ARRAYS)
    assert not any(layout.is_complete(path) for path in layout.find(tmp_path).values())
    layout.prune(tmp_path, 3, 1, lambda path: True)
    assert os.listdir(tmp_path / "target")

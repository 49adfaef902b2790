"""Large arrays in parts that checkpoints share: written once, removed with the last checkpoint that lists them."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from polyak.storage import checkpoint, segments
from polyak.storage.checkpoint import CheckpointError, read_manifest, restore, save, steps
from polyak.storage.segments import SEGMENTS

ROWS = 4096  # of 16 bytes: 16 segments
SEGMENT = 4096


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(checkpoint, "SEGMENT_BYTES", SEGMENT)


def ring(step, rows=100):
    """A ring of which every step overwrites the next rows."""
    storage = np.zeros((ROWS, 4), np.float32)
    for number in range(1, step + 1):
        storage[(np.arange(rows) + number * rows) % ROWS] = number
    return storage


def tree(step):
    return {"replay": {"rows": jnp.asarray(ring(step)), "position": jnp.uint32(step)}, "params": jnp.full(3, float(step))}


def save_step(root, step, **options):
    return save(root, tree(step), step=step, meta={}, segmented="['replay']", **options)


def names(root):
    return {path.name for path in (root / SEGMENTS).iterdir()}


def written(root):
    """The segments by the number of their file, which a file that is written anew does not keep."""
    return {path.name: path.stat().st_ino for path in (root / SEGMENTS).iterdir()}


def check(root, step, *, exactly=None, **options):
    restored = restore(root, tree(0), step=exactly, **options)
    assert restored.step == step and restored.is_complete
    np.testing.assert_array_equal(restored.tree["replay"]["rows"], ring(step))
    assert float(restored.tree["params"][0]) == step and int(restored.tree["replay"]["position"]) == step


def segment_of(root, step, row):
    """The file of a row."""
    leaf = next(leaf for leaf in read_manifest(root, step=step).leaves if leaf.segments)
    return root / SEGMENTS / leaf.segments[row * 16 // SEGMENT]


@pytest.mark.slow
def test_only_segments_that_changed_are_written_and_every_checkpoint_restores(tmp_path):
    for step in range(1, 41):
        before = written(tmp_path) if step > 1 else {}
        save_step(tmp_path, step)
        # 100 rows of 16 bytes are in one or two segments of 4096.
        new = written(tmp_path).items() - before.items()
        assert 1 <= len(new) <= 2 + (step == 1), f"step {step} wrote {len(new)} segments"
        for kept in steps(tmp_path):
            check(tmp_path, kept, exactly=kept)
    assert steps(tmp_path) == [38, 39, 40]


def test_the_file_of_arrays_holds_the_rest(tmp_path):
    path = save_step(tmp_path, 1)
    assert (path / "arrays.safetensors").stat().st_size < 1000
    manifest = read_manifest(tmp_path)
    assert (manifest.format, manifest.segment_bytes) == (2, SEGMENT)
    assert {leaf.path: len(leaf.segments) for leaf in manifest.leaves} == {
        "['params']": 0,
        "['replay']['position']": 0,
        "['replay']['rows']": 16,
    }
    # Rows that were never written are all the same.
    assert len(names(tmp_path)) <= 3
    save(tmp_path, tree(2), step=2, meta={})
    assert read_manifest(tmp_path).format == 1


def test_segments_are_removed_with_the_last_checkpoint_that_lists_them(tmp_path):
    for step in range(1, 60):
        save_step(tmp_path, step, keep=2)
    listed = {name for step in steps(tmp_path) for leaf in read_manifest(tmp_path, step=step).leaves for name in leaf.segments}
    assert names(tmp_path) == listed
    save(tmp_path, {"a": 1}, step=60, meta={}, keep=1)
    assert not (tmp_path / SEGMENTS).exists()


DAMAGES = {
    "truncated": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": os.unlink,
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "a link": lambda path: (path.rename(path.with_suffix(".elsewhere")), path.symlink_to(path.with_suffix(".elsewhere"))),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_segment_is_named_and_an_older_checkpoint_without_it_is_used(tmp_path, how):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    path = segment_of(tmp_path, 3, row=310)
    DAMAGES[how](path)
    with pytest.raises(CheckpointError, match=path.name):
        restore(tmp_path, tree(0), step=3)
    with pytest.warns(UserWarning, match=f"using the checkpoint of step 2; damaged: .*{path.name}"):
        check(tmp_path, 2)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_segment_that_all_share_is_an_error_and_the_next_save_mends_it(tmp_path, how):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    path = segment_of(tmp_path, 3, row=4000)
    assert path == segment_of(tmp_path, 1, row=4000)
    DAMAGES[how](path)
    with pytest.raises(CheckpointError, match=rf"no valid checkpoint.*{path.name}"):
        restore(tmp_path, tree(0))
    save_step(tmp_path, 4)
    check(tmp_path, 4)
    check(tmp_path, 3, exactly=3)


def test_a_subtree_without_the_segments_is_read_although_they_are_gone(tmp_path):
    save_step(tmp_path, 1)
    for path in (tmp_path / SEGMENTS).iterdir():
        path.unlink()
    like = tree(0)
    restored = restore(tmp_path, like, skip="['replay']")
    assert float(restored.tree["params"][0]) == 1.0
    assert restored.tree["replay"]["rows"] is like["replay"]["rows"]
    with pytest.raises(CheckpointError):
        restore(tmp_path, like)


def test_an_omitted_subtree_is_not_saved_and_optional_when_restored(tmp_path):
    path = save(tmp_path, tree(5), step=5, meta={}, omitted="['replay']")
    assert not (tmp_path / SEGMENTS).exists() and (path / "arrays.safetensors").stat().st_size < 1000
    like = tree(0)
    restored = restore(tmp_path, like, optional="['replay']")
    assert not restored.is_complete and float(restored.tree["params"][0]) == 5.0
    assert restored.tree["replay"]["rows"] is like["replay"]["rows"]
    with pytest.raises(CheckpointError, match=r"\['replay'\]\['rows'\]: expected .*, missing in the checkpoint"):
        restore(tmp_path, like)
    save_step(tmp_path, 6)
    check(tmp_path, 6, optional="['replay']")


def test_nan_in_a_segmented_array_is_rejected_and_leaves_no_segment(tmp_path):
    save_step(tmp_path, 1)
    before = written(tmp_path)
    bad = tree(2)
    bad["replay"]["rows"] = bad["replay"]["rows"].at[7, 0].set(jnp.nan)
    with pytest.raises(CheckpointError, match=r"step 2: NaN or infinity in \['replay'\]\['rows'\]; nothing was saved"):
        save(tmp_path, bad, step=2, meta={}, segmented="['replay']")
    assert written(tmp_path) == before and steps(tmp_path) == [1]


def test_a_full_disk_leaves_the_older_checkpoints_and_its_space_returns(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    before, count = written(tmp_path), 0
    real = segments.new_file

    def full_at_the_third(path):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(segments, "new_file", full_at_the_third)
    changed = {"replay": {"rows": jnp.arange(ROWS * 4.0).reshape(ROWS, 4), "position": jnp.uint32(2)}, "params": jnp.ones(3)}
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*No space left"):
        save(tmp_path, changed, step=2, meta={}, segmented="['replay']")
    assert written(tmp_path) == before
    check(tmp_path, 1)


def test_a_directory_of_segments_that_is_a_link_is_rejected(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / SEGMENTS).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        save_step(root, 1)
    assert not list(elsewhere.iterdir())


def test_a_manifest_whose_segments_do_not_fit_its_leaf_is_damaged(tmp_path):
    from tests.storage.test_checkpoint import forge

    def drop_one(document):
        document["leaves"][-1]["segments"].pop()

    def rename_one(document):
        document["leaves"][-1]["segments"][0] = "../" * 20 + "etc/passwd"

    for change in (drop_one, rename_one, lambda document: document | {"segment_bytes": 0}):
        save_step(tmp_path, 1, overwrite=True)
        forge(tmp_path, change)
        with pytest.raises(CheckpointError, match="malformed"):
            restore(tmp_path, tree(0))


def test_files_are_synced_before_the_manifest_that_lists_them(tmp_path, monkeypatch):
    order = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), real_sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"renamed {b}"), real_replace(a, b)))
    save_step(tmp_path, 1)
    folder = str(tmp_path / SEGMENTS)
    renamed = [i for i, entry in enumerate(order) if entry.startswith(f"renamed {folder}")]
    manifest = next(i for i, entry in enumerate(order) if entry.endswith("manifest.json"))
    assert renamed and max(renamed) < order.index(folder) < manifest
    for i in renamed:
        assert Path(order[i - 1]).parent == Path(folder), "a segment was renamed before it was synced"


@pytest.mark.parametrize("rows", [4_096, pytest.param(1_048_576, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_restore_finds_the_last_acknowledged_save_or_a_newer(tmp_path, rows):
    script = Path(__file__).parent / "killed_saver.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "c"), "20", "4", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kills, step, torn = map(int, done.stdout.split())
    assert step >= 2 * kills
    assert torn >= 4, "the kills hit no saves, so this shows nothing"


def test_no_warning_while_saving(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 6):
            save_step(tmp_path, step)

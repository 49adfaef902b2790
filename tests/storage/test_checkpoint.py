import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.struct import struct
from polyak.storage import directory as layout
from polyak.storage.checkpoint import CheckpointError, read_manifest, restore, save, steps
from polyak.storage.directory import ARRAYS, COMMIT, MANIFEST
from polyak.storage.json import DTYPES
from polyak.storage.leaves import KEY_WORDS
from polyak.storage.manifest import FORMAT, WHOLE

FILES = (ARRAYS, MANIFEST, COMMIT)
GOLDEN = Path(__file__).parent / "golden"


@struct
class State:
    params: dict
    key: object
    count: int
    rate: float
    done: bool
    host: np.ndarray


def state(seed=0):
    return State(
        {"kernel": jnp.arange(6.0).reshape(2, 3) + seed, "half": jnp.full((2,), seed, jnp.bfloat16)},
        jax.random.split(jax.random.key(seed), 2),
        2**70 + seed,
        0.1 * seed,
        bool(seed % 2),
        np.arange(4, dtype=np.float64) * seed,
    )


def bits(tree):
    def leaf_bits(leaf):
        if isinstance(leaf, bool | int | float):
            return repr(leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return (type(leaf).__name__, str(getattr(leaf, "dtype", "")), np.shape(leaf), np.asarray(leaf).tobytes())

    return [leaf_bits(leaf) for leaf in jax.tree.leaves(tree)]


def damage(path, change):
    """Change a file that was written for its owner alone."""
    path.write_bytes(change(path.read_bytes()))


def forge(directory, change, step=1):
    """A checkpoint whose manifest was changed by someone who knows the format: all hashes agree."""
    path = directory / layout.directory_name(step)
    document = json.loads((path / MANIFEST).read_bytes())
    text = json.dumps(change(document) or document).encode()
    (path / MANIFEST).write_bytes(text)
    (path / COMMIT).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n")


@pytest.fixture
def saved(tmp_path):
    """Three checkpoints: steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path, state(step), step=step, meta={"step": step})
    return tmp_path


def test_restore_returns_the_saved_bits(tmp_path):
    meta = {"env": {"rng": np.random.PCG64(3).state, "obs": np.float32([1, np.nan])}, "n": 10**30}
    path = save(tmp_path / "new", state(3), step=12, meta=meta)
    assert path.name == "000000000012"
    restored = restore(tmp_path / "new", state(0))
    assert bits(restored.tree) == bits(state(3))
    assert restored.step == 12
    assert restored.meta["env"]["rng"] == meta["env"]["rng"]
    assert restored.meta["n"] == 10**30
    np.testing.assert_array_equal(restored.meta["env"]["obs"], meta["env"]["obs"])


def test_restore_into_shape_structs(tmp_path):
    tree = {"a": jnp.arange(3), "key": jax.random.key(1, impl="rbg"), "b": (jnp.float32(2.5),)}
    save(tmp_path, tree, step=1, meta={})
    restored = restore(tmp_path, jax.eval_shape(lambda: tree)).tree
    assert bits(restored) == bits(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert restored["key"].dtype == tree["key"].dtype


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_are_restored(tmp_path, name):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[name])
    tree = {"a": array, "scalar": array[0, 1], "empty": array[:0]}
    save(tmp_path, tree, step=1, meta={}, allow_nonfinite=True)
    assert bits(restore(tmp_path, tree).tree) == bits(tree)
    if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        assert restore(tmp_path, like).tree["a"].dtype == array.dtype


def test_a_subtree_is_restored_without_the_rest(tmp_path):
    tree = {"loop": 1}
    save(tmp_path, {"agent": state(3), "agents": 3, "rest": tree}, step=1, meta={})
    assert bits(restore(tmp_path, state(0), prefix="['agent']").tree) == bits(state(3))
    assert restore(tmp_path, 0, prefix="['agent'].count").tree == state(3).count
    save(tmp_path, state(3), step=2, meta={})
    for prefix in (".count", "count"):
        assert restore(tmp_path, 0, prefix=prefix).tree == state(3).count
    shutil.rmtree(tmp_path / layout.directory_name(2))
    with pytest.raises(CheckpointError, match=r"has no leaves under '\.agent'; the top level has \['agent'\], \['agents'\]"):
        restore(tmp_path, state(0), prefix=".agent")
    with pytest.raises(CheckpointError, match=r"\['agent'\]\.rate: Python float in the checkpoint, not expected"):
        restore(tmp_path, {}, prefix="['agent']")


def test_a_tree_of_one_leaf_and_an_empty_one(tmp_path):
    save(tmp_path, jnp.arange(3), step=1, meta={})
    save(tmp_path, {}, step=2, meta={})
    assert bits(restore(tmp_path, jnp.zeros(3, int), step=1).tree) == bits(jnp.arange(3))
    assert restore(tmp_path, {}, step=2).tree == {}


def test_restored_arrays_can_be_donated(tmp_path):
    save(tmp_path, {"a": jnp.zeros(1 << 14)}, step=1, meta={})
    restored = restore(tmp_path, {"a": jax.ShapeDtypeStruct((1 << 14,), jnp.float32)}).tree
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    assert float(step(step(restored))["a"][-1]) == 2.0


def test_manifest_records_version_step_and_machine(saved):
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.format, manifest.meta) == (3, 1, {"step": 3})
    assert manifest.machine == {"platform": "cpu", "devices": jax.device_count(), "processes": 1}
    assert [leaf.path for leaf in manifest.leaves][:2] == [".params['half']", ".params['kernel']"]
    assert read_manifest(saved, step=2).meta == {"step": 2}


def test_checkpoints_are_readable_by_their_owner_only(tmp_path):
    old = os.umask(0)
    try:
        path = save(tmp_path / "c", state(1), step=1, meta={})
    finally:
        os.umask(old)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c", path, *(path / name for name in FILES))}
    assert set(modes.values()) == {0o700, 0o600}
    assert modes[path] == modes[tmp_path / "c"] == 0o700


def test_save_keeps_the_newest_checkpoints(tmp_path):
    for step in range(5):
        save(tmp_path, {"a": step}, step=step, meta={}, keep=2)
    assert steps(tmp_path) == [3, 4]
    assert steps(tmp_path / "none") == []


def test_wrong_arguments_are_errors_and_write_nothing(tmp_path):
    directory = tmp_path / "c"
    with pytest.raises(ValueError, match="step must be an integer >= 0, got -1"):
        save(directory, {}, step=-1, meta={})
    with pytest.raises(ValueError, match="keep must be an integer >= 1, got 0"):
        save(directory, {}, step=1, meta={}, keep=0)
    with pytest.raises(CheckpointError, match=r"\['f'\] must be .*, got a builtin_function_or_method"):
        save(directory, {"f": print}, step=1, meta={})
    with pytest.raises(CheckpointError, match=r"meta\.f: must be dicts, lists, .*, got a builtin_function"):
        save(directory, {}, step=1, meta={"f": print})
    assert not directory.exists()


# Kills and full disks


def test_killed_at_any_moment_a_restore_finds_the_last_acknowledged_save_or_a_newer(tmp_path):
    script = Path(__file__).parent / "killed_saver.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "c"), "50", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kills, step, torn = map(int, done.stdout.split())
    assert step >= 2 * kills
    assert torn >= 10, "the kills hit no saves, so this shows nothing"


@pytest.mark.parametrize("size", [0, 100, 350, 1500])
def test_a_full_disk_is_an_error_and_leaves_the_older_ones_and_no_rest(saved, full_disk, size):
    tree = {"a": jnp.ones(64), "b": list(range(30))}
    with full_disk(size), pytest.raises(CheckpointError, match=r"step 4 was not saved: .*File too large"):
        save(saved, tree, step=4, meta={})
    assert sorted(os.listdir(saved)) == [".lock", "000000000001", "000000000002", "000000000003"]
    assert bits(restore(saved, state(0)).tree) == bits(state(3))
    save(saved, tree, step=4, meta={})


def test_a_full_file_system_is_an_error_and_its_space_returns(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        for step in (1, 2):
            save(small, {"a": np.full(100_000, step, np.float32)}, step=step, meta={})
        for _ in range(3):
            with pytest.raises(CheckpointError, match=r"step 3 was not saved: .*No space left"):
                save(small, {"a": np.zeros(100_000, np.float32)}, step=3, meta={})
        assert steps(small) == [1, 2]
        save(small, {"a": np.full(40_000, 3, np.float32)}, step=3, meta={})
    finally:
        subprocess.run(["umount", str(small)], check=True)


# Damage


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    for step in (1, 2):
        save(root, {"a": np.arange(2, dtype=np.float32) + step}, step=step, meta={})
    return root


def flipped(path, seed):
    """The path of a file of the checkpoint in which a random bit was flipped."""
    sizes = {name: (path / name).stat().st_size for name in FILES}
    generator = np.random.default_rng(seed)
    name = FILES[seed % 3]
    position, bit = int(generator.integers(sizes[name])), int(generator.integers(8))
    damage(path / name, lambda data: data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
    return path / name


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file(tiny):
    path = tiny / layout.directory_name(2)
    contents = {name: (path / name).read_bytes() for name in FILES}
    for seed in range(300):
        changed = flipped(path, seed)
        with pytest.raises(CheckpointError, match=f"{MANIFEST}|{ARRAYS}"):
            restore(tiny, {"a": np.zeros(2, np.float32)}, step=2)
        changed.write_bytes(contents[changed.name])
    assert restore(tiny, {"a": np.zeros(2, np.float32)}, step=2).tree["a"][0] == 2


def test_a_flipped_bit_in_the_newest_falls_back_with_a_warning(tiny):
    path = tiny / layout.directory_name(2)
    contents = {name: (path / name).read_bytes() for name in FILES}
    for seed in range(30):
        changed = flipped(path, seed)
        with pytest.warns(UserWarning, match=r"using the checkpoint of step 1; damaged: .*000000000002"):
            restored = restore(tiny, {"a": np.zeros(2, np.float32)})
        assert (restored.step, restored.tree["a"][0]) == (1, 1)
        changed.write_bytes(contents[changed.name])


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut to half": lambda path: damage(path, lambda data: data[: len(data) // 2]),
    "cut by a hundredth": lambda path: damage(path, lambda data: data[: int(len(data) * 0.99)]),
    "made longer": lambda path: damage(path, lambda data: data + b"\0"),
    "made a directory": lambda path: (path.unlink(), path.mkdir()),
    "made a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_truncated_or_missing_file_falls_back_to_an_older_checkpoint(saved, name, how):
    DAMAGES[how](saved / layout.directory_name(3) / name)
    with pytest.warns(UserWarning, match=r"using the checkpoint of step 2; damaged: .*000000000003"):
        restored = restore(saved, state(0))
    assert bits(restored.tree) == bits(state(2))
    with pytest.raises(CheckpointError, match=r"000000000003.*there are steps 1, 2, 3"):
        restore(saved, state(0), step=3)
    for step in (1, 2):
        DAMAGES[how](saved / layout.directory_name(step) / name)
    with pytest.raises(CheckpointError, match=r"no valid checkpoint(.|\n)*000000000003(.|\n)*000000000002(.|\n)*000000000001"):
        restore(saved, state(0))


def test_a_damaged_newest_is_replaced_by_the_next_save(saved):
    damage(saved / layout.directory_name(3) / ARRAYS, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    save(saved, state(9), step=3, meta={})
    assert bits(restore(saved, state(0)).tree) == bits(state(9))
    damage(saved / layout.directory_name(3) / ARRAYS, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.warns(UserWarning, match="using the checkpoint of step 2"):
        restore(saved, state(0))
    shutil.rmtree(saved / layout.directory_name(2))
    save(saved, state(8), step=2, meta={})
    assert steps(saved) == [1, 2], "what training did not come from is gone"


def test_swapped_checkpoints_are_reported_as_damaged(saved):
    os.rename(saved / layout.directory_name(1), saved / layout.directory_name(9))
    with pytest.warns(UserWarning, match=r"step 3; damaged: .*belongs to step 1"):
        assert restore(saved, state(0)).step == 3


# Other versions, other trees


def test_a_newer_format_is_rejected_by_name_even_if_an_older_one_is_there(saved):
    forge(saved, lambda document: document | {"format": 7, "library": "9.1"}, step=3)
    with pytest.raises(CheckpointError, match=r"written by polyak 9\.1 \(format 7\), this is .* \(format 2\); upgrade"):
        restore(saved, state(0))


def test_a_checkpoint_of_a_newer_format_is_no_leftover_that_a_save_removes(saved):
    forge(saved, lambda document: document | {"format": 7, "library": "9.1"}, step=3)
    with pytest.raises(CheckpointError, match="step 2 must be greater than the saved step 3"):
        save(saved, state(9), step=2, meta={})
    assert steps(saved) == [1, 2, 3]
    save(saved, state(9), step=4, meta={})
    assert bits(restore(saved, state(0)).tree) == bits(state(9))


def golden_2():
    """What `golden/format-2` holds, in segments of 4096 bytes: the last one is shorter, and two are the same file."""
    rows = np.arange(2_600, dtype=np.float32).reshape(-1, 4)
    replay = {"rows": jnp.asarray(rows), "zeros": np.zeros((2, 4096), np.uint8), "position": jnp.uint32(7)}
    return {"params": jnp.full(3, 0.5), "replay": replay}


def test_files_of_every_released_format_are_read():
    tree = {
        "arrays": {name: np.array([0, 1, 1]).astype(dtype) for name, dtype in DTYPES.items()},
        "keys": {impl: jax.random.split(jax.random.key(1, impl=impl), 2) for impl in KEY_WORDS},
        "scalars": (True, 2**70, 0.1),
    }
    restored = restore(GOLDEN / "format-1", tree)
    assert bits(restored.tree) == bits(tree)
    assert restored.meta == {"none": None, "tuple": (1, 2.5), "large": -(2**100), "text": "ü"}
    restored = restore(GOLDEN / "format-2", golden_2())
    assert bits(restored.tree) == bits(golden_2()) and restored.meta == {"tuple": (1, 2.5)}
    assert {read_manifest(path).format for path in GOLDEN.iterdir()} == set(range(WHOLE, FORMAT + 1))


def test_all_differences_are_named_in_one_message_and_nothing_is_restored(saved):
    other = {"params": {"kernel": jnp.zeros((3, 2))}, "target": jnp.zeros(3)}
    with pytest.raises(CheckpointError) as error:
        restore(saved, other)
    message = str(error.value)
    assert "000000000003 does not match the requested tree" in message
    assert "['params']['kernel']: expected float32[3,2], missing in the checkpoint" in message
    assert "['target']: expected float32[3], missing in the checkpoint" in message
    assert ".params['kernel']: float32[2,3] in the checkpoint, not expected" in message
    assert ".key: key<threefry2x32>[2] in the checkpoint, not expected" in message


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (jnp.zeros((3, 2)), r"\['a'\]: float32\[2,3\] in the checkpoint, expected float32\[3,2\]"),
        (jnp.zeros((2, 3), jnp.bfloat16), r"expected bfloat16\[2,3\]"),
        (jnp.zeros((2, 3), jnp.int32), r"expected int32\[2,3\]"),
        (jnp.zeros((1, 3)), r"expected float32\[1,3\]"),
        (1.0, r"expected Python float"),
    ],
)
def test_no_shape_or_dtype_changes_silently(tmp_path, like, message):
    save(tmp_path, {"a": jnp.zeros((2, 3))}, step=1, meta={})
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, {"a": like})


# Directories and values


def test_a_directory_in_which_another_saves_is_rejected(saved):
    with layout.lock_directory(saved), pytest.raises(CheckpointError, match="is being saved into by process"):
        save(saved, state(4), step=4, meta={})


@pytest.mark.parametrize("step", [3, 2, 0])
def test_step_that_is_not_newer_is_rejected_without_overwrite(saved, step):
    with pytest.raises(CheckpointError, match=f"step {step} must be greater than the saved step 3.*overwrite=True"):
        save(saved, state(7), step=step, meta={})
    assert bits(restore(saved, state(0)).tree) == bits(state(3))
    save(saved, state(7), step=step, meta={}, overwrite=True)
    assert bits(restore(saved, state(0)).tree) == bits(state(7))
    assert steps(saved)[-1] == step


def test_foreign_directories_named_like_a_step_are_passed_over_with_a_warning(saved):
    (saved / layout.directory_name(9)).mkdir()
    foreign = saved / layout.directory_name(8)
    foreign.mkdir()
    (foreign / "model.pt").write_bytes(b"x")
    assert steps(saved) == [1, 2, 3]
    with pytest.warns(UserWarning, match=r"step 3; damaged: .*000000000009: has no manifest\.json.*000000000008: has no"):
        assert restore(saved, state(0)).step == 3
    with pytest.raises(CheckpointError, match="000000000008: exists and is not a polyak checkpoint"):
        save(saved, state(8), step=8, meta={})
    save(saved, state(10), step=10, meta={}, keep=1)
    assert (foreign / "model.pt").exists()
    assert steps(saved) == [10]


def test_a_missing_step_an_empty_and_a_missing_directory_are_errors(saved, tmp_path_factory):
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are steps 1, 2, 3"):
        restore(saved, state(0), step=7)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match="no valid checkpoint; there are no checkpoints"):
        restore(empty, state(0))
    with pytest.raises(CheckpointError, match="there is no such directory"):
        restore(empty / "none", state(0))
    with pytest.raises(CheckpointError, match="there is no such directory"):
        read_manifest(empty / "none")


def test_no_permission_is_an_error_that_says_so(saved, nobody):
    saved.chmod(0o500)
    with nobody(), pytest.raises(CheckpointError, match=r"step 4 was not saved: .*Permission denied"):
        save(saved, {"a": np.zeros(3)}, step=4, meta={})
    saved.chmod(0)
    with nobody(), pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied"):
        restore(saved, {"a": np.zeros(3)})
    saved.chmod(0o700)
    assert steps(saved) == [1, 2, 3]


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"was not saved: .*File exists"):
        save(tmp_path / "c", {}, step=1, meta={})
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Not a directory"):
        restore(tmp_path / "c", {})


def test_a_missing_parent_of_the_directory_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"was not saved: .*No such file or directory"):
        save(tmp_path / "run" / "checkpoints", {}, step=1, meta={})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_leaves_are_rejected_unless_allowed(saved, bad):
    tree = {"ok": jnp.ones(3), "a": [jnp.array([1.0, bad])], "b": jnp.full((), bad, jnp.bfloat16), "c": bad}
    with pytest.raises(CheckpointError, match=r"NaN or infinity in \['c'\], \['a'\]\[0\], \['b'\]; nothing was saved"):
        save(saved, tree, step=4, meta={})
    assert steps(saved) == [1, 2, 3]
    save(saved, tree, step=4, meta={}, allow_nonfinite=True)
    assert bits(restore(saved, tree).tree) == bits(tree)


def test_finite_check_can_be_limited_to_a_subtree(saved):
    nan = np.array([0x7FC00123, 0xFFC00001, 0x7F800000], np.uint32).view(np.float32)
    tree = {"a": {"b": [jnp.ones(2)]}, "ab": jnp.array(nan), "c": float("-inf")}
    save(saved, tree, step=4, meta={}, finite="['a']")
    assert bits(restore(saved, tree).tree) == bits(tree)
    for prefix, names in (("['c']", r"\['c'\]"), ("['nothing']", r"\['c'\], \['ab'\]"), (None, r"\['c'\], \['ab'\]")):
        with pytest.raises(CheckpointError, match=f"NaN or infinity in {names}; nothing was saved"):
            save(saved, tree, step=5, meta={}, finite=prefix)
    assert steps(saved)[-1] == 4


def test_retention_counts_whole_checkpoints_only(saved):
    (saved / layout.directory_name(3) / COMMIT).write_bytes(b"")
    save(saved, state(4), step=4, meta={}, keep=2)
    assert sorted(layout.find(saved)) == [2, 3, 4]
    with pytest.warns(UserWarning, match="using the checkpoint of step 2"):
        (saved / layout.directory_name(4) / COMMIT).unlink()
        assert restore(saved, state(0)).step == 2


def test_a_snapshot_is_that_of_its_step_whatever_training_does_with_the_buffers(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    tree = {"a": jnp.arange(1000.0), "host": np.arange(5.0)}
    wanted = [np.array(leaf) for leaf in jax.tree.leaves(tree)]
    save(tmp_path, tree, step=1, meta={})
    tree["host"] *= 7
    device = step({"a": tree["a"]})
    device = step(device)
    restored = restore(tmp_path, {"a": jnp.zeros(1000), "host": np.zeros(5)}).tree
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(restored), wanted, strict=True))


def test_donated_buffers_are_an_error_that_saves_nothing(saved):
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        save(saved, {"a": array}, step=4, meta={})
    assert sorted(os.listdir(saved)) == [".lock", *map(layout.directory_name, (1, 2, 3))]


def test_files_directory_and_rename_are_synced_in_that_order(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def path_of(descriptor):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition("-")[0]

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(path_of(fd)), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    save(tmp_path / "c", {"a": 1}, step=1, meta={})
    assert events == [ARRAYS, MANIFEST, COMMIT, ".tmp", "rename", "c"]


# Memory

MEMORY = """
import sys
import jax, jax.numpy as jnp, numpy as np
from polyak.storage.checkpoint import restore, save

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def most(function):
    open("/proc/self/clear_refs", "w").write("5")  # The peak is counted from here.
    before = status("VmRSS")
    result = function()
    return (status("VmHWM") - before) / SIZE, result

SIZE = 64 * 2**20
like = {"replay": np.broadcast_to(np.float32(0), (SIZE // 4,))}
small = {"replay": jnp.zeros(4096)}
for name, segmented in (("whole", None), ("segments", "['replay']")):
    # Modules and buffers of a first time are not counted.
    save(f"{sys.argv[1]}/small-{name}", small, step=1, meta={}, segmented=segmented)
    restore(f"{sys.argv[1]}/small-{name}", small)
    tree = {"replay": jax.block_until_ready(jnp.arange(SIZE // 4, dtype=jnp.float32))}
    saving, _ = most(lambda: save(f"{sys.argv[1]}/{name}", tree, step=1, meta={}, segmented=segmented))
    del tree
    restoring, restored = most(lambda: restore(f"{sys.argv[1]}/{name}", like))
    assert restored.tree["replay"][-1] == SIZE // 4 - 1
    del restored
    print(saving, restoring)
"""


@pytest.mark.slow
def test_a_large_array_is_saved_and_restored_without_a_second_one_in_memory(tmp_path):
    """The peak is at most 1.2 times the array, whether it is in segments or not."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for saving, restoring in (map(float, line.split()) for line in done.stdout.splitlines()):
        assert saving < 0.2 and restoring < 1.2

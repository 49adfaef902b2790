import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.core.types import Progress
from polyak.storage.files import dump_json
from polyak.storage.json import finite_or_none
from polyak.storage.progress import save_state
from polyak.storage.run_directory import (
    CONFIG,
    Run,
    RunError,
    create,
    describe_system,
    library_version,
    machine_shape,
    open_run,
    package_version,
    runs_in,
)

HOLD = """
import sys, time
from polyak.storage.run_directory import open_run
run = open_run(sys.argv[1], write=True)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    with create(tmp_path / "run", {"seed": 1}) as made:
        yield made


def test_a_run_holds_its_settings_and_circumstances(run):
    assert sorted(os.listdir(run.directory)) == ["checkpoints", "config.json", "run.lock", "system.json"]
    assert run.read_config() == {"seed": 1}
    system = json.loads((run.directory / "system.json").read_text())
    assert system["command_line"] == sys.argv
    assert system["packages"]["jax"]
    assert open_run(run.directory).read_config() == {"seed": 1}


def test_missing_parents_are_made_and_an_empty_directory_is_taken(tmp_path):
    create(tmp_path / "a" / "b" / "run", {}).close()
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty", {}).close()
    create(tmp_path / "a" / ".." / "up", {}).close()
    assert open_run(tmp_path / "up").directory == tmp_path / "up"


def test_a_run_stays_where_it_is_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with create("run", {}) as run:
        monkeypatch.chdir("/")
        run.append_metrics({"env_steps": 1})
        run.write_summary({"fps": 1.0})
    assert (tmp_path / "run" / "summary.json").exists()
    monkeypatch.chdir(tmp_path)
    opened = open_run("run")
    monkeypatch.chdir("/")
    assert opened.read_summary() == {"fps": 1.0}


def test_existing_files_are_rejected_and_unchanged(tmp_path, run):
    run.close()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "way").symlink_to(tmp_path / "full")
    for name, message in {
        "run": r"holds a run already; resume it \(polyak resume .*run\) or choose another directory",
        "file": "is a file; a run needs a directory",
        "full": r"is not empty \(it has 'notes\.txt'\)",
        "link": "is a symbolic link",
        "way": "is a symbolic link",
        "file/run": "cannot be created: Not a directory",
    }.items():
        with pytest.raises(RunError, match=message):
            create(tmp_path / name, {})
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path / "full") == ["notes.txt"]
    assert not (tmp_path / "elsewhere").exists()
    assert open_run(tmp_path / "run").read_config() == {"seed": 1}


def test_no_permission_is_an_error_that_says_so(tmp_path, nobody):
    (tmp_path / "theirs").mkdir(mode=0o500)
    with nobody(), pytest.raises(RunError, match="theirs/run: cannot be created: Permission denied"):
        create(tmp_path / "theirs" / "run", {})


def test_a_config_that_is_no_json_makes_no_directory(tmp_path):
    with pytest.raises(TypeError, match=r"config\.json: cannot be written as JSON"):
        create(tmp_path / "run", {"f": print})
    with pytest.raises(ValueError, match=r"config\.json: cannot be written as JSON"):
        create(tmp_path / "run", {"f": float("nan")})
    assert not (tmp_path / "run").exists()


def test_create_succeeds_after_a_killed_create(tmp_path):
    directory = tmp_path / "run"
    with create(directory, {"seed": 1}):
        (directory / CONFIG).unlink()
        (directory / ".config.json.aside").write_text("{")
    with create(directory, {"seed": 2}) as run:
        assert run.read_config() == {"seed": 2}


@pytest.mark.parametrize("size", [0, 200])
def test_a_full_disk_is_an_error_and_no_run(tmp_path, full_disk, size):
    with full_disk(size), pytest.raises((RunError, OSError), match="too large"):
        create(tmp_path / "run", {"seed": 1, "long": "x" * 1000})
    with pytest.raises(RunError, match="holds no run"):
        open_run(tmp_path / "run")
    create(tmp_path / "run", {"seed": 1}).close()


def test_a_run_is_for_its_owner(tmp_path):
    old = os.umask(0)
    try:
        with create(tmp_path / "run", {}) as run:
            run.append_metrics({"env_steps": 1})
            run.write_summary({})
    finally:
        os.umask(old)
    modes = {str(p): stat.S_IMODE(p.stat().st_mode) for p in [run.directory, *run.directory.iterdir()]}
    assert {mode for path, mode in modes.items() if Path(path).is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if Path(path).is_file()} == {0o600}


def test_a_directory_that_everyone_may_write_is_a_warning(tmp_path):
    create(tmp_path / "open" / "run", {}).close()
    (tmp_path / "open" / "run").chmod(0o777)
    with pytest.warns(UserWarning, match="run: everyone on this machine may write here; chmod 700 it"):
        open_run(tmp_path / "open" / "run")
    (tmp_path / "open" / "run").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(UserWarning, match="open: everyone on this machine may replace what is in it"):
        create(tmp_path / "open" / "other", {}).close()


def test_no_environment_variable_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "topsecret123")
    with create(tmp_path / "run", {"seed": 1}) as run:
        run.append_metrics({"env_steps": 1})
        run.write_summary({"fps": 1.0})
    for path in run.directory.rglob("*"):
        assert path.is_dir() or b"topsecret123" not in path.read_bytes(), path


# One writer


def test_second_writer_error_names_the_first(run):
    with pytest.raises(RunError, match=rf"run: is being written by process {os.getpid()} on host .* since"):
        open_run(run.directory, write=True)
    assert open_run(run.directory).read_config() == {"seed": 1}
    run.close()
    open_run(run.directory, write=True).close()


def test_the_lock_of_a_killed_writer_is_recovered(run):
    run.close()
    command = [sys.executable, "-W", "ignore", "-c", HOLD, str(run.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"by process {process.pid}"):
            open_run(run.directory, write=True)
        process.kill()
    with open_run(run.directory, write=True) as again:
        again.append_metrics({"env_steps": 1})


def test_a_reader_may_not_write(run):
    reader = open_run(run.directory)
    for write in (
        lambda: reader.append_metrics({}),
        lambda: reader.write_summary({}),
        lambda: reader.rewind(0),
        lambda: reader.change_config(),
    ):
        with pytest.raises(RunError, match=r"opened for reading; open_run\(\.\.\., write=True\) to write"):
            write()


@pytest.mark.parametrize("place", ["empty", "removed", "replaced", "unlocked"])
def test_a_writer_never_writes_where_its_directory_was(tmp_path, run, place):
    if place == "removed":
        shutil.rmtree(run.directory)
    elif place == "unlocked":
        (run.directory / "run.lock").unlink()
    else:
        run.directory.rename(tmp_path / "moved")
    if place == "replaced":
        create(run.directory, {}).close()
    before = sorted(tmp_path.rglob("*"))
    save_progress = partial(save_state, run, Progress(1, 1, 1, 0.0, 0.0, 0.0), {"agent": np.float32(0)}, None)
    for write in (
        lambda: run.append_metrics({"env_steps": 1}),
        lambda: run.append_worker_event({}),
        lambda: run.write_summary({}),
        lambda: run.rewind(0),
        run.change_config,
        save_progress,
        partial(save_progress, directory=run.best),
    ):
        with pytest.raises(RunError, match=f"^{run.directory}: was moved, removed or replaced while it was open"):
            write()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_writer_that_comes_back_records_its_machine_too(run):
    for times in (1, 2):
        run.close()
        run = open_run(run.directory, write=True)
        system = json.loads((run.directory / "system.json").read_text())
        assert len(system["resumed"]) == times
    run.close()


def test_damaged_system_json_is_replaced_with_a_warning(run):
    run.close()
    (run.directory / "system.json").write_text("{")
    with pytest.warns(UserWarning, match=r"system\.json: not valid JSON.*; a new record begins"):
        open_run(run.directory, write=True).close()
    open_run(run.directory, write=True).close()
    assert len(json.loads((run.directory / "system.json").read_text())["resumed"]) == 2


def test_opening_a_run_does_not_start_jax(run):
    run.close()
    code = (
        "import sys, jax\n"
        "from polyak.storage.run_directory import open_run\n"
        "open_run(sys.argv[1], write=True).close()\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(jax.device_count())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run([sys.executable, "-c", code, str(run.directory)], capture_output=True, text=True, env=environment)
    assert done.stdout == "3\n", done.stderr


# Reading


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "none: there is no such directory; a run was expected"),
        ("file", "file: not a directory; a run was expected"),
        ("", r"holds no run \(it has no config\.json\); give one of .*/seed-1"),
        ("empty", r"empty: holds no run \(it has no config\.json\)"),
        ("seed-1/checkpoints/000000000010", "is a checkpoint; give the run, .*seed-1, whose newest valid checkpoint is used"),
    ],
)
def test_directory_without_a_run_raises(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "seed-1/checkpoints/000000000010").mkdir(parents=True)
    (tmp_path / "seed-1/config.json").write_text("")
    with pytest.raises(RunError, match=message):
        open_run(tmp_path / name)


def test_an_empty_name_does_not_mean_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(RunError, match="must not be empty"):
        create("", {})
    monkeypatch.chdir(run.directory)
    open_run(".")
    for read in (open_run, polyak.load_run, polyak.load_runs, polyak.video):
        with pytest.raises(RunError, match="must not be empty"):
            read("")
    with pytest.raises(RunError, match="must not be empty"):
        polyak.pack("", tmp_path / "pack.zip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a":' * 5000, "nested more than 64 deep"),
        (" " * (16 * 2**20 + 1), "at most 16777216 are read"),
    ],
)
def test_a_damaged_or_hostile_config_is_an_error_that_names_the_file(run, text, message):
    (run.directory / CONFIG).write_text(text)
    with pytest.raises(RunError, match=rf"config\.json.*{message}"):
        run.read_config()


def test_links_out_of_the_run_are_rejected(tmp_path, run):
    run.close()
    (tmp_path / "secret.json").write_text('{"password": "x"}')
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        (run.directory / name).unlink(missing_ok=True)
        (run.directory / name).symlink_to(tmp_path / "secret.json")
    opened = open_run(run.directory)
    for read in (opened.read_config, opened.read_summary, opened.read_metrics):
        with pytest.raises(RunError, match="is a symbolic link"):
            read()
    (run.directory / "checkpoints").rmdir()
    (run.directory / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(RunError, match="checkpoints: is a symbolic link"):
        open_run(run.directory)


def test_a_link_to_a_run_may_be_opened(tmp_path, run):
    run.close()
    (tmp_path / "latest").symlink_to(run.directory)
    assert open_run(tmp_path / "latest").directory == run.directory


# Metrics and summary


def test_metrics_can_be_read_by_any_json_reader(run):
    run.append_metrics({"env_steps": 1, "rollout/ep_rew_mean": float("nan"), "a": float("inf"), "b": -0.5})
    run.append_metrics({"env_steps": 2})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in run.metrics.read_text().splitlines()]
    assert rows == run.read_metrics()
    assert rows == [{"env_steps": 1, "rollout/ep_rew_mean": None, "a": None, "b": -0.5}, {"env_steps": 2}]


def test_no_metrics_yet_are_no_rows(run):
    assert run.read_metrics() == []
    run.rewind(0)
    assert not run.metrics.exists()


def test_rows_after_the_restored_step_are_dropped(run):
    for step in (10, 20, 30, 40):
        run.append_metrics({"env_steps": step})
    run.rewind(20)
    run.append_metrics({"env_steps": 30})
    assert [row["env_steps"] for row in run.read_metrics()] == [10, 20, 30]


def test_incomplete_last_row_is_dropped(run):
    run.append_metrics({"env_steps": 1})
    with run.metrics.open("ab") as file:
        file.write(b'{"env_steps": 2, "a"')
    assert run.read_metrics() == [{"env_steps": 1}]
    run.close()
    with open_run(run.directory, write=True) as again:
        again.append_metrics({"env_steps": 3})
        assert [row["env_steps"] for row in again.read_metrics()] == [1, 3]


def test_a_damaged_line_is_an_error_for_readers_and_dropped_on_resume(run):
    for step in (1, 2):
        run.append_metrics({"env_steps": step})
    run.metrics.write_bytes(run.metrics.read_bytes() + b"\0\0\0\n" + b'{"env_steps": "x"}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 3: not valid JSON"):
        run.read_metrics()
    with pytest.warns(UserWarning, match="2 damaged lines were dropped, the first of which was line 3$"):
        run.rewind(2)
    assert run.read_metrics() == [{"env_steps": 1}, {"env_steps": 2}]


def test_fields_of_the_config_are_replaced_as_a_whole(tmp_path, full_disk):
    config = {"env_steps": 100, "seed": 1, "agent": {"$class": "PPO"}}
    with create(tmp_path / "run", config) as run:
        run.change_config(env_steps=200)
        assert run.read_config() == config | {"env_steps": 200}
        assert list(run.read_config()) == list(config)
        with pytest.raises(RunError, match=r"config\.json: has no field 'env_step' to change"):
            run.change_config(env_step=300)
        with full_disk(10), pytest.raises(RunError, match=r"config\.json: cannot be written: File too large"):
            run.change_config(env_steps=300)
        with full_disk(10):
            run.change_config(env_steps=200)
        assert run.read_config()["env_steps"] == 200
        assert ".config.json.aside" not in os.listdir(run.directory)


def test_an_edited_or_damaged_config_is_rejected_and_can_be_accepted(run):
    path = run.directory / CONFIG
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 3'))
    with pytest.raises(RunError, match=r"config\.json: was edited or damaged .* polyak resume .*run --force"):
        run.read_config()
    run.accept_config()
    assert run.read_config() == {"seed": 3}


def test_a_config_of_an_older_version_has_no_hash(run):
    (run.directory / CONFIG).write_text('{"seed": 1}')
    assert run.read_config() == {"seed": 1}


def test_every_bit_flip_of_a_config_that_changes_it_is_noticed(run):
    path = run.directory / CONFIG
    whole = path.read_bytes()
    for position in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with contextlib.suppress(RunError):
            # White space, and the name of the hash, which is then an unknown field of the config.
            assert run.read_config() == {"seed": 1} or len(run.read_config()) == 2


@pytest.mark.parametrize("row", ["{}", '{"env_steps": true}', '{"env_steps": "1"}', '{"env_steps": null}'])
def test_a_row_of_metrics_needs_env_steps(run, row):
    run.metrics.write_text(row + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1: env_steps=.* must be an integer"):
        run.read_metrics()


def test_a_file_in_the_place_of_the_checkpoints_is_an_error(run):
    run.close()
    run.checkpoints.rmdir()
    run.checkpoints.write_text("mine")
    with pytest.raises(RunError, match="checkpoints: cannot be created: File exists"):
        open_run(run.directory, write=True)


def test_the_summary_is_replaced_as_a_whole(run, full_disk):
    run.write_summary({"eval_mean_return": float("nan"), "seeds": [1.0, float("inf")], "n": {"a": 1}})
    assert run.read_summary() == {"eval_mean_return": None, "seeds": [1.0, None], "n": {"a": 1}}
    with full_disk(100), pytest.raises(RunError, match=r"summary\.json: cannot be written: File too large"):
        run.write_summary({"long": "x" * 1000})
    assert run.read_summary()["n"] == {"a": 1}
    with pytest.raises(RunError, match=r"summary\.json: .*builtin_function"):
        run.write_summary({"f": print})


def test_a_run_that_has_not_ended_has_no_summary(run):
    with pytest.raises(RunError, match=r"summary\.json: there is no such file"):
        run.read_summary()


def test_finite_or_none_leaves_everything_else():
    value = {"a": [1, True, "nan", (None, 1e308)]}
    assert finite_or_none(value) == {"a": [1, True, "nan", [None, 1e308]]}
    assert isinstance(Run(Path("x")), Run)


# The machine


def test_versions_are_those_installed():
    assert package_version("jax") == jax.__version__
    assert package_version("numpy") == np.__version__
    assert package_version("no-such-package-anywhere") is None
    assert library_version() == package_version("polyak")


def test_the_description_is_json_and_names_machine_and_command():
    system = describe_system()
    dump_json(system, "system.json")
    assert system["command_line"] == sys.argv
    assert (system["devices"], system["device_kinds"]) == (jax.device_count(), ["cpu"])
    assert set(system["packages"]) >= {"polyak", "jax", "numpy", "flax", "optax", "gymnasium"}


def test_the_machine_s_shape_counts_its_devices():
    assert machine_shape() == {"platform": "cpu", "devices": jax.device_count(), "processes": 1}


def test_runs_are_found_in_a_directory_and_in_those_in_it(tmp_path):
    for name in ("b", "seeds/seed-10", "seeds/seed-9", "a", "study/trials/3/seed-0", "five/levels/are/too/deep", ".hidden/run"):
        create(tmp_path / name, {"seed": 1}).close()
    (tmp_path / "link").symlink_to(tmp_path / "seeds")
    (tmp_path / "other/model").mkdir(parents=True)
    (tmp_path / "other/model/config.json").write_text("{}")
    found = [str(run.relative_to(tmp_path)) for run in runs_in(tmp_path)]
    assert (found, runs_in(tmp_path / "a")) == (["a", "b", "seeds/seed-9", "seeds/seed-10", "study/trials/3/seed-0"], [])

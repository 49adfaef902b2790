"""JAX's compilation cache for the command line: whose it is, and that runs may share it."""

import os
import signal
import subprocess
import sys

import pytest

from polyak.cli import compilation_cache as module
from tests.cli.processes import environment, last_checkpoint

TRAIN = "train ppo CartPole-v1 --env-steps 64 --hidden 4 --num-steps 8 --num-envs 2 --num-epochs 1 --num-minibatches 1"
KILLED = """
import os, pathlib, signal, sys
from polyak.cli.compilation_cache import _session
with _session(pathlib.Path(sys.argv[1])) as session:
    (session / "half-cache").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(words, directory, **variables):
    """`polyak WORDS` in a process that has the user's cache in `directory / "cache"`."""
    kept = {name: value for name, value in environment().items() if not name.startswith("JAX_COMP")}
    done = subprocess.run(
        [sys.executable, "-m", "polyak", *words.split()],
        cwd=directory,
        env=kept | {"XDG_CACHE_HOME": str(directory / "cache"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def cached(directory):
    return sorted(path for path in directory.rglob("*-cache") if path.is_file())


@pytest.mark.slow
def test_a_second_run_reads_what_the_first_compiled_and_gets_the_same_bits(tmp_path):
    first = run(f"{TRAIN} --eval-episodes 2 --run-dir first", tmp_path)
    files = cached(tmp_path / "cache")
    times = [path.stat().st_mtime_ns for path in files]
    assert any("learn" in path.name for path in files)
    second = run(f"{TRAIN} --eval-episodes 2 --run-dir second", tmp_path)
    run(f"{TRAIN} --eval-episodes 0 --run-dir third --no-compilation-cache", tmp_path, XDG_CACHE_HOME=str(tmp_path / "other"))
    assert (cached(tmp_path / "cache"), cached(tmp_path / "other")) == (files, [])
    assert [path.stat().st_mtime_ns for path in files] == times
    assert "note" not in first.stderr + second.stderr
    compiled, read, uncached = (last_checkpoint(tmp_path / name) for name in ("first", "second", "third"))
    assert compiled == read == uncached
    for path in (tmp_path / "cache" / "polyak", *(tmp_path / "cache/polyak").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_users_own_cache_is_used_instead(tmp_path):
    run(f"{TRAIN} --eval-episodes 0 --run-dir run", tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_training_goes_on_without_a_cache_that_is_rejected(tmp_path):
    (tmp_path / "cache/polyak").mkdir(parents=True, mode=0o755)
    (tmp_path / "cache/polyak").chmod(0o755)
    done = run(f"{TRAIN} --eval-episodes 0 --run-dir run", tmp_path)
    assert done.stderr.startswith(f"note: compilation cache is off: {tmp_path}/cache/polyak must be a directory that you own")
    assert cached(tmp_path) == []


@pytest.mark.slow
def test_new_files_appear_at_the_end_and_files_of_killed_runs_are_deleted(tmp_path):
    shared = tmp_path / "shared"
    with module._session(shared) as session:
        (session / "a-cache").write_text("1")
        assert not (shared / "a-cache").exists()
        with module._session(shared) as other:
            assert not (other / "a-cache").exists()
            (other / "a-cache").write_text("2")
            (other / "b-cache").write_text("2")
        assert session.exists()
    assert sorted(path.name for path in shared.iterdir()) == ["a-cache", "b-cache"]
    assert subprocess.run([sys.executable, "-c", KILLED, str(shared)]).returncode == -signal.SIGKILL
    assert any(path.is_dir() for path in shared.iterdir())
    with module._session(shared) as session:
        assert sorted(path.name for path in session.iterdir()) == ["a-cache", "b-cache"]
    assert sorted(path.name for path in shared.iterdir()) == ["a-cache", "b-cache"]


def test_the_oldest_files_are_deleted_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 25)
    for number in range(4):
        with module._session(tmp_path) as session:
            (session / f"{number}-cache").write_bytes(bytes(10))
            os.utime(session / f"{number}-cache", (number, number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-cache", "3-cache"]

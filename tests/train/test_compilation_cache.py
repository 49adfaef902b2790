"""JAX's compilation cache for trainings and the command line: whose it is, and that runs may share it."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import pytest

from polyak import data, envs, policies, train
from polyak.train import compilation_cache as module
from tests.cli.processes import environment, last_checkpoint

TRAIN = "train ppo CartPole-v1 --env-steps 64 --hidden 4 --num-steps 8 --num-envs 2 --num-epochs 1 --num-minibatches 1"
KILLED = """
import os, pathlib, signal, sys
from polyak.train.compilation_cache import _session
with _session(pathlib.Path(sys.argv[1])) as session:
    (session / "half-cache").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""

TRAINED = """
import os, pathlib, sys
import jax
import polyak

def count():
    return len(list(pathlib.Path(sys.argv[1]).glob("polyak/*/*-cache")))

settings = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1}
arguments = dict(env_steps=64, settings=settings, progress=False)
own = jax.jit(lambda x: x + 1)(1)  # JAX has started, and has compiled without a cache
polyak.train.run("ppo", "CartPole-v1", num_envs=4, compilation_cache=False, **arguments)
before = count()
polyak.train.run("ppo", "CartPole-v1", num_envs=2, run_dir=sys.argv[2], **arguments)
after = count()
jax.jit(lambda x: x * 2)(own)  # a program of the user
os.environ["POLYAK_COMPILATION_CACHE"] = "0"
polyak.train.run("ppo", "CartPole-v1", num_envs=8, **arguments)
assert count() == after and jax.config.values["jax_compilation_cache_dir"] is None
print(before, after)
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
def test_trainings_from_python_keep_only_their_programs_and_give_the_same_bits(tmp_path):
    kept = {name: value for name, value in environment().items() if not name.startswith("JAX_COMP")}
    counts = []
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", TRAINED, str(tmp_path / "cache"), str(tmp_path / name)],
            env=kept | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (done.returncode, done.stderr) == (0, "")
        counts.append([int(word) for word in done.stdout.split()])
    (_, after), again = counts
    assert counts[0][0] == 0 < after
    assert again == [after, after]
    assert last_checkpoint(tmp_path / "first") == last_checkpoint(tmp_path / "second")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of a new process, in `tmp_path / "cache"`, at whose end nothing is left open."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(module.SWITCH)
    # Other tests of this process may have configured a cache.
    own = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(module, "_process", module._Process())
    at_exit = []
    monkeypatch.setattr(module.atexit, "register", at_exit.append)
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", own)
    for close in at_exit:
        close()


def options():
    names = "compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"
    return [jax.config.values[f"jax_{name}"] for name in names]


def test_a_cache_directory_that_cannot_be_used_is_noted_once_and_nothing_else(cache):
    cache.write_text("a file, not a directory")
    before, notes = options(), []
    for _ in range(2):
        with module.compilation_cache(True, note=notes.append):
            assert options() == before
    assert [note.startswith("compilation cache is off: ") for note in notes] == [True]


def test_a_user_without_a_home_directory_trains_without_the_cache(cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module.Path, "expanduser", no_home)
    before = options()
    expected = pytest.warns(UserWarning, match="compilation cache is off: .*; set XDG_CACHE_HOME")
    with expected, module.compilation_cache(True):
        assert options() == before


def test_threads_share_the_cache_and_leave_jax_as_it_was(cache):
    before, inside, both, first_has_left = options(), [], threading.Barrier(2), threading.Event()

    def train(is_first):
        with module.compilation_cache(True):
            both.wait()
            if is_first:
                return
            first_has_left.wait()
            inside.append(options()[0])

    threads = [threading.Thread(target=train, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    threads[0].join()
    first_has_left.set()
    threads[1].join()
    assert len(inside) == 1 and inside[0].startswith(str(cache))
    assert options() == before


def test_a_process_lists_the_shared_files_once_and_publishes_what_is_new(cache):
    for name in ("a-cache", "b-cache"):
        with module.compilation_cache(True):
            session, shared = (Path(options()[0]), Path(options()[0]).parent)
            (session / name).write_text(name)
            assert not (shared / name).exists()
        assert (shared / name).read_text() == name
    assert sorted(path.name for path in session.iterdir()) == ["a-cache", "b-cache"]


def stops():
    raise InterruptedError


@pytest.mark.slow
@pytest.mark.parametrize("function", ["run", "run_seeds", "offline", "resume"])
def test_every_training_has_the_cache_and_an_error_leaves_jax_as_it_was(function, cache, tmp_path):
    inside = []

    def see(*_):
        inside.append(options()[0])
        stops()

    settings = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "learning_rate": 1e-3, "clip_range": 0.2}
    common = {"progress": False, "callbacks": [see]}
    run = partial(train.run, "ppo", "jax/CartPole-v1", env_steps=16, num_envs=2, settings=settings)
    env = envs.make("jax/CartPole-v1", num_envs=2)
    calls = {
        "run": partial(run, **common),
        "run_seeds": partial(
            train.run_seeds, *run.args, **run.keywords, seeds=[0], progress=False, eval_episodes=0, callbacks=lambda seed: [see]
        ),
        "offline": partial(train.offline, "dqn", gradient_steps=2, settings={"batch_size": 4}, **common),
        "resume": partial(train.resume, tmp_path / "run", env_steps=64, **common),
    }
    given = []
    if function == "resume":
        run(progress=False, run_dir=tmp_path / "run")
    if function == "offline":
        given = [data.collect(policies.Uniform(env.spec), env, 50)]
    before = options()
    with pytest.raises(InterruptedError):
        calls[function](*given)
    assert len(inside) == 1 and inside[0].startswith(str(cache))
    assert options() == before


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
            module._publish(other, shared)
        assert session.exists()
        module._publish(session, shared)
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
            module._publish(session, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-cache", "3-cache"]

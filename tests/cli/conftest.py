"""Small trainings through the command line, in this process and in others."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from polyak.cli import main
from tests.cli.processes import SETTINGS


@pytest.fixture(scope="session")
def jax_cache(tmp_path_factory):
    """Where compiled programs are kept, so that the many trainings here compile the same one once."""
    return tmp_path_factory.mktemp("jax-cache")


@contextmanager
def compiled_once(jax_cache):
    """A context in which JAX looks up what it compiles."""
    options = {
        "jax_compilation_cache_dir": str(jax_cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _compile_once(jax_cache, unchecked):
    with compiled_once(jax_cache):
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory, jax_cache):
    """A run of CartPole-v1 that has ended; not to be changed."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    with compiled_once(jax_cache):
        assert main(f"train ppo CartPole-v1 --run-dir {directory} --env-steps 400 {SETTINGS}".split()) == 0
    return directory


@pytest.fixture
def run(trained, workdir):
    """A copy of it, `run` in the working directory."""
    shutil.copytree(trained, workdir / "run")
    return workdir / "run"


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory, so that what a command leaves can be seen."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(workdir, capsys):
    """Run a command line, of words between spaces and of paths, in this process: `(exit code, stdout, stderr)`."""

    def run(*words):
        arguments = [word for text in words for word in ([str(text)] if isinstance(text, Path) else str(text).split())]
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def train(command):
    """A tiny training that must succeed: its stdout."""

    def run(env, directory, *words):
        code, out, err = command("train ppo", env, "--run-dir", directory, SETTINGS, *words)
        assert code == 0, err
        return out

    return run

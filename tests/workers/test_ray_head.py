"""The start of a private Ray, with processes that are none: what ends it, and what its errors say."""

import subprocess
import sys
import types

import pytest

from polyak.workers import ray_workers
from polyak.workers.ray_workers import PRIVATE_SETTINGS, RayWorkers


@pytest.fixture
def heads(monkeypatch):
    """Let another command be the head; returns the processes that were started with it."""
    started, popen = [], subprocess.Popen

    def start(command):
        def start_head(_, **options):
            started.append(popen(command, **options))
            return started[-1]

        monkeypatch.setattr(ray_workers.subprocess, "Popen", start_head)
        return started

    monkeypatch.setattr(ray_workers, "_check_installed", lambda: None)
    monkeypatch.setattr(ray_workers, "_import_ray", lambda: None)
    monkeypatch.setattr(ray_workers, "set_private_environment", lambda: None)
    for name, value in PRIVATE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("step", "error"), [("_import_ray", ImportError), ("_read_line", KeyboardInterrupt)])
def test_an_interrupted_start_leaves_no_process(step, error, heads, monkeypatch):
    def interrupt(*_):
        raise error("of a test")

    started = heads(["cat"])
    monkeypatch.setattr(ray_workers, step, interrupt)
    with pytest.raises(error, match="of a test"):
        RayWorkers(1)
    assert [process.poll() for process in started] == [0], "its input was closed"


@pytest.mark.parametrize(("name", "other"), [("RAY_AUTH_MODE", None), ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")])
def test_a_ray_that_was_imported_before_is_an_error_at_once(name, other, heads, monkeypatch):
    monkeypatch.delenv(name)
    if other is not None:
        monkeypatch.setenv(name, other)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    started = heads(["cat"])
    with pytest.raises(RuntimeError, match=f"needs {name}={PRIVATE_SETTINGS[name]} in the .* before `import ray`"):
        RayWorkers(1)
    assert started == []


def test_a_ray_that_was_imported_with_the_settings_can_have_a_private_one(heads, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setattr(ray_workers, "connect", lambda address: types.SimpleNamespace(remote=lambda **_: lambda actor: actor))
    heads(["echo", '{"address": "127.0.0.1:1"}'])
    RayWorkers(1)._end_head()

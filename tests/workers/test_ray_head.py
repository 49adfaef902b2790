"""The start of a private Ray, with processes that are none: what ends it, and what its errors say."""

import subprocess

import pytest

from polyak.workers import ray_workers
from polyak.workers.ray_workers import RayWorkers


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

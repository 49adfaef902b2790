"""The start of a private Ray, with processes that are none: what ends it, and what its errors say."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from polyak.workers import ray_workers
from polyak.workers.learner_group import StoppedBeforeStart
from polyak.workers.ray_workers import PRIVATE_SETTINGS, RayWorkers

NODES = {"one": True, "two": True, "lost": False}
"""Machines of a cluster, and whether they are there."""


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


def test_a_long_directory_of_temporary_files_is_not_used(heads, monkeypatch, tmp_path):
    """Paths of Ray's sockets in it would be too long, as where TMPDIR is the directory of a job."""
    found = []

    def look(*_):
        found.extend(Path("/tmp").glob(f"polyak-ray-{os.getpid()}-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_workers, "_read_line", look)
    heads(["cat"])
    with pytest.raises(KeyboardInterrupt):
        RayWorkers(1)
    assert len(found) == 1 and not found[0].exists() and not list(tmp_path.iterdir())


def test_a_request_to_stop_ends_the_start(heads):
    started = heads(["cat"])
    with pytest.raises(StoppedBeforeStart, match="before Ray had started"):
        RayWorkers(1, should_stop=lambda: True)
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


@pytest.mark.parametrize(("free", "total"), [(4, 4), (1, 4), (1, 1), (0, 0)])
def test_a_cluster_says_its_machines_and_at_once_which_cpus_it_lacks(free, total, monkeypatch, capsys):
    nodes = [{"Alive": alive, "NodeManagerHostname": name, "Resources": {"CPU": 2.0}} for name, alive in NODES.items()]
    ray = types.SimpleNamespace(
        __version__="2.60.0",
        nodes=lambda: nodes,
        cluster_resources=lambda: {"CPU": float(total)} if total else {},
        available_resources=lambda: {"CPU": float(free)} if free else {},
        remote=lambda **_: lambda actor: actor,
    )
    monkeypatch.setattr(ray_workers, "_check_installed", lambda: None)
    monkeypatch.setattr(ray_workers, "connect", lambda address: ray)
    workers = RayWorkers(4, "a:1")
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == "Ray 2.60.0: one (2 CPUs), two (2 CPUs)"
    assert lines == [f"4 workers need 4 CPUs, {free} of the Ray cluster are free: waiting, up to start_timeout"] * (free < 4)
    assert workers.shortage() == ("" if total == 4 else f"4 workers need 4 CPUs, the Ray cluster at a:1 has {total}")


ENDS = {
    "of Python": (
        "echo Traceback >&2; echo 'ModuleNotFoundError: no polyak' >&2; exit 1",
        "cannot start: ModuleNotFoundError: no",
    ),
    "final": (
        """echo '{"error": "AttributeError: start", "is_final": true}'; kill -9 $$""",
        "cannot start: AttributeError: start",
    ),
    "of a slow machine": (
        """echo '{"error": "Exception: timed out", "is_final": false}'; kill -9 $$""",
        "did not start in 3 tries: Exception: timed out; is the machine overloaded",
    ),
    "of Ray itself": (
        "echo 'F gcs.cc:1: check failed' >&2; kill -6 $$",
        "did not start in 3 tries: F gcs.cc:1: check failed; is",
    ),
    "none": ("exec cat", "did not start in 3 tries: no answer in 0.2 s; is the machine overloaded"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_error_has_its_reason_and_what_another_try_repeats_is_tried_once(end, heads, monkeypatch):
    command, message = ENDS[end]
    if end == "none":
        monkeypatch.setattr(ray_workers, "START_SECONDS", 0.2)
    started = heads(["sh", "-c", command])
    with pytest.raises(RuntimeError, match=f"train: a private Ray {message}"):
        RayWorkers(1)
    assert len(started) == (1 if "cannot" in message else 3)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "a..b:6379"])
@pytest.mark.parametrize("given", ["address", "RAY_ADDRESS", "ray_current_cluster"])
def test_an_address_where_nothing_listens_is_an_error_at_once(address, given, monkeypatch, tmp_path):
    """Ray itself would try for two minutes."""
    monkeypatch.setattr(ray_workers, "_check_installed", lambda: None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if given == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", address)
    elif given == "ray_current_cluster":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"nothing answers at the Ray address {re.escape(address)}: .*; start the cluster"):
        ray_workers.connect(address if given == "address" else "auto")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("address", ["auto", "local", "::1", "fe80::1", "k8s://cluster:1", "ray://name", "127.0.0.1:²", "a:b"])
def test_other_addresses_are_left_to_ray(address, monkeypatch, tmp_path):
    monkeypatch.setattr(ray_workers, "_check_installed", lambda: None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_workers, "_import_ray", lambda: (_ for _ in ()).throw(LookupError("is asked")))
    with pytest.raises(LookupError, match="is asked"):
        ray_workers.connect(address)


def test_the_head_reports_why_ray_cannot_be_imported(tmp_path):
    words = "1", "1", str(tmp_path / "ray")
    code = f"import sys; sys.modules['ray'] = None; from polyak.workers.ray_head import main; sys.argv[1:] = {words}; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        report = json.loads(process.stdout.readline())
        assert process.wait() == -signal.SIGKILL
    assert report["error"].startswith("ModuleNotFoundError: import of ray halted") and report["is_final"]

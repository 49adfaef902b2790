"""Workers on a private Ray, in a process of its own: Ray's threads and JAX's would otherwise live on in the test process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.processes import descendants, is_running, read

pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "ray_script.py"
NO_RAY = 77
"""The exit code of the script where Ray does not start, as on an overloaded machine."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the script prints; it runs once for most tests of this file."""
    return run(tmp_path_factory.mktemp("ray"))


def run(path, *arguments):
    """What the script prints last; Ray prints lines of its own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=path, env=environment(), capture_output=True, text=True, timeout=280
    )
    if done.returncode == NO_RAY:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return report | {"terminal": done.stdout + done.stderr}


def environment():
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    # A private Ray must not become a client of the cluster that this names.
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**others, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "RAY_ADDRESS": "127.0.0.1:1"}


def test_two_workers_have_the_bits_of_the_host_loop(report):
    assert report["same_bits"]


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_worker_that_is_killed_or_stopped_leaves_no_trace(report, fault):
    """W1, W3, W15."""
    assert report[fault]["same_bits"] and report[fault]["restarts"] >= 1


def test_a_dead_worker_is_noticed_at_once(report):
    assert report["killed"]["noticed"] < 1.0, "0.1 s on a quiet machine"


def test_ray_prints_nothing_about_dead_workers(report):
    """The training says it in one line of its own."""
    assert "raylet" not in report["terminal"]


def test_a_private_ray_listens_on_loopback_only(report):
    assert report["listening"] and all(address.startswith("127.") for address in report["listening"])


def test_a_policy_in_numpy_starts_no_jax_in_the_workers(report):
    assert report["jax_started"] == [False, False]


def test_a_worker_computes_on_one_thread(report):
    assert report["blas_threads"] in (1, None)


def test_closing_ends_all_processes_within_seconds(report):
    """W11."""
    assert report["close_seconds"] < 10 and report["left"] == []


def test_ray_leaves_the_handler_of_sigterm(report):
    """T5: a training ends with its checkpoint, as without workers."""
    assert report["keeps_handler"]


def test_a_ray_that_is_connected_already_is_an_error(report):
    assert "Ray is already connected in this process" in report["connected"]


@pytest.mark.slow
def test_training_goes_on_elsewhere_when_a_node_of_the_cluster_is_removed(tmp_path):
    """W15: with the same bits."""
    report = run(tmp_path, "cluster")
    assert report["removed"] >= 1 and len(report["restarts"]) >= 1
    assert report["same_bits"] and report["alive"] == 4
    assert report["listening"] == ["127.0.0.1"]


def test_nothing_is_left_of_a_learner_that_was_killed(tmp_path):
    """W10: its processes and their files."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "forever"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    if not line and process.wait() == NO_RAY:
        process.stdout.close()
        pytest.skip("Ray does not start here")
    pids = json.loads(line)
    assert len(pids) > 5 and all(map(is_running, pids))
    process.stdout.close()
    check_that_nothing_is_left(process, pids)


def test_nothing_is_left_of_a_learner_that_was_killed_while_ray_started(tmp_path):
    """W10: the head does not wait until Ray has started."""
    code = "from polyak.workers.ray_workers import RayWorkers; RayWorkers(2)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 60
    while not is_starting(pids := descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_starting(pids)
    check_that_nothing_is_left(process, pids)


def is_starting(pids):
    """Whether Ray's first daemon is there."""
    return any("gcs_server" in read(f"/proc/{pid}/cmdline") for pid in pids)


def check_that_nothing_is_left(process, pids):
    """Kill a learner; its processes are to end within 5 s on a quiet machine."""
    process.kill()
    process.wait()
    deadline = time.monotonic() + 8
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        pids = sorted({*pids, *(child for pid in pids for child in descendants(pid))})
        time.sleep(0.1)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not any(Path("/tmp").glob(f"polyak-ray-{process.pid}-*"))

"""Workers on a private Ray, in a process of its own: Ray's threads and JAX's would otherwise live on in the test process."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.workers import ray_script
from tests.workers.processes import descendants, is_running, read
from tests.workers.ray_script import NO_RAY

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "ray_script.py"


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
        skip_without_ray(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return report | {"terminal": "\n".join(line for line in done.stdout.splitlines() if line[:1] != "{") + done.stderr}


def skip_without_ray(reason):
    """Skip a test on a machine where Ray does not start; it must in continuous integration."""
    if os.environ.get("CI"):
        pytest.fail(f"Ray must start where CI is set: {reason}")
    pytest.skip(reason)


def environment():
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    # A private Ray must not become a client of the cluster that this names.
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**others, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "RAY_ADDRESS": "127.0.0.1:1"}


@pytest.mark.slow
def test_two_workers_have_the_bits_of_the_host_loop(report):
    assert report["same_bits"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_worker_that_is_killed_or_stopped_leaves_no_trace(report, fault):
    assert report[fault]["same_bits"] and report[fault]["restarts"] >= 1


@pytest.mark.slow
def test_a_dead_worker_is_noticed_at_once(report):
    assert report["killed"]["noticed"] < 1.0, "0.1 s on a quiet machine"


@pytest.mark.slow
def test_ray_prints_nothing_about_dead_workers(report):
    """The training says it in one line of its own."""
    assert "raylet" not in report["terminal"]


@pytest.mark.slow
def test_training_in_one_process_opens_no_socket(report):
    assert report["sockets_alone"] == 0


@pytest.mark.slow
def test_a_private_ray_listens_on_loopback_only(report):
    assert report["listening"] and all(address.startswith("127.") for address in report["listening"])


@pytest.mark.slow
def test_a_caller_without_the_token_is_refused(report):
    """Where one with the token gets an answer."""
    code, output = report["cluster"]["no token"]
    assert code == 1 and "InvalidAuthToken" in output.splitlines()[-1] and report["cluster"]["keys"] > 0


@pytest.mark.slow
def test_no_dashboard_listens_and_no_port_serves_http_without_the_token(report):
    number, open_ports = report["cluster"]["dashboard"]
    assert number >= 1 and open_ports == [], "Ray starts its processes even so"
    assert set(report["cluster"]["http"]) <= {401, None}


@pytest.mark.slow
def test_another_version_of_ray_is_an_error_with_both_in_one_line(report):
    code, output = report["cluster"]["other version"]
    ray = re.escape(report["cluster"]["ray"])
    last = output.strip().splitlines()[-1]
    assert code == 1 and "cannot connect to Ray at 127." in last and "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in last
    assert re.search(rf"Version mismatch: .* Ray: {ray} .* Ray: 1\.2\.3 ", last)


@pytest.mark.slow
def test_a_command_with_workers_on_a_cluster_says_where_they_are(report):
    _, output = report["cluster"]["stopped"]
    assert re.search(r"^Ray \S+: \S+ \(4 CPUs\)$", output, re.MULTILINE)
    assert re.search(r"^workers: 2 on \S+ \(a call takes \d+\.\d ms\); python \S+, polyak ", output, re.MULTILINE)
    assert "need" not in output, "two of the four CPUs are free"


@pytest.mark.slow
def test_a_command_with_workers_leaves_a_checkpoint_at_sigterm_and_continues_without_them(report):
    code, output = report["cluster"]["stopped"]
    done = report["cluster"]["done"]
    assert code == 143 and f"stopped by SIGTERM at {done:,} env_steps" in output and done >= 64
    code, output = report["cluster"]["resumed"]
    assert code == 0, output


@pytest.mark.parametrize(("message", "error"), [("did not start in 3 tries: x", SystemExit), ("cannot connect", RuntimeError)])
def test_only_a_ray_that_does_not_start_is_skipped_and_never_where_ci_is_set(message, error, monkeypatch):
    def fail(workers):
        raise RuntimeError(message)

    monkeypatch.setattr(ray_script, "RayWorkers", fail)
    with pytest.raises(error):
        ray_script.start_ray(2)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        skip_without_ray("x")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="Ray must start where CI is set: x"):
        skip_without_ray("x")


@pytest.mark.slow
def test_a_policy_in_numpy_starts_no_jax_in_the_workers(report):
    assert report["jax_started"] == [False, False]


@pytest.mark.slow
def test_a_worker_computes_on_one_thread(report):
    assert report["blas_threads"] in (1, None)


@pytest.mark.slow
def test_closing_ends_all_processes_within_seconds(report):
    assert report["close_seconds"] < 10 and report["left"] == []


@pytest.mark.slow
def test_ray_leaves_the_handler_of_sigterm(report):
    """A training ends with its checkpoint, as without workers."""
    assert report["keeps_handler"]


@pytest.mark.slow
def test_a_ray_that_is_connected_already_is_an_error(report):
    assert "Ray is already connected in this process" in report["connected"]


@pytest.mark.slow
def test_training_goes_on_elsewhere_when_a_node_of_the_cluster_is_removed(tmp_path):
    """With the same bits."""
    report = run(tmp_path, "cluster")
    assert report["removed"] >= 1 and len(report["restarts"]) >= 1
    assert report["same_bits"] and report["alive"] == 4
    assert report["listening"] == ["127.0.0.1"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What is left of a training whose environments print, warn, and end a process."""
    return run(tmp_path_factory.mktemp("output"), "output")


@pytest.mark.slow
def test_what_environments_print_is_in_a_file_of_each_worker(output):
    assert sorted(output["logs"]) == ["0.log", "1.log"]
    for text in output["logs"].values():
        assert "said\n" in text and "written\n" in text and "RuntimeWarning: warned of a test" in text
    assert "said" not in output["terminal"] and "written" not in output["terminal"]


@pytest.mark.slow
def test_warnings_of_workers_are_issued_once_in_the_learner(output):
    assert output["warnings"] == [["RuntimeWarning", "warned of a test"]]


@pytest.mark.slow
def test_a_worker_whose_process_ends_tells_how(output):
    (reason,) = output["reasons"]
    assert reason.startswith("died: Worker unexpectedly exits") and "it was killed" in reason and "Some common" not in reason


@pytest.mark.slow
def test_environments_of_workers_are_closed_at_the_end(output):
    """Those of the processes that are there; the learner closes the one that tells the spaces."""
    closed = set(output["closed"]) - {output["own"]}
    assert len(output["pids"]) == 3 and len(closed) == 2 and closed < set(output["pids"])


def start_forever(directory):
    """A training with workers that does not end, in a process of its own: `(process, pids of what it started)`."""
    command = [sys.executable, str(SCRIPT), "forever"]
    with (directory / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True)
    line = process.stdout.readline()
    process.stdout.close()
    if not line and process.wait() == NO_RAY:
        skip_without_ray("Ray does not start here")
    pids = json.loads(line)
    assert len(pids) > 5 and all(map(is_running, pids))
    return process, pids


@pytest.mark.slow
def test_nothing_is_left_of_a_learner_that_was_killed(tmp_path):
    """Its processes and their files."""
    process, pids = start_forever(tmp_path)
    check_that_nothing_is_left(process, pids)


@pytest.mark.slow
def test_a_training_ends_when_a_daemon_of_its_private_ray_dies(tmp_path):
    """Ray alone would hang for minutes; and no other user opens the directory of its sockets."""
    process, pids = start_forever(tmp_path)
    (directory,) = Path(tempfile.gettempdir()).glob(f"polyak-ray-{process.pid}-*")
    assert directory.stat().st_mode & 0o077 == 0
    (daemon,) = (pid for pid in pids if "gcs_server" in read(f"/proc/{pid}/cmdline").split("\0")[0])
    os.kill(daemon, signal.SIGKILL)
    assert process.wait(30) == 1
    assert "the private Ray has ended" in (tmp_path / "stderr").read_text()
    check_that_nothing_is_left(process, pids)


@pytest.mark.slow
def test_a_training_ends_when_the_head_of_its_private_ray_is_killed(tmp_path):
    process, pids = start_forever(tmp_path)
    (head,) = (pid for pid in pids if "polyak.workers.ray_head" in read(f"/proc/{pid}/cmdline").split("\0"))
    os.kill(head, signal.SIGKILL)
    assert process.wait(30) == 1
    assert "the private Ray has ended" in (tmp_path / "stderr").read_text()
    check_that_nothing_is_left(process, pids)


@pytest.mark.slow
def test_nothing_is_left_of_a_learner_that_was_killed_while_ray_started(tmp_path):
    """The head does not wait until Ray has started."""
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
    """Kill a learner, unless it has ended; its processes end, and their files go, within 5 s on a quiet machine."""

    def remaining_files():
        return list(Path(tempfile.gettempdir()).glob(f"polyak-ray-{process.pid}-*"))

    process.kill()
    process.wait()
    deadline = time.monotonic() + 8
    while (any(map(is_running, pids)) or remaining_files()) and time.monotonic() < deadline:
        pids = sorted({*pids, *(child for pid in pids for child in descendants(pid))})
        time.sleep(0.1)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not remaining_files()

"""Workers as Ray actors, in a private Ray on this machine or in an existing cluster."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polyak.workers.rollout_worker import RolloutWorker, configure_process, find_sources
from polyak.workers.supervise import StoppedBeforeStart, WorkerLost, last_line
from polyak.workers.worker_output import RecordedWarnings, WarningsOfWorkers, WorkerWarning

START_TRIES = 3
START_SECONDS = 60.0
"""Seconds in which a private Ray must start."""

CONNECT_SECONDS = 10.0
"""Seconds in which the head of a cluster must accept a connection."""

PYTHON_ERROR = 1
"""Exit code of a program that ends with an exception; a private Ray that cannot start kills itself."""

POLL_SECONDS = 0.05
"""Longest delay in seconds of a stop request while a private Ray starts."""

CLOSE_SECONDS = 5.0

LOOK_SECONDS = 1.0
"""Seconds between checks that the private Ray is alive: no call returns after its end."""

KILL_SECONDS = 1.0
"""Seconds to wait at the end for workers that are being killed; the end of Ray kills workers as well."""

STORE_BYTES_PER_WORKER = 64 * 2**20
"""Shared memory per worker, for rollouts and policies in transit."""

INLINE_BYTES = 100_000
"""Largest argument that is sent in the call itself, which is 2 ms faster than through Ray's store."""

MIN_STORE_BYTES = 128 * 2**20

PRIVATE_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    # Without clusters, Ray takes the loopback address for the machine's, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables of a private Ray; Ray reads them when it is imported."""


class ClusterError(RuntimeError):
    """No Ray cluster answers at an address, or it rejects this process."""


def check_ray(address: str | None) -> None:
    """Check that Ray is installed, and that something listens at the address of a cluster, if there is one.

    Raises:
        ImportError: Ray is not installed.
        ClusterError: nothing listens at the address.
    """
    _check_installed()
    if address is not None:
        _check_reachable(address)


def connect(address: str) -> Any:
    """Connect this process to a Ray cluster, as `ray.init` does; returns the `ray` module.

    Raises:
        ImportError: Ray is not installed.
        ClusterError: the cluster cannot be reached, wants a token, or has another version.
        RuntimeError: this process is already connected to Ray.
    """
    check_ray(address)
    ray = _import_ray()
    if ray.is_initialized():
        raise RuntimeError("train: Ray is already connected in this process; call ray.shutdown() before")
    try:
        with _keep_handler(signal.SIGTERM):
            ray.init(address=address, configure_logging=False, log_to_driver=False)
    except Exception as error:
        # Ray's message about other versions has several lines.
        reason = " ".join(str(error).split())
        token = "if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise ClusterError(f"train: cannot connect to Ray at {address}: {reason}; {token}") from error
    return ray


def _import_ray() -> Any:
    # Ray reads these at import: a call after the end must not start another Ray, and an unreachable Ray is an error after two
    # tries of a minute, not after 20.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
    # The supervisor reports the death of a worker, in one line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    import ray

    return ray


def _check_reachable(address: str) -> None:
    """Check that something listens at `host:port` or at the address of `auto`: Ray would try for two minutes, ignoring Ctrl-C.

    Raises:
        ClusterError: nothing listens there.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _address_of_this_machine() or address
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    is_bare = host and ("[" in host or ":" not in host) and "/" not in host
    if scheme not in ("", "ray") or not is_bare or not (port.isascii() and port.isdigit()):
        return  # Ray parses or rejects it.
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"train: nothing answers at the Ray address {address}: {reason}; start the cluster with `ray start --head`, or "
            "pass the host:port of its head"
        ) from error


def _address_of_this_machine() -> str | None:
    """Read the address that `ray start` has written to a file on this machine."""
    path = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return None


def describe_death(error: Exception) -> str:
    """Describe why an actor died: how its process ended if Ray reports it, else the first line of the exception."""
    detail = re.search(r"Worker exit detail: (.*?)\.?(?: Some common causes|\n|$)", str(error))
    if detail is None:
        return first_line(error)
    is_killed = "connection error" in detail[1]
    return detail[1] + (": it was killed (by the system, for its memory?), crashed, or called os._exit" if is_killed else "")


def first_line(error: Exception) -> str:
    """The first line of an exception's text that is not empty, without a full stop."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class RayWorkers:
    """An `Engine` whose workers are Ray actors.

    Args:
        workers: number of workers.
        address: address of a cluster, as for `ray.init`; None starts a private Ray on this machine, on loopback and with a
            token, which ends with this process.
        should_stop: called while a private Ray starts.

    Raises:
        ImportError: Ray is not installed.
        StoppedBeforeStart: a stop was requested.
        RuntimeError: a private Ray did not start in three tries, or after an error that a retry would repeat; or the cluster
            cannot be reached or has another version; or this process has connected to Ray or imported it with other settings.
    """

    def __init__(
        self,
        workers: int,
        address: str | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        _check_installed()
        self._should_stop = should_stop
        self._head: subprocess.Popen[str] | None = None
        self._directory = ""
        if address is None:
            address = self._start_head(workers, max(MIN_STORE_BYTES, workers * STORE_BYTES_PER_WORKER))
        try:
            self._ray = connect(address)
        except BaseException:
            self._end_head()
            raise
        self._kills: list[threading.Thread] = []
        self._warnings = WarningsOfWorkers()
        self._workers, self._address = workers, address
        if self._head is None:
            print(self.describe())
            if (free := self._ray.available_resources().get("CPU", 0)) < workers:
                print(
                    f"{workers} workers need {workers} CPUs, {free:g} of the Ray cluster are free: waiting, up to start_timeout"
                )
        # With task events, Ray would keep a record of every rollout.
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
        self._actor = self._ray.remote(**options, scheduling_strategy="SPREAD")(_RayWorker)

    def start(self, payload: bytes) -> Any:
        """Start an actor, which waits until the cluster has a free CPU."""
        self._require_head()
        return self._actor.remote(payload, list(sys.path))

    def call(self, handle: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns a Ray reference to its result."""
        return handle.call.remote(method, *arguments)

    def share(self, value: Any) -> Any:
        """Put large arrays into Ray's store and return their reference; return small arrays unchanged."""
        return self._ray.put(value) if sum(array.nbytes for array in value.values()) > INLINE_BYTES else value

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Return the finished calls, as soon as there is one, or after `seconds`.

        Raises:
            RuntimeError: the private Ray has ended.
        """
        deadline, done = time.monotonic() + seconds, []
        while True:
            self._require_head()
            left = max(0.0, min(deadline - time.monotonic(), LOOK_SECONDS))
            if calls:
                done, rest = self._ray.wait(list(calls), num_returns=1, timeout=left)
            else:
                threading.Event().wait(left)
            if done or time.monotonic() >= deadline:
                break
        if done and rest:
            # Other calls may have returned meanwhile.
            done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        returned: Sequence[Any] = done
        return returned

    def result(self, call: Any) -> Any:
        """Return the result of a finished call; arrays of a result above 1 MB are in Ray's shared memory.

        Warnings of the worker are issued again in this process, each once.

        Raises:
            WorkerLost: the actor died.
        """
        try:
            result, found = self._ray.get(call, timeout=CLOSE_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(f"died: {describe_death(error)}") from error
        self._warnings.issue(found)
        return result

    def end(self, handle: Any) -> None:
        """Kill the actor in a thread: killing a suspended process takes five seconds."""
        if handle is not None:
            thread = threading.Thread(target=self._kill, args=(handle,), daemon=True)
            self._kills = [*(kill for kill in self._kills if kill.is_alive()), thread]
            thread.start()

    def shortage(self) -> str:
        """Describe, as a clause, how many CPUs the workers need and the cluster has; empty if the cluster has enough."""
        cpus = self._ray.cluster_resources().get("CPU", 0)
        if cpus >= self._workers:
            return ""
        return f"{self._workers} workers need {self._workers} CPUs, the Ray cluster at {self._address} has {cpus:g}"

    def close(self) -> None:
        """Disconnect, and end the private Ray with all its processes; a second call does nothing."""
        deadline = time.monotonic() + KILL_SECONDS
        for thread in self._kills:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ray.shutdown()
        self._end_head()

    def describe(self) -> str:
        """The machines, and their CPUs."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        cpus = [f"{node['NodeManagerHostname']} ({node['Resources'].get('CPU', 0):g} CPUs)" for node in nodes]
        return f"Ray {self._ray.__version__}: {', '.join(cpus)}"

    def _require_head(self) -> None:
        """Check that the private Ray is alive, and disconnect if it has ended: a call to it would wait for minutes.

        Raises:
            RuntimeError: the private Ray has ended.
        """
        if self._head is not None and self._head.poll() is not None:
            self._ray.shutdown()
            self._end_remains(self._head)
            raise RuntimeError("train: the private Ray has ended, and with it all workers; polyak.resume continues a run")

    def _kill(self, handle: Any) -> None:
        if not self._ray.is_initialized():
            return  # Without a connection the call would start another Ray.
        with contextlib.suppress(Exception):
            self._ray.kill(handle, no_restart=True)

    def _start_head(self, workers: int, store_bytes: int) -> str:
        _check_not_imported()
        set_private_environment()
        reason = ""
        for _ in range(START_TRIES):
            # Created here, so that the files of the head can be deleted however it ends.
            self._directory = tempfile.mkdtemp(prefix=f"polyak-ray-{os.getpid()}-", dir=_short_directory())
            command = [sys.executable, "-m", "polyak.workers.ray_head", str(workers), str(store_bytes), self._directory]
            with tempfile.TemporaryFile() as log:
                head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
                self._head = head
                try:
                    # In parallel to the import in the head.
                    _import_ray()
                    report = json.loads(_read_line(head, START_SECONDS, self._should_stop) or "{}")
                except BaseException:
                    self._end_head()
                    raise
                if "address" in report:
                    address: str = report["address"]
                    return address
                self._end_head()
                reason = report.get("error") or last_line(log) or f"no answer in {START_SECONDS:g} s"
            if report.get("is_final", head.returncode == PYTHON_ERROR):
                raise RuntimeError(f"train: a private Ray cannot start: {reason}")
        raise RuntimeError(
            f"train: a private Ray did not start in {START_TRIES} tries: {reason}; is the machine overloaded, or /dev/shm too "
            "small?"
        )

    def _end_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            assert head.stdin is not None and head.stdout is not None, "pipes"
            with contextlib.suppress(OSError):
                head.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(CLOSE_SECONDS)
            self._end_remains(head)
            head.wait()
            head.stdout.close()

    def _end_remains(self, head: subprocess.Popen[str]) -> None:
        """Kill a head that hangs, and its processes, and delete its files."""
        # The number of the group may belong to another user's process by now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)


class _RayWorker:
    """A worker in a process of its own."""

    def __init__(self, make_env: bytes, paths: list[str]) -> None:
        configure_process()
        find_sources(paths)
        self._worker, self._warnings = RolloutWorker(make_env), RecordedWarnings()

    def call(self, method: str, *arguments: Any) -> tuple[Any, list[WorkerWarning]]:
        """Call a method; returns its result, and the warnings since the last call."""
        return getattr(self._worker, method)(*arguments), self._warnings.take()


def _short_directory() -> str:
    """The directory of temporary files; /tmp if paths of sockets in it, to which Ray adds 94 bytes, would exceed 107 bytes."""
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) <= 107 - 94 else "/tmp"


def set_private_environment() -> None:
    """Make Ray listen on loopback only, require a token, and send no usage statistics."""
    os.environ.update(PRIVATE_SETTINGS)
    # Ray reads the token once in a process, so later private Rays of this process need the same token.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@contextlib.contextmanager
def _keep_handler(number: int) -> Iterator[None]:
    """Restore the handler of a signal at the end: Ray's handler would end a training run without its checkpoint."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(number, handler)


def _read_line(process: subprocess.Popen[str], seconds: float, should_stop: Callable[[], bool]) -> str:
    """Return the first line that a process prints; empty if the process prints none in time, or ends.

    Raises:
        StoppedBeforeStart: a stop was requested.
    """
    lines: list[str] = []
    assert process.stdout is not None, "a pipe"
    thread = threading.Thread(target=lambda stream: lines.append(stream.readline()), args=(process.stdout,), daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        if should_stop():
            raise StoppedBeforeStart("train: stopped before Ray had started")
        thread.join(POLL_SECONDS)
    return lines[0] if lines else ""


def _check_not_imported() -> None:
    """Check that Ray was not imported without the settings of a private Ray: it would try for minutes to connect.

    Raises:
        RuntimeError: Ray was imported without these settings.
    """
    missing = [f"{name}={value}" for name, value in PRIVATE_SETTINGS.items() if os.environ.get(name) != value]
    if "ray" in sys.modules and missing:
        raise RuntimeError(
            f"train: a private Ray needs {' and '.join(missing)} in the environment before `import ray`, which this program "
            "has done already; start the training before it, or set them in the shell"
        )


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ImportError("train: workers need Ray: pip install 'polyak[ray]'")

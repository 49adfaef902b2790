"""A group of learners: processes that train as one, and are started again together when one of them dies.

The group is independent of training: each process calls a function, which can resume from what it has saved.
"""

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import IO, Any, Protocol, TypeAlias, runtime_checkable

import cloudpickle

from polyak.core.checks import check_integer
from polyak.core.struct import check_settings, integer
from polyak.workers.learner_process import JOINED, STOP, TRAINING, LearnerEnd, LearnerNote, LearnerStart
from polyak.workers.supervise import StoppedBeforeStart, WorkerEvent, back_off, last_line

MAX_LEARNERS = 2**12
"""Maximum number of processes of a group."""

MAX_STARTS = 3
"""Starts after which training ends if the learners have never found each other: the address or the machines may be wrong."""

LearnerFunction: TypeAlias = Callable[[int, Callable[[], bool], Callable[[Any], None]], Any]
"""`function(rank, should_stop, note)`, called in each process; `note(value)` sends a value to the parent process.

A call of `should_stop()` also tells the parent process that training is making progress."""

LOOPBACK = "127.0.0.1"

POLL_SECONDS = 0.05
"""Longest time in seconds until the death of a learner is noticed."""

GRACE_SECONDS = 5.0
"""Seconds beyond the heartbeat in which the death of another learner may still explain an error of JAX."""

STOP_SECONDS = 2.0
"""Seconds in which learners that are asked to stop may still connect; the command line ends them after 4.5 s."""

END_SECONDS = 5.0
"""Seconds in which a killed process must end."""


class LearnerLost(Exception):
    """A learner died.

    Attributes:
        rank: number of the learner.
        reason: clause that says how the learner ended.
        has_joined: whether the group was complete.
    """

    def __init__(self, rank: int, reason: str, *, has_joined: bool = True) -> None:
        super().__init__(f"learner {rank} {reason}")
        self.rank, self.reason, self.has_joined = rank, reason, has_joined


@dataclass(frozen=True)
class Learners:
    """Processes that train together, and how they are watched.

    Attributes:
        number: number of learners; the devices and the environments are split equally over the learners.
        restarts: maximum number of restarts of the group.
        heartbeat: seconds without a heartbeat after which the other learners treat a learner as dead.
        start_timeout: maximum seconds for the start of the group.
        address: address of a Ray cluster, such as `"auto"`, to which this machine and one machine for each other learner
            belong; None starts all learners on this machine.
        timeout: maximum seconds for a chunk of iterations, including an evaluation, before the group is treated as hung and
            restarted. The first chunk, which compiles, has no limit.
    """

    number: int
    restarts: int = integer(default=100, at_least=0, at_most=None)
    heartbeat: int = integer(default=10, at_most=None)
    start_timeout: int = integer(default=300, at_most=None)
    address: str | None = None
    timeout: int = integer(default=3600, at_most=None)

    def __post_init__(self) -> None:
        check_integer("train", "learners", self.number, at_most=MAX_LEARNERS)
        check_settings(self, "train")
        if self.address == "":
            raise ValueError("train: ray_address must be HOST:PORT or auto, got an empty one")


@runtime_checkable
class Learner(Protocol):
    """A process of a group, here or on another machine.

    Attributes:
        has_joined: the learner has reported that it is connected to the other learners.
        messages: number of messages received from the learner.
    """

    has_joined: bool
    messages: int

    def poll(self) -> LearnerEnd | str | None:
        """Return the end of the learner, or a clause that says how it died; None while it runs."""
        ...

    def ask_to_stop(self) -> None:
        """Ask the learner to stop after its current chunk."""
        ...

    def kill(self) -> None:
        """Kill the learner; a second call does nothing."""
        ...

    def notes(self) -> Sequence[Any]:
        """Return the values that the learner has sent, also before it was killed."""
        ...


class LocalLearner:
    """A learner on this machine, which ends with this process.

    Args:
        start: settings of the learner process.
    """

    def __init__(self, start: LearnerStart) -> None:
        self.has_joined, self.messages = False, 0
        self._notes: list[Any] = []
        self._connection, remote = Pipe()
        first = start.rank == 0
        self._log: IO[bytes] | None = None if first else tempfile.TemporaryFile()  # noqa: SIM115  (closed by `kill`)
        # A new session: only the parent process handles Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyak.workers.learner_process", str(remote.fileno())],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
        )
        remote.close()
        # A learner that has ended before it reads is reported by `poll`.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(start))

    @property
    def pid(self) -> int:
        """Process id of the learner."""
        return self._process.pid

    def poll(self) -> LearnerEnd | str | None:
        """Return the end of the learner, or a clause that says how it died; None while it runs."""
        try:
            while self._connection.poll():
                data = self._connection.recv_bytes()
                # Trusted bytes: from a child of this process.
                message = None if data in (JOINED, TRAINING) else pickle.loads(data)
                if isinstance(message, LearnerEnd):
                    return message
                if isinstance(message, LearnerNote):
                    self._notes.append(message.value)
                self.has_joined = True
                self.messages += 1
        except (EOFError, OSError):
            return self._describe_end()
        return None

    def ask_to_stop(self) -> None:
        """Ask the learner to stop after its current chunk."""
        # A learner that has ended is reported by `poll`.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(STOP)

    def kill(self) -> None:
        """Kill the learner; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        if not self._connection.closed:
            # Reads the notes that are still in the pipe.
            self.poll()
            self._connection.close()
        if self._log is not None:
            self._log.close()

    def notes(self) -> Sequence[Any]:
        """Return the values that the learner has sent, also before it was killed."""
        return self._notes

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code == -signal.SIGABRT:
            return "was killed by SIGABRT, as where another one gives no sign of life"
        line = "" if self._log is None else last_line(self._log)
        end = f"ended with exit code {code}: {line}" if line else f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else end


def start_here(function: LearnerFunction, devices: int, learners: Learners) -> list[Learner]:
    """Start a group on this machine.

    Args:
        function: see `LearnerFunction`.
        devices: number of devices of all processes together.
        learners: options of the group.
    """
    coordinator, pickled = f"{LOOPBACK}:{free_port(LOOPBACK)}", cloudpickle.dumps(function)
    limits = (learners.heartbeat, learners.start_timeout)
    group: list[Learner] = []
    try:
        for rank in range(learners.number):
            share = devices // learners.number
            # By default each learner would use the first accelerators of the machine.
            own = list(range(rank * share, (rank + 1) * share))
            start = LearnerStart(rank, learners.number, coordinator, share, *limits, list(sys.path), pickled, own)
            group.append(LocalLearner(start))
    except BaseException:
        _kill(group)
        raise
    return group


def run_group(
    start: Callable[[], Sequence[Learner]],
    options: Learners,
    *,
    progress: Callable[[], int],
    on_event: Callable[[WorkerEvent], None],
    on_note: Callable[[Any], None] = lambda value: None,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Run a group of learners, restarting all of them when one dies; returns the result of the first learner.

    The first restart is immediate; repeated restarts without progress wait longer. The group is not restarted after three
    starts in which the learners have never connected.

    Args:
        start: starts all learners.
        options: options of the group.
        progress: returns a number that grows with every checkpoint from which a new group can resume.
        on_event: called with an event for every death.
        on_note: called with each noted value, when the group has ended.
        should_stop: True asks the first learner to stop.
        clock: monotonic clock in seconds.
        sleep: function that waits for a number of seconds.

    Raises:
        RuntimeError: no restart is left, or the learners do not connect.
        StoppedBeforeStart: a stop was requested while no group trains.
        Exception: an exception that a learner raised, with its type.
    """
    restarts = failures = 0
    saved, was_complete = progress(), False
    while True:
        group: Sequence[Learner] = ()
        try:
            group = start()
            return _watch(group, options, should_stop, clock, sleep)
        except LearnerLost as error:
            lost = error
        finally:
            _kill(group)
            for learner in group:
                for value in learner.notes():
                    on_note(value)
        was_complete = was_complete or lost.has_joined
        end = None
        if restarts >= options.restarts:
            end = f"no restart is left of restarts={options.restarts}"
        elif not was_complete and restarts + 1 >= MAX_STARTS:
            end = f"the learners did not find each other in {MAX_STARTS} starts"
        is_stopped = should_stop()
        on_event(WorkerEvent(lost.rank, "failed" if end is None and not is_stopped else "lost", lost.reason))
        if not is_stopped and end is not None:
            raise RuntimeError(f"{lost}; {end}")
        restarts += 1
        failures, saved = 1 if progress() > saved else failures + 1, progress()
        until = clock() + back_off(failures)
        while not should_stop() and clock() < until:
            sleep(POLL_SECONDS)
        if should_stop():
            raise StoppedBeforeStart(f"train: stopped after the death of a learner: {lost}")


def _watch(
    group: Sequence[Learner],
    options: Learners,
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Any:
    """Wait for the first learner's result.

    Raises:
        LearnerLost: a learner died, or hangs, so that the first learner waits for it.
        StoppedBeforeStart: a stop was requested, and the learners do not connect.
        Exception: an exception that a learner raised. An exception that the death of another learner may explain is raised only
            if no death is noticed for a while.
    """
    ends: dict[int, LearnerEnd] = {}
    deadline = stop_at = hung_at = float("inf")
    received = 1  # the message JOINED
    while True:
        if should_stop() and stop_at == float("inf"):
            stop_at = clock() + STOP_SECONDS
            group[0].ask_to_stop()
        if clock() >= stop_at and not any(learner.has_joined for learner in group):
            raise StoppedBeforeStart("train: stopped before the learners found each other")
        for rank, learner in enumerate(group):
            end = None if rank in ends else learner.poll()
            if isinstance(end, str):
                raise LearnerLost(rank, end, has_joined=any(learner.has_joined for learner in group))
            if end is None:
                continue
            ends[rank] = end
            if end.failure is not None and not end.has_joined:
                raise LearnerLost(rank, f"did not start: {end.failure.summary}", has_joined=False)
            if end.failure is not None:
                deadline = min(deadline, clock() + options.heartbeat + GRACE_SECONDS)
        if group[0].messages > received:
            received, hung_at = group[0].messages, clock() + options.timeout
        first = ends.get(0)
        if first is None and clock() >= hung_at:
            raise LearnerLost(
                0,
                f"trained no further for timeout={options.timeout} s, itself or waiting for another; a longer update or "
                "evaluation needs a larger timeout of train.Learners",
            )
        if first is not None and first.failure is None:
            return first.result
        failed = [(rank, end.failure) for rank, end in sorted(ends.items()) if end.failure is not None]
        if failed and (clock() >= deadline or (first is not None and not first.may_be_loss)):
            rank, failure = failed[0]
            raise failure.exception(f"learner {rank}")
        sleep(POLL_SECONDS)


def _kill(group: Sequence[Learner]) -> None:
    for learner in group:
        learner.kill()


def free_port(host: str) -> int:
    """Return a free port of this machine."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as bound:
        bound.bind((host, 0))
        port: int = bound.getsockname()[1]
        return port

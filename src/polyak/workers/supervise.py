"""Supervises workers: deadlines, restarts with back-off, a budget of restarts; independent of Ray and of environments."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, runtime_checkable

from polyak.core.warn import add_note

MAX_BACK_OFF = 60.0
"""Longest time in seconds before a worker is started again."""

MAX_FAILURES = 5
"""Consecutive failures after which a worker is lost, if training can go on without it or no worker has ever succeeded."""

MAX_PATIENCE = 4
"""Largest multiple of `timeout` that a request to a slow worker may take."""

MAX_LATE_STARTS = 2
"""Timeouts in the first start of a worker after which the worker is lost."""


def back_off(failures: int) -> float:
    """Return the seconds before a restart: 0 after the first failure in a row, then 1, 2, 4, ... up to 60."""
    return 0.0 if failures <= 1 else min(2.0 ** (failures - 2), MAX_BACK_OFF)


def last_line(log: IO[bytes]) -> str:
    """Return the last line of a process's log file, up to 200 characters; empty if there is none."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


CLOSE_SECONDS = 2.0
"""Seconds to wait for environments to close; a worker may hang, or be in a rollout."""


class StoppedBeforeStart(Exception):
    """A stop was requested before training began: workers had not started, or learners had not connected.

    Raised during a restart of the learners too.
    """


class WorkerLost(Exception):
    """A worker died; the message says how."""


@runtime_checkable
class Engine(Protocol):
    """Starts workers and calls their methods, in this process or by Ray."""

    def start(self, payload: bytes) -> Any:
        """Start a worker, and return its handle at once.

        Raises:
            RuntimeError: the engine has ended.
        """
        ...

    def call(self, handle: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns the call at once. Calls to the same worker run in order."""
        ...

    def share(self, value: Any) -> Any:
        """Return a reference to a mapping of arrays for use in several calls, so that large arrays are sent once."""
        ...

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Return the finished calls, as soon as there is one, or after `seconds`.

        Raises:
            RuntimeError: the engine has ended.
        """
        ...

    def result(self, call: Any) -> Any:
        """Return the result of a finished call.

        Raises:
            WorkerLost: the worker died.
        """
        ...

    def end(self, handle: Any) -> None:
        """End a worker, without waiting for it."""
        ...

    def shortage(self) -> str:
        """Describe, as a clause, the resources that are missing to run all workers at once; empty if none is missing."""
        ...

    def close(self) -> None:
        """End all workers and the engine."""
        ...


@dataclass(frozen=True)
class WorkerEvent:
    """An event of a worker: `"started"`, `"failed"` (restarts), `"restarted"`, `"lost"` (failed, and does not restart).

    Attributes:
        worker: number of the worker.
        event: name of the event.
        detail: clause that says why the worker failed.
        node: machine of the worker; None if it has not started.
        pid: process id of the worker on its machine.
    """

    worker: int
    event: str
    detail: str = ""
    node: str | None = None
    pid: int | None = None

    def failure(self) -> str | None:
        """Describe the failure and whether the worker restarts, as a sentence; None if the event is no failure."""
        ends = {"failed": "starting it again", "lost": "it is not started again"}
        return f"worker {self.worker} {self.detail}; {ends[self.event]}" if self.event in ends else None


@dataclass
class _Worker:
    """The supervisor's record of one worker.

    Attributes:
        handle: handle of the engine; None while the worker waits for its restart.
        call: the call in progress, or None.
        sent_at: time at which the call was made.
        deadline: time at which the call must have returned.
        patience: multiple of `timeout` that a request may take.
        late_method: the method for which `patience` was raised.
        is_starting: the call in progress is `begin`.
        request: method and arguments to call after the start, and again after a restart.
        failures: number of failures since the last accepted result.
        is_warm: a result was accepted since the last start.
        start_at: time of the next start.
        restarts: number of restarts.
        last_failure: reason of the last failure.
        is_lost: the worker is not restarted any more.
        has_begun: the worker has started at least once.
        late_starts: number of timeouts before the first successful start.
        place: machine and process id, after the start.
    """

    handle: Any = None
    call: Any = None
    sent_at: float = 0.0
    deadline: float = math.inf
    patience: int = 1
    late_method: str = ""
    is_starting: bool = False
    request: tuple[str, Sequence[Any]] | None = None
    failures: int = 0
    is_warm: bool = False
    start_at: float = 0.0
    restarts: int = 0
    last_failure: str = ""
    is_lost: bool = False
    has_begun: bool = False
    late_starts: int = 0
    place: tuple[str | None, int | None] = (None, None)

    @property
    def has_started(self) -> bool:
        """Return True if the worker can take requests now."""
        return self.handle is not None and not self.is_starting


@dataclass
class Supervisor:
    """Keeps workers alive: a worker that dies, hangs or is slow is restarted, and its request is repeated.

    A restarted worker begins with the state before the request, so nothing is lost or done twice; results of a replaced worker
    are ignored.

    If each worker has failed before any result was accepted, `MAX_FAILURES` consecutive failures of one worker end the
    training: the cause is the environment and not a machine.

    Attributes:
        engine: starts the workers and calls their methods.
        payloads: payload from which the engine starts each worker.
        begin_arguments: returns the arguments of `begin` for a worker.
        timeout: maximum seconds of a request. After a timeout the worker's limit doubles, up to `MAX_PATIENCE` times `timeout`,
            until a request of the same method takes less than `timeout`.
        start_timeout: maximum seconds of a start.
        budget: maximum number of restarts of all workers together.
        on_event: called with every event.
        clock: monotonic clock in seconds.
        warm_up: additional seconds of a request until a result is accepted, for compilation.
        min_workers: number of workers that training needs. While at least this many other workers are left, a worker is lost if
            it fails `MAX_FAILURES` times in a row, does not start in time at the beginning, or fails when the budget is spent;
            otherwise it is restarted until the budget is spent. None needs all workers.
        place_of: returns machine and process id of a worker from the result of its start.

    Raises:
        RuntimeError: the budget is spent, too few workers are left, or no worker has ever succeeded.
        Exception: the exception of the last failure, if no worker has ever succeeded.
    """

    engine: Engine
    payloads: Sequence[bytes]
    begin_arguments: Callable[[int], Sequence[Any]]
    timeout: float
    start_timeout: float
    budget: int
    on_event: Callable[[WorkerEvent], None]
    clock: Callable[[], float] = time.monotonic
    warm_up: float = 0.0
    min_workers: int | None = None
    place_of: Callable[[Any], tuple[str | None, int | None]] = lambda result: (None, None)
    workers: list[_Worker] = field(default_factory=list)
    _has_worked: bool = False

    def start(self) -> None:
        """Start all workers, and return at once; the result of each start is named `"start"`."""
        self.workers = [_Worker() for _ in self.payloads]
        for index in range(len(self.workers)):
            self._start(index)

    def request(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of a worker that has no request; does nothing if the worker is lost."""
        worker = self.workers[index]
        if worker.is_lost:
            return
        assert worker.request is None, "one request at a time"
        worker.request = method, arguments
        if worker.handle is not None and worker.call is None:
            self._send(worker)

    def is_idle(self, index: int) -> bool:
        """Return True if a worker has no request and is not lost."""
        return self.workers[index].request is None and not self.workers[index].is_lost

    def is_lost(self, index: int) -> bool:
        """Return True if a worker is lost."""
        return self.workers[index].is_lost

    def is_absent(self, index: int) -> bool:
        """Return True if rollouts should not wait for a worker: lost, or restarting after two failures with enough others."""
        absent = [one.is_lost or (one.failures > 1 and not one.has_started) for one in self.workers]
        return self.workers[index].is_lost or (absent[index] and self._suffices(len(absent) - sum(absent)))

    def withdraw(self, index: int) -> None:
        """Cancel the request of a worker that has not started yet."""
        assert not self.workers[index].has_started, "it has begun"
        self.workers[index].request = None

    def is_settled(self) -> bool:
        """Return True if all workers that are not lost have started, and none has a request."""
        return all(one.is_lost or (one.request is None and one.has_started) for one in self.workers)

    def accept(self, index: int) -> None:
        """Record a success of a worker, which resets its count of consecutive failures."""
        self.workers[index].failures, self.workers[index].is_warm, self._has_worked = 0, True, True

    def forget_failures(self) -> None:
        """Reset the counts of failures and restarts, for another training run; lost workers are restarted."""
        for worker in self.workers:
            worker.failures = worker.restarts = worker.late_starts = 0
            worker.patience = 1
            worker.last_failure, worker.is_lost = "", False

    def results(self, seconds: float) -> list[tuple[int, str, Any]]:
        """Wait up to `seconds` for results; returns `(worker, method, result)` for each finished call.

        The method of a worker's start is `"start"`. Failed workers are restarted, and their requests repeated.

        Raises:
            RuntimeError: the budget of restarts is spent, or too few workers are left.
        """
        for index, worker in enumerate(self.workers):
            if worker.handle is None and not worker.is_lost and self.clock() >= worker.start_at:
                self._start(index)
        by_call = {worker.call: index for index, worker in enumerate(self.workers) if worker.call is not None}
        results = []
        for call in self.engine.wait(list(by_call), self._patience(seconds)):
            index = by_call[call]
            try:
                result = self.engine.result(call)
            except WorkerLost as error:
                self.fail(index, str(error))
                continue
            results.append((index, self._returned(index, result), result))
        for index, worker in enumerate(self.workers):
            if worker.call is not None and self.clock() >= worker.deadline:
                if worker.is_starting:
                    self._fail_to_start(index)
                else:
                    reason = self._describe_timeout(worker)
                    assert worker.request is not None, "it was called"
                    worker.patience, worker.late_method = min(2 * worker.patience, MAX_PATIENCE), worker.request[0]
                    self.fail(index, reason)
        return results

    def fail(self, index: int, reason: str, error: Exception | None = None) -> None:
        """End a worker, and restart it after `back_off` seconds or mark it as lost.

        Args:
            reason: clause that says why the worker failed.
            error: the exception that the worker raised, if any.

        Raises:
            RuntimeError: the budget of restarts is spent, too few workers are left, or no worker has ever succeeded.
            Exception: `error`, if no worker has ever succeeded.
        """
        worker = self.workers[index]
        is_spent = sum(one.restarts for one in self.workers) >= self.budget
        worker.failures += 1
        never_began = not worker.has_begun and self.clock() >= worker.deadline
        is_hopeless = never_began or worker.failures >= MAX_FAILURES
        have_all_failed = not self._has_worked and all(one.failures for one in self.workers if not one.is_lost)
        is_useless = worker.failures >= MAX_FAILURES and have_all_failed
        suffices = self._suffices(sum(not one.is_lost for one in self.workers) - 1)
        worker.is_lost = is_spent or is_useless or worker.late_starts >= MAX_LATE_STARTS or (is_hopeless and suffices)
        self.on_event(WorkerEvent(index, "lost" if worker.is_lost else "failed", reason, *worker.place))
        handle, worker.handle, worker.call, worker.last_failure = worker.handle, None, None, reason
        if worker.is_lost:
            worker.request = None
            self.engine.end(handle)
            self._check_left(index, error, is_spent=is_spent)
            return
        worker.restarts += 1
        pause = back_off(worker.failures)
        worker.start_at = self.clock() + pause
        if not pause:
            self._start(index)
        # Last, because ending a suspended process takes seconds.
        self.engine.end(handle)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of running workers, and of restarts."""
        alive = sum(worker.has_started for worker in self.workers)
        return {"workers/alive": alive, "workers/restarts": sum(worker.restarts for worker in self.workers)}

    def close(self) -> None:
        """Close the environments of running workers, and end all workers and the engine; a second call does nothing."""
        workers, self.workers = self.workers, []
        try:
            self._close_environments([one for one in workers if one.has_started])
        finally:
            self.engine.close()

    def _close_environments(self, workers: Sequence[_Worker]) -> None:
        """Wait up to `CLOSE_SECONDS` for workers to close their environments, ignoring errors."""
        deadline = self.clock() + CLOSE_SECONDS
        with contextlib.suppress(Exception):
            calls = [self.engine.call(one.handle, "close", ()) for one in workers]
            while calls and (left := deadline - self.clock()) > 0:
                done = self.engine.wait(calls, left)
                calls = [call for call in calls if call not in done]
                if not done:
                    break

    def _suffices(self, left: int) -> bool:
        """Return True if training can go on with `left` workers."""
        return self.min_workers is not None and left >= self.min_workers

    def _check_left(self, index: int, raised: Exception | None, *, is_spent: bool) -> None:
        """Check that training can go on without a lost worker.

        Raises:
            RuntimeError: too few workers are left.
            Exception: the exception of the worker, if no worker has ever succeeded.
        """
        left = sum(not one.is_lost for one in self.workers)
        if self._suffices(left):
            return
        why = f"failures in a row: {self.workers[index].failures}"
        if is_spent:
            why = f"no restart is left of restarts={self.budget}"
        fewer = "" if self.min_workers is None else f", and only {left} others are left of min_workers={self.min_workers}"
        advice = "; --worker-restarts and Workers(restarts=) allow more" if is_spent and self._has_worked else ""
        error: Exception = RuntimeError(f"worker {index} {self.workers[index].last_failure}; {why}{fewer}{advice}")
        if raised is not None and not self._has_worked:
            error = raised
            add_note(error, f"No worker has returned a valid result; worker {index}: {why}{fewer}")
        for other, one in enumerate(self.workers):
            if one.last_failure and other != index:
                add_note(error, f"worker {other} before: {one.last_failure}")
        raise error from (None if error is raised else raised)

    def _start(self, index: int) -> None:
        worker = self.workers[index]
        worker.handle = self.engine.start(self.payloads[index])
        worker.is_starting, worker.is_warm, worker.place = True, False, (None, None)
        worker.deadline = self.clock() + self.start_timeout
        worker.call = self.engine.call(worker.handle, "begin", self.begin_arguments(index))

    def _send(self, worker: _Worker) -> None:
        assert worker.request is not None, "checked by the callers"
        worker.sent_at = self.clock()
        worker.deadline = worker.sent_at + worker.patience * self.timeout + (0.0 if worker.is_warm else self.warm_up)
        worker.call = self.engine.call(worker.handle, *worker.request)

    def _describe_timeout(self, worker: _Worker) -> str:
        """Describe a timeout, and the options that allow more time."""
        assert worker.request is not None, "it was called"
        limit = f"timeout={self.timeout:g} s"
        if worker.patience > 1:
            limit = f"{worker.patience} times {limit}"
        if self.warm_up and not worker.is_warm:
            limit += f" and {self.warm_up:g} s to compile"
        return f"did not return from {worker.request[0]}() within {limit}; --worker-timeout and Workers(timeout=) allow more"

    def _fail_to_start(self, index: int) -> None:
        """Handle a start that takes too long; see `fail`.

        Raises:
            RuntimeError: the engine lacks resources for all workers.
        """
        worker, shortage = self.workers[index], self.engine.shortage()
        limit = f"start_timeout={self.start_timeout:g} s"
        if shortage and not worker.has_begun and self.min_workers is None:
            raise RuntimeError(
                f"train: worker {index} did not start within {limit}: {shortage}; start fewer workers, or give them more time"
            )
        worker.late_starts += not worker.has_begun
        why = shortage or "it is slow, or waits for a free CPU"
        if worker.late_starts >= MAX_LATE_STARTS and not shortage:
            why = "the constructor or reset() of the environment did not return, or no CPU was free"
        self.fail(index, f"did not return from begin() within {limit}: {why}")

    def _returned(self, index: int, result: Any) -> str:
        """Record that the worker's call has returned; returns the name of its method."""
        worker = self.workers[index]
        worker.call = None
        if not worker.is_starting:
            assert worker.request is not None, "it was called"
            method, worker.request = worker.request[0], None
            if method == worker.late_method and self.clock() - worker.sent_at <= self.timeout:
                worker.patience = 1
            return method
        worker.is_starting, worker.has_begun, worker.place = False, True, self.place_of(result)
        self.on_event(WorkerEvent(index, "restarted" if worker.restarts else "started", "", *worker.place))
        if worker.request is not None:
            self._send(worker)
        return "start"

    def _patience(self, seconds: float) -> float:
        """Return the seconds until the next deadline or start, at most `seconds`."""
        now = self.clock()
        deadlines = [worker.deadline for worker in self.workers if worker.call is not None]
        starts = [worker.start_at for worker in self.workers if worker.handle is None and not worker.is_lost]
        return max(0.0, min(seconds, *(moment - now for moment in (*deadlines, *starts, math.inf))))

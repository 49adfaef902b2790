"""Supervision of workers: deadlines, restarts with back-off, a budget of restarts. It knows neither Ray nor environments."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, runtime_checkable

MAX_BACK_OFF = 60.0
"""Longest time in seconds before a worker is started again."""

MAX_FAILURES = 5
"""Failures in a row after which a worker is given up, where training may go on with fewer or nothing has ever worked."""

MAX_PATIENCE = 4
"""How many times `timeout` a request may take of a worker that was too slow before."""

MAX_LATE_STARTS = 2
"""First starts of a worker that may take too long."""


def back_off(failures: int) -> float:
    """Seconds before the next start: none after the first failure in a row, then 1, 2, 4, ... up to 60."""
    return 0.0 if failures <= 1 else min(2.0 ** (failures - 2), MAX_BACK_OFF)


def last_line(log: IO[bytes]) -> str:
    """The last line that a process has written into a file, up to 200 characters; empty if there is none."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


CLOSE_SECONDS = 2.0
"""How long the end waits for environments that close; a worker may hang, or be in a rollout."""


class WorkerLost(Exception):
    """A worker died; the message says how."""


@runtime_checkable
class Engine(Protocol):
    """Starts workers and calls their methods: in this process, or by Ray."""

    def start(self, payload: bytes) -> Any:
        """Start a worker, and return its handle at once.

        Raises:
            RuntimeError: the engine has ended.
        """
        ...

    def call(self, handle: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns the call at once. Calls of one worker run in order."""
        ...

    def share(self, value: Any) -> Any:
        """What stands for a mapping of arrays in the arguments of several calls, so that a large one travels once."""
        ...

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """The calls that have returned, as soon as one has, or after `seconds`.

        Raises:
            RuntimeError: the engine has ended.
        """
        ...

    def result(self, call: Any) -> Any:
        """The result of a call that has returned.

        Raises:
            WorkerLost: the worker died.
        """
        ...

    def end(self, handle: Any) -> None:
        """End a worker, without waiting for it."""
        ...

    def shortage(self) -> str:
        """What it lacks to have all workers at once, as a clause; empty if it lacks nothing."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


@dataclass(frozen=True)
class WorkerEvent:
    """What happened to a worker: `"started"`, `"failed"` (it is started again), `"restarted"`, `"lost"` (it is not).

    Attributes:
        worker: which.
        event: one of these words.
        detail: why it failed.
        node: its machine; None where it has not started.
        pid: its process there.
    """

    worker: int
    event: str
    detail: str = ""
    node: str | None = None
    pid: int | None = None

    def failure(self) -> str | None:
        """What failed and whether the worker is started again, as a sentence; None if nothing did."""
        ends = {"failed": "starting it again", "lost": "it is not started again"}
        return f"worker {self.worker} {self.detail}; {ends[self.event]}" if self.event in ends else None


@dataclass
class _Worker:
    """What is known of one worker.

    Attributes:
        handle: the engine's; None while it waits to be started again.
        call: the call that has not returned, or None.
        sent_at: when it was made.
        deadline: when it must have.
        patience: how many times `timeout` its requests may take.
        late_method: the method for which it has more than once `timeout`.
        is_starting: the call is `begin`.
        request: the method and arguments to call once it has started, or again after a restart.
        failures: since the last result that was accepted.
        is_warm: a result was accepted since its start.
        start_at: when to start it again.
        restarts: how often it was.
        last_failure: the reason of the last one.
        is_lost: it was given up.
        has_begun: it has started once.
        late_starts: how often it did not start in time before it has.
        place: its machine and process, once it has started.
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
        """Whether it can take requests now."""
        return self.handle is not None and not self.is_starting


@dataclass
class Supervisor:
    """Keeps workers alive: one that dies, hangs or is slow is made again, and repeats its request.

    A request is repeated on a worker that begins with the state of before it, so nothing is lost or done twice; the result of
    a worker that was given up is ignored.

    Where no result of any worker has been accepted yet, and each has failed, `MAX_FAILURES` in a row of one of them end the
    training: the fault is that of the environment, and not of a machine.

    Attributes:
        engine: starts and calls them.
        payloads: what each worker is made of.
        begin_arguments: the arguments of the `begin` of a worker, new or made again.
        timeout: seconds that a request may take. Of a worker that takes longer, each next one may take twice as long, at most
            `MAX_PATIENCE` times `timeout`, until one of the same method takes less than `timeout`.
        start_timeout: seconds that a start may take.
        budget: restarts of all workers together, after which the training ends.
        on_event: called with every event.
        clock: the monotonic clock in seconds.
        warm_up: further seconds that requests may take until a result is accepted: a worker may have to compile.
        min_workers: how many workers training needs. While at least as many others are left, a worker that fails `MAX_FAILURES`
            times in a row, does not start in time at the beginning, or fails without a restart left, is given up; otherwise it
            is restarted until the budget is spent. None needs all.
        place_of: machine and process of a worker by the result of its start.

    Raises:
        RuntimeError: the budget is spent, too few workers are left, or none has ever worked.
        Exception: what the last failure raised, where none has ever worked.
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
        """Call a method of a worker that has no request; of one that is lost, nothing is called."""
        worker = self.workers[index]
        if worker.is_lost:
            return
        assert worker.request is None, "one request at a time"
        worker.request = method, arguments
        if worker.handle is not None and worker.call is None:
            self._send(worker)

    def is_idle(self, index: int) -> bool:
        """Whether a worker has no request, and is not lost."""
        return self.workers[index].request is None and not self.workers[index].is_lost

    def is_lost(self, index: int) -> bool:
        """Whether a worker was given up."""
        return self.workers[index].is_lost

    def is_absent(self, index: int) -> bool:
        """Whether nobody should wait for a worker: it is lost, or failed twice in a row and is not back, and others suffice."""
        absent = [one.is_lost or (one.failures > 1 and not one.has_started) for one in self.workers]
        return self.workers[index].is_lost or (absent[index] and self._suffices(len(absent) - sum(absent)))

    def withdraw(self, index: int) -> None:
        """Take back the request of a worker that has not started yet."""
        assert not self.workers[index].has_started, "it has begun"
        self.workers[index].request = None

    def is_settled(self) -> bool:
        """Whether all workers that are not lost have started, and none has a request."""
        return all(one.is_lost or (one.request is None and one.has_started) for one in self.workers)

    def accept(self, index: int) -> None:
        """Count a result as a success: the next failure of its worker is the first in a row."""
        self.workers[index].failures, self.workers[index].is_warm, self._has_worked = 0, True, True

    def forget_failures(self) -> None:
        """Begin to count failures and restarts anew, for another training; workers that are lost are started again."""
        for worker in self.workers:
            worker.failures = worker.restarts = worker.late_starts = 0
            worker.patience = 1
            worker.last_failure, worker.is_lost = "", False

    def results(self, seconds: float) -> list[tuple[int, str, Any]]:
        """Wait for results, at most for so long: `(worker, method, result)` of those that have returned.

        Starts of workers are among them, as `"start"`; a worker that failed is started again, and its request is repeated.

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
        """End a worker and start it again, at once after its first failure in a row, else after a while; or give it up.

        Args:
            reason: why, as a clause.
            error: what it raised, if it did.

        Raises:
            RuntimeError: the budget of restarts is spent, too few workers are left, or none has ever worked.
            Exception: `error`, where none has ever worked.
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
        # Last, because ending a stopped process takes seconds.
        self.engine.end(handle)

    def metrics(self) -> Mapping[str, float]:
        """The number of workers that are there, and of restarts."""
        alive = sum(worker.has_started for worker in self.workers)
        return {"workers/alive": alive, "workers/restarts": sum(worker.restarts for worker in self.workers)}

    def close(self) -> None:
        """Close the environments of the workers that are there, and end all, and the engine; a second call does nothing."""
        workers, self.workers = self.workers, []
        try:
            self._close_environments([one for one in workers if one.has_started])
        finally:
            self.engine.close()

    def _close_environments(self, workers: Sequence[_Worker]) -> None:
        """Let workers close their environments, which takes them `CLOSE_SECONDS` at most; those that fail are ended anyway."""
        deadline = self.clock() + CLOSE_SECONDS
        with contextlib.suppress(Exception):
            calls = [self.engine.call(one.handle, "close", ()) for one in workers]
            while calls and (left := deadline - self.clock()) > 0:
                done = self.engine.wait(calls, left)
                calls = [call for call in calls if call not in done]
                if not done:
                    break

    def _suffices(self, left: int) -> bool:
        """Whether training may go on with so many workers."""
        return self.min_workers is not None and left >= self.min_workers

    def _check_left(self, index: int, raised: Exception | None, *, is_spent: bool) -> None:
        """Check that training can go on without a worker that is lost.

        Raises:
            RuntimeError: it cannot.
            Exception: what the worker raised, where none has ever worked.
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
            error.add_note(f"No worker has returned a valid result; worker {index}: {why}{fewer}")
        for other, one in enumerate(self.workers):
            if one.last_failure and other != index:
                error.add_note(f"worker {other} before: {one.last_failure}")
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
        """What a worker did not do in which time, and how it gets more."""
        assert worker.request is not None, "it was called"
        limit = f"timeout={self.timeout:g} s"
        if worker.patience > 1:
            limit = f"{worker.patience} times {limit}"
        if self.warm_up and not worker.is_warm:
            limit += f" and {self.warm_up:g} s to compile"
        return f"did not return from {worker.request[0]}() within {limit}; --worker-timeout and Workers(timeout=) allow more"

    def _fail_to_start(self, index: int) -> None:
        """Give up a start that takes too long, as `fail`.

        Raises:
            RuntimeError: the workers have never been there, and cannot be.
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
        """Note that the worker's call has returned; the name of its method."""
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
        """The time until the next deadline or start, at most `seconds`."""
        now = self.clock()
        deadlines = [worker.deadline for worker in self.workers if worker.call is not None]
        starts = [worker.start_at for worker in self.workers if worker.handle is None and not worker.is_lost]
        return max(0.0, min(seconds, *(moment - now for moment in (*deadlines, *starts, math.inf))))

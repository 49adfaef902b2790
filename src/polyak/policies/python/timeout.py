"""A time limit for calls of Python that may never return."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

Request: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


class TimeLimitedCaller:
    """Calls functions in another thread, and waits a limited time for each call.

    A call that is late, or whose wait was interrupted, is abandoned: nothing can end it, but neither the next call nor the
    exit of the process waits for it, and its result is dropped.

    Args:
        seconds: time limit of one call.
        callee: name of the callee, for the error.
    """

    def __init__(self, seconds: float, callee: str) -> None:
        self._seconds, self._callee = seconds, callee
        # A worker belongs to one call at a time, also where several threads call.
        self._idle: deque[_Worker] = deque()
        weakref.finalize(self, _end, self._idle)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`.

        Raises:
            TimeoutError: the function did not return in time.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        worker.requests.put((function, args))
        try:
            result, error = worker.results.get(timeout=self._seconds)
        except BaseException as late:
            worker.requests.put(None)
            if not isinstance(late, Empty):
                raise
            raise TimeoutError(f"{self._callee} did not return within timeout={self._seconds:g} seconds") from None
        self._idle.append(worker)
        if error is not None:
            raise error
        return result


class _Worker:
    """A thread that runs requests until it receives None."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Request | None] = SimpleQueue()
        self.results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=_work, args=(self.requests, self.results), name="polyak-deadline", daemon=True).start()


def _end(workers: "deque[_Worker]") -> None:
    for worker in workers:
        worker.requests.put(None)


def _work(requests: "SimpleQueue[Request | None]", results: "SimpleQueue[tuple[Any, BaseException | None]]") -> None:
    while (request := requests.get()) is not None:
        function, args = request
        try:
            results.put((function(*args), None))
        except BaseException as error:
            results.put((None, error))

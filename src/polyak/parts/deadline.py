"""A time limit for calls of Python that may never return."""

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

Request: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


class Deadline:
    """Calls functions in a thread of its own, and waits so long for each and no longer.

    A call that is late is left to itself: nothing can end it, but nobody waits for it, neither the next call nor the end of the
    process.

    Args:
        seconds: for one call.
        who: for the error.
    """

    def __init__(self, seconds: float, who: str) -> None:
        self._seconds, self._who = seconds, who
        self._worker: _Worker | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`.

        Raises:
            TimeoutError: it did not return in time.
        """
        worker = self._worker
        if worker is None:
            worker = self._worker = _Worker()
            weakref.finalize(self, worker.requests.put, None)
        worker.requests.put((function, args))
        try:
            result, error = worker.answers.get(timeout=self._seconds)
        except Empty:
            worker.requests.put(None)
            self._worker = None
            raise TimeoutError(f"{self._who} did not answer within timeout={self._seconds:g} seconds") from None
        if error is not None:
            raise error
        return result


class _Worker:
    """A thread that answers requests until it is asked None."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Request | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=_work, args=(self.requests, self.answers), name="polyak-deadline", daemon=True).start()


def _work(requests: "SimpleQueue[Request | None]", answers: "SimpleQueue[tuple[Any, BaseException | None]]") -> None:
    while (request := requests.get()) is not None:
        function, args = request
        try:
            answers.put((function(*args), None))
        except BaseException as error:
            answers.put((None, error))

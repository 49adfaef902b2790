"""Workers in this process, one after the other: for tests and debuggers."""

from collections.abc import Sequence
from typing import Any

from polyak.workers.rollout_worker import RolloutWorker


class InProcessWorkers:
    """An `Engine` whose calls run at once."""

    def __init__(self) -> None:
        self._workers: list[RolloutWorker] = []

    def start(self, payload: bytes) -> RolloutWorker:
        """Create a worker."""
        worker = RolloutWorker(payload)
        self._workers.append(worker)
        return worker

    def call(self, handle: RolloutWorker, method: str, arguments: Sequence[Any]) -> "_Call":
        """Call the method now."""
        return _Call(getattr(handle, method)(*arguments))

    def share(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def wait(self, calls: Sequence["_Call"], seconds: float) -> Sequence["_Call"]:
        """Return all calls."""
        return calls

    def result(self, call: "_Call") -> Any:
        """Return the result of the call."""
        return call.result

    def end(self, handle: RolloutWorker) -> None:
        """Close the worker's environments."""
        handle.close()
        self._workers.remove(handle)

    def shortage(self) -> str:
        """Return an empty text: no resource is missing."""
        return ""

    def close(self) -> None:
        """Close all environments."""
        for worker in list(self._workers):
            self.end(worker)


class _Call:
    """A call that has returned; equal only to itself."""

    def __init__(self, result: Any) -> None:
        self.result = result

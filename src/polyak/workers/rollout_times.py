"""Metrics of worker rollouts: time per phase, and policy staleness."""

import time
from collections.abc import Callable, Sequence

import numpy as np


class RolloutTimes:
    """Accumulates times and staleness of the rollouts of one report.

    Args:
        num_workers: number of workers.
        clock: monotonic clock in seconds.

    Attributes:
        waited: seconds that the learner waited for workers.
        updated: seconds that the learner spent in updates.
    """

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_workers, self._clock, self._start = num_workers, clock, clock()
        self.waited = self.updated = 0.0
        self._seconds: list[float] = []
        self._staleness: list[int] = []
        self._iterations = 0

    def add(self, seconds: Sequence[float], staleness: Sequence[int]) -> None:
        """Add the rollouts that one update learns from.

        Args:
            seconds: seconds that each rollout took in its worker.
            staleness: number of updates by which the policy of each rollout is older than the update.
        """
        self._seconds += seconds
        self._staleness += staleness
        self._iterations += 1

    def metrics(self) -> dict[str, float]:
        """Return the metrics by tag."""
        elapsed, busy = max(self._clock() - self._start, 1e-9), sum(self._seconds)
        iterations = max(self._iterations, 1)
        return {
            "staleness/mean": float(np.mean(self._staleness or [0])),
            "staleness/max": float(max(self._staleness or [0])),
            "time/collect": busy / max(len(self._seconds), 1),
            "time/wait": self.waited / iterations,
            "time/update": self.updated / iterations,
            "workers/idle_share": max(0.0, 1.0 - busy / elapsed / self._num_workers),
            "workers/slowest_seconds": max(self._seconds, default=0.0),
        }

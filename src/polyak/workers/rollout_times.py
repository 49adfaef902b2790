"""Where the time of a training with workers goes, and how old the policies of its rollouts are: the metrics of one report."""

import time
from collections.abc import Callable, Sequence

import numpy as np


class RolloutTimes:
    """What the rollouts of one report took.

    Args:
        num_workers: how many workers collect.
        clock: in seconds.

    Attributes:
        waited: seconds in which the learner waited for workers.
        updated: seconds in which it learned.
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
            seconds: that each took in its worker.
            staleness: updates between the policy of each and that update.
        """
        self._seconds += seconds
        self._staleness += staleness
        self._iterations += 1

    def metrics(self) -> dict[str, float]:
        """By tag."""
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

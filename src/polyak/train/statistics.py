"""Statistics over the runs of several seeds: mean, interquartile mean, and a bootstrap interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyak.core.printing import format_number
from polyak.reports.statistics import iqm

RESAMPLES = 10_000


@dataclass(frozen=True)
class SeedStatistics:
    """Mean, interquartile mean and its interval over several seeds.

    Attributes:
        mean: mean over the seeds.
        iqm: interquartile mean, the mean without the lowest and the highest floor(count / 4) seeds.
        low: lower end of the 95 % interval of `iqm`.
        high: upper end of the 95 % interval of `iqm`.
        count: number of seeds.
    """

    mean: float
    iqm: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        mean, iqm, low, high = map(format_number, (self.mean, self.iqm, self.low, self.high))
        return f"return over {self.count} seeds: mean {mean}, IQM {iqm}, 95 % interval of the IQM [{low}, {high}]"


def seed_statistics(returns: Sequence[float]) -> SeedStatistics:
    """Compute mean and interquartile mean of the seeds' mean returns, with a percentile bootstrap over the seeds.

    The resampling has a fixed seed, so that equal returns give an equal interval.

    Raises:
        ValueError: there are no returns, or several for a seed.

    Source: Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical precipice, arXiv:2108.13264.

    >>> seed_statistics([0.0, 1.0, 2.0, 9.0]).iqm
    1.5
    """
    values = np.asarray(returns, np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"seed_statistics: returns must be one number for each of 1 or more seeds, got shape {values.shape}")
    resamples = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(iqm(resamples[..., None]), (0.025, 0.975))
    return SeedStatistics(float(values.mean()), float(iqm(values[..., None])), float(low), float(high), len(values))

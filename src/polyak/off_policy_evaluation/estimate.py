"""The result of an off-policy evaluation, and its interval by a bootstrap over episodes."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyak.core.printing import format_number
from polyak.core.warn import warn

Floats: TypeAlias = npt.NDArray[np.float64]

# Numbers of a bootstrap that are in memory at once.
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True, repr=False)
class Estimate:
    """The estimated value of a policy: its expected discounted return from the first observation of an episode.

    Attributes:
        value: the estimate.
        low: lower end of the confidence interval.
        high: upper end of the confidence interval.
        standard_error: standard deviation of the bootstrap's estimates.
        confidence: confidence level of the interval.
        method: `"fqe"`, `"is"`, `"wis"`, `"dr"` or `"dm"`.
        gamma: the discount per step.
        episodes: number of episodes of the data.
        effective_sample_size: (Σ w)² / Σ w² of the episodes' importance weights w, the number of episodes of the policy itself
            that would tell as much; None for methods without importance weights.
        q: the action values that `"fqe"` has learned, a `FittedQ`; None for the others.
    """

    value: float
    low: float
    high: float
    standard_error: float
    confidence: float
    method: str
    gamma: float
    episodes: int
    effective_sample_size: float | None = None
    q: Callable[[Any, Any], Any] | None = None

    def __str__(self) -> str:
        value, low, high = map(format_number, (self.value, self.low, self.high))
        size = self.effective_sample_size
        effective = "" if size is None else f", effective {format_number(size)}"
        return (
            f"{self.method}: {value}, {100 * self.confidence:g} % interval [{low}, {high}], gamma {self.gamma:g}, "
            f"{self.episodes} episodes{effective}"
        )

    def __repr__(self) -> str:
        return f"Estimate({self})"


@dataclass(frozen=True)
class Estimator:
    """An estimator Σ_t Σ_i x_{i,t} / Σ_i w_{i,t} over episodes i; a mean has one column and weights 1.

    Attributes:
        x: `[E, T]`.
        weight: w `[E, T]`, at least 0.
    """

    x: Floats
    weight: Floats

    @classmethod
    def mean(cls, values: Floats) -> "Estimator":
        """The mean of one value for each episode `[E]`."""
        return cls(values[:, None], np.ones((len(values), 1)))

    def resample(self, counts: Floats) -> Floats:
        """The estimates `[R]` of data that have each episode as often as `counts` `[R, E]`; NaN where weights are all 0."""
        with np.errstate(invalid="ignore"):
            return np.asarray((counts @ self.x / (counts @ self.weight)).sum(axis=1))

    def bootstrap(self, *, resamples: int, seed: int, confidence: float) -> tuple[float, float, float, float]:
        """The estimate, and the percentile interval and standard error of a bootstrap over episodes.

        Returns:
            value, low, high, standard error.

        Raises:
            ValueError: no resample has a weight above 0.

        Source: Efron 1979, Bootstrap methods: another look at the jackknife, doi:10.1214/aos/1176344552.
        """
        rng, episodes, estimates = np.random.default_rng(seed), len(self.x), []
        size = max(1, _NUMBERS_AT_ONCE // sum(self.x.shape))
        for start in range(0, resamples, size):
            estimates.append(self.resample(draw_counts(rng, min(size, resamples - start), episodes)))
        all_estimates = np.concatenate(estimates)
        finite = all_estimates[~np.isnan(all_estimates)]
        if num_nan := resamples - len(finite):
            unknown = f"evaluate_offline: {num_nan} of {resamples} resamples have no episode with a weight above 0"
            if not len(finite):
                raise ValueError(f"{unknown}; use method='fqe', or more resamples")
            warn(f"{unknown}, and the interval leaves them out: it is too narrow")
        tail = 50 * (1 - confidence)
        low, high = np.percentile(finite, (tail, 100 - tail))
        return float(self.resample(np.ones((1, episodes)))[0]), float(low), float(high), float(finite.std())


def draw_counts(rng: np.random.Generator, resamples: int, episodes: int) -> Floats:
    """The number of times that each of E episodes is in each resample of E, `[R, E]`."""
    return rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=resamples).astype(np.float64)


def student_interval(value: float, estimates: Floats, confidence: float) -> tuple[float, float, float]:
    """The interval of Student's t around a value, from at least five estimates of resampled data; and the standard error.

    The quantile of t with n - 1 degrees of freedom is a series in the normal one (Abramowitz and Stegun, 26.7.5).
    """
    error = float(estimates.std(ddof=1))
    z, freedom = NormalDist().inv_cdf(0.5 + confidence / 2), len(estimates) - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return value - t * error, value + t * error, error

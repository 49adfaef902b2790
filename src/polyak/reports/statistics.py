"""Statistics over runs: interquartile mean, bootstrap intervals, performance profiles and probability of improvement.

Scores are arrays `[..., runs, tasks]`; leading axes are resamples. A task is an environment, or a pair of an environment and a
point of the training. NaN is an error: sorting would count it as the highest score.

Source: Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical precipice, arXiv:2108.13264, whose
library `rliable` gives the same numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 2_000
"""Number of bootstrap resamples."""

LEVEL = 0.95
"""Confidence level of the intervals."""

_BATCH = 2**22
"""Number of scores that are resampled at once."""


def iqm(scores: npt.ArrayLike) -> Any:
    """Interquartile mean over runs and tasks together: the mean without the lowest and the highest floor(count / 4) scores.

    >>> float(iqm([[0.0], [1.0], [2.0], [9.0]]))
    1.5
    """
    ordered = np.sort(_flatten(scores), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def mean(scores: npt.ArrayLike) -> Any:
    """Mean over runs and tasks."""
    return _flatten(scores).mean(axis=-1)


def median(scores: npt.ArrayLike) -> Any:
    """Median over the tasks of the mean over the runs."""
    return np.median(_without_nan(scores).mean(axis=-2), axis=-1)


def optimality_gap(scores: npt.ArrayLike, *, target: float = 1.0) -> Any:
    """Mean amount by which scores miss a target, target - mean(min(score, target)); scores above it do not make up for it.

    Args:
        scores: scores `[..., runs, tasks]`, normalized if there are several tasks.
        target: the desired score.
    """
    return target - np.minimum(_flatten(scores), target).mean(axis=-1)


def performance_profile(scores: npt.ArrayLike, thresholds: npt.ArrayLike) -> Floats:
    """Fraction of runs and tasks with a score above each threshold, `[..., thresholds]`: the run-score distribution."""
    ordered, limits = np.sort(_flatten(scores), axis=-1), np.asarray(thresholds, np.float64)
    rows = ordered.reshape(-1, ordered.shape[-1])
    above = np.array([row.size - np.searchsorted(row, limits, side="right") for row in rows]) / ordered.shape[-1]
    return np.asarray(above.reshape(*ordered.shape[:-1], *limits.shape), np.float64)


def probability_of_improvement(scores: npt.ArrayLike, others: npt.ArrayLike) -> Any:
    """Probability that a run scores higher than one of the others on the same task, mean over tasks; equal scores count half.

    It is the Mann-Whitney U statistic over the number of pairs.

    Args:
        scores: scores `[..., runs, tasks]`.
        others: scores `[..., other runs, tasks]` of the same tasks.
    """
    a, b = _without_nan(scores)[..., :, None, :], _without_nan(others)[..., None, :, :]
    return ((a > b) + 0.5 * (a == b)).mean(axis=(-3, -2, -1))


def resample_runs(runs: int, tasks: int, *, resamples: int = RESAMPLES, seed: int = 0) -> npt.NDArray[np.int64]:
    """Draw runs with replacement, for each task on its own: indices `[resamples, runs, tasks]` of a stratified bootstrap."""
    return np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))


def bootstrap_interval(
    statistic: Callable[..., Any],
    *scores: npt.ArrayLike,
    indices: Sequence[npt.NDArray[np.int64]] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> tuple[Any, Any]:
    """Percentile interval of a statistic by a bootstrap that is stratified over the tasks; equal scores give equal intervals.

    Args:
        statistic: function of arrays `[resamples, runs, tasks]` such as `iqm`; returns `[resamples, ...]`.
        scores: an array `[runs, tasks]` for each argument of the statistic; each is resampled on its own.
        indices: the runs that are drawn, `[resamples, runs, tasks]` for each array; None draws them.
        resamples: number of resamples.
        seed: seed of the draws.
        level: confidence level.

    Returns:
        The lower and the upper end.
    """
    arrays = [np.asarray(array, np.float64) for array in scores]
    if indices is None:
        indices = [resample_runs(*array.shape, resamples=resamples, seed=seed + n) for n, array in enumerate(arrays)]
    step = max(1, _BATCH // max(array.size for array in arrays))
    values = [
        statistic(*(np.take_along_axis(a[None], i[start : start + step], axis=1) for a, i in zip(arrays, indices, strict=True)))
        for start in range(0, len(indices[0]), step)
    ]
    return _interval(np.concatenate(values), level)


def iqm_intervals(
    scores: npt.ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> tuple[Floats, Floats, Floats]:
    """Interquartile mean over the runs and its interval, at each of many points, as of a curve.

    A resample of sorted scores is sorted by its ranks alone, which are the same for all points. So the interquartile mean of
    every resample is a weighted sum of the sorted scores, and the interquartile means at all points are one matrix product.

    Args:
        scores: scores `[runs, points]`, without NaN.
        resamples: number of resamples.
        seed: seed of the draws.
        level: confidence level.

    Returns:
        Interquartile mean, lower and upper end, each `[points]`.
    """
    ordered = np.sort(np.asarray(scores, np.float64), axis=0).T
    weights = _iqm_weights(ordered.shape[1], resamples, seed)
    # Not `@`: the threads of BLAS take ten times as long for small matrices while other programs use the cores.
    return iqm(ordered[..., None]), *_interval(np.einsum("pr,rs->ps", ordered, weights).T, level)


@functools.cache
def _iqm_weights(runs: int, resamples: int, seed: int) -> Floats:
    """Return the weights `[runs, resamples]` of sorted scores in the interquartile mean of each resample."""
    ranks = np.sort(resample_runs(runs, 1, resamples=resamples, seed=seed)[..., 0], axis=1)
    cut = runs // 4
    inner = ranks[:, cut : runs - cut]
    return np.ascontiguousarray((inner[:, :, None] == np.arange(runs)).sum(axis=1).T / inner.shape[1])


def _interval(values: Floats, level: float) -> tuple[Any, Any]:
    """Return the quantiles of the first axis at both ends of an interval, by linear interpolation as `np.quantile`."""
    # NumPy sorts faster than it partitions.
    ordered = np.sort(np.moveaxis(values, 0, -1), axis=-1)
    last = ordered.shape[-1] - 1
    ends = []
    for quantile in ((1 - level) / 2, (1 + level) / 2):
        position = last * quantile
        below, part = int(position), position - int(position)
        ends.append(ordered[..., below] * (1 - part) + ordered[..., min(below + 1, last)] * part)
    return ends[0], ends[1]


def _flatten(scores: npt.ArrayLike) -> Floats:
    """Return scores with runs and tasks as one axis."""
    array = _without_nan(scores)
    return array.reshape(*array.shape[:-2], -1)


def _without_nan(scores: npt.ArrayLike) -> Floats:
    """Return scores as floats.

    Raises:
        ValueError: a score is NaN.
    """
    array = np.asarray(scores, np.float64)
    if np.isnan(array).any():
        raise ValueError("statistics: scores must not be NaN; leave these runs out, or give them the score of a failure")
    return array

"""Importance sampling and doubly robust estimators, in NumPy; each term is in the words of its paper."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from polyak.core.warn import warn
from polyak.off_policy_evaluation.estimate import Estimator, Floats

# With fewer effective episodes, a few of them decide an estimate.
LEAST_EFFECTIVE = 10
# Sums of squares of larger weights, times rewards, overflow.
LARGEST_LOG_WEIGHT = 200.0


@dataclass(frozen=True)
class ImportanceRatios:
    """The N steps of E episodes, with the ratios ρ_t = π(a_t|s_t) / μ(a_t|s_t) of the policy and the behavior.

    Attributes:
        reward: r_t `[N]`.
        log_ratio: log ρ_t `[N]`; -inf where π is 0.
        lengths: L of each episode `[E]`.
        gamma: discount per step.
    """

    reward: Floats
    log_ratio: Floats
    lengths: npt.NDArray[np.int64]
    gamma: float

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first step of each episode `[E]`."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def time(self) -> npt.NDArray[np.int64]:
        """The time t of each step within its episode `[N]`, from 0."""
        return np.arange(len(self.reward)) - np.repeat(self.starts, self.lengths)

    @cached_property
    def log_weight(self) -> Floats:
        """Log w_t = Σ_{k≤t} log ρ_k `[N]`."""
        return np.concatenate([np.cumsum(part) for part in np.split(self.log_ratio, self.starts[1:])])

    @cached_property
    def log_episode_weight(self) -> Floats:
        """Log w_{L-1}, the weight of each whole episode `[E]`."""
        return self.log_weight[self.starts + self.lengths - 1]

    def discounted_sum(self, x: Floats) -> Floats:
        """Σ_t γ^t x_t of each episode `[E]`."""
        return np.add.reduceat(np.power(self.gamma, self.time, dtype=np.float64) * x, self.starts)


def importance_sampling(ratios: ImportanceRatios, *, per_decision: bool) -> Estimator:
    """The estimate of each episode, whose mean is unbiased.

        w_{L-1} Σ_t γ^t r_t,    per decision Σ_t γ^t w_t r_t

    Source: Precup, Sutton and Singh 2000, Eligibility traces for off-policy policy evaluation.
    """
    if per_decision:
        return Estimator.mean(ratios.discounted_sum(_clipped_weight(ratios.log_weight) * ratios.reward))
    return Estimator.mean(_clipped_weight(ratios.log_episode_weight) * ratios.discounted_sum(ratios.reward))


def weighted_importance_sampling(ratios: ImportanceRatios, *, per_decision: bool) -> Estimator:
    """Importance sampling divided by the sum of the weights.

        Σ_i w_i G_i / Σ_i w_i,    per decision Σ_t γ^t Σ_i w_{i,t} r_{i,t} / Σ_i w_{i,t}

    Biased, by less the more episodes there are, with a smaller variance. After its end an episode keeps its weight, with a
    reward of 0.

    Source: Precup, Sutton and Singh 2000; per decision, Thomas 2015, Safe reinforcement learning, section 3.8.
    """
    if per_decision:
        episode = np.repeat(np.arange(len(ratios.lengths)), ratios.lengths)
        log_weight = np.repeat(ratios.log_episode_weight[:, None], int(ratios.lengths.max()), axis=1)
        reward = np.zeros(log_weight.shape)
        log_weight[episode, ratios.time] = ratios.log_weight
        reward[episode, ratios.time] = np.power(ratios.gamma, ratios.time, dtype=np.float64) * ratios.reward
    else:
        log_weight, reward = ratios.log_episode_weight[:, None].copy(), ratios.discounted_sum(ratios.reward)[:, None]
    # Only the proportions count, so the largest weight of each step is 1 and none overflows. In place: [E, T] is large.
    log_weight -= log_weight.max(axis=0)
    weight = np.exp(log_weight, out=log_weight)
    reward *= weight
    return Estimator(reward, weight)


def doubly_robust(ratios: ImportanceRatios, value: Floats, q: Floats, next_value: Floats) -> Estimator:
    """The doubly robust estimate of each episode.

        V_DR(s_t) = V(s_t) + ρ_t (r_t + γ V_DR(s_{t+1}) - Q(s_t, a_t)),
        so V_DR(s_0) = V(s_0) + Σ_t γ^t w_t (r_t + γ V(s_{t+1}) - Q(s_t, a_t))

    Its mean is unbiased if Q is independent of the episode and the ratios are right; and right if Q is.

    Args:
        value: V(s_t) `[N]`.
        q: Q(s_t, a_t) `[N]`.
        next_value: V(s_{t+1}) `[N]`, 0 after a terminal state. An episode that was cut short ends with V of its final
            observation, whose error nothing corrects.

    Source: Jiang and Li 2016, arXiv:1511.03722, eq. 10.
    """
    error = ratios.reward + ratios.gamma * next_value - q
    return Estimator.mean(value[ratios.starts] + ratios.discounted_sum(_clipped_weight(ratios.log_weight) * error))


def effective_sample_size(log_weight: Floats) -> float:
    """(Σ w)² / Σ w²; 0 if all weights are 0.

    Source: Kong 1992, A note on importance sampling using standardized weights.

    >>> effective_sample_size(np.array([700.0, 700.0, -np.inf, 0.0]))
    2.0
    """
    if np.isneginf(log_weight).all():
        return 0.0
    weight = np.exp(log_weight - log_weight.max())
    return float(weight.sum() ** 2 / np.square(weight).sum())


def warn_of_poor_overlap(method: str, log_weight: Floats) -> None:
    """Warn if few episodes have all the weight, or the weights' mean is not 1, as it is where μ covers π."""
    size, count = effective_sample_size(log_weight), len(log_weight)
    weight = np.exp(np.minimum(log_weight, LARGEST_LOG_WEIGHT))
    if size < LEAST_EFFECTIVE:
        warn(
            f"evaluate_offline: method={method!r} has an effective sample size of {size:.1f} of {count} episodes, below "
            f"{LEAST_EFFECTIVE}: the data hardly have the policy's actions, and the estimate is unreliable"
        )
    elif abs(weight.mean() - 1.0) > 0.05 + 4.0 * float(weight.std()) / np.sqrt(count):
        warn(
            f"evaluate_offline: the importance weights of method={method!r} have mean {weight.mean():.3g} instead of 1: too "
            "few episodes have the policy's actions, or the behavior's probabilities are wrong"
        )


def _clipped_weight(log_weight: Floats) -> Floats:
    """The weights, at most e^200; a warning if some are larger."""
    if (is_large := log_weight > LARGEST_LOG_WEIGHT).any():
        warn(
            f"evaluate_offline: {is_large.sum()} importance weights above e^{LARGEST_LOG_WEIGHT:g} are clipped: the behavior's "
            "probabilities are wrong, or the data hardly have the policy's actions"
        )
    return np.exp(np.minimum(log_weight, LARGEST_LOG_WEIGHT))

"""Warnings about a run: what ended it, what was skipped, and curves whose shape is wrong.

The thresholds are from docs/training-does-not-learn.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.tags import RETURN
from polyak.storage.columns import ENV_STEPS

Floats = npt.NDArray[np.float64]

BAD_QUANTITIES = ("none", "obs", "reward", "value", "log_prob", "loss", "gradient", "statistics", "step", "action")
"""Meanings of `train/nonfinite_source`, by number."""

DISCRETE = ("Discrete", "MultiDiscrete", "MultiBinary")
"""Action spaces in which an entropy of 0 means that every action is certain."""

MIN_POINTS = 8
"""Number of points below which a curve has no shape."""


@dataclass(frozen=True)
class Finding:
    """A warning about a run.

    Attributes:
        subject: the tag or the file.
        text: one or two sentences.
    """

    subject: str
    text: str


@dataclass(frozen=True)
class Curve:
    """The finite values of a metric.

    Attributes:
        steps: env_steps, or gradient steps of a training on data, of each value.
        values: the values.
    """

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def late(self) -> float:
        """Return the median over the last half."""
        return float(np.median(self.values[len(self) // 2 :]))


def find_faults(curves: Mapping[str, Curve], agent: Mapping[str, Any], unit: str = ENV_STEPS) -> list[Finding]:
    """Return the warnings that the curves of a run give.

    Args:
        curves: the metrics by tag, each with at least one value.
        agent: the agent in `config.json`.
        unit: the unit of steps, of `RunRecord.unit`.
    """
    # RND's losses and rewards are of an agent inside.
    inner = agent.get("agent", agent)
    return [*_counters(curves), *_policy(curves, inner, unit), *_values(curves, inner), *_learning(curves, unit)]


def _counters(curves: Mapping[str, Curve]) -> Iterator[Finding]:
    """Counts that are 0 in a healthy training."""
    last = {tag: float(curve.values[-1]) for tag, curve in curves.items()}
    if skipped := last.get("train/skipped_steps"):
        sources = curves["train/nonfinite_source"].values if "train/nonfinite_source" in curves else np.zeros(0)
        bad = [BAD_QUANTITIES[int(n)] for n in sources if 0 < n < len(BAD_QUANTITIES)]
        first = f" The first bad quantity was the {bad[0]}." if bad else ""
        yield Finding("train/skipped_steps", f"{skipped:,.0f} gradient steps were skipped because of NaN or infinity.{first}")
    if dropped := last.get("replay/dropped"):
        yield Finding("replay/dropped", f"{dropped:,.0f} transitions had NaN or infinity and were not stored.")
    if restarts := last.get("workers/restarts"):
        yield Finding("workers/restarts", f"{restarts:,.0f} workers crashed, hung or were lost, and were replaced.")
    if lost := last.get("workers/episodes_lost"):
        yield Finding("workers/episodes_lost", f"{lost:,.0f} episodes were cut, as their worker was replaced.")
    if invalid := last.get("rollouts/invalid"):
        yield Finding("rollouts/invalid", f"{invalid:,.0f} rollouts had NaN, infinity or wrong shapes and got no weight.")
    if last.get("train/n_updates") == 0:
        yield Finding("train/n_updates", "No gradient step was taken. Use a smaller learning_starts or more env_steps.")


def _policy(curves: Mapping[str, Curve], agent: Mapping[str, Any], unit: str) -> Iterator[Finding]:
    """Entropy, and the size of updates."""
    for tag in ("train/entropy_loss", "train/entropy"):
        entropy = curves.get(tag)
        if entropy is None or len(entropy) < MIN_POINTS or not _is_discrete(agent):
            continue
        is_certain = np.abs(entropy.values) < 0.01
        if is_certain[len(entropy) // 2 :].all():
            start = entropy.steps[len(is_certain) - int(np.argmin(is_certain[::-1]))] if not is_certain.all() else 0
            text = f"The entropy is 0 from {start:,.0f} {unit} on: the policy no longer explores."
            yield Finding(tag, f"{text} Try a smaller learning rate or a larger ent_coef.")
    kl = curves.get("train/approx_kl")
    if kl is not None and len(kl) >= MIN_POINTS:
        if np.median(kl.values) > 0.1:
            yield Finding(
                "train/approx_kl", "Updates are too large: the median KL divergence is above 0.1. Try a smaller learning rate."
            )
        elif np.max(kl.values) < 1e-5 and np.max(np.abs(kl.values)) > 0:
            yield Finding(
                "train/approx_kl",
                "Updates are too small: the KL divergence is below 1e-5 throughout. Try a larger learning rate.",
            )
    clipped = curves.get("train/clip_fraction")
    if clipped is not None and len(clipped) >= MIN_POINTS and clipped.late() > 0.4:
        yield Finding("train/clip_fraction", f"{clipped.late():.0%} of the samples are clipped. Try fewer num_epochs.")


def _values(curves: Mapping[str, Curve], agent: Mapping[str, Any]) -> Iterator[Finding]:
    """Values, gradients and the weight of the entropy."""
    explained = curves.get("train/explained_variance")
    # A critic that nothing trains, such as REINFORCE's without a baseline, explains nothing.
    if explained is not None and agent.get("vf_coef") == 0:
        explained = None
    if explained is not None and len(explained) >= MIN_POINTS and explained.late() < 0 and not _has_settled(curves.get(RETURN)):
        text = f"The critic is worse than a constant: the median of the last half is {explained.late():.2g}."
        yield Finding("train/explained_variance", f'{text} Try normalize_reward="return" and normalize_obs=True.')
    limit = agent.get("max_grad_norm")
    for tag, norm in curves.items():
        if tag.endswith("grad_norm") and isinstance(limit, int | float) and limit > 0 and norm.late() > 1000 * limit:
            text = f"It is {norm.late():,.0f}, over 1,000 times max_grad_norm={limit:g}: rewards or observations are too large."
            yield Finding(tag, text)
    q, returns = curves.get("train/q"), curves.get(RETURN)
    if q is not None and returns is not None and agent.get("reward_scale", 1) == 1:
        highest, largest = np.max(np.abs(q.values)), np.max(np.abs(returns.values))
        if highest > 10 * max(largest, 1.0):
            yield Finding("train/q", f"Values reach {highest:,.0f}, where the largest return is {largest:,.0f}: they diverge.")
    alpha = curves.get("train/alpha")
    if alpha is not None and len(alpha) >= MIN_POINTS:
        first, last = float(alpha.values[0]), float(alpha.values[-1])
        if last > 10 * first and last >= 0.99 * np.max(alpha.values):
            text = f"It grew from {first:.2g} to {last:.2g} and still grows: the target entropy cannot be reached."
            yield Finding("train/alpha", text)


def _learning(curves: Mapping[str, Curve], unit: str) -> Iterator[Finding]:
    """The return."""
    if RETURN not in curves:
        if curves and unit == ENV_STEPS:  # A training on data has no episodes.
            yield Finding(RETURN, "No episode has ended, so there is no return. Does the environment have a time limit?")
        return
    returns = curves[RETURN]
    if len(returns) < MIN_POINTS:
        return
    best = int(np.argmax(returns.values))
    gained = returns.values[best] - np.min(returns.values[: best + 1])
    end = float(np.median(returns.values[-max(3, len(returns) // 20) :]))
    if gained > 0 and returns.values[best] - end > 0.5 * gained:
        at_best = f"{returns.values[best]:,.1f} at {returns.steps[best]:,.0f} {unit}"
        text = f"The return fell from {at_best} to {end:,.1f} at the end."
        yield Finding(RETURN, f"{text} Try a learning rate that falls to 0.")


def _has_settled(returns: Curve | None) -> bool:
    """Return True if late episodes have nearly the same return, so that there is no variance to explain."""
    if returns is None or len(returns) < MIN_POINTS:
        return False
    late = returns.values[len(returns) // 2 :]
    return bool(np.ptp(late) <= 0.02 * max(np.ptp(returns.values), 1e-12))


def _is_discrete(agent: Mapping[str, Any]) -> bool:
    spec = agent.get("spec")
    action = spec.get("action") if isinstance(spec, Mapping) else None
    return isinstance(action, Mapping) and action.get("$class") in DISCRETE

"""Why a training took no gradient step, or reset no network."""

from collections.abc import Mapping

from polyak.core.types import Agent, HasReplay, Progress
from polyak.ops.gradient_step import QUANTITIES


def explain_no_step(agent: Agent, progress: Progress, metrics: Mapping[str, float]) -> str | None:
    """Explain why no gradient step was taken, or no reset with `reset_period`; None if they were, or are not reported.

    Args:
        agent: the agent that was trained.
        progress: progress at the end of training.
        metrics: metrics of the last report.
    """
    updates, skipped = metrics.get("train/n_updates"), metrics.get("train/skipped_steps", 0)
    if updates is None:
        return None
    if _has_taken_step(agent, updates, metrics):
        if metrics.get("train/resets") != 0:
            return None
        period = getattr(agent, "reset_period", None)
        return f"no network was reset; reset_period={period} must be below {updates:.0f} gradient steps"
    if skipped:
        quantity = QUANTITIES[int(metrics.get("train/nonfinite_source", 1)) - 1]
        return f"all {skipped:,.0f} gradient steps were skipped, as {quantity} was NaN or infinite; nothing was learned"
    learning_starts = getattr(agent, "learning_starts", None)
    if learning_starts is not None and learning_starts >= progress.env_steps:
        why = f"learning_starts={learning_starts} must be less than env_steps={progress.target_env_steps}"
    else:
        why = f"{progress.env_steps} env_steps are too few for one"
    return f"no gradient step was taken; {why}"


def _has_taken_step(agent: Agent, updates: float, metrics: Mapping[str, float]) -> bool:
    """Return True if a gradient step was taken."""
    if isinstance(agent, HasReplay):
        return updates > 0
    if (applied := metrics.get("pushes/applied")) is not None:
        return applied > 0
    # Other agents count updates, not gradient steps.
    return updates > metrics.get("train/consecutive_skipped_updates", 0)

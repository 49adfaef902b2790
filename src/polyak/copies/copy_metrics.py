"""Numbers about copies for the log, each under the name of its copies."""

from collections.abc import Sequence

from polyak.copies.network_copies import NetworkCopies
from polyak.copies.workers import staleness
from polyak.core.types import Metrics


def metrics_of(copies: Sequence[NetworkCopies]) -> Metrics:
    """What there is to watch of each: `critic/target_distance`, `critic/skipped_steps`, `critic/staleness` and so on.

    Raises:
        ValueError: two of them have one name, so that one would hide the other.
    """
    names = [one.name for one in copies]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"metrics_of: more than one of the copies has the name {twice[0]!r}; create each with its own name=")
    metrics: Metrics = {}
    for one in copies:
        metrics[f"{one.name}/skipped_steps"] = one.guard.skipped
        metrics[f"{one.name}/skipped_in_a_row"] = one.guard.in_a_row
        metrics[f"{one.name}/refused_gradients"] = one.gradients.refused
        if one.target is not None:
            metrics[f"{one.name}/target_distance"] = one.distance("online", "target")
        if one.shared is not None:
            metrics[f"{one.name}/shared_version"] = one.shared.version
            metrics[f"{one.name}/staleness"] = staleness(one, one.shared)
            metrics[f"{one.name}/dropped_pushes"] = one.shared.dropped
    return metrics

"""Checks of what an agent gives a loop: errors in its own words, in place of those of the compiled program around it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from polyak.core.tree_check import describe, named_leaves, quoted
from polyak.core.types import Agent, Histogram, Mean, PyTree
from polyak.loops.metrics import is_number

METHODS = tuple(name for name in vars(Agent) if not name.startswith("_"))
METHODS_OF_A_POLICY = ("initial_state", "action")
"""What loops call of `collect_policy(state)`."""


def check_agent(owner: str, agent: Any) -> None:
    """Check that an object is an agent.

    Raises:
        TypeError: it is its class, for example; or it lacks a method; or it is no pytree, as which its settings are arguments
            of compiled programs.
    """
    kind = type(agent).__name__
    if isinstance(agent, type):
        raise TypeError(f"{owner}: agent must be an agent, got the class {agent.__name__}; pass {agent.__name__}(env.spec)")
    missing = _missing(agent, METHODS)
    if not isinstance(agent, Agent) or missing:
        # Of an agent that is nearly one.
        lacks = f" object, which lacks {', '.join(missing)}" if 2 * len(missing) < len(METHODS) else ""
        got = kind if lacks else f"{agent!r:.80}"
        raise TypeError(f"{owner}: agent must be an agent or the name of an algorithm, such as 'ppo', got {got}{lacks}")
    if any(leaf is agent for leaf in jax.tree.leaves(agent)):
        raise TypeError(f"{owner}: agent must be a pytree, got a {kind} object; decorate {kind} with polyak.core.struct.struct")


def check_collect_policy(agent: Agent, policy: Any) -> None:
    """Check that an agent's `collect_policy` has returned a policy.

    Raises:
        TypeError: it has not.
    """
    if missing := _missing(policy, METHODS_OF_A_POLICY):
        got = f"{type(policy).__name__}, which lacks {' and '.join(missing)}"
        raise TypeError(f"{type(agent).__name__}.collect_policy must return a policy, got {got}")


def check_update(agent: Agent, before: PyTree, result: Any) -> None:
    """Check, while it is traced, what an agent's `update` has returned.

    Args:
        before: the state that it was called with.
        result: what it returned.

    Raises:
        TypeError: it is no pair of a state and metrics, or a metric is no number; the message names the metric.
        ValueError: the state has other leaves than before, or one has another shape or dtype; the message names the leaf.
    """
    owner = f"{type(agent).__name__}.update"
    if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping)):
        kinds = ", ".join(type(x).__name__ for x in result) if isinstance(result, tuple | list) else type(result).__name__
        raise TypeError(f"{owner} must return the state and a dict of metrics, got {kinds}")
    _check_state(owner, before, result[0])
    for name, metric in result[1].items():
        if not (isinstance(name, str) and _is_metric(metric)):
            got = describe(metric) if isinstance(metric, jax.Array | np.ndarray) else f"{metric!r:.80}"
            raise TypeError(f"{owner}: metrics must be single numbers, Mean or Histogram by name, got {name!r}: {got}")


def _check_state(owner: str, before: PyTree, after: PyTree) -> None:
    old, new = dict(named_leaves(before)), dict(named_leaves(after))
    if old.keys() != new.keys():
        changes = [f"{quoted(name)} is new" for name in new if name not in old]
        changes += [f"{quoted(name)} is gone" for name in old if name not in new]
        raise ValueError(f"{owner}: the state must keep its leaves, but {', '.join(changes)}")
    for name, leaf in new.items():
        if describe(leaf) != describe(old[name]):
            raise ValueError(f"{owner}: {quoted(name)} of the state must stay {describe(old[name])}, got {describe(leaf)}")
    structures = [str(jax.tree.structure(tree)) for tree in (before, after)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"{owner}: containers and static fields of the state must stay {structures[0]:.300}, got {structures[1]:.300}"
        )


def _is_metric(metric: Any) -> bool:
    parts = (metric.total, metric.count) if isinstance(metric, Mean) else (metric,)
    return isinstance(metric, Histogram) or all(is_number(part) for part in parts)


def _missing(value: Any, methods: tuple[str, ...]) -> list[str]:
    return sorted(name for name in methods if getattr(value, name, None) is None)

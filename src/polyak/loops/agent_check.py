"""Checks of what an agent gives a loop: errors in its own words, in place of those of the compiled program around it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.tree_check import check_same_tree, describe, named_leaves, quoted
from polyak.core.types import Agent, Histogram, Mean, Policy, PyTree


def check_agent(owner: str, agent: Any) -> None:
    """Check that an object is an agent.

    Raises:
        TypeError: it is its class, for example; or it lacks a method; or it is no pytree, as which its settings are arguments
            of compiled programs.
    """
    if isinstance(agent, type):
        raise TypeError(f"{owner}: agent must be an agent, got the class {agent.__name__}; pass {agent.__name__}(env.spec)")
    if not isinstance(agent, Agent):
        missing = sorted({name for name in vars(Agent) if not name.startswith("_")} - set(dir(agent)))
        lacks = f", which lacks {', '.join(missing)}" if "update" not in missing else ""
        raise TypeError(f"{owner}: agent must be an agent or the name of an algorithm, such as 'ppo', got {agent!r:.80}{lacks}")
    if any(leaf is agent for leaf in jax.tree.leaves(agent)):
        name = type(agent).__name__
        raise TypeError(f"{owner}: agent must be a pytree, got {agent!r:.80}; decorate {name} with polyak.core.struct.struct")


def check_collect_policy(agent: Agent, policy: Any) -> None:
    """Check that an agent's `collect_policy` has returned a policy.

    Raises:
        TypeError: it has not.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"{_name(agent)}.collect_policy must return a policy, got {policy!r:.80}")


def check_update(agent: Agent, before: PyTree, result: Any) -> None:
    """Check, while it is traced, what an agent's `update` has returned.

    Args:
        before: the state that it was called with.
        result: what it returned.

    Raises:
        TypeError: it is no pair of a state and metrics, or a metric is no number; the message names the metric.
        ValueError: the state has other leaves than before, or one has another shape or dtype; the message names the leaf.
    """
    owner = f"{_name(agent)}.update"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise TypeError(f"{owner} must return the state and a dict of metrics, got {_kinds(result)}")
    after, metrics = result
    check_same_tree(after, before, owner, sides=("the returned state", "the state before"))
    for (name, x), (_, y) in zip(named_leaves(after), named_leaves(before), strict=True):
        # That floats have the same width is not among the checks above.
        if describe(x) != describe(y):
            raise ValueError(f"{owner}: {quoted(name)} of the state must stay {describe(y)}, got {describe(x)}")
    for name, metric in metrics.items():
        if not (isinstance(name, str) and _is_metric(metric)):
            got = describe(metric) if isinstance(metric, jax.Array) else f"{metric!r:.80}"
            raise TypeError(f"{owner}: metrics must be single numbers, Mean or Histogram by name, got {name!r}: {got}")


def _is_metric(metric: Any) -> bool:
    if isinstance(metric, Histogram):
        return True
    numbers = (metric.total, metric.count) if isinstance(metric, Mean) else (metric,)
    return all(isinstance(x, float | int) or (isinstance(x, jax.Array) and jnp.ndim(x) == 0) for x in numbers)


def _kinds(result: Any) -> str:
    kinds = [type(x).__name__ for x in result] if isinstance(result, tuple) else [type(result).__name__]
    return f"({', '.join(kinds)})" if isinstance(result, tuple) else kinds[0]


def _name(agent: Agent) -> str:
    return type(agent).__name__

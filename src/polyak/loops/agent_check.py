"""Validates agents, policies and callbacks of users, and what agents return: errors name a method, not an operation of XLA."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from polyak.core.checks import describe_change
from polyak.core.tree_check import describe_leaf, named_leaves
from polyak.core.types import Agent, Histogram, Mean, Policy, PyTree
from polyak.loops.metrics import is_number

METHODS = tuple(name for name in vars(Agent) if not name.startswith("_"))


def check_agent(owner: str, agent: Any) -> None:
    """Check that an object is an agent.

    Raises:
        TypeError: the object is a class, lacks a method of an agent, or is no pytree. Compiled programs take the settings of
            an agent as leaves.
    """
    kind = type(agent).__name__
    if isinstance(agent, type):
        raise TypeError(f"{owner}: agent must be an agent, got the class {agent.__name__}; pass {agent.__name__}(env.spec)")
    missing = _missing(agent, METHODS)
    if not isinstance(agent, Agent) or missing:
        # List the missing methods only if the object has most of them.
        lacks = f" object, which lacks {', '.join(missing)}" if 2 * len(missing) < len(METHODS) else ""
        got = kind if lacks else f"{agent!r:.80}"
        raise TypeError(f"{owner}: agent must be an agent or the name of an algorithm, such as 'ppo', got {got}{lacks}")
    if any(leaf is agent for leaf in jax.tree.leaves(agent)):
        raise TypeError(f"{owner}: agent must be a pytree, got a {kind} object; decorate {kind} with polyak.core.struct.struct")


def check_agent_state(name: str, agent: Agent, state: PyTree, key: PRNGKeyArray) -> None:
    """Check that a state is of this agent: a network of other layers would ignore the parameters that it does not have.

    Args:
        name: the state, for messages.
        key: a key as the run's.

    Raises:
        ValueError: it is of an agent with other networks, another optimizer or another replay.
    """
    try:
        new = jax.eval_shape(agent.init, key)
    except jax.errors.JAXTypeError:
        return  # `init` reads numbers, so its shapes are not known.
    found, expected = ({leaf: describe_leaf(x) for leaf, x in named_leaves(tree)} for tree in (state, new))
    for leaf in (*expected, *found):
        got, wanted = (leaves.get(leaf, "missing") for leaves in (found, expected))
        if got != wanted:
            raise ValueError(
                f"{name} must be of an agent with the same networks, optimizer and replay; its {leaf!r} is {got}, "
                f"expected {wanted}"
            )


def check_policy_methods(owner: str, policy: Any, name: str = "policy") -> None:
    """Check that an argument is a policy.

    Args:
        name: the argument.

    Raises:
        TypeError: it is a function, an agent or an exported policy; the message says what to pass.
    """
    if isinstance(policy, Policy):
        return
    wanted = f"{owner}: {name} must have initial_state, distribution and action, got {type(policy).__name__}"
    if isinstance(policy, Agent) or getattr(policy, "loop_state", None) is not None:
        raise TypeError(f"{wanted}; pass agent.policy(result.state)")
    raise TypeError(
        f"{wanted}; wrap a function f with PythonPolicy(f, env.spec), an exported policy with "
        "PythonPolicy(policy.as_python(), env.spec)"
    )


def check_should_stop(owner: str, should_stop: Any) -> None:
    """Check that `should_stop` is a function.

    Raises:
        TypeError: it is not.
    """
    if not callable(should_stop):
        raise TypeError(f"{owner}: should_stop must be a function without arguments, got {should_stop!r:.80}")


def check_callbacks(owner: str, callbacks: Any) -> None:
    """Check that callbacks are functions of `(progress, metrics, state)` in a sequence.

    Raises:
        TypeError: `callbacks` is one function, or a callback takes other arguments; the message names it.
    """
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"{owner}: callbacks must be a list of functions, got {callbacks!r:.80}; pass callbacks=[...]")
    for callback in callbacks:
        name = getattr(callback, "__name__", type(callback).__name__)
        try:
            inspect.signature(callback).bind(None, None, None)
        except TypeError:
            wanted = f"{owner}: callback {name} must be a function of (progress, metrics, state)"
            raise TypeError(f"{wanted}, got {callback!r:.80}") from None
        except ValueError:  # a function in C does not tell
            continue


def check_update(agent: Agent, before: PyTree, result: Any) -> None:
    """Check the result of an agent's `update`, while tracing.

    Args:
        before: the state with which `update` was called.
        result: the result of `update`.

    Raises:
        TypeError: the result is no pair of a state and metrics, a metric is no number, or the new state has other leaves or
            dtypes; the message names the metric or the leaf.
    """
    owner = f"{type(agent).__name__}.update"
    if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping)):
        kinds = ", ".join(type(x).__name__ for x in result) if isinstance(result, tuple | list) else type(result).__name__
        raise TypeError(f"{owner} must return the state and a dict of metrics, got {kinds}")
    if change := describe_change("the state", before, result[0]):
        raise TypeError(f"{owner} changes {change}")
    for name, metric in result[1].items():
        if not (isinstance(name, str) and _is_metric(metric)):
            got = describe_leaf(metric) if isinstance(metric, jax.Array | np.ndarray) else f"{metric!r:.80}"
            raise TypeError(f"{owner}: metrics must be single numbers, Mean or Histogram by name, got {name!r}: {got}")


def _is_metric(metric: Any) -> bool:
    parts = (metric.total, metric.count) if isinstance(metric, Mean) else (metric,)
    return isinstance(metric, Histogram) or all(is_number(part) for part in parts)


def _missing(value: Any, methods: tuple[str, ...]) -> list[str]:
    return sorted(name for name in methods if getattr(value, name, None) is None)

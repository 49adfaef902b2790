"""Resets of an agent's networks, which it then learns again from all that its replay has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.agents.settings import Entries
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_created_with
from polyak.core.struct import integer, setting, struct
from polyak.core.suggestions import unknown_name
from polyak.core.types import PyTree
from polyak.ops.gradient_step import ravel

RESETS = 2**32 - 1
"""Number folded into the key of `init` for the key of resets; the networks' keys use other numbers."""


@struct
class Resets:
    """The resets of an agent's networks.

    Attributes:
        key: the key of all resets; the new parameters of reset n are those of `fold_in(key, n)`.
        count: n, the number of resets so far.
        updates: gradient steps until the last reset.
    """

    key: PRNGKeyArray
    count: UInt32[Array, ""]
    updates: UInt32[Array, ""]


def check_layer_names(owner: str, name: str, value: Any) -> None:
    """Check that a setting is None, a name, or a tuple of names.

    Raises:
        TypeError, ValueError: the value is something else.
    """
    if value is None:
        return
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
        raise TypeError(f"{owner}: {name} must be a name, a tuple of names, or None, got {value!r}")
    if not names or "" in names or len(set(names)) < len(names):
        raise ValueError(f"{owner}: {name} must be names of layers, each once, or None, got {value!r}")


@struct(kw_only=True)
class ResetSettings:
    """Resets of networks, against the primacy bias: what a network learned first hinders what it learns later.

    After `reset_period` gradient steps the agent gets new networks, as `init` makes them: online, target and average copies,
    states of optimizers, a learned temperature, and counts of steps (`target_period`, `policy_delay`). The replay, the
    statistics of normalization and `env_steps` remain, so schedules continue; a schedule within your own `optimizer` starts
    again.

    Attributes:
        reset_period: gradient steps between resets (Nikishin et al. 2022, arXiv:2205.07802). A reset comes with the first
            update after them, before its gradient steps, so that no training ends with a reset. None disables resets.
        reset_keeps: layers that resets keep, by their names in the parameters, in all copies and with the averages of their
            optimizer; `"encoder"` keeps the convolutions, `("encoder", "dense")` all but the heads, `"cell"` the cells of
            recurrent networks. None keeps none.
    """

    reset_period: int | None = integer(default=None, optional=True)
    reset_keeps: Entries | None = setting(default=None, check=check_layer_names, static=True, used_if=("reset_period", ...))


def create_resets(settings: Any, key: PRNGKeyArray, copies: PyTree) -> Resets | None:
    """No resets yet; None without a `reset_period`.

    Args:
        settings: the agent, with `ResetSettings`.
        key: the key of `init`.
        copies: the networks.

    Raises:
        ValueError: no network has a layer of `reset_keeps`.
    """
    if settings.reset_period is None:
        return None
    found = {name: None for path, _ in jax.tree_util.tree_leaves_with_path(copies) for name in _layers(path)}
    for layer in _kept(settings):
        if layer not in found:
            raise ValueError(f"{type(settings).__name__}: reset_keeps: {unknown_name(layer, found, 'layer')}")
    # Two buffers, because the state is donated.
    return Resets(jax.random.fold_in(key, RESETS), jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))


def reset_if_due(
    agent: Any, copies: PyTree, resets: Resets | None, updates: UInt32[Array, ""], enabled: Bool[Array, ""]
) -> tuple[PyTree, Resets | None]:
    """New copies once `reset_period` gradient steps have passed since the last reset, and the count of resets.

    Args:
        agent: with `ResetSettings` and `create_copies`.
        updates: gradient steps so far.
        enabled: gradient steps follow; False resets nothing.

    Raises:
        ValueError: the state was created with resets and the agent has none, or the reverse.
    """
    check_created_with(agent, equal={}, present={"reset_period": resets})
    if resets is None:
        return copies, None
    is_due = enabled & (updates - resets.updates >= jnp.uint32(agent.reset_period))

    def reset(old: PyTree) -> PyTree:
        created = agent.create_copies(jax.random.fold_in(resets.key, resets.count))
        new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(created))
        return keep_layers(_kept(agent), old, new)

    copies = jax.lax.cond(is_due, reset, lambda copies: copies, copies)
    count = resets.count + is_due.astype(jnp.uint32)
    return copies, Resets(resets.key, count, jnp.where(is_due, updates, resets.updates))


def keep_layers(names: tuple[str, ...], old: PyTree, new: PyTree) -> PyTree:
    """The new copies, with the layers of these names and their optimizer's averages from the old ones.

    The optimizer's count of steps is new.

    Args:
        old: a tree of `NetworkCopies`, variables and other arrays.
        new: the same tree.
    """
    if not names:
        return new

    def is_kept(path: tuple[Any, ...]) -> bool:
        return any(name in names for name in _layers(path))

    def keep_in_vectors(old: PyTree, kept: PyTree) -> PyTree:
        """The same for optimizers of parameters as one vector."""
        if not isinstance(old, NetworkCopies):
            return kept
        mask, _ = ravel(jax.tree_util.tree_map_with_path(lambda path, x: jnp.full(x.shape, is_kept(path)), old.online.params))
        if not isinstance(mask, jax.Array):
            return kept
        states = old.optimizer_state, kept.optimizer_state
        state = jax.tree.map(lambda x, y: jnp.where(mask, x, y) if x.shape == mask.shape else y, *states)
        return dataclasses.replace(kept, optimizer_state=state)

    kept = jax.tree_util.tree_map_with_path(lambda path, x, y: x if is_kept(path) else y, old, new)
    return jax.tree.map(keep_in_vectors, old, kept, is_leaf=lambda node: isinstance(node, NetworkCopies))


def _kept(settings: Any) -> tuple[str, ...]:
    names = settings.reset_keeps
    return (names,) if isinstance(names, str) else names or ()


def _layers(path: tuple[Any, ...]) -> list[str]:
    """The layers that an array is of, by its path, from the outermost on; the array's own name is none of them."""
    keys = [entry.key for entry in path[:-1] if isinstance(entry, jax.tree_util.DictKey)]
    return [key for key in keys if isinstance(key, str)]

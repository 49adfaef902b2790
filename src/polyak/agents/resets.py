"""Resets of an agent's networks, which it then learns again from all that its replay has."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.agents.settings import Entries
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_created_with
from polyak.core.struct import integer, setting, struct
from polyak.core.suggestions import unknown_name
from polyak.core.types import PyTree
from polyak.ops.any_seed import is_any
from polyak.ops.gradient_step import ravel

RESETS = 2**32 - 1
"""Number folded into the key of `init` for the key of resets; the networks' keys use other numbers."""


@struct
class Resets:
    """The resets of an agent's networks.

    Attributes:
        key: the key of all resets; reset n creates its parameters with `fold_in(key, n)`.
        count: n, the number of resets so far.
        updates: gradient steps until the last reset.
    """

    key: PRNGKeyArray
    count: UInt32[Array, ""]
    updates: UInt32[Array, ""]


def check_layer_names(owner: str, name: str, value: Any) -> None:
    """Check that a setting is None, a name, or a tuple of names.

    Raises:
        TypeError: the value is something else.
    """
    names = (value,) if isinstance(value, str) else value
    if value is not None and not (isinstance(names, tuple) and names and all(isinstance(each, str) and each for each in names)):
        raise TypeError(f"{owner}: {name} must be the name of a layer, a tuple of names, or None, got {value!r}")


@struct(kw_only=True)
class ResetSettings:
    """Resets of networks, against the primacy bias: what a network learned first hinders what it learns later.

    After `reset_period` gradient steps the agent gets new networks, as `init` makes them: online, target and average copies,
    states of optimizers, a learned temperature, and counts of steps (`target_period`, `policy_delay`). The replay, the
    statistics of normalization and `env_steps` remain, so schedules continue; a schedule within your own `optimizer` starts
    again.

    Attributes:
        reset_period: gradient steps between resets (Nikishin et al. 2022, arXiv:2205.07802), more than an update has. A reset
            comes with the first update after them, before its gradient steps: a training that ends soon after one has networks
            of only these steps. None disables resets.
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
    found = {layer: None for path, _ in tree_leaves_with_path(copies) for layer in _layers(path)}
    for layer in _kept(settings) - found.keys():
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
        new = keep_layers(_kept(agent), old, jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(created)))
        return optax.tree.where(is_due, new, old)

    copies = jax.lax.cond(is_any(is_due), reset, lambda copies: copies, copies)
    return copies, Resets(resets.key, resets.count + is_due.astype(jnp.uint32), jnp.where(is_due, updates, resets.updates))


def keep_layers(names: set[str], old: PyTree, new: PyTree) -> PyTree:
    """The new copies, with the layers of these names and their optimizer's averages from the old ones.

    The optimizer's count of steps is new.

    Args:
        old: a tree of `NetworkCopies`, variables and other arrays.
        new: the same tree.
    """
    if not names:
        return new

    def is_kept(path: tuple[Any, ...]) -> bool:
        return not names.isdisjoint(_layers(path))

    def keep(outer: tuple[Any, ...], old: PyTree, new: PyTree) -> PyTree:
        mask: Any = None
        if isinstance(old, NetworkCopies):
            # An optimizer of parameters as one vector has averages of its shape.
            mask, _ = ravel(tree_map_with_path(lambda path, x: jnp.full(x.shape, is_kept(path), float), old.online.params))

        def choose(path: tuple[Any, ...], x: Array, y: Array) -> Array:
            is_vector = isinstance(mask, jax.Array) and x.shape == mask.shape
            return jnp.where(mask > 0 if is_vector else is_kept((*outer, *path)), x, y)

        return tree_map_with_path(choose, old, new)

    return tree_map_with_path(keep, old, new, is_leaf=lambda node: isinstance(node, NetworkCopies))


def _kept(settings: Any) -> set[str]:
    names = settings.reset_keeps or ()
    return {names} if isinstance(names, str) else set(names)


def _layers(path: tuple[Any, ...]) -> list[str]:
    """The layers that an array is of, by its path, from the outermost on; the array's own name is none of them."""
    return [entry.key for entry in path[:-1] if isinstance(entry, DictKey) and isinstance(entry.key, str)]

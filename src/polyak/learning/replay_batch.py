"""Batches of a replay, as the losses take them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.checks import check_created_with
from polyak.core.types import PyTree, Variables
from polyak.learning.normalizers import Normalizers
from polyak.networks.adapters import has_batch_statistics
from polyak.ops.bounded_rewards import BoundedRewardScaler
from polyak.ops.losses import fill_rows
from polyak.replay.replay import Transition
from polyak.replay.sequences import SequenceObs


def normalize(batch: Transition, normalizers: Normalizers) -> Transition:
    """The batch with normalized observations (for sequences, all observations) and scaled rewards."""
    if normalizers.obs is not None:
        scale = normalizers.obs.normalize

        def normalized(obs: PyTree) -> PyTree:
            return dataclasses.replace(obs, obs=scale(obs.obs)) if isinstance(obs, SequenceObs) else scale(obs)

        batch = dataclasses.replace(batch, obs=normalized(batch.obs), next_obs=normalized(batch.next_obs))
    scaler = normalizers.reward
    if scaler is not None:
        divisor = scaler.divisor()
        whole_return = None if batch.whole_return is None else batch.whole_return / divisor
        batch = dataclasses.replace(batch, reward=batch.reward / divisor, whole_return=whole_return)
    return batch


def with_bound(normalizers: Normalizers, bound: float | None) -> Normalizers:
    """New statistics that also keep discounted returns within ± `bound`; None for `bound` returns the statistics themselves."""
    scaler = normalizers.reward
    if scaler is None or scaler.of != "return" or bound is None:
        return normalizers
    bounded = BoundedRewardScaler(stats=scaler.stats, of=scaler.of, largest=jnp.zeros((), jnp.float32), bound=bound)
    return dataclasses.replace(normalizers, reward=bounded)


def check_created_bound(settings: Any, normalizers: Normalizers) -> None:
    """Check that statistics were created with the agent's `max_return`; the state's would silently replace it.

    Raises:
        ValueError: they were created with another one.
    """
    scaler = normalizers.reward
    if scaler is not None and scaler.of == "return":
        bound = scaler.bound if isinstance(scaler, BoundedRewardScaler) else None
        check_created_with(settings, equal={"max_return": bound}, present={})


def without_hidden_rows(batch: Transition, copies: PyTree) -> Transition:
    """The batch, with rows without weight replaced by other rows if a network has batch normalization; see `fill_rows`."""
    nodes = jax.tree.leaves(copies, is_leaf=lambda node: isinstance(node, Variables))
    is_normalized = any(isinstance(node, Variables) and has_batch_statistics(node) for node in nodes)
    if not is_normalized or isinstance(batch.obs, SequenceObs):  # a recurrent network stays in evaluation mode
        return batch
    names = ("obs", "action", "action_mask", "next_obs", "next_action_mask")
    rows = fill_rows([getattr(batch, name) for name in names], batch.weight)
    return dataclasses.replace(batch, **dict(zip(names, rows, strict=True)))

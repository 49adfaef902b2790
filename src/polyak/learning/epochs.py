"""Epochs of gradient steps over shuffled minibatches of a rollout."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.types import Mean, PyTree, Terms
from polyak.learning.batch import Batch, normalize_minibatches
from polyak.learning.minibatches import epoch_seeds, shuffled_minibatches
from polyak.ops.gradient_step import LossFn, StepLog, gradient_step, ravel


def train_epochs(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    optimizer_state: PyTree,
    make_batch: Callable[[PyTree], Batch],
    key: PRNGKeyArray,
    *,
    num_epochs: int,
    num_minibatches: int,
    num_microbatches: int,
    rollout_shape: tuple[int, int],
    normalize_advantage: Literal["minibatch", "batch"] | None,
    early_stop: Callable[[Terms], Bool[Array, ""]] | None,
    data_is_finite: Bool[Array, ""],
    is_elementwise: bool,
    axis_name: str | None,
) -> tuple[PyTree, PyTree, StepLog]:
    """Parameters and optimizer state after the epochs, and the log `[E, K]` of every gradient step.

    Args:
        loss_fn: of `(params, minibatch)`; weights of a minibatch sum to 1, over all devices, so means are weighted sums.
        make_batch: what an epoch that begins with these parameters learns from.
        key: decides the minibatches.
        num_microbatches: parts of a minibatch whose gradients are computed one after the other.
        rollout_shape: `(T, B)` on this device; sequences are shuffled as `(1, B)`.
        normalize_advantage: see `normalize_minibatches`.
        early_stop: of a minibatch's terms; True ends the update before the step.
        data_is_finite: False skips all steps.
        is_elementwise: the optimizer treats every parameter alike, so that they may be raveled into one vector.
    """
    params, unravel = ravel(params) if is_elementwise else (params, lambda params: params)
    shape = (*rollout_shape, num_minibatches)

    def loss_of_raveled(params: PyTree, minibatch: Batch) -> tuple[Float[Array, ""], Terms]:
        return loss_fn(unravel(params), minibatch)

    def epoch(carry: PyTree, seeds: Array) -> tuple[PyTree, StepLog]:
        index = shuffled_minibatches(seeds, *shape)
        batch, total = normalize_minibatches(make_batch(unravel(carry[0])), index, normalize_advantage, axis_name)

        def step(carry: PyTree, minibatch: tuple[Array, Array]) -> tuple[PyTree, StepLog]:
            index, total = minibatch
            params, optimizer_state, stopped = carry
            params, optimizer_state, log = gradient_step(
                loss_of_raveled,
                optimizer,
                params,
                optimizer_state,
                batch if num_minibatches == 1 else batch.at(index),
                # Adam moves on its momentum even without a gradient, so a minibatch without a transition is no step.
                due=~stopped & (total > 0),
                data_is_finite=data_is_finite,
                early_stop=early_stop,
                num_microbatches=num_microbatches,
                axis_name=axis_name,
            )
            stopped = stopped if early_stop is None else stopped | early_stop(log.terms)
            return (params, optimizer_state, stopped), log

        epoch_log: Any = jax.lax.scan(step, carry, (index, total))
        return epoch_log

    seeds = epoch_seeds(key, num_epochs, *shape, axis_name)
    (params, optimizer_state, _), log = jax.lax.scan(epoch, (params, optimizer_state, jnp.array(False)), seeds)
    return unravel(params), optimizer_state, log


def mean_terms(log: StepLog) -> tuple[dict[str, Mean], dict[str, Mean]]:
    """The mean of each term of the loss over the applied steps of all epochs, and of the last epoch that has one."""
    epochs = jnp.arange(log.applied.shape[0])[:, None]
    last = log.applied & (epochs == jnp.max(jnp.where(log.applied, epochs, 0)))
    of_all, of_last = ({name: Mean.of(term, steps) for name, term in log.terms.items()} for steps in (log.applied, last))
    return of_all, of_last

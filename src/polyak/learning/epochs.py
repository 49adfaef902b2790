"""Epochs of gradient steps over shuffled minibatches of a rollout, the same ones on any number of devices."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.copies.network_copies import NetworkCopies
from polyak.core.types import Mean, PyTree, Terms, Variables
from polyak.kernels.shuffle import permutation, permutation_seeds
from polyak.learning.rollout_batch import Batch, normalize_minibatches
from polyak.ops.gradient_step import Aux, BoundedOptimizer, StepLog, ravel

# A minibatch has equally many samples from each of (up to) eight groups of environments. Each device has whole groups, so
# the samples of a minibatch do not depend on the number of devices.
GROUPS = (8, 4, 2, 1)


def train_epochs(
    copies: NetworkCopies,
    loss_fn: Callable[..., tuple[Float[Array, ""], Aux]],
    optimizer: optax.GradientTransformation,
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
    axis_name: str | None,
) -> tuple[NetworkCopies, StepLog]:
    """The copies after the gradient steps of all epochs, and the log `[E, K]` of every step.

    Args:
        loss_fn: function of `(params, minibatch, variables=, key=)`: the online copy's variables, for their statistics, and a
            key for dropout; weights of a minibatch sum to 1, over all devices, so means are weighted sums.
        make_batch: the batch of an epoch, as a function of the parameters at its beginning.
        key: decides the minibatches, and the keys of the loss.
        num_microbatches: parts of a minibatch whose gradients are computed one after the other.
        rollout_shape: `(T, B)` on this device; sequences are shuffled as `(1, B)`.
        normalize_advantage: see `normalize_minibatches`.
        early_stop: function of a minibatch's terms; True ends the update before the step.
        data_is_finite: False skips all steps.
    """
    loss_key = key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    params = copies.online.params
    params, unravel = ravel(params) if isinstance(optimizer, BoundedOptimizer) else (params, lambda params: params)
    shape = (*rollout_shape, num_minibatches)

    def loss_of_raveled(
        params: PyTree, minibatch: Batch, *, variables: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        return loss_fn(unravel(params), minibatch, variables=variables, key=key)

    def epoch(carry: PyTree, seeds: Array) -> tuple[PyTree, StepLog]:
        index = shuffled_minibatches(seeds, *shape)
        batch, total = normalize_minibatches(make_batch(unravel(carry[0].online.params)), index, normalize_advantage, axis_name)

        def step(carry: PyTree, minibatch: tuple[Array, Array]) -> tuple[PyTree, StepLog]:
            index, total = minibatch
            copies, stopped = carry
            copies, log = copies.train(
                partial(loss_of_raveled, variables=copies.online, key=jax.random.fold_in(loss_key, copies.steps)),
                optimizer,
                batch if num_minibatches == 1 else batch.at(index),
                # Adam moves on its momentum even without a gradient, so a minibatch without a transition is no step.
                enabled=~stopped & (total > 0),
                data_is_finite=data_is_finite,
                early_stop=early_stop,
                num_microbatches=num_microbatches,
                axis_name=axis_name,
            )
            stopped = stopped if early_stop is None else stopped | early_stop(log.terms)
            return (copies, stopped), log

        return jax.lax.scan(step, carry, (index, total))

    seeds = epoch_seeds(key, num_epochs, *shape, axis_name)
    (copies, _), log = jax.lax.scan(epoch, (with_params(copies, params), jnp.array(False)), seeds)
    return with_params(copies, unravel(copies.online.params)), log


def with_params(copies: NetworkCopies, params: PyTree) -> NetworkCopies:
    """The copies with these parameters as the online copy's."""
    return dataclasses.replace(copies, online=dataclasses.replace(copies.online, params=params))


def mean_terms(log: StepLog) -> tuple[dict[str, Mean], dict[str, Mean]]:
    """The mean of each term of the loss over the applied steps of all epochs, and of the last epoch that has one."""
    epochs = jnp.arange(log.applied.shape[0])[:, None]
    last = log.applied & (epochs == jnp.max(jnp.where(log.applied, epochs, 0)))
    of_all, of_last = ({name: Mean.of(term, steps) for name, term in log.terms.items()} for steps in (log.applied, last))
    return of_all, of_last


def epoch_seeds(
    key: PRNGKeyArray, num_epochs: int, num_steps: int, num_envs: int, num_minibatches: int, axis_name: str | None = None
) -> UInt32[Array, "num_epochs groups rounds"]:
    """Random seeds of the minibatches of all epochs, on this device; see `shuffled_minibatches`.

    Args:
        num_envs: environments on this device.
        axis_name: the mesh axis over which environments are sharded; a minibatch is the union of the devices' parts.

    Raises:
        ValueError: the samples cannot be split into `num_minibatches` of equal size.
    """
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    groups = _groups_per_device(num_steps, num_envs, num_minibatches, devices)
    seeds = permutation_seeds(key, num_epochs, groups * devices)
    if axis_name is None:
        return seeds
    return jax.lax.dynamic_slice_in_dim(seeds, jax.lax.axis_index(axis_name) * groups, groups, axis=1)


def shuffled_minibatches(
    seeds: UInt32[Array, "groups rounds"], num_steps: int, num_envs: int, num_minibatches: int
) -> Int32[Array, "num_minibatches M"]:
    """Indices of one epoch's minibatches into the flattened `[T, B]` samples, each once; a single one is not shuffled.

    Args:
        seeds: the seeds of one epoch, from `epoch_seeds` with the same arguments.
    """
    if num_minibatches == 1:
        # The order does not matter for a sum, and shuffling takes a tenth of the time of a full-batch update.
        return jnp.arange(num_steps * num_envs, dtype=jnp.int32)[None]
    groups = seeds.shape[0]
    width = num_envs // groups
    order = jax.vmap(lambda seed: permutation(seed, num_steps * width))(seeds).astype(jnp.int32)
    step, env = order // width, order % width
    first_env = jnp.arange(groups, dtype=jnp.int32)[:, None] * width
    index = step * num_envs + jnp.broadcast_to(first_env, env.shape) + env
    return index.reshape(groups, num_minibatches, -1).swapaxes(0, 1).reshape(num_minibatches, -1)


def check_divides(
    owner: str,
    num_steps: int,
    num_envs: int,
    num_minibatches: int,
    microbatch_size: int | None = None,
    *,
    sequences: bool = False,
) -> None:
    """Check that rollouts can be split into minibatches of equal size, and these into microbatches.

    Args:
        owner: the agent, for the message.
        sequences: minibatches consist of sequences, one per environment.

    Raises:
        ValueError: a size does not divide; the message contains all sizes.
    """
    if sequences and num_envs % num_minibatches:
        raise ValueError(
            f"{owner}: num_minibatches={num_minibatches} must divide num_envs={num_envs}: minibatches of a recurrent network "
            f"consist of whole sequences, one per environment"
        )
    samples = num_steps * num_envs
    if samples % num_minibatches:
        raise ValueError(
            f"{owner}: num_minibatches={num_minibatches} must divide num_steps * num_envs = "
            f"{num_steps} * {num_envs} = {samples} samples"
        )
    size = (num_envs if sequences else samples) // num_minibatches
    if microbatch_size is not None and size % microbatch_size:
        kind = "sequences" if sequences else "samples"
        raise ValueError(
            f"{owner}: microbatch_size={microbatch_size} must divide the {size} {kind} of a minibatch on each device"
        )


def _groups_per_device(num_steps: int, num_envs: int, num_minibatches: int, devices: int) -> int:
    """The number of groups of environments per device."""
    total = num_envs * devices
    for groups in GROUPS:
        fits = groups % devices == 0 and total % groups == 0
        if fits and (num_steps * total // groups) % num_minibatches == 0:
            return groups // devices
    check_divides("epoch_seeds", num_steps, num_envs, num_minibatches)
    return 1

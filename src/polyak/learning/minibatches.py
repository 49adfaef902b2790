"""Shuffled minibatches of a rollout, the same ones on one device or on several, and parts of them that fit the cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from polyak.core.types import PyTree
from polyak.kernels.shuffle import permutation, permutation_seeds

# A minibatch draws the same share from each of (up to) eight groups of environments. Devices hold whole groups, so which
# samples make up a minibatch does not depend on how many devices there are.
GROUPS = (8, 4, 2, 1)

# On this many samples the gradient of a (64, 64) network runs at twice the speed that it has where activations leave the cache.
SAMPLES_IN_CACHE = 4096
# Devices that are one core each have only that core's cache; a single device uses more cores for larger products.
SAMPLES_IN_CACHE_OF_A_CORE = 512


def epoch_seeds(
    key: PRNGKeyArray, num_epochs: int, num_steps: int, num_envs: int, num_minibatches: int, axis_name: str | None = None
) -> UInt32[Array, "num_epochs groups rounds"]:
    """The random bits that decide the minibatches of every epoch, on this device; see `shuffled_minibatches`.

    Args:
        num_envs: environments on this device.
        axis_name: the mesh axis that environments are split over; a minibatch is then the union of the devices' parts.

    Raises:
        ValueError: the samples cannot be split into that many minibatches of one size.
    """
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    groups = _groups(num_steps, num_envs, num_minibatches, devices)
    seeds = permutation_seeds(key, num_epochs, groups * devices)
    if axis_name is None:
        return seeds
    mine: Array = jax.lax.dynamic_slice_in_dim(seeds, jax.lax.axis_index(axis_name) * groups, groups, axis=1)
    return mine


def shuffled_minibatches(
    seeds: UInt32[Array, "groups rounds"], num_steps: int, num_envs: int, num_minibatches: int
) -> Int32[Array, "num_minibatches M"]:
    """Indices into the flattened `[T, B]` samples of one epoch's minibatches, every sample once; one minibatch is not shuffled.

    Args:
        seeds: one epoch's of `epoch_seeds` with the same numbers.
    """
    if num_minibatches == 1:
        # A sum does not depend on the order: shuffling took a tenth of a full-batch update.
        return jnp.arange(num_steps * num_envs, dtype=jnp.int32)[None]
    groups = seeds.shape[0]
    width = num_envs // groups
    order = jax.vmap(lambda seed: permutation(seed, num_steps * width))(seeds).astype(jnp.int32)
    step, env = order // width, order % width
    first_env = jnp.arange(groups, dtype=jnp.int32)[:, None] * width
    index = step * num_envs + jnp.broadcast_to(first_env, env.shape) + env
    return index.reshape(groups, num_minibatches, -1).swapaxes(0, 1).reshape(num_minibatches, -1)


def check_divides(
    num_steps: int, num_envs: int, num_minibatches: int, microbatch_size: int | None = None, *, sequences: bool = False
) -> None:
    """Check that rollouts can be split into minibatches of one size, and those into microbatches.

    Args:
        sequences: a minibatch is made of environments, each with all its steps.

    Raises:
        ValueError: with all the numbers.
    """
    if sequences and num_envs % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_envs={num_envs}: a recurrent network's minibatches are "
            f"made of whole sequences, one of each environment"
        )
    rows = num_steps * num_envs
    if rows % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_steps * num_envs = {num_steps} * {num_envs} = {rows} samples"
        )
    size = (num_envs if sequences else rows) // num_minibatches
    if microbatch_size is not None and size % microbatch_size:
        kind = "sequences" if sequences else "samples"
        raise ValueError(f"microbatch_size={microbatch_size} must divide the {size} {kind} of a minibatch on each device")


def _groups(num_steps: int, num_envs: int, num_minibatches: int, devices: int) -> int:
    """Groups of environments on each device."""
    total = num_envs * devices
    for groups in GROUPS:
        fits = groups % devices == 0 and total % groups == 0
        if fits and (num_steps * total // groups) % num_minibatches == 0:
            return groups // devices
    check_divides(num_steps, num_envs, num_minibatches)
    return 1


def count_microbatches(size: int, microbatch_size: int | None, axis_name: str | None = None) -> int:
    """How many equal parts of `size` samples have their gradients computed one after the other.

    Args:
        microbatch_size: samples (or sequences) of a part; None: the fewest parts that fit the cache, one where no such number
            divides the size, or where there is no CPU.
    """
    if microbatch_size is not None:
        return size // microbatch_size
    limit = SAMPLES_IN_CACHE if axis_name is None else SAMPLES_IN_CACHE_OF_A_CORE
    fewest = -(-size // limit) if jax.default_backend() == "cpu" else 1
    return next((parts for parts in range(fewest, 4 * fewest) if size % parts == 0), 1)


def map_steps(function: Callable[[PyTree], PyTree], tree: PyTree, microbatch_size: int | None = None) -> PyTree:
    """`function`, which maps leaves `[N, ...]` sample by sample, over leaves `[T, B, ...]`, some whole steps at a time.

    Args:
        microbatch_size: most samples at a time, but at least one step; None: as many as fit the cache.
    """
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    limit = SAMPLES_IN_CACHE if microbatch_size is None else microbatch_size
    steps = min(num_steps, max(1, limit // num_envs))

    def apply(part: PyTree) -> PyTree:
        leading = jax.tree.leaves(part)[0].shape[:2]
        out = function(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), part))
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)

    parts, rest = num_steps // steps, num_steps % steps
    if parts == 1:
        return apply(tree)
    mapped = jax.lax.map(apply, jax.tree.map(lambda x: x[: parts * steps].reshape(parts, steps, *x.shape[1:]), tree))
    mapped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)
    if rest == 0:
        return mapped
    last = apply(jax.tree.map(lambda x: x[-rest:], tree))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mapped, last)

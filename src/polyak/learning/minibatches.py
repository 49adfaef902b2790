"""Shuffled minibatches of a rollout, independent of the number of devices, and microbatches that fit the cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from polyak.core.types import PyTree
from polyak.kernels.shuffle import permutation, permutation_seeds

# A minibatch has equally many samples from each of (up to) eight groups of environments. Each device has whole groups, so
# the samples of a minibatch do not depend on the number of devices.
GROUPS = (8, 4, 2, 1)

# With this many samples the gradient of a (64, 64) network is twice as fast as with activations that exceed the cache.
SAMPLES_IN_CACHE = 4096
# A device of one core has only the cache of that core; a single device uses several cores for large products.
SAMPLES_IN_CORE_CACHE = 512
# The gradient of `nature_cnn` for 256 images of 84x84 takes 0.22 s by 32 at a time, 0.26 by 64, and 0.35 at once.
IMAGES_IN_CACHE = 32


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
    local: Array = jax.lax.dynamic_slice_in_dim(seeds, jax.lax.axis_index(axis_name) * groups, groups, axis=1)
    return local


def shuffled_minibatches(
    seeds: UInt32[Array, "groups rounds"], num_steps: int, num_envs: int, num_minibatches: int
) -> Int32[Array, "num_minibatches M"]:
    """Indices of one epoch's minibatches into the flattened `[T, B]` samples, each once; a single one is not shuffled.

    Args:
        seeds: those of one epoch from `epoch_seeds`, with the same arguments.
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
    num_steps: int, num_envs: int, num_minibatches: int, microbatch_size: int | None = None, *, sequences: bool = False
) -> None:
    """Check that rollouts can be split into minibatches of equal size, and these into microbatches.

    Args:
        sequences: minibatches consist of whole sequences, one per environment.

    Raises:
        ValueError: a size does not divide; the message contains all sizes.
    """
    if sequences and num_envs % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_envs={num_envs}: minibatches of a recurrent network "
            f"consist of whole sequences, one per environment"
        )
    samples = num_steps * num_envs
    if samples % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_steps * num_envs = {num_steps} * {num_envs} = {samples} samples"
        )
    size = (num_envs if sequences else samples) // num_minibatches
    if microbatch_size is not None and size % microbatch_size:
        kind = "sequences" if sequences else "samples"
        raise ValueError(f"microbatch_size={microbatch_size} must divide the {size} {kind} of a minibatch on each device")


def _groups_per_device(num_steps: int, num_envs: int, num_minibatches: int, devices: int) -> int:
    """The number of groups of environments per device."""
    total = num_envs * devices
    for groups in GROUPS:
        fits = groups % devices == 0 and total % groups == 0
        if fits and (num_steps * total // groups) % num_minibatches == 0:
            return groups // devices
    check_divides(num_steps, num_envs, num_minibatches)
    return 1


def count_microbatches(
    size: int,
    microbatch_size: int | None,
    axis_name: str | None = None,
    *,
    samples_each: int = 1,
    has_images: bool = False,
) -> int:
    """The number of equal microbatches of a minibatch of `size` samples (or sequences).

    Args:
        microbatch_size: samples (or sequences) per microbatch; None: the fewest microbatches that fit the cache, or one if
            none of these numbers divides the size, or if the backend is not a CPU.
        samples_each: 1, or the number of time steps of a sequence.
        has_images: observations pass through convolutions.
    """
    if microbatch_size is not None:
        return size // microbatch_size
    limit = _samples_in_cache(has_images, axis_name)
    minimum = min(size, -(-size * samples_each // limit)) if jax.default_backend() == "cpu" else 1
    return next((parts for parts in range(minimum, 4 * minimum) if size % parts == 0), 1)


def _samples_in_cache(has_images: bool, axis_name: str | None = None) -> int:
    if has_images and jax.default_backend() == "cpu":
        return IMAGES_IN_CACHE
    return SAMPLES_IN_CACHE if axis_name is None else SAMPLES_IN_CORE_CACHE


def map_steps(
    function: Callable[[PyTree], PyTree], tree: PyTree, microbatch_size: int | None = None, *, has_images: bool = False
) -> PyTree:
    """Apply `function`, which maps leaves `[N, ...]` per sample, to leaves `[T, B, ...]` in chunks of whole time steps.

    Args:
        microbatch_size: maximum samples per chunk, but at least one time step; None: as many as fit the cache.
        has_images: observations pass through convolutions.
    """
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    limit = _samples_in_cache(has_images) if microbatch_size is None else microbatch_size
    steps = min(num_steps, max(1, limit // num_envs))

    def apply(chunk: PyTree) -> PyTree:
        leading = jax.tree.leaves(chunk)[0].shape[:2]
        out = function(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunk))
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)

    chunks, rest = num_steps // steps, num_steps % steps
    if chunks == 1:
        return apply(tree)
    mapped = jax.lax.map(apply, jax.tree.map(lambda x: x[: chunks * steps].reshape(chunks, steps, *x.shape[1:]), tree))
    mapped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)
    if rest == 0:
        return mapped
    last = apply(jax.tree.map(lambda x: x[-rest:], tree))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mapped, last)

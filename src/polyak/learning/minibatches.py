"""Shuffled minibatches of a rollout, the same ones on one device or on several, and their gradients in cache-sized parts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from polyak.core.types import PyTree
from polyak.kernels.shuffle import shuffle_words, shuffled_indices
from polyak.ops.devices import device_count, device_index, sum_over_devices

# A minibatch draws the same share from each of (up to) eight groups of environments. Devices hold whole groups, so which
# rows make up a minibatch does not depend on how many devices there are.
GROUPS = (8, 4, 2, 1)

# On so many rows the gradient of a (64, 64) network runs at twice the speed that it has where activations leave the cache.
ROWS_IN_CACHE = 4096
# Devices that are a core each have only that core's cache; alone, a device takes more cores for larger products.
ROWS_IN_CACHE_OF_A_CORE = 512


def epoch_words(
    key: PRNGKeyArray, num_epochs: int, num_steps: int, num_envs: int, num_minibatches: int, axis_name: str | None = None
) -> UInt32[Array, "num_epochs groups rounds"]:
    """What decides the minibatches of every epoch, on this device; see `shuffled_minibatches`.

    Args:
        num_envs: environments on this device.
        axis_name: the mesh axis that environments are split over; a minibatch is then the union of the devices' parts.

    Raises:
        ValueError: the rows cannot be split into so many minibatches of one size.
    """
    devices = device_count(axis_name)
    groups = _groups(num_steps, num_envs, num_minibatches, devices)
    words = shuffle_words(key, num_epochs, groups * devices)
    if devices == 1:
        return words
    mine: Array = jax.lax.dynamic_slice_in_dim(words, device_index(axis_name) * groups, groups, axis=1)
    return mine


def shuffled_minibatches(
    words: UInt32[Array, "groups rounds"], num_steps: int, num_envs: int, num_minibatches: int
) -> Int32[Array, "num_minibatches M"]:
    """Row numbers, into the flattened `[T, B]` rows, of one epoch's minibatches: every row once; the whole batch as it lies.

    Args:
        words: one epoch's of `epoch_words` with the same numbers.
    """
    if num_minibatches == 1:
        # Sums alone are made of it: shuffling took a tenth of a full-batch update.
        return jnp.arange(num_steps * num_envs, dtype=jnp.int32)[None]
    groups = words.shape[0]
    width = num_envs // groups
    order = jax.vmap(lambda its: shuffled_indices(its, num_steps * width))(words).astype(jnp.int32)
    step, env = order // width, order % width
    first_env = jnp.arange(groups, dtype=jnp.int32)[:, None] * width
    rows = step * num_envs + jnp.broadcast_to(first_env, env.shape) + env
    return rows.reshape(groups, num_minibatches, -1).swapaxes(0, 1).reshape(num_minibatches, -1)


def check_divides(
    num_steps: int, num_envs: int, num_minibatches: int, microbatch_size: int | None = None, *, sequences: bool = False
) -> None:
    """Refuse rollouts that do not fall into so many minibatches of one size, and those into microbatches of this size.

    Args:
        sequences: a minibatch is made of environments, each with all its steps.

    Raises:
        ValueError: with all the numbers.
    """
    if sequences and num_envs % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_envs={num_envs}: with a memory, minibatches are made of whole "
            f"sequences, one of each environment"
        )
    rows = num_steps * num_envs
    if rows % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide num_steps * num_envs = {num_steps} * {num_envs} = {rows} rows"
        )
    size = (num_envs if sequences else rows) // num_minibatches
    if microbatch_size is not None and size % microbatch_size:
        kind = "sequences" if sequences else "rows"
        raise ValueError(f"microbatch_size={microbatch_size} must divide the {size} {kind} of a minibatch on each device")


def accumulate(
    share: Callable[[Int32[Array, " m"]], PyTree],
    index: Int32[Array, " M"],
    axis_name: str | None = None,
    microbatch_size: int | None = None,
) -> PyTree:
    """What `share` answers for parts of the rows, summed over the parts and over devices.

    Args:
        share: of some rows, something that adds up: their part of a mean over the whole minibatch, or of its gradient.
        index: the minibatch's rows on this device.
        microbatch_size: rows of a part; None: as many as fit the cache.
    """
    rows_in_cache = ROWS_IN_CACHE if axis_name is None else ROWS_IN_CACHE_OF_A_CORE
    rows = index.shape[0]
    parts = _parts(rows, rows_in_cache) if microbatch_size is None else rows // microbatch_size
    if parts == 1:
        total = share(index)
    else:
        shapes = jax.eval_shape(share, index[: rows // parts])
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(sums: PyTree, part: Array) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, sums, share(part)), None

        total, _ = jax.lax.scan(add, nothing, index.reshape(parts, -1))
    if axis_name is None:
        return total
    # One raveled vector: leaf by leaf a reduction costs ten times as much.
    vector, unravel = ravel_pytree(total)
    return unravel(sum_over_devices(vector, axis_name))


def _groups(num_steps: int, num_envs: int, num_minibatches: int, devices: int) -> int:
    """Groups of environments on each device."""
    total = num_envs * devices
    for groups in GROUPS:
        fits = groups % devices == 0 and total % groups == 0
        if fits and (num_steps * total // groups) % num_minibatches == 0:
            return groups // devices
    check_divides(num_steps, num_envs, num_minibatches)
    return 1


def _parts(rows: int, rows_in_cache: int) -> int:
    """The fewest equal parts that fit the cache; one where the rows have no fitting divisor, or the cache is no CPU's."""
    wanted = -(-rows // rows_in_cache) if jax.default_backend() == "cpu" else 1
    return next((parts for parts in range(wanted, 4 * wanted) if rows % parts == 0), 1)


def map_rows(function: Callable[[PyTree], PyTree], tree: PyTree, microbatch_size: int | None = None) -> PyTree:
    """`function`, which maps `[B, ...]` leaves row by row, over `[T, B, ...]` leaves, in parts of whole steps.

    Args:
        microbatch_size: rows of a part, if not more than one step has; None: as many as fit the cache.
    """
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    steps = max(1, (ROWS_IN_CACHE if microbatch_size is None else microbatch_size) // num_envs)

    def flat(part: PyTree) -> PyTree:
        lead = jax.tree.leaves(part)[0].shape[:2]
        out = function(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), part))
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)

    whole = num_steps // steps
    if whole <= 1:
        return flat(tree)
    parts = jax.tree.map(lambda x: x[: whole * steps].reshape(whole, steps, *x.shape[1:]), tree)
    mapped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(flat, parts))
    if whole * steps == num_steps:
        return mapped
    rest = flat(jax.tree.map(lambda x: x[whole * steps :], tree))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mapped, rest)

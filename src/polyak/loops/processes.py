"""Communication between processes that run one compiled loop over the devices of all processes.

`jax.distributed` connects the processes. Every process must run the same program equally often, so the first process decides
everything that depends on a clock, a signal or a callback.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from polyak.core.types import PyTree

KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def spans_processes(mesh: Mesh | None) -> bool:
    """Return True if a mesh has devices of other processes."""
    return mesh is not None and mesh.is_multi_process


def is_first_process(mesh: Mesh | None) -> bool:
    """Return True for the first process of a mesh, which calls callbacks and writes files."""
    return not spans_processes(mesh) or jax.process_index() == 0


def agree(mesh: Mesh | None, *values: int) -> tuple[int, ...]:
    """Return the first process's integers in every process; all processes must call it."""
    if not spans_processes(mesh):
        return values
    return tuple(map(int, multihost_utils.broadcast_one_to_all(np.array(values, np.int32))))


def put(x: Any, sharding: Sharding) -> jax.Array:
    """Put an array, equal in every process, onto devices; an array that spans several processes is returned unchanged."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    array = x if _is_key(x) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: array[index])


def gather(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Gather arrays that are split over processes onto one device of each process; all processes must call it."""
    if mesh is None or not spans_processes(mesh):
        return tree
    gathered = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), gathered)


def from_first_process(tree: PyTree, shapes: PyTree) -> PyTree:
    """Return the first process's tree, bit for bit, in every process; all processes must call it.

    Args:
        tree: arrays and keys; ignored in the other processes.
        shapes: shapes and dtypes of the leaves.
    """
    raw = jax.tree.map(lambda x: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x, shapes)
    sizes = [leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(raw)]
    # As integers: a sum of floats would turn -0.0 into 0.0.
    words = np.zeros(-(-sum(sizes) // 4), np.uint32)
    if jax.process_index() == 0:
        leaves = [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in jax.tree.leaves(tree)]
        parts = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves]
        words.view(np.uint8)[: sum(sizes)] = np.concatenate(parts)
    received = np.asarray(multihost_utils.broadcast_one_to_all(words)).view(np.uint8)
    ends = np.cumsum(sizes)
    parts = [received[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    leaves = [
        part.copy().view(np.dtype(leaf.dtype)).reshape(leaf.shape)
        for part, leaf in zip(parts, jax.tree.leaves(raw), strict=True)
    ]
    arrays = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return jax.tree.map(_as_leaf, arrays, shapes)


def _as_leaf(array: Any, shape: Any) -> Any:
    if isinstance(shape, np.ndarray):
        return array
    if not _is_key(shape):
        return jnp.asarray(array)
    dtypes = {jax.eval_shape(partial(jax.random.key, 0, impl=name)).dtype: name for name in KEY_IMPLEMENTATIONS}
    return jax.random.wrap_key_data(array, impl=dtypes[shape.dtype])


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _identity(tree: PyTree) -> PyTree:
    return tree

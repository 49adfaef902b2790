"""Reductions over devices, and that they do nothing on one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from polyak.ops.devices import any_over_devices, device_count, device_index, sum_over_devices


def test_one_device_keeps_what_it_has():
    x = jnp.arange(3.0)
    assert sum_over_devices(x, None) is x and device_count(None) == 1 and device_index(None) == 0
    assert np.array_equal(any_over_devices(jnp.array([True, False]), None), [True, False])


def test_several_reduce():
    mesh = jax.make_mesh((4,), ("rows",), (AxisType.Auto,), devices=jax.local_devices()[:4])

    def reduce(x):
        flags = jnp.stack([x[0] > 2.5, x[0] > 9.0])
        index = jnp.asarray(device_index("rows"), jnp.int32)
        return sum_over_devices(x, "rows"), any_over_devices(flags, "rows"), index[None] + device_count("rows")

    whole = PartitionSpec()
    split = jax.shard_map(
        reduce, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=(whole, whole, PartitionSpec("rows")), check_vma=False
    )
    total, flags, index = jax.jit(split)(jnp.arange(4.0))
    assert float(total[0]) == 6.0 and list(np.asarray(flags)) == [True, False] and list(np.asarray(index)) == [4, 5, 6, 7]

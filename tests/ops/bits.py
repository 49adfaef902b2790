"""Little trees, compared to the bit: what the tests of the updates share."""

import jax
import jax.numpy as jnp
import numpy as np

NAN, INF = float("nan"), float("inf")


def tree(*values, dtype=jnp.float32):
    return {"w": jnp.array(values, dtype)}


def bits(x):
    return np.asarray(x).tobytes()


def same_bits(a, b):
    return jax.tree.map(lambda x, y: bits(x) == bits(y) and x.dtype == y.dtype, a, b) == jax.tree.map(lambda x: True, b)


def sharded(values, partition):
    """A tree over the eight host devices, along the axes that say `d`."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*partition)))

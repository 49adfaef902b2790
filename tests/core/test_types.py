"""Copies of arrays that can be donated."""

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.types import copy_buffers


def test_copied_buffers_are_shared_with_no_numpy_or_jax_array():
    # Large and aligned, as JAX wants it of a buffer that it takes over.
    given = np.zeros(1 << 16, np.float32)
    there = jnp.zeros(3)
    tree = copy_buffers({"numpy": given, "one": there, "the same": there, "key": jax.random.key(1)})
    given[:] = 1.0
    assert not np.any(tree["numpy"])
    assert jax.random.key_data(tree["key"]).tolist() == [0, 1]
    addresses = [x.unsafe_buffer_pointer() for x in (there, tree["one"], tree["the same"])]
    assert len(set(addresses)) == 3
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    doubled({name: tree[name] for name in ("numpy", "one", "the same")})
    assert there.tolist() == [0.0, 0.0, 0.0]

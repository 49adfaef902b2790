"""Arrays in buffers of their own."""

from typing import Any

import jax

from polyak.core.types import PyTree


def owned(tree: PyTree) -> Any:
    """The same numbers, each array a JAX array in a new buffer that nothing else names, so that it can be donated.

    When it returns, the copy is made: what it was given may change.
    """
    # Onto the device first: `device_put` copies what lies there, but not NumPy's buffers, whatever it is told; `jnp.array` and
    # `jnp.copy` compile a program for every shape. It copies in the background, from a buffer that is still the caller's.
    return jax.block_until_ready(jax.device_put(jax.device_put(tree), may_alias=False))

"""Random integers below a traced bound, from half of the random bits that `jax.random.randint` takes or less."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32


def random_below(key: PRNGKeyArray, shape: tuple[int, ...], n: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    """Integers in [0, n), floor(n · x / 2³²) of 32 random bits x: a probability differs from 1/n by less than 2⁻³²."""
    # `jax.random.randint` draws twice the bits, which takes longer than all else in a sample.
    x = jax.random.bits(key, shape, jnp.uint32)
    low_bits = jnp.uint32(0xFFFF)
    x_high, x_low, n_high, n_low = x >> 16, x & low_bits, n >> 16, n & low_bits
    middle = x_high * n_low + (x_low * n_low >> 16)
    other = x_low * n_high + (middle & low_bits)
    return (x_high * n_high + (middle >> 16) + (other >> 16)).astype(jnp.int32)

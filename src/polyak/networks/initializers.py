"""Initial weights, drawn in NumPy: JAX would compile a program for each shape, 1.2 s before the first update.

An initializer is a function `(key, shape, dtype)`, as in `jax.nn.initializers`. The same key gives the same weights inside and
outside of `jit` and `vmap`, where they come from a callback.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, PRNGKeyArray

Initializer: TypeAlias = Callable[[PRNGKeyArray, tuple[int, ...], Any], Float[Array, "..."]]


def orthogonal(gain: float) -> Initializer:
    """Orthogonal matrices times `gain`, uniformly distributed; axes before the last are one.

    Source: Saxe et al. 2014, arXiv:1312.6120; sampling: Mezzadri 2007, arXiv:math-ph/0609050, section 5.
    """

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        columns = shape[-1]
        rows = int(np.prod(shape[:-1]))
        q, r = np.linalg.qr(random.standard_normal((max(rows, columns), min(rows, columns))))
        # QR leaves the signs open; with a positive diagonal the distribution is uniform.
        q = gain * q * np.sign(np.diagonal(r))
        return (q if rows >= columns else q.T).reshape(shape)

    return _in_numpy(draw)


def uniform(bound: float) -> Initializer:
    """Numbers in [-bound, bound)."""
    return _in_numpy(lambda random, shape: random.uniform(-bound, bound, shape))


def constant(value: float) -> Initializer:
    """The same number everywhere."""
    return lambda key, shape, dtype: jax.device_put(np.full(shape, value, dtype))


def _in_numpy(draw: Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[Any]]) -> Initializer:
    def initializer(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        def from_bits(seed_bits: Any) -> npt.NDArray[Any]:
            return draw(np.random.default_rng(np.asarray(seed_bits)), shape).astype(dtype)

        seed_bits = jax.random.key_data(key)
        if isinstance(seed_bits, jax.core.Tracer):
            return jax.pure_callback(from_bits, jax.ShapeDtypeStruct(shape, dtype), seed_bits, vmap_method="sequential")
        return jax.device_put(from_bits(seed_bits))

    return initializer

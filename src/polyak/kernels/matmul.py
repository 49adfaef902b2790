"""A matrix product whose gradient is fast on a CPU, in place of `x @ kernel`."""

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float


def matmul(x: Float[Array, "*N inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "*N outputs"]:
    """The product x · kernel; replaces `x @ kernel`, equal up to rounding, with the same derivatives.

    Gain: the kernel's gradient xᵀ · dy sums over the leading axis of both, for which XLA has no fast product on a CPU. With x
    transposed in memory first, an update with 4 minibatches of 256 samples takes 9 % less, and the compiled loop with 512
    environments 15 to 20 %. Delete it when `jax.grad` of `x @ kernel` is as fast as `matmul` for three times 64.
    """
    return _matmul(x, kernel) if x.ndim == 2 else x @ kernel


@jax.custom_jvp
def _matmul(x: Array, kernel: Array) -> Array:
    return x @ kernel


def _jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    # At most one of the two is a symbolic zero.
    terms = [] if isinstance(dx, SymbolicZero) else [dx @ kernel]
    terms += [] if isinstance(dkernel, SymbolicZero) else [_times_tangent(x, dkernel)]
    return _matmul(x, kernel), sum(terms[1:], terms[0])


def _times_tangent(x: Array, dkernel: Array) -> Array:
    """The tangent x · dkernel, whose transpose is the gradient; without the barrier XLA would undo the transposition."""
    # Read here, not when the module is imported: it starts JAX.
    if jax.default_backend() != "cpu":
        return x @ dkernel
    return jax.lax.dot_general(jax.lax.optimization_barrier(x.T), dkernel, (((0,), (0,)), ((), ())))


_matmul.defjvp(_jvp, symbolic_zeros=True)

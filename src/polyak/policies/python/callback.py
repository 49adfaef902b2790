"""One call of Python from a compiled program: exactly once, in order, with read-only NumPy arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from polyak.core.python_call import call_python
from polyak.core.types import PyTree
from polyak.policies.python.callee import CalleeRef, PythonCallee


def ordered_call(
    ref: CalleeRef,
    function: Callable[[PythonCallee, PyTree], PyTree],
    shapes: PyTree,
    inputs: PyTree,
    unused: Sequence[Array] = (),
) -> PyTree:
    """`function(callee, inputs)`, called in Python with read-only NumPy arrays.

    Args:
        ref: refers to the callee, which counts the call.
        function: returns arrays of these shapes and dtypes; it may not hold the callee, since compiled programs hold it.
        shapes: a tree of `jax.ShapeDtypeStruct`.
        inputs: a tree of arrays.
        unused: arrays that the function does not get, but over which it cannot be mapped either.

    Raises:
        TypeError: while tracing: under `vmap`, `grad`, or in a program for several devices.
    """
    leaves, structure = jax.tree.flatten(inputs)
    out_leaves, out_structure = jax.tree.flatten(shapes)
    count = len(leaves)

    def call(*arrays: Any, compiled: bool) -> list[Any]:
        callee = ref()
        how = callee.calls.call_compiled if compiled else callee.calls.call
        return jax.tree.leaves(how(function, callee, jax.tree.unflatten(structure, arrays[:count])))

    arguments = map(jnp.asarray, (*leaves, *unused))
    return jax.tree.unflatten(out_structure, call_python(ref.name, call, out_leaves, list(arguments)))

"""One call of Python from a compiled program: exactly once, in order, with all that it is given in one array."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from polyak.core.python_calls import PythonCalls
from polyak.core.types import PyTree


def ordered_call(calls: PythonCalls, function: Callable[[PyTree], PyTree], shapes: PyTree, given: PyTree) -> PyTree:
    """`function(given)`, called in Python with NumPy arrays that cannot be written to.

    Args:
        calls: counts it and keeps what it raises.
        function: gives arrays of these shapes and dtypes.
        shapes: a tree of `jax.ShapeDtypeStruct`.
        given: a tree of arrays.

    Raises:
        TypeError: while tracing: under `vmap`, `grad`, or in a program for several devices.
    """
    leaves, structure = jax.tree.flatten(given)
    leaves = _only_plain.bind(*(jnp.asarray(leaf) for leaf in leaves), name=calls.name)
    packed, unpack = _packing(leaves)

    def call(packed: Any) -> PyTree:
        # By hand, for JAX's tree functions cost as much as the checks.
        return calls.call_compiled(function, jax.tree.unflatten(structure, unpack(np.asarray(packed))))

    return io_callback(call, shapes, packed, ordered=True)


def _packing(leaves: Sequence[Array]) -> tuple[Array, Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]]:
    """All arrays as one of bytes, for each array that JAX hands over costs 20 µs; and the way back, as views."""
    if len(leaves) == 1:
        return leaves[0], lambda packed: [packed]
    # The widest first: every number then lies where the processor wants it.
    order = sorted(range(len(leaves)), key=lambda i: -leaves[i].dtype.itemsize)
    places: list[tuple[int, slice, np.dtype[Any], tuple[int, ...]]] = []
    end = 0
    for i in order:
        start, end = end, end + leaves[i].size * leaves[i].dtype.itemsize
        places.append((i, slice(start, end), np.dtype(leaves[i].dtype), leaves[i].shape))

    def unpack(packed: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        parts: list[Any] = [None] * len(places)
        for i, place, dtype, shape in places:
            parts[i] = packed[place].view(dtype).reshape(shape)
        return parts

    return jnp.concatenate([_as_bytes(leaves[i]) for i in order]), unpack


def _as_bytes(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8).reshape(-1)
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


# The identity, which no transformation goes through: JAX's own errors name neither the policy nor a way out.
_only_plain = Primitive("calls_python")
_only_plain.multiple_results = True
_only_plain.def_impl(lambda *leaves, name: list(leaves))
_only_plain.def_abstract_eval(lambda *leaves, name: list(leaves))


def _refuse_vmap(leaves: Any, axes: Any, *, name: str) -> NoReturn:
    raise TypeError(
        f"{name} is called once a step, in order, and cannot be mapped by vmap (nor by train.compiled_seeds): it takes "
        "a batch as it is, so give it one; train seeds one after the other by train.compiled, or use the host loop"
    )


def _refuse_grad(leaves: Any, tangents: Any, *, name: str) -> NoReturn:
    raise TypeError(
        f"{name} is Python, which cannot be differentiated: use jax.lax.stop_gradient on what it is given, or write it in JAX"
    )


def _devices(context: Any) -> int:
    """How many devices a program is lowered for: by hand over a mesh (`shard_map`), or split by the compiler."""
    try:
        return int(context.mesh.size)
    except AttributeError:
        return int(context.num_devices)


def _lower(ctx: Any, *leaves: Any, name: str) -> Sequence[Any]:
    if _devices(ctx.module_context.axis_context) > 1:
        raise TypeError(
            f"{name} is Python in this process and cannot be split over devices: use devices=1, act on one device and share "
            "only the update, or use the host loop"
        )
    return leaves


batching.primitive_batchers[_only_plain] = _refuse_vmap
ad.primitive_jvps[_only_plain] = _refuse_grad
mlir.register_lowering(_only_plain, _lower)

"""A call of Python from a compiled program, in order and exactly once, with NumPy arrays.

`io_callback` converts all arguments to JAX arrays and back to NumPy: 110 µs a call, of which 20 µs are left here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

# JAX's own ordered effect: JAX keeps such calls in order through loops, and makes them also where no result is used.
(_ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def call_python(
    name: str, call: Callable[..., list[Any]], shapes: Sequence[jax.ShapeDtypeStruct], arguments: Sequence[Array]
) -> list[Array]:
    """`call(*arguments, compiled)`, which returns NumPy arrays of these shapes and dtypes.

    Args:
        name: the callee, for errors.
        call: its keyword argument `compiled` is False outside of compiled programs, where exceptions pass as they are.

    Raises:
        TypeError: while tracing: under `vmap`, `grad`, or in a program for several devices.
    """
    called: list[Array] = _call_python.bind(*arguments, name=name, call=call, shapes=tuple(shapes))
    return called


_call_python = Primitive("call_python")
_call_python.multiple_results = True


def _evaluate(*leaves: Array, call: Callable[..., list[Any]], **_: Any) -> list[Array]:
    """Outside of compiled programs: exceptions pass as they are."""
    arrays = [np.array(leaf) for leaf in leaves]
    for array in arrays:
        array.flags.writeable = False
    return [jnp.asarray(output) for output in call(*arrays, compiled=False)]


def _abstract(*leaves: Any, shapes: Sequence[Any], **_: Any) -> tuple[list[Any], set[Any]]:
    return [jax.core.ShapedArray(shape.shape, shape.dtype) for shape in shapes], {_ORDERED}


def _reject_vmap(leaves: Any, axes: Any, *, name: str, **_: Any) -> NoReturn:
    raise TypeError(
        f"{name} is called once a step, in order, and cannot be mapped by vmap (nor by loops.compiled_seeds): it takes "
        "a batch as it is, so give it one; train seeds one after the other by loops.compiled, or use the host loop"
    )


def _reject_grad(leaves: Any, tangents: Any, *, name: str, **_: Any) -> NoReturn:
    raise TypeError(
        f"{name} is Python, which cannot be differentiated: use jax.lax.stop_gradient on its inputs, or write it in JAX"
    )


def _device_count(context: Any) -> int:
    """Number of devices of the program that is lowered: of the mesh (`shard_map`), or of the compiler's partition."""
    try:
        return int(context.mesh.size)
    except AttributeError:
        return int(context.num_devices)


def _lower(ctx: Any, *leaves: Any, name: str, call: Callable[..., list[Any]], **_: Any) -> Sequence[Any]:
    if _device_count(ctx.module_context.axis_context) > 1:
        raise TypeError(
            f"{name} is Python in this process and cannot be split over devices: use devices=1, act on one device and "
            "share only the update, or use the host loop"
        )
    outputs, token, _ = mlir.emit_python_callback(
        ctx,
        lambda *arrays: tuple(call(*arrays, compiled=True)),
        ctx.tokens_in.get(_ORDERED),
        list(leaves),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDERED: token})))
    return outputs


_call_python.def_impl(_evaluate)
_call_python.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[_call_python] = _reject_vmap
ad.primitive_jvps[_call_python] = _reject_grad
mlir.register_lowering(_call_python, _lower)

"""One call of Python from a compiled program: exactly once, in order, with NumPy arrays of its own."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from polyak.core.policy_faults import PythonCalls
from polyak.core.types import PyTree

# JAX's own kind of effect, which it keeps in order through loops, and drops for no unused result. `io_callback` itself makes
# JAX arrays of all that it is given and NumPy arrays of these again: 110 µs a step, of which 20 µs are left here.
(_ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def ordered_call(
    calls: PythonCalls, function: Callable[[PyTree], PyTree], shapes: PyTree, given: PyTree, unused: Sequence[Array] = ()
) -> PyTree:
    """`function(given)`, called in Python with NumPy arrays that cannot be written to.

    Args:
        calls: counts it and keeps what it raises.
        function: gives arrays of these shapes and dtypes.
        shapes: a tree of `jax.ShapeDtypeStruct`.
        given: a tree of arrays.
        unused: what the function is not given, but over which it cannot be mapped either.

    Raises:
        TypeError: while tracing: under `vmap`, `grad`, or in a program for several devices.
    """
    leaves, structure = jax.tree.flatten(given)
    wanted, answered = jax.tree.flatten(shapes)

    def call(how: Callable[..., PyTree], *arrays: Any) -> list[Any]:
        answer = how(function, jax.tree.unflatten(structure, arrays[: len(leaves)]))
        return jax.tree.leaves(answer)

    arguments = map(jnp.asarray, (*leaves, *unused))
    return jax.tree.unflatten(answered, _calls_python.bind(*arguments, calls=calls, call=call, wanted=tuple(wanted)))


_calls_python = Primitive("calls_python")
_calls_python.multiple_results = True


def _now(*leaves: Array, calls: PythonCalls, call: Callable[..., list[Any]], wanted: Sequence[Any]) -> list[Array]:
    """Outside of compiled programs: what Python raises is not in anything's way."""
    arrays = [np.array(leaf) for leaf in leaves]
    for array in arrays:
        array.flags.writeable = False
    return [jnp.asarray(answer) for answer in call(calls.call, *arrays)]


def _abstract(*leaves: Any, wanted: Sequence[Any], **_: Any) -> tuple[list[Any], set[Any]]:
    return [jax.core.ShapedArray(shape.shape, shape.dtype) for shape in wanted], {_ORDERED}


def _refuse_vmap(leaves: Any, axes: Any, *, calls: PythonCalls, **_: Any) -> NoReturn:
    raise TypeError(
        f"{calls.name} is called once a step, in order, and cannot be mapped by vmap (nor by train.compiled_seeds): it takes "
        "a batch as it is, so give it one; train seeds one after the other by train.compiled, or use the host loop"
    )


def _refuse_grad(leaves: Any, tangents: Any, *, calls: PythonCalls, **_: Any) -> NoReturn:
    raise TypeError(
        f"{calls.name} is Python, which cannot be differentiated: use jax.lax.stop_gradient on what it is given, or write it "
        "in JAX"
    )


def _devices(context: Any) -> int:
    """How many devices a program is lowered for: by hand over a mesh (`shard_map`), or split by the compiler."""
    try:
        return int(context.mesh.size)
    except AttributeError:
        return int(context.num_devices)


def _lower(ctx: Any, *leaves: Any, calls: PythonCalls, call: Callable[..., list[Any]], wanted: Sequence[Any]) -> Sequence[Any]:
    if _devices(ctx.module_context.axis_context) > 1:
        raise TypeError(
            f"{calls.name} is Python in this process and cannot be split over devices: use devices=1, act on one device and "
            "share only the update, or use the host loop"
        )
    answers, token, _ = mlir.emit_python_callback(
        ctx,
        lambda *arrays: tuple(call(calls.call_compiled, *arrays)),
        ctx.tokens_in.get(_ORDERED),
        list(leaves),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDERED: token})))
    return answers


_calls_python.def_impl(_now)
_calls_python.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[_calls_python] = _refuse_vmap
ad.primitive_jvps[_calls_python] = _refuse_grad
mlir.register_lowering(_calls_python, _lower)

"""Converts functions of arrays to and from StableHLO programs for any batch size, on CPU and CUDA."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import export

from polyak.export.archive import ExportError

MEMBER = "policy.jax_export"
PLATFORMS = ("cpu", "cuda")
ROWS = "rows"

# The only custom call in the program of a policy: the check of its shapes.
_ALLOWED_CALLS = {"shape_assertion"}
# Complete names: MLIR quotes names that are no words, and writes a quotation mark in a name as \22.
_CALL = re.compile(r"\bstablehlo\.custom_call\s*@(?:\"([^\"]*)\"|([\w$.-]+))\(")
# Any text that may be a call in another form, or that waits for another program.
_POSSIBLE_CALL = re.compile(r"custom_call|\bstablehlo\.(?:infeed|outfeed|send|recv)\b")


def program(function: Callable[..., Any], inputs: Mapping[str, jax.ShapeDtypeStruct]) -> bytes:
    """Serialize a function of arrays `[N, ...]`, for any N, with `jax.export`; JAX versions of the next half year read it.

    Args:
        inputs: shapes and dtypes without the first axis.
    """
    (rows,) = export.symbolic_shape(ROWS)
    arguments = [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in inputs.values()]
    # Without source locations, which name directories of this machine.
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        return bytes(export.export(jax.jit(function), platforms=PLATFORMS)(*arguments).serialize())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)


def load_program(
    data: bytes,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    what: str,
    *,
    writer: str = jax.__version__,
) -> Callable[..., Any]:
    """Load a serialized function, which is compiled at its first call.

    Args:
        inputs: wanted shapes and dtypes without the first axis.
        outputs: wanted shapes and dtypes without the first axis.
        what: name of the file in errors.
        writer: version of JAX that wrote the file.

    Raises:
        ExportError: the program cannot be read, has other inputs or outputs, or makes custom calls (to Python, for example).
    """
    try:
        exported = export.deserialize(bytearray(data))
        text = exported.mlir_module()
    except Exception as error:
        advice = "" if writer == jax.__version__ else f"; it was written by JAX {writer!r}: install that, or export it again"
        raise ExportError(f"{what}: {MEMBER} cannot be read by JAX {jax.__version__}{advice}: {error}") from None
    called = calls_in(text)
    if called or exported.ordered_effects or exported.unordered_effects:
        raise ExportError(f"{what}: {MEMBER} would call {sorted(called) or 'Python'}; a policy makes no custom calls")
    for name, avals, arrays in (("inputs", exported.in_avals, inputs), ("outputs", exported.out_avals, outputs)):
        got = [_describe(x.shape, x.dtype) for x in avals]
        wanted = [_describe((ROWS, *x.shape), x.dtype) for x in arrays.values()]
        if got != wanted:
            raise ExportError(f"{what}: {MEMBER} has the {name} {got}, its header declares {wanted}")
    trees = exported.in_tree, exported.out_tree
    if trees != (jax.tree.structure(((*inputs,), {})), jax.tree.structure((*outputs,))):
        raise ExportError(f"{what}: {MEMBER} has the input and output trees {trees}, expected plain arrays")
    return jax.jit(exported.call)


def calls_in(text: str) -> set[str]:
    """Return the custom calls in the text of a program; `""` stands for a call in an unknown form."""
    calls = [quoted or bare for quoted, bare in _CALL.findall(text)]
    hidden = {""} if len(_POSSIBLE_CALL.findall(text)) != len(calls) else set()
    return (set(calls) - _ALLOWED_CALLS) | hidden


def _describe(shape: tuple[Any, ...], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"

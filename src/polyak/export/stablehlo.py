"""A function of arrays as a StableHLO program for any number of rows, on CPU and CUDA, and back."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import export

from polyak.export.archive import ExportError

MEMBER = "policy.jax_export"
PLATFORMS = ("cpu", "cuda")
ROWS = "rows"

# What a program that came from a policy calls outside itself: nothing but the checks of its own shapes.
_HARMLESS = {"shape_assertion"}
# Whole names: MLIR quotes those that are no words, and writes a quotation mark in one as \22.
_CALL = re.compile(r"\bstablehlo\.custom_call\s*@(?:\"([^\"]*)\"|([\w$.-]+))\(")
# Anything that looks like one, however it is written, or that waits for another program.
_LIKE_A_CALL = re.compile(r"custom_call|\bstablehlo\.(?:infeed|outfeed|send|recv)\b")


def program(function: Callable[..., Any], inputs: Mapping[str, jax.ShapeDtypeStruct]) -> bytes:
    """The function of arrays `[N, ...]`, whatever N, as `jax.export` writes it; any JAX of the next half year reads it.

    Args:
        inputs: shapes and dtypes without the first axis.
    """
    (rows,) = export.symbolic_shape(ROWS)
    arguments = [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in inputs.values()]
    # Without the lines of source, and so the directories of this machine, that it was made by.
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        return bytes(export.export(jax.jit(function), platforms=PLATFORMS)(*arguments).serialize())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)


def load_program(
    data: bytes, inputs: Mapping[str, jax.ShapeDtypeStruct], outputs: Mapping[str, jax.ShapeDtypeStruct], what: str
) -> Callable[..., Any]:
    """The function again, compiled when it is called.

    Raises:
        ExportError: it cannot be read, takes or answers other arrays, or would call something outside itself (Python, say).
    """
    try:
        exported = export.deserialize(bytearray(data))
        text = exported.mlir_module()
    except Exception as error:
        raise ExportError(f"{what}: {MEMBER} cannot be read by JAX {jax.__version__}: {error}") from None
    called = calls_in(text)
    if called or exported.ordered_effects or exported.unordered_effects:
        raise ExportError(f"{what}: {MEMBER} would call {sorted(called) or 'Python'}; a policy calls nothing outside itself")
    for verb, got, arrays in (("takes", exported.in_avals, inputs), ("answers", exported.out_avals, outputs)):
        found = [_text(x.shape, x.dtype) for x in got]
        said = [_text((ROWS, *x.shape), x.dtype) for x in arrays.values()]
        if found != said:
            raise ExportError(f"{what}: {MEMBER} {verb} {found}, its header says {said}")
    trees = exported.in_tree, exported.out_tree
    if trees != (jax.tree.structure(((*inputs,), {})), jax.tree.structure((*outputs,))):
        raise ExportError(f"{what}: {MEMBER} takes and answers trees {trees}, wanted plain arrays")
    return jax.jit(exported.call)


def calls_in(text: str) -> set[str]:
    """What a program, as text, calls outside itself; `""` stands for what does not have the form that JAX gives a call."""
    calls = [quoted or bare for quoted, bare in _CALL.findall(text)]
    hidden = {""} if len(_LIKE_A_CALL.findall(text)) != len(calls) else set()
    return (set(calls) - _HARMLESS) | hidden


def _text(shape: tuple[Any, ...], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"

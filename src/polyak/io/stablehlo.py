"""A function of arrays as a StableHLO program for any number of rows, on CPU and CUDA, and back."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import export

from polyak.io.export import ExportError

MEMBER = "policy.jax_export"
PLATFORMS = ("cpu", "cuda")

# What a program that came from a policy calls outside itself: nothing but the checks of its own shapes.
_HARMLESS = {"shape_assertion"}
_CALL = re.compile(r"custom_call\s*@\"?([\w.$-]+)|call_target_name\s*=\s*\"([^\"]*)\"")


def program(function: Callable[..., Any], inputs: Mapping[str, jax.ShapeDtypeStruct]) -> bytes:
    """The function of arrays `[N, ...]`, whatever N, as `jax.export` writes it; any JAX of the next half year reads it.

    Args:
        inputs: shapes and dtypes without the first axis.
    """
    (rows,) = export.symbolic_shape("rows")
    arguments = [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in inputs.values()]
    # Without the lines of source, and so the directories of this machine, that it was made by.
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        return bytes(export.export(jax.jit(function), platforms=PLATFORMS)(*arguments).serialize())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)


def load_program(data: bytes, inputs: Mapping[str, jax.ShapeDtypeStruct], what: str) -> Callable[..., Any]:
    """The function again, compiled when it is called.

    Raises:
        ExportError: it cannot be read, takes other arrays, or would call something outside itself (Python, say).
    """
    try:
        exported = export.deserialize(bytearray(data))
        text = exported.mlir_module()
    except Exception as error:
        raise ExportError(f"{what}: {MEMBER} cannot be read by JAX {jax.__version__}: {error}") from None
    called = {a or b for a, b in _CALL.findall(text)} - _HARMLESS
    if called or exported.ordered_effects or exported.unordered_effects:
        raise ExportError(f"{what}: {MEMBER} would call {sorted(called) or 'Python'}; a policy calls nothing outside itself")
    takes = [(tuple(x.shape[1:]), str(x.dtype)) for x in exported.in_avals]
    said = [(x.shape, str(x.dtype)) for x in inputs.values()]
    if takes != said:
        raise ExportError(f"{what}: {MEMBER} takes {takes}, its header says {said}")
    return jax.jit(exported.call)

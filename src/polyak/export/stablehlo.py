"""Converts functions of arrays to and from StableHLO programs for any batch size, on CPU and CUDA."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export

from polyak.export.archive import ExportError
from polyak.storage.user_cache import cache_directory, open_directory

MEMBER = "policy.jax_export"
PLATFORMS = ("cpu", "cuda")
ROWS = "rows"

# The only custom call in the program of a policy: the check of its shapes.
_ALLOWED_CALLS = {"shape_assertion"}
# Complete names: MLIR quotes names that are no words, and writes a quotation mark in a name as \22.
_CALL = re.compile(r"\bstablehlo\.custom_call\s*@(?:\"([^\"]*)\"|([\w$.-]+))\(")
# Any text that may be a call in another form, or that waits for another program.
_POSSIBLE_CALL = re.compile(r"custom_call|\bstablehlo\.(?:infeed|outfeed|send|recv)\b")


READ_SECONDS = 60.0
"""Seconds in which another process must read a program."""

# Without core files; what Python raises is raised again where the program is then read.
_READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    from jax import export
    export.deserialize(bytearray(sys.stdin.buffer.read())).mlir_module()
    end = "read"
except Exception:
    end = "raised"
print(end)
"""


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
        data = bytes(export.export(jax.jit(function), platforms=PLATFORMS)(*arguments).serialize())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
    _remember(data)
    return data


def load_program(
    data: bytes,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    what: str,
    *,
    writer: str = jax.__version__,
) -> Callable[..., Any]:
    """Load a serialized function, which is compiled at its first call.

    JAX's reader may end the process at a damaged program, so a program that is not known is first read in another process.

    Args:
        inputs: wanted shapes and dtypes without the first axis.
        outputs: wanted shapes and dtypes without the first axis.
        what: name of the file in errors.
        writer: version of JAX that wrote the file.

    Raises:
        ExportError: the program cannot be read, has other inputs or outputs, or makes custom calls (to Python, for example).
    """
    _check_in_process(data, what)
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


def _known_programs() -> Path:
    """Return the path of a file with a line for each program that JAX has written or read here.

    Raises:
        OSError: there is no private cache directory.
    """
    return open_directory(cache_directory()) / "programs"


def _line(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()} {metadata.version('jaxlib')}"


def _remember(data: bytes) -> None:
    with contextlib.suppress(OSError), _known_programs().open("a") as file:
        file.write(f"{_line(data)}\n")


def _check_in_process(data: bytes, what: str) -> None:
    """Read a program in another process, unless it is known.

    Raises:
        ExportError: the other process died, or did not end in time.
    """
    with contextlib.suppress(OSError, UnicodeError):
        if _line(data) in _known_programs().read_text().splitlines():
            return
    # Without the working directory, which may have a module named jax.
    command, env = [sys.executable, "-P", "-c", _READ], os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, input=data, capture_output=True, env=env, timeout=READ_SECONDS, check=False)
        death = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"{what}: {MEMBER} was not read within {READ_SECONDS:g} s: it is damaged, or made to hang") from error
    if done.stdout.split()[-1:] == [b"read"]:
        _remember(data)
    elif done.stdout.split()[-1:] != [b"raised"]:
        raise ExportError(f"{what}: {MEMBER} ends the process that reads it ({death}): it is damaged, or made to do so")


def calls_in(text: str) -> set[str]:
    """Return the custom calls in the text of a program; `""` stands for a call in an unknown form."""
    calls = [quoted or bare for quoted, bare in _CALL.findall(text)]
    hidden = {""} if len(_POSSIBLE_CALL.findall(text)) != len(calls) else set()
    return (set(calls) - _ALLOWED_CALLS) | hidden


def _describe(shape: tuple[Any, ...], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"

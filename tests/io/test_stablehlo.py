"""A function as a StableHLO program: any number of rows, two platforms, nothing outside itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from polyak.io.export import ExportError
from polyak.io.stablehlo import load_program, program

ROW = {"x": jax.ShapeDtypeStruct((2,), np.float32)}


def double(x):
    return (2.0 * x,)


def test_a_program_is_for_any_number_of_rows_on_cpu_and_cuda():
    data = program(double, ROW)
    assert b"test_stablehlo.py" not in data  # nor any other place on the machine that wrote it
    assert export.deserialize(bytearray(data)).platforms == ("cpu", "cuda")
    call = load_program(data, ROW, "file")
    for rows in (1, 3):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        np.testing.assert_array_equal(call(x)[0], 2 * x)


def test_S2_a_program_that_would_call_python_is_refused():
    def shouting(x):
        return (jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),)

    rows = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(Exception, match="callback"):  # JAX itself writes none
        program(shouting, rows)
    planted = jax.jit(lambda x: (jax.ffi.ffi_call("planted", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),))
    check = [export.DisabledSafetyCheck.custom_call("planted")]
    exported = export.export(planted, disabled_checks=check)(jax.ShapeDtypeStruct((1, 2), jnp.float32))
    with pytest.raises(ExportError, match=r"file: policy.jax_export would call \['planted'\]"):
        load_program(bytes(exported.serialize()), ROW, "file")


def test_a_program_that_takes_other_arrays_than_its_header_says_or_is_none_is_refused():
    data = program(double, ROW)
    with pytest.raises(ExportError, match=r"takes \[\(\(2,\), 'float32'\)\], its header says \[\(\(3,\), 'float32'\)\]"):
        load_program(data, {"x": jax.ShapeDtypeStruct((3,), np.float32)}, "file")
    for broken in (b"", b"not a program", data[: len(data) // 2]):
        with pytest.raises(ExportError, match=r"file: policy\.jax_export cannot be read by JAX"):
            load_program(broken, ROW, "file")

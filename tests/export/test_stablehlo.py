"""A function as a StableHLO program: any number of rows, two platforms, nothing outside itself."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import polyak
from polyak.export import stablehlo
from polyak.export.archive import ExportError
from polyak.export.stablehlo import calls_in, load_program, program
from polyak.export.write_policy import write_policy

ROW = {"x": jax.ShapeDtypeStruct((2,), np.float32)}


def choose_left(obs):
    return 0


def double(x):
    return (2.0 * x,)


@pytest.fixture
def in_this_process(monkeypatch):
    """Read programs here at once: the other process takes a second or two."""
    monkeypatch.setattr(stablehlo, "_check_in_process", lambda data, what: None)


def test_a_program_is_for_any_number_of_rows_on_cpu_and_cuda():
    data = program(double, ROW)
    assert b"test_stablehlo.py" not in data  # nor any other place on the machine that wrote it
    assert export.deserialize(bytearray(data)).platforms == ("cpu", "cuda")
    call = load_program(data, ROW, ROW, "file")
    for rows in (1, 3):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        np.testing.assert_array_equal(call(x)[0], 2 * x)


def test_what_jax_export_imports_is_a_core_dependency():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("flatbuffers") for requirement in project["dependencies"])


def test_a_program_that_would_call_python_is_rejected():
    def shouting(x):
        return (jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),)

    rows = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(Exception, match="callback"):  # JAX itself writes none
        program(shouting, rows)


@pytest.mark.parametrize("kind", ["stablehlo", "onnx", "numpy"])
def test_a_policy_in_python_is_rejected_by_name(kind, tmp_path):
    spec = polyak.envs.make("jax/CartPole-v1").spec
    policy = polyak.policies.EpsilonGreedy(polyak.policies.PythonPolicy(choose_left, spec), 0.1)
    with pytest.raises(ValueError, match=r"export: the policy must be in JAX, got one that calls Python: .*choose_left"):
        write_policy(policy, spec, kind, tmp_path / "policy")


@pytest.mark.parametrize("name", ["planted", "/evil", "shape_assertion/evil", "shape_assertion", 'a"b(', "é"])
def test_a_call_outside_is_rejected_whatever_its_name(name, in_this_process):
    planted = jax.jit(lambda x: (jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x),))
    check = [export.DisabledSafetyCheck.custom_call(name)]
    exported = export.export(planted, disabled_checks=check)(jax.ShapeDtypeStruct((1, 2), jnp.float32))
    said = "has the inputs" if name == "shape_assertion" else "would call "
    with pytest.raises(ExportError, match=f"file: policy.jax_export {said}"):
        load_program(bytes(exported.serialize()), ROW, ROW, "file")


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("%0 = stablehlo.custom_call @shape_assertion(%4, %0) {api_version = 2 : i32}", set()),
        ("stablehlo.custom_call @shape_assertion.evil(%4)", {"shape_assertion.evil"}),
        ('stablehlo.custom_call @"shape_assertion"(%4)\nstablehlo.custom_call @"/evil"(%4)', {"/evil"}),
        ('"stablehlo.custom_call"(%4) <{call_target_name = "shape_assertion"}>', {""}),
        ('"stablehlo.custom_call"(%4) <{call_target_name = "evil"}>', {""}),
        ("stablehlo.custom_call @[evil](%4)", {""}),
        ('"stablehlo.send"(%0, %1) <{is_host_transfer = true}>', {""}),
        ("%0 = stablehlo.add %send, %1", set()),
    ],
)
def test_a_call_in_whatever_form_is_seen(text, called):
    assert calls_in(text) == called


def test_a_program_that_takes_other_arrays_than_its_header_says_or_is_none_is_rejected(in_this_process):
    data = program(double, ROW)
    three = {"x": jax.ShapeDtypeStruct((3,), np.float32)}
    for header, said in (
        ((three, ROW), r"has the inputs \['float32\[rows,2\]'\], its header declares \['float32\[rows,3\]'\]"),
        ((ROW, three), r"has the outputs \['float32\[rows,2\]'\], its header declares \['float32\[rows,3\]'\]"),
        ((ROW, {"x": ROW["x"], "y": ROW["x"]}), "has the outputs"),
        ((ROW, {}), "has the outputs"),
    ):
        with pytest.raises(ExportError, match=said):
            load_program(data, *header, "file")
    with pytest.raises(ExportError, match="trees"):
        load_program(program(lambda x: {"b": x}, ROW), ROW, ROW, "file")
    for broken in (b"", b"not a program", data[: len(data) // 2]):
        with pytest.raises(ExportError, match=r"file: policy\.jax_export cannot be read by JAX"):
            load_program(broken, ROW, ROW, "file")


def test_a_program_that_this_jax_cannot_read_names_the_jax_that_wrote_it(in_this_process):
    with pytest.raises(
        ExportError, match=r"cannot be read by JAX .*; it was written by JAX '99\.1': install that, or export it"
    ):
        load_program(b"not a program", ROW, ROW, "file", writer="99.1")


@pytest.mark.parametrize(
    ("end", "death"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os._exit(1)", "exit code 1"),
        ("print('unread')", "exit code 0"),
    ],
)
def test_a_program_that_ends_its_reader_is_an_error_and_is_not_remembered(end, death, monkeypatch):
    monkeypatch.setattr(stablehlo, "_READ", end)
    for _ in range(2):
        with pytest.raises(ExportError, match=rf"file: policy.jax_export ends the process that reads it \({death}\): it"):
            load_program(b"deadly " + death.encode(), ROW, ROW, "file")


def test_a_program_that_is_not_read_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(stablehlo, "_READ", "import time; time.sleep(60)")
    monkeypatch.setattr(stablehlo, "READ_SECONDS", 0.1)
    with pytest.raises(ExportError, match=re.escape("file: policy.jax_export was not read within 0.1 s: it is damaged")):
        load_program(b"endless", ROW, ROW, "file")


def test_a_program_is_read_in_another_process_once(monkeypatch, tmp_path):
    started, run = [], subprocess.run
    monkeypatch.setattr(stablehlo.subprocess, "run", lambda *args, **options: started.append(args) or run(*args, **options))
    data = program(double, ROW)
    load_program(data, ROW, ROW, "file")
    assert started == []  # it was written here
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stablehlo, "_READ", "print('read')")
    for _ in range(2):
        load_program(data, ROW, ROW, "file")
    assert len(started) == 1
    os.chmod(tmp_path / "polyak", 0o755)  # another user may have written the hashes
    load_program(data, ROW, ROW, "file")
    assert len(started) == 2


@pytest.mark.slow
def test_a_program_is_read_in_another_process_by_jax(monkeypatch, tmp_path):
    data = program(double, ROW)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jax.py").write_text("raise SystemExit('is run')")
    assert load_program(data, ROW, ROW, "file")(np.ones((1, 2), np.float32))[0].tolist() == [[2.0, 2.0]]
    assert len((tmp_path / "polyak/programs").read_text().splitlines()) == 1
    with pytest.raises(ExportError, match=r"file: policy\.jax_export cannot be read by JAX"):
        load_program(data[: len(data) // 2], ROW, ROW, "file")
    assert len((tmp_path / "polyak/programs").read_text().splitlines()) == 1

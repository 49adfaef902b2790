"""polyak export RUN --format stablehlo|onnx|numpy: exports the greedy policy of a run to one file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from polyak.cli.flags import UsageError, fail, parse, print_usage
from polyak.core.spaces import EnvSpec
from polyak.core.types import Policy
from polyak.export.archive import Export, ExportError, make_header, replace_file, to_members, write_export
from polyak.export.numpy_weights import numpy_weights
from polyak.export.policy_function import export_function
from polyak.export.stablehlo import MEMBER, program
from polyak.policies import numpy_reader
from polyak.runs import read_config, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.files import read_bytes
from polyak.storage.run_directory import RunError, is_run_file, open_run

Format = Literal["stablehlo", "onnx", "numpy"]
SUFFIXES: dict[str, str] = {"stablehlo": ".stablehlo", "onnx": ".onnx", "numpy": ".npz"}
READER = "numpy_reader.py"
_READER_SOURCE = Path(numpy_reader.__file__)
MAX_READER_BYTES = 2**20
OUTPUT_DEFAULT = "(default: policy.SUFFIX in the run)"
OutputFlag: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=OUTPUT_DEFAULT)]


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Format and output file."""

    format: Format
    """stablehlo: for polyak.load_policy and JAX; onnx: for ONNX runtimes; numpy: weights of an mlp, with a reader"""
    output: OutputFlag = None
    """file to write, replaced if it exists; numpy also writes numpy_reader.py next to it"""


def export(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        flags = "--format stablehlo|onnx|numpy [--output FILE]"
        return print_usage(f"polyak export RUN {flags}\n\nRUN is a run directory.", arguments)
    try:
        return _export(Path(arguments[0]), arguments[1:])
    except (UsageError, ValueError, ImportError, RunError, ConfigError, CheckpointError, ExportError) as error:
        return fail(error)


def _export(directory: Path, arguments: list[str]) -> int:
    flags = parse(ExportFlags, arguments, prog=f"polyak export {directory}", description="Export the greedy policy.")
    run = open_run(directory)
    if flags.output is not None and (flags.output == Path("-") or is_run_file(flags.output)):
        raise UsageError(
            f"--output {flags.output}: must be a file of its own, not the standard output or one that the run keeps"
        )
    config = read_config(run)
    policy, env_steps = restore_policy(run, config.agent)
    output = flags.output or directory / f"policy{SUFFIXES[flags.format]}"
    about = {"algorithm": config.algorithm, "env": config.env, "env_steps": env_steps}
    made = write_policy(policy, config.agent.spec, flags.format, output, about)
    print("\n".join(f"wrote {path} ({path.stat().st_size:,} bytes)" for path in made))
    return 0


def write_policy(policy: Policy, spec: EnvSpec, kind: Format, output: Path, about: dict[str, Any]) -> list[Path]:
    """Write the policy; returns the files.

    Raises:
        ExportError, ValueError: the policy is not one for this format, or the file cannot be written, or would replace a
            `numpy_reader.py` that is not polyak's.
        ImportError: the extra is missing.
    """
    step = export_function(policy, spec)
    if kind == "numpy":
        needs, arrays = numpy_weights(policy, spec)
        reader = _reader_path(output)
        write_export(output, Export(kind, spec, step.inputs, step.outputs, about | needs, to_members(arrays)))
        replace_file(reader, _READER_SOURCE.read_bytes())
        return [output, reader]
    if kind == "stablehlo":
        members = {MEMBER: program(step.function, step.inputs)}
        write_export(output, Export(kind, spec, step.inputs, step.outputs, about, members))
        return [output]
    header = {"polyak": json.dumps(make_header(Export(kind, spec, step.inputs, step.outputs, about, {})))}
    replace_file(output, _onnx_model()(step.function, step.inputs, step.outputs, header))
    return [output]


def _reader_path(output: Path) -> Path:
    """The path next to the weights, where only an earlier reader may be replaced."""
    reader = output.with_name(READER)
    if reader == output:
        raise ExportError(f"{output}: the reader of the weights is written there; choose another --output")
    if not os.path.lexists(reader):
        return reader
    try:
        found = read_bytes(reader, limit=MAX_READER_BYTES)
    except (OSError, ValueError) as error:
        raise ExportError(f"{reader}: the reader of the weights is written there, but {error}") from None
    if found.splitlines()[:1] != _READER_SOURCE.read_bytes().splitlines()[:1]:
        raise ExportError(f"{reader}: is not polyak's; the reader of the weights would replace it; choose another --output")
    return reader


def _onnx_model() -> Any:
    try:
        from polyak.export.onnx import model
    except ModuleNotFoundError as error:
        raise ImportError(f"format onnx needs {error.name}: pip install 'polyak[onnx]'") from None
    return model

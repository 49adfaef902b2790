"""polyak export RUN --format stablehlo|onnx|numpy: exports the greedy policy of a run to one file."""

import dataclasses
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from polyak.cli.flags import UsageError, fail, parse_for_run
from polyak.cli.imports import ImportFlag
from polyak.cli.user_code import config_with_agent
from polyak.cli.user_flags import UserGroupOfRun
from polyak.export.archive import ExportError
from polyak.export.write_policy import SUFFIXES, Format, write_policy
from polyak.runs import open_checkpoints, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import RunError, is_run_file
from polyak.train.devices import count_devices

OUTPUT_DEFAULT = "(default: policy.SUFFIX in the run)"
OutputFlag: TypeAlias = Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint=OUTPUT_DEFAULT)]


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Format and output file."""

    user: UserGroupOfRun

    format: Format
    """stablehlo: for polyak.load_policy and JAX; onnx: for ONNX runtimes; numpy: weights of dense layers, with a reader"""
    output: OutputFlag = None
    """file to write, replaced if it exists; numpy also writes numpy_reader.py next to it"""
    imports: ImportFlag = None
    """with --agent: module of the run's environment if config.json names it as module:Name; it is then imported"""


def export(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Export the greedy policy of RUN, a run directory or its subdirectory `best`."
    try:
        return _export(*parse_for_run(ExportFlags, arguments, command="export", description=description))
    except (UsageError, TypeError, ValueError, ImportError, RunError, ConfigError, CheckpointError, ExportError) as error:
        return fail(error)


def _export(directory: Path, flags: ExportFlags) -> int:
    count_devices()  # Raises if JAX does not start.
    run, checkpoints = open_checkpoints(directory)
    if flags.output is not None and (flags.output == Path("-") or is_run_file(flags.output)):
        raise UsageError(f"--output {flags.output}: must be a separate file, not the standard output or a file of the run")
    config = config_with_agent(run, flags.user, flags.imports)
    policy, env_steps = restore_policy(checkpoints, config.agent)
    output = flags.output or directory / f"policy{SUFFIXES[flags.format]}"
    about = {"algorithm": config.algorithm, "env": config.env, "env_steps": env_steps}
    made = write_policy(policy, config.agent.spec, flags.format, output, about)
    print("\n".join(f"wrote {path} ({path.stat().st_size:,} bytes)" for path in made))
    return 0

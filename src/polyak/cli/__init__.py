"""The command line: polyak train | resume | evaluate | export | list."""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import TextIO

USAGE = """usage: polyak COMMAND ...

Reinforcement learning in JAX.

commands:
  train ALGO ENV [flags]   train an agent in a new run directory
  resume RUN [flags]       continue a run from its last checkpoint
  evaluate RUN [flags]     evaluate the greedy policy of a run
  export RUN --format F    export the greedy policy to one file: stablehlo, onnx or numpy
  list                     list algorithms, presets and environments

`polyak train ppo CartPole-v1 --help` shows every flag with its value for that environment.
Environments are named by their source: CartPole-v1 and HalfCheetah-v5 are Gymnasium's and step on the host;
jax/CartPole-v1 is polyak's and gymnax/... are gymnax's: they are compiled with the agent into one program.

exit codes: 0 success, 1 runtime error, 2 usage error, 129 terminal closed, 130 Ctrl-C, 141 broken pipe, 143 SIGTERM
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if argv is None:
        _replace_unencodable_characters()
    try:
        code = _run(argv)
        if sys.stdout is not None:  # as it is after `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        from polyak.core.output import discard_output, is_broken_pipe

        if not is_broken_pipe(sys.stdout.fileno()):
            raise
        discard_output(sys.stdout.fileno())
        return 141
    return code


def _run(argv: Sequence[str] | None) -> int:
    # Not `list(...)`: here that is the module of `polyak list`, once it is imported.
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        import polyak

        print(f"polyak {polyak.__version__}")
        return 0
    if argv is None:
        warnings.showwarning = _show_warning
    try:
        # A program that calls `main` keeps its own signal handlers.
        with _exit_on_ctrl_c() if argv is None else nullcontext():
            command = _command(name, is_own_process=argv is None)
        return command(rest)
    except KeyboardInterrupt:
        # Only outside of training, which handles signals itself.
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


def _replace_unencodable_characters() -> None:
    """Print `?` for what the encoding of the output lacks, as that of `…` in latin-1: an error would end the training."""
    for stream in (sys.stdout, sys.stderr):
        # Standard error has another way to print them.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print one line, without the place in the source that Python adds."""
    from polyak.core.suggestions import escape_control

    print(f"warning: {escape_control(str(message))}", file=sys.stderr)


@contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process while modules are imported, where it would surface as any other exception."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopped by Ctrl-C\n")
        os._exit(128 + number)

    # Only the main thread may set a handler; one that ignores Ctrl-C, as under nohup, or that is not Python's stays.
    is_default = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_default:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _command(name: str, *, is_own_process: bool) -> Callable[[list[str]], int]:
    """The function of a command, imported when it is needed: JAX takes most of a second."""
    match name:
        case "train":
            from polyak.cli.train import train

            return partial(train, is_own_process=is_own_process)
        case "resume":
            from polyak.cli.resume import resume

            return resume
        case "evaluate":
            from polyak.cli.evaluate import evaluate

            return evaluate
        case "export":
            from polyak.cli.export import export

            return export
        case "list":
            from polyak.cli.list import list_names

            return list_names
    return lambda arguments: _unknown(name)


def _unknown(name: str) -> int:
    from polyak.core.suggestions import unknown_name

    message = unknown_name(name, ("train", "resume", "evaluate", "export", "list"), "command")
    print(f"error: {message}\n\n{USAGE}", end="", file=sys.stderr)
    return 2

"""The command line: polyak train, resume, evaluate, video, watch, record, export, report, plot, pack, study and list."""

import codecs
import errno
import io
import os
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import TextIO

USAGE = """usage: polyak COMMAND ...

Reinforcement learning in JAX.

commands:
  train ALGO ENV [flags]   train an agent in a new run directory
  train ALGO --data PATH   train an agent on a data set; ENV is optional, for evaluation
  resume RUN [flags]       continue a run from its last checkpoint
  evaluate RUN [flags]     evaluate the greedy policy of a run
  video RUN [-o FILE]      write a video of the greedy policy of a run
  watch RUN                show the greedy policy of a run in a window
  record ENV DATA          record what you do in an environment, with keys, as a data set
  export RUN --format F    export the greedy policy to one file: stablehlo, onnx or numpy
  report RUN... [flags]    write an HTML page about runs; --live DIR follows trainings
  plot RUN... -o FILE      draw curves of runs as svg, pdf or png
  pack RUN -o FILE         pack policy, settings, scores and model card into one zip file
  study ALGO ENV [flags]   search for better settings of an algorithm
  list                     list algorithms, presets and environments

`polyak train ppo CartPole-v1 --help` shows every flag with its value for that environment.
The prefix of a name is the source of the environment: CartPole-v1 and HalfCheetah-v5 are from Gymnasium and step on
the host; jax/CartPole-v1 from polyak and brax/ant from Brax are in JAX, and are compiled with the agent.

exit codes: 0 success, 1 runtime error, 2 usage error, 129 terminal closed, 130 Ctrl-C, 141 broken pipe, 143 SIGTERM
"""


PLAIN = {"±": "+-", "…": "..."}
"""Replacements of characters that an encoding lacks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if argv is None:
        _replace_unencodable_characters()
    try:
        code = _run(argv)
        if sys.stdout is not None and not sys.stdout.closed:  # None after `>&-`; an environment may close it
            sys.stdout.flush()
    except BrokenPipeError:
        from polyak.core.output import discard_output, is_broken_pipe

        if not is_broken_pipe(sys.stdout.fileno()):
            raise
        discard_output(sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        from polyak.core.output import discard_output

        # What is left in the buffer would fail again at the exit.
        discard_output(sys.stdout.fileno())
        print(f"error: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    # `list` may be the imported module of `polyak list` here.
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        import polyak

        print(f"polyak {polyak.__version__}")
        return 0
    # An unset shell variable gives an empty argument, whose path would be the working directory.
    for before, word in pairwise([name, *rest]):
        if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
            where = word.removesuffix("=") or before
            print(f"error: the argument after {where} is empty; is a shell variable unset?", file=sys.stderr)
            return 2
    if argv is None:
        warnings.showwarning = _show_warning
    try:
        # A program that calls `main` keeps its own signal handlers.
        with _exit_on_ctrl_c() if argv is None else nullcontext():
            try:
                command = _command(name, is_own_process=argv is None)
            except ValueError as error:  # JAX's, about an environment variable such as JAX_ENABLE_X64
                print(f"error: {error}", file=sys.stderr)
                return 2
        return command(rest)
    except KeyboardInterrupt:
        # Training handles signals itself.
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


def _replace_unencodable_characters() -> None:
    """Print `+-`, `...` or `?` for characters that the output's encoding lacks: an error would end training."""
    codecs.register_error("polyak", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        # Standard error already has another error handler.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="polyak")


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return PLAIN.get(error.object[error.start], "?"), error.start + 1


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print one line, without the source location that Python adds."""
    from polyak.core.suggestions import escape_control

    print(f"warning: {escape_control(str(message))}", file=sys.stderr)


@contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    """Exit at once on Ctrl-C while modules are imported, where KeyboardInterrupt could surface as another exception."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopped by Ctrl-C\n")
        os._exit(128 + number)

    # Only the main thread may set a handler. Other handlers than Python's default are kept, as under nohup.
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


COMMANDS = {
    "train": "polyak.cli.train:train",
    "resume": "polyak.cli.resume:resume",
    "evaluate": "polyak.cli.evaluate:evaluate",
    "video": "polyak.cli.video:video",
    "watch": "polyak.cli.video:watch",
    "record": "polyak.cli.record:record",
    "export": "polyak.cli.export:export",
    "report": "polyak.cli.report:report",
    "plot": "polyak.cli.plot:plot",
    "pack": "polyak.cli.pack:pack",
    "study": "polyak.cli.study:study",
    "list": "polyak.cli.list:list_names",
}
"""The function of each command as `"module:function"`, imported when it is called: JAX takes most of a second."""


def _command(name: str, *, is_own_process: bool) -> Callable[[list[str]], int]:
    """Import the function of a command."""
    if name not in COMMANDS:
        return lambda arguments: _unknown(name)
    command: Callable[..., int] = pkgutil.resolve_name(COMMANDS[name])
    return partial(command, is_own_process=is_own_process) if name == "train" else command


def _unknown(name: str) -> int:
    from polyak.core.suggestions import unknown_name

    message = unknown_name(name, COMMANDS, "command")
    print(f"error: {message}\n\n{USAGE}", end="", file=sys.stderr)
    return 2

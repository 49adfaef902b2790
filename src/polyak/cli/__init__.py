"""The command line: polyak train | resume | evaluate | export | list."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType

USAGE = """usage: polyak COMMAND ...

Reinforcement learning in JAX.

commands:
  train ALGO ENV [flags]   train an agent and keep everything in a run directory
  resume RUN [flags]       go on where a run was stopped
  evaluate RUN [flags]     the greedy return of a run's policy
  export RUN --format F    the policy as one file: stablehlo, onnx or numpy
  list                     algorithms, presets and environments

`polyak train ppo CartPole-v1 --help` shows every flag with its value for that environment.
The name of an environment says where it lives: CartPole-v1, HalfCheetah-v5 are Gymnasium's and step on the host;
jax/CartPole-v1 is polyak's own and gymnax/... are gymnax's: they run compiled, with the agent, as one program.

exit codes: 0 done, 1 something went wrong while running, 2 wrong use, 130 Ctrl-C, 143 SIGTERM, 129 the terminal was closed,
141 nobody reads the output on
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:  # as it is after `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        from polyak.cli.signals import nobody_reads, silence

        if not nobody_reads(sys.stdout.fileno()):
            raise
        silence(sys.stdout.fileno())
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
    try:
        # A program that calls `main` has its own way to end.
        with _leaving_at_once() if argv is None else nullcontext():
            command = _command(name)
        return _unknown(name) if command is None else command(rest)
    except KeyboardInterrupt:
        # Not while training, which ends in order by itself.
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


def _unknown(name: str) -> int:
    import difflib

    near = difflib.get_close_matches(name, ("train", "resume", "evaluate", "export", "list"), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"error: unknown command {name!r}{hint}\n\n{USAGE}", end="", file=sys.stderr)
    return 2


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process while modules are imported: inside them it would come out as any error."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopped by Ctrl-C\n")
        os._exit(128 + number)

    # Only the main thread may; and who ignores Ctrl-C, as under nohup, or has a handler, keeps that.
    ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _command(name: str) -> Callable[[list[str]], int] | None:
    """The command's function. JAX is imported with it, not before: help answers at once."""
    match name:
        case "train":
            from polyak.cli.train import train

            return train
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
            from polyak.cli.list import listing

            return listing
    return None

"""Tracebacks of errors in user-defined code, without the frames of the libraries that called it."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

import polyak

LIBRARIES = tuple(
    os.path.join(directory, "")
    for directory in (
        str(Path(polyak.__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)


def print_user_traceback(error: BaseException) -> None:
    """Print a traceback, from the first frame in user-defined code (no file of polyak or an installed library).

    Without such a frame, the complete traceback is printed, as the error is in a library.
    """
    chain: list[traceback.TracebackException] = []
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    while shown is not None:
        chain.append(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    stacks = [list(one.stack) for one in chain]
    if any(is_user_code(frame.filename) for stack in stacks for frame in stack):
        for one, stack in zip(chain, stacks, strict=True):
            first = next((i for i, frame in enumerate(stack) if is_user_code(frame.filename)), len(stack))
            one.stack = traceback.StackSummary.from_list(stack[first:])
    print("".join(chain[0].format()), end="", file=sys.stderr)


def is_user_code(filename: str) -> bool:
    """Return True if a file is neither polyak's nor an installed library's; code from a string has no file."""
    return not filename.startswith(("<", *LIBRARIES))

"""Tracebacks of errors in a person's own code, without the frames of the libraries that called it."""

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


def print_own_frames(error: BaseException) -> None:
    """Print the traceback from the first frame in a file that is neither polyak's nor an installed library's.

    Where there is none, the traceback is printed whole: the error is the library's.
    """
    chain: list[traceback.TracebackException] = []
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    while shown is not None:
        chain.append(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    stacks = [list(one.stack) for one in chain]
    if any(is_own(frame.filename) for stack in stacks for frame in stack):
        for one, stack in zip(chain, stacks, strict=True):
            first = next((i for i, frame in enumerate(stack) if is_own(frame.filename)), len(stack))
            one.stack = traceback.StackSummary.from_list(stack[first:])
    print("".join(chain[0].format()), end="", file=sys.stderr)


def is_own(filename: str) -> bool:
    """Whether a file is the person's own; code that was made from a text has no file."""
    return not filename.startswith(("<", *LIBRARIES))

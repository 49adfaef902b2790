"""Warnings that point at the user's line, however deep in the library they come from, and notes on exceptions."""

import contextlib
import inspect
import warnings

PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Issue a `UserWarning` at the line that called polyak: the caller of the outermost frame of the package."""
    frame = inspect.currentframe()
    level = outermost = 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            outermost = level
        frame = frame.f_back
    warnings.warn(message, stacklevel=outermost + 1)


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, unless the exception's class does not allow notes."""
    with contextlib.suppress(Exception):
        error.add_note(note)

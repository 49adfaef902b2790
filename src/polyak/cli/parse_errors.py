"""Turns tyro's framed errors into one sentence."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

WIDE = "10000"
"""Columns of the terminal for tyro, which then wraps no line."""

FRAME = "│╭╮╰╯─- "

ENDS = ("Perhaps you meant:", "Argument helptext:", "For full helptext")
"""Beginnings of lines that follow the error."""

SENTENCES = (
    (r"Error parsing (\S+:)", r"\1"),
    (r"Missing value for argument .*?(--[\w-]+).*", r"\1 needs a value"),
    (r"invalid choice ('.*') for argument '(?:-\w/)?(\S+)'\. Expected one of \((.*?),?\)\.", r"\2 must be one of \3, got \1"),
    (r"(\S+:) no type matching (\S+) could be instantiated from \['(.*?)'\].*", r"\1 must be one of \2, got '\3'"),
    (r"Unrecognized options: (\w.*(?:-v\d+|[/:]).*)", r"unexpected \1, as no flag takes it; ENV comes before the flags"),
    (r"Unrecognized options: (.*)", r"unexpected \1, as no flag takes it"),
    (r"Missing from .*?: (?:-\w \S+, )?(--\S+) .*", r"\1 is missing"),
)
"""Patterns of tyro's errors, and the sentences for them."""


class ParseError(Exception):
    """Arguments that tyro cannot parse, in one sentence."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Raise `ParseError` where tyro would print a framed error and exit.

    Raises:
        ParseError: the arguments are invalid.
    """
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDE
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as left:
        if not left.code:
            raise
        text, printed = printed.getvalue(), io.StringIO()
        raise ParseError(_sentence(text)) from None
    finally:
        sys.stderr.write(printed.getvalue())  # warnings
        os.environ.pop("COLUMNS")
        os.environ |= {} if columns is None else {"COLUMNS": columns}


def _sentence(text: str) -> str:
    """The error in tyro's text, which begins with a title, and has colors and a frame in a terminal."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    lines = [line.strip().strip("│").strip() for line in text.splitlines()[1:] if line.strip(FRAME)]
    end = next((i for i, line in enumerate(lines) if line.startswith(ENDS)), len(lines))
    error = " ".join(" ".join(lines[:end]).split())
    for pattern, sentence in SENTENCES:
        error = re.sub(f"^{pattern}", sentence, error)
    return error

"""Names in messages: suggestions for those that do not exist, and control characters made visible."""

import difflib
from collections.abc import Iterable


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """The sentence for a name that does not exist: the name, the nearest one, and those that do exist.

    >>> unknown_name("gama", ("gamma", "tau"), "field")
    "unknown field 'gama'; did you mean 'gamma'? (fields: gamma, tau)"
    """
    known = tuple(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} ({what}s: {', '.join(known)})"


def escape_control(text: str) -> str:
    r"""`text` with control characters escaped, so that a name from a file cannot rewrite the user's terminal.

    >>> escape_control("run\x07")
    'run\\x07'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)

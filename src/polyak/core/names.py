"""Suggestions for names that do not exist."""

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

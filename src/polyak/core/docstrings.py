"""The texts of attributes in docstrings, which classes inherit with the attributes."""

import textwrap
from collections.abc import Iterable, Mapping

WIDTH = 128


def attribute_texts(docstring: str) -> dict[str, str]:
    """The descriptions under `Attributes:` of a docstring, each in one line."""
    texts: dict[str, str] = {}
    for line in docstring.partition("Attributes:\n")[2].partition("\n\n")[0].splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name.isidentifier():
            texts[name] = text
        elif texts:
            texts[next(reversed(texts))] += " " + line.strip()
    return texts


def entries(texts: Mapping[str, str], indent: int = 8) -> list[str]:
    """Format attributes and their descriptions as entries of a docstring."""
    space = " " * indent
    return [
        textwrap.fill(f"{name}: {text}", WIDTH, initial_indent=space, subsequent_indent=space + " " * 4)
        for name, text in texts.items()
    ]


def with_inherited(docstring: str, bases: Iterable[str | None], order: Iterable[str], indent: int = 8) -> str:
    """Add the `Attributes:` of base classes to the docstring of a class.

    Args:
        docstring: docstring of the class; its texts replace texts of the bases.
        bases: docstrings of its bases, the nearest first.
        order: the names of the attributes.
        indent: spaces before the name of an attribute.
    """
    own = attribute_texts(docstring)
    texts: Mapping[str, str] = own
    for base in bases:
        texts = {**attribute_texts(base or ""), **texts}
    if texts.keys() == own.keys():
        return docstring
    names = [name for name in order if name in texts]
    space = " " * indent
    ordered = [*names, *(name for name in own if name not in names)]
    section = "Attributes:\n" + "\n".join(entries({name: texts[name] for name in ordered}, indent))
    head, found, tail = docstring.partition("Attributes:\n")
    if not found:
        return f"{docstring.rstrip()}\n\n{space[4:]}{section}\n{space[4:]}"
    _, blank, rest = tail.partition("\n\n")
    return f"{head}{section}\n{blank and chr(10)}{rest}"

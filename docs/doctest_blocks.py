"""A griffe extension: doctests in docstrings are shown as code blocks."""

import re
from typing import Any

import griffe

# A prompt and the lines after it, up to the next empty line.
DOCTEST = re.compile(r"^( *)(>>> .*(?:\n(?! *$).*)*)", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts each doctest into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)

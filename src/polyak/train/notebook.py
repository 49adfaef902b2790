"""A progress bar in a notebook: one output that changes, without widgets."""

import html
import sys
from collections.abc import Callable
from typing import Any


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Picture:
    """A bar with its title and a line below it; as text where a program cannot show HTML."""

    def __init__(self, title: str, completed: int, total: int, status: str) -> None:
        self._title, self._completed, self._total, self._status = title, completed, total, status

    def __repr__(self) -> str:
        return f"{self._title}: {self._status}"

    def _repr_html_(self) -> str:
        title, status = html.escape(self._title), html.escape(self._status)
        bar = f'<progress value="{self._completed}" max="{self._total}" style="width: 100%"></progress>'
        return f'<div style="max-width: 60em">{title}<br>{bar}<br>{status}</div>'


def notebook_bar(title: str, total: int, completed: int) -> Callable[[int | None, str], None]:
    """Show a bar, and return a function that sets the completed part, or leaves it with None, and the line below."""
    from IPython.display import display

    handle = display(Picture(title, completed, total, "compiling …"), display_id=True)

    def update(now: int | None, status: str) -> None:
        nonlocal completed
        completed = completed if now is None else now
        handle.update(Picture(title, completed, total, status))

    return update

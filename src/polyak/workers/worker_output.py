"""Output of environments in workers: printed text goes to a file per worker, warnings are issued in the learner's process."""

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from polyak.core.types import HostEnv

WorkerWarning: TypeAlias = tuple[str, str, str, int]
"""Category, text, file and line."""

CATEGORIES: Mapping[str, type[Warning]] = {
    category.__name__: category
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning, ResourceWarning, RuntimeWarning, UserWarning)
}
"""Categories of a worker's warnings by name; any other category becomes a UserWarning."""

MAX_WARNINGS = 20
"""Maximum number of warnings that are sent with one result, or issued for one line of a source file."""


@dataclass(frozen=True)
class WithOutputFile:
    """Creates environments after redirecting the process's standard output and error to a file.

    Attributes:
        make: creates the environments.
        path: path of the file; output is appended.
    """

    make: Callable[[], HostEnv]
    path: str

    def __call__(self) -> HostEnv:
        """Redirect the output and create the environments."""
        Path(self.path).parent.mkdir(exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # File descriptors, to include C libraries and the traceback of a crash.
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        return self.make()


class RecordedWarnings:
    """Records the warnings of this process, which are shown too."""

    def __init__(self) -> None:
        self._found: list[WorkerWarning] = []
        show = warnings.showwarning

        def record(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if len(self._found) < MAX_WARNINGS:
                self._found.append((category.__name__, str(message), filename, lineno))
            show(message, category, filename, lineno, file, line)

        warnings.showwarning = record

    def take(self) -> list[WorkerWarning]:
        """Return the warnings since the last call."""
        found, self._found = self._found, []
        return found


class WarningsOfWorkers:
    """Issues the warnings of workers in this process, each once."""

    def __init__(self) -> None:
        self._issued: dict[tuple[str, str, int], set[str]] = {}

    def issue(self, found: Sequence[WorkerWarning]) -> None:
        """Issue the warnings that no worker has sent before, at most `MAX_WARNINGS` for a line of a source file.

        Warnings that differ only in their digits count as the same.
        """
        for name, text, filename, lineno in found:
            issued, kind = self._issued.setdefault((name, filename, lineno), set()), re.sub(r"\d+", "", text)
            if kind in issued or len(issued) >= MAX_WARNINGS:
                continue
            issued.add(kind)
            warnings.warn_explicit(text, CATEGORIES.get(name, UserWarning), filename, lineno)

"""What environments print and warn of in workers: into a file of each worker, and as warnings of the learner."""

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
"""Of the warnings that a worker names; another is a UserWarning here."""

MAX_WARNINGS = 20
"""Most warnings that travel with one result, or are issued of one line of a source file."""


@dataclass(frozen=True)
class WithOutputFile:
    """Creates environments in a process that from then on writes its standard output and error into a file.

    Attributes:
        make: creates them.
        path: of the file, to which is appended.
    """

    make: Callable[[], HostEnv]
    path: str

    def __call__(self) -> HostEnv:
        """Create the environments."""
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # Also what libraries in C write, and the traceback of a crash.
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        return self.make()


class RecordedWarnings:
    """The warnings of this process, which are also shown."""

    def __init__(self) -> None:
        self._found: list[WorkerWarning] = []
        show = warnings.showwarning

        def record(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if len(self._found) < MAX_WARNINGS:
                self._found.append((category.__name__, str(message), filename, lineno))
            show(message, category, filename, lineno, file, line)

        warnings.showwarning = record

    def take(self) -> list[WorkerWarning]:
        """Those since the last call."""
        found, self._found = self._found, []
        return found


class WarningsOfWorkers:
    """Issues the warnings of workers in this process, each once."""

    def __init__(self) -> None:
        self._issued: dict[tuple[str, str, int], set[str]] = {}

    def issue(self, found: Sequence[WorkerWarning]) -> None:
        """Issue those that no worker has sent before, at most `MAX_WARNINGS` of a line in a source file.

        Those of two environments differ in their numbers only.
        """
        for name, text, filename, lineno in found:
            issued, kind = self._issued.setdefault((name, filename, lineno), set()), re.sub(r"\d+", "", text)
            if kind in issued or len(issued) >= MAX_WARNINGS:
                continue
            issued.add(kind)
            warnings.warn_explicit(text, CATEGORIES.get(name, UserWarning), filename, lineno)

"""The interface of a tracker, and what the trackers share."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

PROJECT = "polyak"
"""Project, or experiment, of runs where the tracker's environment variable names no other."""


class Tracker(Protocol):
    """One tracked run."""

    @property
    def id(self) -> str:
        """The tracker's name for the run, with which it is continued."""
        ...

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log the settings of the run, JSON data."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        ...

    def log_video(self, path: Path, step: int) -> None:
        """Log a video of the policy at a step."""
        ...

    def log_files(self, name: str, files: Mapping[str, Path]) -> None:
        """Log files as an artifact, by their paths inside it."""
        ...

    def close(self, failed: bool) -> None:
        """End the tracked run, by an error or not; it can be continued."""
        ...


def project_from(variable: str) -> str:
    """Return the project that an environment variable names, else `PROJECT`."""
    return os.environ.get(variable) or PROJECT


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by names with dots, `agent.gamma`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat

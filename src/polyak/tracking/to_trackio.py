"""Tracks a run in Trackio, which keeps runs in a database on this machine unless it is told otherwise."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyak.tracking.tracker import project_from


class TrackioTracker:
    """A run of Trackio, the result of `trackio.init`; it is continued by its name."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The name of the run, which is unique in its project."""
        return str(self._run.name)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Set the config, which is stored with the next metrics."""
        self._run.config.update(settings)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._run.log(dict(metrics), step=step)

    def log_video(self, path: Path, step: int) -> None:
        """Log a video as `video`."""
        import trackio

        self._run.log({"video": trackio.Video(str(path))}, step=step)

    def log_files(self, name: str, files: Mapping[str, Path]) -> None:
        """Log an artifact of type `model`, whose name has the name of the run."""
        import trackio

        artifact = trackio.Artifact(f"{name}-{self.id}", type="model")
        for inside, path in files.items():
            artifact.add_file(str(path), name=inside)
        self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Finish the run, after everything is stored; Trackio knows no failed runs."""
        self._run.finish()


def start_trackio(title: str, id: str | None) -> TrackioTracker:
    """Begin or continue a run in the project of the environment variable TRACKIO_PROJECT."""
    import trackio

    # Runs of several directories of one name stay apart.
    name = id or f"{title}-{secrets.token_hex(4)}"
    return TrackioTracker(trackio.init(project=project_from("TRACKIO_PROJECT"), name=name, resume="allow", embed=False))

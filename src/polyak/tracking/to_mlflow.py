"""Tracks a run in MLflow, by its client, which knows no active run: seeds that train together have several."""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from polyak.tracking.tracker import flatten, project_from

FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that names must not have."""

MAX_BATCH = 100
"""Maximum number of parameters that MLflow takes at a time."""

MAX_VALUE = 500
"""Maximum number of characters of a parameter's value."""


class MlflowTracker:
    """A run of MLflow.

    Args:
        client: an `mlflow.MlflowClient`.
        id: the id of a run.
        params: values of parameters that the run has, which MLflow never changes.
    """

    def __init__(self, client: Any, id: str, params: Mapping[str, str]) -> None:
        self._client, self.id, self._params = client, id, params

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Set the parameters; where a resumed run has changed a setting, a tag has its new value."""
        from mlflow.entities import Param, RunTag

        texts = {FORBIDDEN.sub("_", name): str(value)[:MAX_VALUE] for name, value in flatten(settings).items()}
        changed = [RunTag(f"changed.{name}", text) for name, text in texts.items() if self._params.get(name, text) != text]
        params = [Param(name, text) for name, text in texts.items() if name not in self._params]
        for start in range(0, len(params), MAX_BATCH):
            self._client.log_batch(self.id, params=params[start : start + MAX_BATCH])
        if changed:
            self._client.log_batch(self.id, tags=changed[:MAX_BATCH])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the finite numbers."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {FORBIDDEN.sub("_", name): float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in finite.items()])

    def log_video(self, path: Path, step: int) -> None:
        """Log a file in `videos`."""
        self._client.log_artifact(self.id, str(path), "videos")

    def log_files(self, name: str, files: Mapping[str, Path]) -> None:
        """Log files in a directory `name`."""
        for inside, path in files.items():
            self._client.log_artifact(self.id, str(path), str(PurePosixPath(name, inside).parent))

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def start_mlflow(title: str, id: str | None) -> MlflowTracker:
    """Begin or continue a run in the experiment of the environment variable MLFLOW_EXPERIMENT_NAME."""
    import mlflow

    client = mlflow.MlflowClient()
    if id is not None:
        client.update_run(id, status="RUNNING")
        return tracker_of(client, id)
    name = project_from("MLFLOW_EXPERIMENT_NAME")
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    return MlflowTracker(client, client.create_run(experiment, run_name=title).info.run_id, {})


def tracker_of(client: Any, id: str) -> MlflowTracker:
    """Return the tracker of an existing run."""
    return MlflowTracker(client, id, client.get_run(id).data.params)

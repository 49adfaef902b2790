"""Tracks a run in Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyak.tracking.tracker import project_from


class WandbTracker:
    """A run of Weights & Biases, the result of `wandb.init`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The id of the run."""
        return str(self._run.id)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Set the config."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._run.log(dict(metrics), step=step)

    def log_video(self, path: Path, step: int) -> None:
        """Log a video as `video`."""
        import wandb

        self._run.log({"video": wandb.Video(str(path), format=path.suffix[1:])}, step=step)

    def log_files(self, name: str, files: Mapping[str, Path]) -> None:
        """Log an artifact of type `model`, whose name has the id of the run."""
        import wandb

        artifact = wandb.Artifact(f"{name}-{self.id}", type="model")
        for inside, path in files.items():
            artifact.add_file(str(path), name=inside)
        self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Finish the run, after its files are sent; an exit code of 1 marks it as failed."""
        self._run.finish(exit_code=int(failed))


def start_wandb(title: str, id: str | None) -> WandbTracker:
    """Begin or continue a run in the project of the environment variable WANDB_PROJECT."""
    import wandb

    project = project_from("WANDB_PROJECT")
    # Several runs of one process, for seeds that train together.
    return WandbTracker(wandb.init(project=project, name=title, id=id, resume="allow", reinit="create_new"))

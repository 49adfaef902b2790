"""The trackers by name, each imported when it is used."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from polyak.tracking.tracker import Tracker

TrackerName: TypeAlias = Literal["wandb", "mlflow", "trackio", "tensorboard"]

NAMES: tuple[TrackerName, ...] = get_args(TrackerName)


def import_tracker(name: TrackerName) -> Callable[[str, str | None], Tracker] | None:
    """Return the function `(title, id)` that begins a tracked run, or continues the one with this id.

    None for TensorBoard, whose files each run with this package has.

    Raises:
        ImportError: the tracker's package is not installed.
    """
    try:
        match name:
            case "wandb":
                import wandb  # noqa: F401

                from polyak.tracking.to_wandb import start_wandb

                return start_wandb
            case "mlflow":
                import mlflow  # noqa: F401

                from polyak.tracking.to_mlflow import start_mlflow

                return start_mlflow
            case "trackio":
                import trackio  # noqa: F401

                from polyak.tracking.to_trackio import start_trackio

                return start_trackio
            case "tensorboard":
                import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"track={name!r} needs {name}: pip install 'polyak[{name}]' ({error})") from None
    return None

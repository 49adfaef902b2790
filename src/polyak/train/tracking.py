"""Tracks a run: settings, metrics and videos while it trains, the checkpoints at its end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyak.core.types import Progress, PyTree
from polyak.core.warn import warn
from polyak.runs import RunConfig
from polyak.storage.directory import find
from polyak.storage.run_directory import CONFIG, TRACKING, Run, RunError
from polyak.storage.run_files import read_object, write_object
from polyak.storage.writers import with_time
from polyak.tracking.names import TrackerName, import_tracker
from polyak.tracking.tracker import Tracker


class TrackedRun:
    """A callback that logs settings, metrics and new videos of a run to a tracker.

    A failure of the tracker, such as a server that is away, gives one warning; training goes on.

    Args:
        owner: name of the tracker in warnings.
        tracker: the tracked run.

    Attributes:
        failed: True marks the tracked run as failed at its end.
    """

    def __init__(self, owner: str, tracker: Tracker) -> None:
        self.failed = False
        self._owner, self._tracker = owner, tracker
        self._has_settings = self._has_warned = False
        self._videos: set[Path] = set()

    def __call__(self, progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        """Log a report."""
        if not self._has_settings:
            self._has_settings = True
            # Videos of the time before a resume are logged already.
            self._videos = set() if progress.run_dir is None else _videos_in(progress.run_dir, until=progress.env_steps - 1)
            if progress.settings:
                self._try(self._tracker.log_settings, progress.settings)
        self._try(self._tracker.log_metrics, with_time(progress, metrics), progress.env_steps)
        if progress.run_dir is not None:
            for path in sorted(_videos_in(progress.run_dir, until=progress.env_steps) - self._videos):
                self._videos.add(path)
                self._try(self._tracker.log_video, path, progress.env_steps)

    def close(self, run: Run) -> None:
        """Log the last and the best checkpoint as run directories that `polyak.load_policy` takes, and end the tracked run."""
        for name, directory in (("checkpoint", run.checkpoints), ("best", run.best)):
            if found := find(directory):
                self._try(self._tracker.log_files, name, _files_of(run, found[max(found)]))
        self._try(self._tracker.close, self.failed)

    def _try(self, log: Callable[..., None], *args: Any) -> None:
        try:
            log(*args)
        except Exception as error:  # Trackers raise any exception.
            if not self._has_warned:
                self._has_warned = True
                warn(f"{self._owner}: {type(error).__name__}: {error}; training goes on, and what was not logged is lost there")


@contextmanager
def tracked(config: RunConfig, run: Run | None, *, is_resumed: bool) -> Iterator[list[TrackedRun]]:
    """Yield a list with the callback of `config.track`, or an empty list; the tracked run ends with the block.

    The tracker's id of the run is in its directory, so that a resumed run continues the same tracked run.

    Raises:
        Exception: the tracked run cannot begin; in a resumed run, this is a warning.
    """
    start = None if config.track is None or run is None else import_tracker(config.track)
    if start is None or run is None or config.track is None:
        yield []
        return
    owner = f"track={config.track}"
    try:
        tracker = start(run.directory.name, _read_id(run, config.track))
        write_object(run.directory / TRACKING, {"tracker": config.track, "id": tracker.id})
    except Exception as error:
        if not is_resumed:
            raise
        warn(f"{owner}: {type(error).__name__}: {error}; training goes on without it")
        yield []
        return
    callback = TrackedRun(owner, tracker)
    try:
        yield [callback]
    except BaseException:
        callback.failed = True
        raise
    finally:
        callback.close(run)


def _read_id(run: Run, track: TrackerName) -> str | None:
    """Read the tracker's id of the run; None before the first start, or of another tracker."""
    try:
        stored = read_object(run.directory / TRACKING)
    except RunError:
        return None
    return str(stored.get("id")) if stored.get("tracker") == track and isinstance(stored.get("id"), str) else None


def _videos_in(directory: Path, until: int) -> set[Path]:
    return {path for path in directory.glob("videos/*.mp4") if path.stem.isdecimal() and int(path.stem) <= until}


def _files_of(run: Run, checkpoint: Path) -> dict[str, Path]:
    """Return the files of a run directory with one checkpoint, by their paths inside it; without the replay's segments."""
    files = {CONFIG: run.directory / CONFIG}
    return files | {f"checkpoints/{checkpoint.name}/{path.name}": path for path in sorted(checkpoint.iterdir())}

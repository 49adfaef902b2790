"""Writes frames to a video file, with the scores of its episodes."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from polyak.core.checks import check_number
from polyak.core.printing import format_number
from polyak.videos.captions import add_caption
from polyak.videos.encoder import open_video
from polyak.videos.play import Frame, Number

DEFAULT_FPS = 30.0
"""Frames per second of an environment whose metadata do not say it."""

MAX_FPS = 1000


@dataclass(frozen=True)
class Video:
    """A video file; a notebook shows it.

    Attributes:
        path: the file.
        fps: frames per second.
        returns: sum of the rewards of each episode, the last of which may have been cut.
        lengths: steps of each episode.
    """

    path: Path
    fps: float
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return (sum(self.lengths) + len(self.lengths)) / self.fps

    def __str__(self) -> str:
        count, returns = len(self.lengths), ", ".join(map(format_number, self.returns))
        episodes = f"{count} episode{'s' if count > 1 else ''}, return {returns}"
        size = self.path.stat().st_size
        return f"{self.path} ({episodes}; {self.seconds:.1f} s at {self.fps:g} frames per second, {size:,} bytes)"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.path.read_bytes()).decode()
        if self.path.suffix.lower() == ".gif":
            return f'<img src="data:image/gif;base64,{data}">'
        return f'<video controls loop autoplay muted src="data:video/mp4;base64,{data}"></video>'


def check_fps(owner: str, fps: float | None) -> None:
    """Check a number of frames per second.

    Raises:
        TypeError, ValueError: it is no positive number, or too large.
    """
    check_number(owner, "fps", fps, above=0.0, at_most=MAX_FPS, optional=True)


def record_frames(
    owner: str, path: Path, frames: Iterator[Frame], *, fps: float | None = None, show: Sequence[Number] = ()
) -> Video:
    """Write frames to a file, which is replaced if it exists; only one frame is in memory at a time.

    Args:
        owner: name of the caller in errors.
        path: a path that ends with `.mp4` or `.gif`.
        frames: at least one frame.
        fps: frames per second; None is the environment's.
        show: numbers below the images.

    Raises:
        VideoError, ImportError: see `open_video`.
    """
    returns: list[float] = []
    lengths: list[int] = []
    first = next(frames)
    fps = fps or first.fps or DEFAULT_FPS
    with open_video(owner, path, fps) as add:
        for frame in chain([first], frames):
            add(add_caption(frame, show))
            if frame.episode == len(returns):
                returns.append(0.0)
                lengths.append(0)
            returns[-1], lengths[-1] = frame.total, frame.step
    return Video(path, fps, tuple(returns), tuple(lengths))

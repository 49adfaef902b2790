"""Writes images to an MP4 or GIF file, one after another, with ffmpeg in a process of its own."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from polyak.videos.play import Image

SUFFIXES = (".mp4", ".gif")

MAX_GIF_FPS = 50
"""Maximum frames per second of a GIF: browsers show frames of less than 0.02 s for 0.1 s."""

MP4 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart", "-f", "mp4")
# Without losses, for the two passes of a GIF.
INTERMEDIATE = ("-c:v", "libx264rgb", "-crf", "0", "-preset", "ultrafast", "-f", "matroska")

# The codec needs even sizes.
EVEN = "pad=ceil(iw/2)*2:ceil(ih/2)*2"


class VideoError(Exception):
    """A video cannot be written or shown; the message says why."""


def check_output(owner: str, path: Path) -> None:
    """Check that a video can be written to this path, before anything is played.

    Raises:
        ValueError: the suffix is not one of `SUFFIXES`.
        VideoError: the directory cannot be written to, or ffmpeg is missing.
        ImportError: the package imageio-ffmpeg is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{owner}: the file of a video must end with {' or '.join(SUFFIXES)}, got {path}")
    if path.is_dir():
        raise VideoError(f"{path}: is a directory; a video needs a file")
    find_ffmpeg(owner)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VideoError(f"{path.parent}: cannot be created: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise VideoError(f"{path}: cannot be written: no permission to write in {path.parent}")


def find_ffmpeg(owner: str) -> str:
    """Return the path of ffmpeg.

    Raises:
        ImportError: the package imageio-ffmpeg is not installed.
        VideoError: it has no program for this machine, and none is installed.
    """
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError:
        raise ImportError(f"{owner} needs imageio-ffmpeg, which writes videos: pip install 'polyak[video]'") from None
    try:
        path: str = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise VideoError(f"{owner}: found no ffmpeg: install it, or set IMAGEIO_FFMPEG_EXE to its path ({error})") from error
    return path


@contextmanager
def open_video(owner: str, path: Path, fps: float) -> Iterator[Callable[[Image], None]]:
    """Yield a function that adds an image to a file, which replaces an existing one when the block ends without an exception.

    Only one image is in memory at a time, and all must have the size of the first.

    Args:
        owner: name of the caller in errors.
        path: a path that ends with one of `SUFFIXES`.
        fps: frames per second.

    Raises:
        VideoError: ffmpeg fails, an image has another size, or there is no image.
    """
    program = find_ffmpeg(owner)
    rate = str(Fraction(fps).limit_denominator(10_000))
    with contextlib.ExitStack() as stack:
        try:
            aside = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent, prefix=".video-")))
        except OSError as error:
            raise VideoError(f"{path}: cannot be written: {error.strerror}") from error
        is_gif = path.suffix.lower() == ".gif"
        encoded = aside / ("frames.mkv" if is_gif else "video.mp4")
        with _encoder(program, encoded, rate, INTERMEDIATE if is_gif else MP4) as add:
            yield add
        os.replace(_to_gif(program, encoded, fps) if is_gif else encoded, path)


@contextmanager
def _encoder(program: str, output: Path, rate: str, codec: Sequence[str]) -> Iterator[Callable[[Image], None]]:
    """Yield a function that sends an image to ffmpeg."""
    process: subprocess.Popen[bytes] | None = None
    shape: tuple[int, ...] = ()
    with tempfile.TemporaryFile() as messages:

        def add(image: Image) -> None:
            nonlocal process, shape
            if process is None:
                shape = image.shape
                size = f"{shape[1]}x{shape[0]}"
                source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", rate, "-i", "pipe:0", "-vf", EVEN]
                process = _start(program, [*source, *codec, str(output)], messages)
            if image.shape != shape:
                raise VideoError(f"{output.name}: every image must have the size of the first, {shape}, got {image.shape}")
            assert process.stdin is not None
            try:
                process.stdin.write(np.ascontiguousarray(image).tobytes())
            except BrokenPipeError:
                process.wait()
                raise _failure(messages) from None

        try:
            yield add
            if process is None:
                raise VideoError("a video needs an image, got none")
            # Ends ffmpeg.
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
            if process.returncode != 0:
                raise _failure(messages)
        finally:
            if process is not None:
                _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End ffmpeg, which has ended by itself unless there was an error."""
    if process.poll() is None:
        process.kill()
        process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _to_gif(program: str, frames: Path, fps: float) -> Path:
    """Convert to a GIF with one palette for all frames."""
    palette, gif = frames.with_name("palette.png"), frames.with_name("video.gif")
    rate = f"fps={MAX_GIF_FPS}," if fps > MAX_GIF_FPS else ""
    with tempfile.TemporaryFile() as messages:
        for arguments in (
            ["-i", str(frames), "-vf", f"{rate}palettegen=stats_mode=full", "-update", "1", str(palette)],
            ["-i", str(frames), "-i", str(palette), "-lavfi", f"{rate}paletteuse=dither=none:diff_mode=rectangle", str(gif)],
        ):
            process = _start(program, arguments, messages)
            try:
                process.communicate()
            finally:
                _end(process)
            if process.returncode != 0:
                raise _failure(messages)
    return gif


def _start(program: str, arguments: Sequence[str], messages: Any) -> "subprocess.Popen[bytes]":
    # In a session of its own, so that Ctrl-C ends this process only, which then ends ffmpeg.
    command = [program, "-hide_banner", "-loglevel", "error", "-y", *arguments]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=null, stderr=messages, start_new_session=True)
    except OSError as error:
        raise VideoError(f"ffmpeg cannot be started: {error}") from error


def _failure(messages: Any) -> VideoError:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return VideoError(f"ffmpeg could not write the video: {lines[-1] if lines else 'it ended without a message'}")

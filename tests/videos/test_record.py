"""Files: every frame is in them, at the right time, and a failure leaves the old file."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import imageio_ffmpeg
import numpy as np
import pytest

from polyak.videos import encoder
from polyak.videos.captions import add_caption
from polyak.videos.encoder import VideoError, check_output, open_video
from polyak.videos.play import NUMBERS, Frame
from polyak.videos.record import record_frames

FRAME = Frame(np.zeros((31, 45, 3), np.uint8), 20.0, 0, 0, 0.0, 0.0, 1.5, False)


def frames(count=30, *, fps=20.0):
    for i in range(count):
        image = np.zeros((31, 45, 3), np.uint8)
        image[:, : 45 * i // count] = 200
        yield replace(FRAME, image=image, fps=fps, step=i, reward=1.0, total=float(i), is_last=i == count - 1)


def read(path):
    """Return frames per second, seconds and images of a file."""
    # imageio_ffmpeg.read_frames would fork, which JAX forbids.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    about = done.stderr.decode()
    fps, seconds = re.search(r"([\d.]+) fps", about)[1], re.search(r"Duration: 00:00:([\d.]+)", about)[1]
    width, height = map(int, re.search(r"Video: .*?(\d{2,})x(\d{2,})", about).groups())
    return float(fps), float(seconds), list(np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3))


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_file_has_every_frame_at_the_environments_speed(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text("replaced")
    video = record_frames("video", path, frames())
    fps, seconds, images = read(path)
    assert fps == 20 and len(images) == 30 and seconds == pytest.approx(1.5, abs=0.06)
    # Enlarged, since 31 x 45 pixels are few, and to even sizes.
    assert images[0].shape[:2] == (218, 316)
    bright = [(image[100, :315].mean(axis=-1) > 100).mean() for image in images]
    np.testing.assert_allclose(bright, [i / 30 for i in range(30)], atol=0.03)
    assert video.lengths == (29,) and video.returns == (29.0,) and video.seconds == 1.5
    assert str(video) == f"{path} (1 episode, return 29.0; 1.5 s at 20 frames per second, {path.stat().st_size:,} bytes)"
    assert ("video/mp4" if suffix == "mp4" else "image/gif") in video._repr_html_()
    assert os.listdir(tmp_path) == [path.name]


def test_a_gif_is_as_long_as_its_episode_above_the_speed_that_browsers_show(tmp_path):
    record_frames("video", tmp_path / "a.gif", frames(60, fps=60.0))
    fps, seconds, images = read(tmp_path / "a.gif")
    assert fps == 50 and seconds == pytest.approx(1.0, abs=0.05) and len(images) == 50


def test_the_numbers_stand_below_the_image():
    plain, shown = add_caption(FRAME, ()), add_caption(FRAME, NUMBERS)
    np.testing.assert_array_equal(shown[: len(plain)], plain)
    strip = shown[len(plain) :]
    # Two numbers in each row of a narrow image.
    assert strip.shape[1] == plain.shape[1] and (strip > 200).any(axis=(1, 2)).sum() > 10
    assert (add_caption(replace(FRAME, value=2.5), NUMBERS) != shown).any()


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    path.write_text("old")

    def other_size():
        yield FRAME
        yield replace(FRAME, image=np.zeros((40, 41, 3), np.uint8))

    with pytest.raises(VideoError, match="every image must have the size of the first"):
        record_frames("video", path, other_size())
    with pytest.raises(VideoError, match="a video needs an image, got none"), open_video("video", path, 20.0):
        pass
    monkeypatch.setattr(encoder, "MP4", ("-c:v", "nonsense"))
    with pytest.raises(VideoError, match=r"ffmpeg could not write the video: .*"):
        record_frames("video", path, frames(2000))
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.mp4"]


def test_ctrl_c_during_the_conversion_to_a_gif_ends_ffmpeg(tmp_path, monkeypatch):
    program, pid = tmp_path / "ffmpeg", tmp_path / "pid"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *palettegen*) echo $$ > {pid}; sleep 0.2; kill -INT $PPID; exec sleep 60;; esac\n'
        f'exec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    with pytest.raises(KeyboardInterrupt):
        record_frames("video", tmp_path / "a.gif", frames(2))
    assert not os.path.exists(f"/proc/{int(pid.read_text())}")
    assert sorted(os.listdir(tmp_path)) == ["ffmpeg", "pid"]


def test_a_path_is_checked_before_anything_is_played(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"the file of a video must end with .mp4 or .gif, got a.avi"):
        check_output("video", type(tmp_path)("a.avi"))
    (tmp_path / "b.mp4").mkdir()
    with pytest.raises(VideoError, match="is a directory; a video needs a file"):
        check_output("video", tmp_path / "b.mp4")
    (tmp_path / "file").write_text("")
    with pytest.raises(VideoError, match="cannot be created: "):
        check_output("video", tmp_path / "file" / "a.mp4")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(VideoError, match=r"a.mp4: cannot be written: no permission"):
        check_output("video", tmp_path / "a.mp4")

    def no_program():
        raise RuntimeError("No ffmpeg exe could be found")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", no_program)
    with pytest.raises(VideoError, match="video: found no ffmpeg: install it, or set IMAGEIO_FFMPEG_EXE"):
        check_output("video", tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"video needs imageio-ffmpeg, which writes videos: pip install 'polyak\[video\]'"):
        check_output("video", tmp_path / "a.mp4")


WINDOW = """
import numpy as np, pygame, sys
from polyak.videos.play import Frame
from polyak.videos.window import show_frames
ended, shown = [], 0
def frames():
    global shown
    for i in range(1000):
        shown = i
        if i == 19:
            pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE))
        yield Frame(np.full((50, 60, 3), 9, np.uint8), 50.0, i // 10, i % 10, 0.0, 0.0, None, i % 10 == 9)
show_frames("watch", frames(), title="t", fps=100.0, show=("step",), on_end=ended.append)
print(shown, len(ended))
"""


def window_in(environ):
    environ = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")} | environ
    return subprocess.run([sys.executable, "-c", WINDOW], env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_window_shows_the_frames_until_a_key_closes_it():
    pytest.importorskip("pygame")
    done = window_in({"SDL_VIDEODRIVER": "offscreen"})
    assert done.stdout.split()[-2:] == ["19", "2"], done.stderr


@pytest.mark.slow
def test_without_a_display_there_is_no_window():
    pytest.importorskip("pygame")
    # `dummy` is what polyak sets for images in memory.
    for environ in ({}, {"SDL_VIDEODRIVER": "dummy"}):
        done = window_in(environ)
        assert "VideoError: watch: there is no display to open a window on (DISPLAY is not set)" in done.stderr

"""Shows frames in a window, at their speed."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from polyak.dynamics.opengl import has_display
from polyak.videos.captions import add_caption
from polyak.videos.encoder import VideoError
from polyak.videos.play import Frame, Image, Number

DRIVER = "SDL_VIDEODRIVER"
"""The environment variable that names what pygame draws on."""

WATCH_ADVICE = "polyak video RUN writes a file"


def check_window(owner: str, advice: str = WATCH_ADVICE) -> None:
    """Check that a window can be opened; `advice` says what can be done without one.

    Raises:
        ImportError: pygame is not installed.
        VideoError: there is no display.
    """
    _open_display(owner, advice).display.quit()


def show_frames(
    owner: str,
    frames: Iterator[Frame],
    *,
    title: str,
    fps: float,
    show: Sequence[Number] = (),
    on_end: Callable[[Frame], None] = lambda frame: None,
) -> None:
    """Show frames until they end or the window is closed: by its button, Escape or Q. The space bar pauses.

    Args:
        owner: name of the caller in errors.
        frames: the frames.
        title: title of the window.
        fps: frames per second.
        show: numbers below the images.
        on_end: called with the last frame of each episode.

    Raises:
        ImportError: pygame is not installed.
        VideoError: there is no display.
    """
    with open_window(owner, title) as window:
        due = time.monotonic()
        for frame in frames:
            window.draw(add_caption(frame, show))
            if frame.is_last:
                on_end(frame)
            due = max(due + 1 / fps, time.monotonic())
            if not _wait(window, due):
                return


class Window:
    """A window that images are drawn in, with the size of the first.

    Attributes:
        pygame: the module.
        title: title of the window.
    """

    def __init__(self, pygame: Any, title: str) -> None:
        self.pygame, self.title = pygame, title
        self._screen: Any = None

    def draw(self, image: Image) -> None:
        """Show an image; the first one opens the window."""
        pygame = self.pygame
        if self._screen is None:
            self._screen = pygame.display.set_mode(image.shape[1::-1], pygame.SCALED | pygame.RESIZABLE)
        pygame.display.set_caption(self.title)
        self._screen.blit(pygame.surfarray.make_surface(np.swapaxes(image, 0, 1)), (0, 0))
        pygame.display.flip()


@contextmanager
def open_window(owner: str, title: str, advice: str = WATCH_ADVICE) -> Iterator[Window]:
    """Yield a window, which is closed at the end; see `check_window`.

    Raises:
        ImportError: pygame is not installed.
        VideoError: there is no display.
    """
    pygame = _open_display(owner, advice)
    try:
        yield Window(pygame, title)
    finally:
        pygame.joystick.quit()
        pygame.display.quit()


def _open_display(owner: str, advice: str) -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ModuleNotFoundError:
        raise ImportError(f"{owner} needs pygame, which opens a window: pip install 'polyak[video]'") from None
    # Set by `silence_pygame`, for images.
    if os.environ.get(DRIVER) == "dummy":
        del os.environ[DRIVER]
    reason = f"{owner}: there is no display to open a window on (DISPLAY is not set); {advice}"
    if not has_display() and DRIVER not in os.environ:
        raise VideoError(reason)
    pygame.display.quit()
    try:
        pygame.display.init()
    except pygame.error as error:
        raise VideoError(f"{reason} ({error})") from None
    return pygame


def _wait(window: Window, until: float) -> bool:
    """Wait and react to keys; returns False if the window is closed."""
    pygame, is_paused = window.pygame, False
    while True:
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)):
                return False
            if event.type == pygame.KEYDOWN and event.key == pygame.K_SPACE:
                is_paused = not is_paused
        left = until - time.monotonic()
        if left <= 0 and not is_paused:
            return True
        time.sleep(min(0.02, max(left, 0.001)))

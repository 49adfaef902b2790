"""Shows frames in a window, at their speed."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polyak.dynamics.opengl import has_display
from polyak.videos.captions import add_caption
from polyak.videos.encoder import VideoError
from polyak.videos.play import Frame, Number

DRIVER = "SDL_VIDEODRIVER"
"""The environment variable that names what pygame draws on."""


def check_window(owner: str) -> None:
    """Check that a window can be opened.

    Raises:
        ImportError: pygame is not installed.
        VideoError: there is no display.
    """
    _open_display(owner).display.quit()


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
    pygame = _open_display(owner)
    screen: Any = None
    due = time.monotonic()
    try:
        for frame in frames:
            image = add_caption(frame, show)
            if screen is None:
                pygame.display.set_caption(title)
                screen = pygame.display.set_mode(image.shape[1::-1], pygame.SCALED | pygame.RESIZABLE)
            screen.blit(pygame.surfarray.make_surface(np.swapaxes(image, 0, 1)), (0, 0))
            pygame.display.flip()
            if frame.is_last:
                on_end(frame)
            due = max(due + 1 / fps, time.monotonic())
            if not _wait(pygame, due):
                return
    finally:
        pygame.display.quit()


def _open_display(owner: str) -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ModuleNotFoundError:
        raise ImportError(f"{owner} needs pygame, which opens a window: pip install 'polyak[video]'") from None
    # Set by `silence_pygame`, for images.
    if os.environ.get(DRIVER) == "dummy":
        del os.environ[DRIVER]
    reason = f"{owner}: there is no display to open a window on (DISPLAY is not set); polyak video RUN writes a file"
    if not has_display() and DRIVER not in os.environ:
        raise VideoError(reason)
    pygame.display.quit()
    try:
        pygame.display.init()
    except pygame.error as error:
        raise VideoError(f"{reason} ({error})") from None
    return pygame


def _wait(pygame: Any, until: float) -> bool:
    """Wait and react to keys; returns False if the window is closed."""
    is_paused = False
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

"""Enlarges small images, and writes numbers below them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyak.videos.play import Frame, Image, Number

SMALLEST_SIDE = 200
"""Images whose shorter side has fewer pixels are enlarged by a whole number, so that a grid of 10 x 10 can be seen."""

CHARACTERS = 16
"""Width of a number with its name, in characters."""


def enlarge(image: Image) -> Image:
    """Return the image, enlarged by a whole number if it is small."""
    times = -(-SMALLEST_SIDE // min(image.shape[:2]))
    return image if times == 1 else image.repeat(times, 0).repeat(times, 1)


def add_caption(frame: Frame, show: Sequence[Number]) -> Image:
    """Return the enlarged image of a frame, with the numbers below it.

    Raises:
        ImportError: Pillow is not installed.
    """
    image = enlarge(frame.image)
    if not show:
        return image
    try:
        from PIL import Image as Picture
        from PIL import ImageDraw
    except ModuleNotFoundError:
        raise ImportError("show needs Pillow, which writes into frames: pip install 'polyak[video]'") from None
    width = image.shape[1]
    size = min(max(width // 30, 12), 28)
    cell = CHARACTERS * size * 0.6
    columns = min(max(int(width // cell), 1), len(show))
    rows = -(-len(show) // columns)
    line = int(size * 1.6)
    strip = Picture.new("RGB", (width, rows * line), (20, 20, 20))
    pen = ImageDraw.Draw(strip)
    for i, name in enumerate(show):
        place = (int((i % columns) * width / columns) + size // 2, (i // columns) * line + size // 4)
        pen.text(place, frame.describe(name), font=_font(size), fill=(240, 240, 240))
    return np.concatenate([image, np.asarray(strip)])


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)

"""Checks the images that environments draw."""

from typing import Any

import numpy as np
import numpy.typing as npt


def read_image(name: str, image: Any) -> npt.NDArray[np.uint8]:
    """Return an environment's image as an array `[H, W, 3]` of uint8.

    Raises:
        ValueError: it is no such image.
    """
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8 and array.size:
        return array
    got = f"{array.dtype} of shape {array.shape}" if array.dtype != object else type(image).__name__
    raise ValueError(f"{name} draws no images: they must be arrays [height, width, 3] of uint8, got {got}")

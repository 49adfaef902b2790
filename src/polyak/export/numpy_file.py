"""NumPy arrays as the members of an exported file, which `numpy.load` opens too, and back without ever making objects."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import write_array

from polyak.export.archive import ExportError
from polyak.export.numpy_reader import array_of


def to_members(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, bytes]:
    """Each array as a `.npy` file."""
    members = {}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        write_array(buffer, np.ascontiguousarray(array))
        members[f"{name}.npy"] = buffer.getvalue()
    return members


def from_members(members: Mapping[str, bytes], what: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays.

    Raises:
        ExportError: a member is none.
    """
    try:
        return {name.removesuffix(".npy"): array_of(data) for name, data in members.items()}
    except Exception as error:
        raise ExportError(f"{what}: is damaged: its arrays cannot be read: {error}") from None

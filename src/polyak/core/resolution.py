"""Changes of numbers that float32 does not resolve.

No JAX here: worker processes check observations with this.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

# float32 resolves 0.002 here.
LEAST = 2.0**14


def find_changes(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which entries change, and which of them are at least `LEAST` in size and do not change in float32."""
    is_changed = after != before
    is_lost = is_changed & (after.astype(np.float32) == before.astype(np.float32)) & (np.abs(after) >= LEAST)
    return is_changed, is_lost

"""The arrays and settings of the NumPy format for given spaces; independent of network libraries, to load files."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Space, leaf_spaces


def describe_spaces(spec: EnvSpec, *, squash_mean: bool) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the settings and arrays of the format that depend on the spaces and on `squash_mean`.

    Raises:
        ValueError: the format does not support these spaces.
    """
    obs = _only_leaf(spec.obs)
    if not isinstance(obs, Box):
        raise ValueError(f"the observation is {spec.obs}"[:300])
    if not isinstance(spec.action, Box | Discrete):
        raise ValueError(f"the action is {spec.action}"[:300])
    divide = obs.byte_scale if obs.dtype == np.uint8 else 1.0
    action = spec.action
    if isinstance(action, Discrete):
        return {"divide": divide, "action": "discrete", "start": action.start}, {}
    if squash_mean and not action.bounded:
        raise ValueError(f"squash_mean needs finite bounds, got {action}")
    about = {"action": "box", "shape": list(action.shape), "dtype": str(action.dtype), "divide": divide}
    # In float64, integer bounds of 32 bits are exact, and so the reader computes integer actions in float64.
    exact = (action.low.astype(np.float64), action.high.astype(np.float64))
    low, high = action.float32_bounds if action.dtype.kind == "f" else exact
    bounds = {"low": low.reshape(1, -1), "high": high.reshape(1, -1)}
    # Squashing into the bounds equals squashing into ±1 and scaling to the bounds.
    return {**about, "rescale": squash_mean or spec.action_scaling == "rescale"}, bounds


def check_weights(spec: EnvSpec, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check that settings and arrays from a file fit a policy for these spaces.

    Raises:
        ValueError: a setting or an array does not fit; the message names it.
    """
    settings, bounds = describe_spaces(spec, squash_mean=about.get("squash_mean") is True)
    obs = _only_leaf(spec.obs)
    if isinstance(obs, Box) and obs.dtype == np.uint8 and about.get("divide") == 255.0:
        settings["divide"] = 255.0  # Files of older versions always divide by 255, not by the largest bound.
    wrong = [name for name, value in settings.items() if about.get(name) != value]
    wrong += [name for name, x in bounds.items() if not np.array_equal(arrays.get(name, ()), x)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} do not fit the spaces")
    layers = about.get("layers")
    if type(layers) is not int or not 0 <= layers < len(arrays):
        raise ValueError(f"layers is {layers!r}")
    width = math.prod(obs.shape) if isinstance(obs, Box) else 0
    shapes = {name: x.shape for name, x in bounds.items()}
    if "deviation" in arrays:
        shapes |= {**dict.fromkeys(("mean", "mean_rest", "deviation"), (1, width)), "clip": (1,)}
    if "clip_mean" in arrays and isinstance(spec.action, Box):
        shapes["clip_mean"] = (1,)
    for name in (*map(str, range(layers)), "head"):
        kernel, bias = ("head_kernel", "head_bias") if name == "head" else (f"kernel{name}", f"bias{name}")
        columns = arrays[kernel].shape[-1] if kernel in arrays else 0
        shapes |= {kernel: (width, columns), bias: (columns,)}
        width = columns
    outputs = spec.action.n if isinstance(spec.action, Discrete) else math.prod(bounds["low"].shape)
    got = {name: x.shape for name, x in arrays.items()}
    is_typed = all(x.dtype == np.float32 or (name in bounds and x.dtype == bounds[name].dtype) for name, x in arrays.items())
    if got != shapes or width != outputs or not is_typed:
        raise ValueError(
            f"its arrays are {str(got)[:300]}, expected {str(shapes)[:300]}, {outputs} columns at the end, all float32 "
            "but bounds of integers"
        )


def _only_leaf(space: Space) -> Space:
    """The leaf of a Dict with a single entry; any other space unchanged."""
    leaves = [leaf for _, leaf in leaf_spaces(space)]
    return leaves[0] if isinstance(space, Dict) and len(leaves) == 1 else space

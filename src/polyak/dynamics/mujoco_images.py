"""Images of MuJoCo models, of which environments of Brax and MuJoCo Playground are made."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH = 240, 320


def mujoco_images(model: Any, id: str) -> Callable[[Mapping[str, Any]], npt.NDArray[np.uint8]]:
    """Return a function of a state's arrays, such as `qpos` and `mocap_pos`: the view of the model's first camera, if any.

    Raises:
        RuntimeError: from the function, if MuJoCo finds no OpenGL.
    """
    import mujoco

    @functools.cache
    def renderer() -> Any:
        try:
            return mujoco.Renderer(model, HEIGHT, WIDTH)
        except Exception as error:
            raise RuntimeError(
                f"{id}: MuJoCo cannot draw images: without a display, set the environment variable MUJOCO_GL=egl (with the "
                f"library libEGL) or MUJOCO_GL=osmesa (with libOSMesa) before Python starts ({error})"
            ) from error

    def draw(arrays: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        data = mujoco.MjData(model)
        for name, array in arrays.items():
            setattr(data, name, np.asarray(array))
        mujoco.mj_forward(model, data)
        renderer().update_scene(data, camera=0 if model.ncam else -1)
        image: npt.NDArray[np.uint8] = renderer().render()
        return image

    return draw

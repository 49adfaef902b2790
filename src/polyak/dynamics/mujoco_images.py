"""Images of MuJoCo models, of which environments of Brax and MuJoCo Playground are made."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH = 240, 320


def mujoco_images(model: Any, id: str) -> Callable[[Any, Any], npt.NDArray[np.uint8]]:
    """Return a function `(qpos, qvel) -> image` with the view of the model's first camera, if it has one.

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

    def draw(qpos: Any, qvel: Any) -> npt.NDArray[np.uint8]:
        data = mujoco.MjData(model)
        data.qpos, data.qvel = np.asarray(qpos), np.asarray(qvel)
        mujoco.mj_forward(model, data)
        renderer().update_scene(data, camera=0 if model.ncam else -1)
        image: npt.NDArray[np.uint8] = renderer().render()
        return image

    return draw

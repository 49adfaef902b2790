"""Creates the environment of a video: one copy of a training's environment that draws images."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyak.core.types import Env, HostEnv
from polyak.dynamics.opengl import choose_opengl, silence_pygame
from polyak.envs.constructors import is_in_jax, make
from polyak.envs.source import EnvSource, can_make_again

RENDER_MODE = "rgb_array"

DRAWN_BY_MUJOCO = ("brax/", "playground/")
"""Prefixes of environments in JAX whose images MuJoCo draws."""


def make_rendered(source: EnvSource) -> Env | HostEnv:
    """Create one copy of an environment, with `render_mode="rgb_array"` if it is Gymnasium's.

    Raises:
        ValueError: the environment draws no images.
        RuntimeError: MuJoCo draws its images, and finds no OpenGL.
    """
    target, options = source.id, dict(source.options)
    silence_pygame()
    if is_in_jax(target):
        if isinstance(target, str) and target.startswith(DRAWN_BY_MUJOCO):
            choose_opengl()
        return make(target, num_envs=1, **options)
    if isinstance(target, str):
        # Vectorized forms may have no images; the ALE has no other form.
        options["vectorization"] = "auto" if target.startswith("ALE/") else "sync"
        env_kwargs = dict(options.get("env_kwargs") or {})
        options["env_kwargs"] = _camera(target, env_kwargs) | env_kwargs | {"render_mode": RENDER_MODE}
    elif can_make_again(target):
        options["vectorization"] = "sync"
        target = with_images(target)
    env = make(target, num_envs=1, **options)
    if "mujoco" in sys.modules:
        choose_opengl()
    return env


def _camera(id: str, env_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting of a camera that follows the robot, for Gymnasium's MuJoCo tasks without a chosen camera.

    Since Gymnasium 1.4 the camera of some stands still, and robots run out of the picture. Models without a camera of this
    name are drawn as before.
    """
    from gymnasium.envs.registration import registry

    is_mujoco = id in registry and str(registry[id].entry_point).startswith("gymnasium.envs.mujoco")
    return {"camera_name": "track"} if is_mujoco and not {"camera_name", "camera_id"} & set(env_kwargs) else {}


def with_images(create: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that creates the environment with `render_mode="rgb_array"`, if `create` takes this argument."""
    if not takes_render_mode(create):
        return create

    def create_with_images() -> Any:
        return create(render_mode=RENDER_MODE)

    create_with_images.__name__ = getattr(create, "__name__", type(create).__name__)
    return create_with_images


def takes_render_mode(create: Callable[..., Any]) -> bool:
    """Return True if a function or class takes the argument `render_mode`."""
    try:
        parameters = inspect.signature(create).parameters
    except (TypeError, ValueError):  # It is not written in Python.
        return False
    return "render_mode" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def single_copy(env: Env) -> Env:
    """Return an environment in JAX with one copy; `env` itself if it cannot be changed."""
    if env.num_envs == 1 or not dataclasses.is_dataclass(env):
        return env
    one: Env = dataclasses.replace(env, num_envs=1)
    return one

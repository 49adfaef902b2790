"""Images of the classic control environments in JAX, drawn by Gymnasium's environments of the same names."""

import functools
from typing import Any

import numpy as np

from polyak.dynamics.opengl import silence_pygame

RENDER_FPS = {"CartPole-v1": 50.0, "Pendulum-v1": 30.0, "Acrobot-v1": 15.0, "MountainCar-v0": 30.0}
"""Frames per second of Gymnasium's environments, from their metadata."""


def draw_classic(name: str, *quantities: Any) -> Any:
    """Return the image of a state, given by the quantities that Gymnasium's environment has as `state`.

    Raises:
        ImportError: pygame, with which Gymnasium draws, is not installed.
    """
    import gymnasium

    env = _env_of(name)
    env.state = np.array(quantities, np.float64)
    try:
        return env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"images of jax/{name} need pygame: pip install 'polyak[video]'") from error


@functools.cache
def _env_of(name: str) -> Any:
    import gymnasium

    silence_pygame()
    env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True).unwrapped
    env.reset(seed=0)  # sets what it draws besides the state
    return env

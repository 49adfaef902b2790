"""An environment in JAX as a `gymnasium.Env` that renders images, for videos."""

from typing import Any

import gymnasium
import jax
import numpy as np

from polyak.core.gymnasium_spaces import to_gymnasium
from polyak.core.types import Env, PyTree
from polyak.envs.autoreset import AutoReset


class RenderedEnv(gymnasium.Env[Any, Any]):
    """One copy of an environment in JAX, with an action and an observation in its own units, and without autoreset.

    Args:
        env: an environment whose dynamics have a function `render`, which returns the image `[H, W, 3]`, uint8, of the state
            of one environment.

    Raises:
        ValueError: the dynamics have no such function.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as Gymnasium declares it)
    render_mode = "rgb_array"

    def __init__(self, env: Env) -> None:
        dynamics: Any = env.dynamics if isinstance(env, AutoReset) else None
        render: Any = getattr(dynamics, "render", None)
        if render is None:
            raise ValueError(f"{env.spec.id} renders no images; its dynamics must have a function render(state)")
        self._render, self._has_mask = render, env.spec.has_action_mask
        self.observation_space, self.action_space = to_gymnasium(env.spec.obs), to_gymnasium(env.spec.action)
        self._reset, self._step = jax.jit(dynamics.reset, static_argnums=1), jax.jit(dynamics.step)
        self._dynamics, self._state, self._key = dynamics, None, jax.random.key(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[PyTree, dict[str, Any]]:
        """Start an episode; a seed sets the key of it and of later ones."""
        super().reset(seed=seed)
        self._key = self._key if seed is None else jax.random.key(seed)
        self._state = self._reset(self._next_key(), 1)
        return self._observe()

    def step(self, action: PyTree) -> tuple[PyTree, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], action)
        self._state, *rest = self._step(self._state, batch, self._next_key())
        obs, info = self._observe()
        reward, terminated, truncated = (np.ravel(x)[0] for x in rest)
        return obs, float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """Return the image of the state."""
        return self._render(_first(self._state))

    def _observe(self) -> tuple[PyTree, dict[str, Any]]:
        info = {"action_mask": _first(self._dynamics.action_mask(self._state))} if self._has_mask else {}
        return jax.tree.map(np.asarray, (_first(self._dynamics.observe(self._state)), info))

    def _next_key(self) -> Any:
        self._key, key = jax.random.split(self._key)
        return key


def _first(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], batch)

"""Craftax' environments as dynamics: without its autoreset, and with its time limit as truncation."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import EnvSpec
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, own_promotion, raw_key
from polyak.dynamics.gymnax import NEVER, action_space_of, box_of
from polyak.dynamics.names import check_name, craftax_names

BLOCK_PIXELS = 16
"""Width of a block in images, one of the library's three."""


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of a Craftax environment, by name.

    Args:
        settings: fields of its `EnvParams` (`max_timesteps`, ...) and `StaticEnvParams` (`map_size`, ...).

    Raises:
        ImportError: Craftax is not installed.
        ValueError: no such environment.
        TypeError: no such setting.
    """
    with explain_missing("craftax", "Craftax"):
        from craftax.craftax_env import make_craftax_env_from_name
    check_name("craftax", name, craftax_names())
    with own_promotion(f"craftax/{name}"):
        env = make_craftax_env_from_name(name, auto_reset=False)
        static = {k: v for k, v in settings.items() if k in env.static_env_params.__dataclass_fields__}
        if static:
            env = type(env)(env.static_env_params.replace(**static))
        params = env.default_params.replace(**{k: v for k, v in settings.items() if k not in static})
    return dynamics_of(env, f"craftax/{name}", params)


def dynamics_of(env: Any, id: str, params: Any = None) -> ForeignDynamics:
    """The dynamics of an environment of Craftax with its parameters; None for the environment's default parameters.

    An episode that is over after `max_timesteps`, and would not be over without that limit, is truncated. At its end it
    reports each achievement as 0 or 100, like the library's `info`.
    """
    params = env.default_params if params is None else params
    unlimited = params.replace(max_timesteps=NEVER)

    def reset_one(key: Any) -> ForeignState:
        obs, state = env.reset_env(raw_key(key), params)
        return ForeignState(state, obs)

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        obs, after, reward, done, _ = env.step_env(raw_key(key), state, action, params)
        terminated = env.is_terminal(after, unlimited)
        return ForeignState(after, obs), reward, terminated, done & ~terminated

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0))
    package = ".".join(type(example.state).__module__.split(".")[:2])
    achievements = importlib.import_module(f"{package}.constants").Achievement

    def info_one(state: Any) -> dict[str, Any]:
        percent = jnp.where(env.is_terminal(state, params), 100.0 * state.achievements, jnp.nan)
        return {f"Achievements/{each.name.lower()}": percent[each.value] for each in achievements}

    @functools.cache
    def renderer() -> Any:
        return jax.jit(importlib.import_module(f"{package}.renderer").make_craftax_pixel_renderer(BLOCK_PIXELS))

    def render_one(state: Any) -> Any:
        with own_promotion(id):
            return np.asarray(renderer()(state)).clip(0, 255).astype(np.uint8)

    obs_space = box_of(env.observation_space(params), example.obs, id)
    spec = EnvSpec(obs_space, action_space_of(env.action_space(params), id), id)
    return ForeignDynamics(env, params, spec, reset_one, step_one, info_one, render_one, has_costly_reset=True)

"""Gymnax environments as dynamics: without gymnax's autoreset, and with time limits separate from terminal states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Discrete, EnvSpec, Space
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, own_promotion
from polyak.dynamics.names import check_name, gymnax_names

# Longer than any episode, and exact in float32, as some limits are floats.
NEVER = 2**30


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of a gymnax environment, by name.

    Args:
        settings: parameters of the environment (`max_steps_in_episode`, ...), else arguments of its constructor.

    Raises:
        ImportError: gymnax is not installed.
        ValueError: no such environment.
        TypeError: no such setting.
    """
    with explain_missing("gymnax", "gymnax"):
        import gymnax
    check_name("gymnax", name, gymnax_names())
    with own_promotion(f"gymnax/{name}"):
        fields = gymnax.make(name)[1].__dataclass_fields__
        env, params = gymnax.make(name, **{k: v for k, v in settings.items() if k not in fields})
        params = params.replace(**{k: v for k, v in settings.items() if k in fields})
    return dynamics_of(env, f"gymnax/{name}", params)


def dynamics_of(env: Any, id: str, params: Any = None) -> ForeignDynamics:
    """The dynamics of an environment of `gymnax.make` with its parameters; None for the environment's default parameters.

    Since gymnax 1.0 `step_env` returns whether the state is terminal, and `is_truncated` tells the time limit. Before, it
    returns `done` for both: every step is computed with the limit and without (XLA removes what both share); done without it
    is `terminated`, done only with it `truncated`. An environment that by design ends after a number of steps, such as a
    bandit, therefore truncates.
    """
    params = env.default_params if params is None else params
    is_truncated = getattr(env, "is_truncated", None)
    unlimited = params.replace(max_steps_in_episode=type(params.max_steps_in_episode)(NEVER))

    def reset_one(key: Any) -> ForeignState:
        obs, state = env.reset_env(key, params)
        return ForeignState(state, obs)

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        obs, after, reward, done, _ = env.step_env(key, state, action, params)
        if is_truncated is not None:
            terminated, truncated = jnp.asarray(done, bool), jnp.asarray(is_truncated(after, params), bool)
        else:
            terminated = jnp.asarray(env.step_env(key, state, action, unlimited)[3], bool)
            truncated = jnp.asarray(done, bool)
        return ForeignState(after, obs), jnp.asarray(reward), terminated, truncated & ~terminated

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0)).obs
    obs_space = box_of(env.observation_space(params), example, id)
    spec = EnvSpec(obs_space, action_space_of(env.action_space(params), id), id)
    return ForeignDynamics(env, params, spec, reset_one, step_one)


def box_of(space: Any, example: jax.ShapeDtypeStruct, id: str) -> Box:
    """The observation space; of floats if the space or the observations are (in some environments they differ)."""
    if type(space).__name__ != "Box":
        raise TypeError(f"{id}: observation space: {type(space).__name__} is not supported; supported is Box")
    if tuple(space.shape) != example.shape:
        raise ValueError(f"{id}: observation space: shape {tuple(space.shape)}, but observations have {example.shape}")
    floats = "f" in (np.dtype(space.dtype).kind, example.dtype.kind)
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), example.shape) for bound in (space.low, space.high))
    return Box(low, high, dtype=np.float32 if floats else example.dtype)


def action_space_of(space: Any, id: str) -> Space:
    """The action space of one of gymnax."""
    match type(space).__name__:
        case "Discrete":
            return Discrete(int(space.n))
        case "Box":
            low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
            return Box(low, high)
        case kind:
            raise TypeError(f"{id}: action space: {kind} is not supported; supported are Discrete and Box")

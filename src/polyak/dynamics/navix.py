"""NAVIX' environments as dynamics: without its autoreset, and with its time limit as truncation."""

from typing import Any

import jax
import numpy as np

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, own_promotion, raw_key
from polyak.dynamics.names import check_name, navix_names

SYMBOLIC = ("symbolic", "symbolic_first_person", "categorical", "categorical_first_person")
"""Functions of `navix.observations` whose numbers stand for entities, colours and states."""

TILE_ZOOM = 4
"""The library's tiles have 8 pixels."""


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of an environment of NAVIX, by name.

    Args:
        settings: arguments of `navix.make`, such as `max_steps` and `observation_fn`, a function or the name of one in
            `navix.observations`.

    Raises:
        ImportError: NAVIX is not installed.
        ValueError: no such environment.
        TypeError, AttributeError: no such setting, or no such function.
    """
    with explain_missing("navix", "NAVIX"):
        import navix
    check_name("navix", name, navix_names())
    function = settings.get("observation_fn")
    named = {"observation_fn": getattr(navix.observations, function)} if isinstance(function, str) else {}
    with own_promotion(f"navix/{name}"):
        env = navix.make(name, **settings | named)
    return dynamics_of(env, f"navix/{name}")


def dynamics_of(env: Any, id: str) -> ForeignDynamics:
    """The dynamics of an environment of `navix.make`. The state holds sprites only where the observation is made of them.

    An episode whose last reward is above 0 is a success.
    """
    from navix import observations
    from navix.entities import EntityIds
    from navix.environments.environment import StepType
    from navix.rendering.cache import RenderingCache

    is_symbolic = env.observation_fn in [getattr(observations, name) for name in SYMBOLIC]

    def read(time_step: Any) -> ForeignState:
        state = time_step.state.replace(cache=None) if is_symbolic else time_step.state
        return ForeignState(time_step.replace(state=state), time_step.observation)

    def reset_one(key: Any) -> ForeignState:
        return read(env.reset(raw_key(key)))

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        # `step` would compute a reset too, for states that are last.
        after = env._step(state, action)
        truncated, terminated = (after.step_type == kind for kind in (StepType.TRUNCATION, StepType.TERMINATION))
        return read(after), after.reward, terminated, truncated

    def info_one(state: Any) -> dict[str, Any]:
        return {"is_success": state.reward > 0}

    def render_one(state: Any) -> Any:
        with own_promotion(id):
            image = observations.rgb(state.state.replace(cache=RenderingCache.init(state.state.grid)))
        return np.asarray(image).repeat(TILE_ZOOM, 0).repeat(TILE_ZOOM, 1)

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0)).obs
        # The library's space of symbols lacks the player's. Walls are -1 where symbols are signed.
        bounds = (-1, EntityIds.PLAYER) if is_symbolic else (env.observation_space.minimum, env.observation_space.maximum)
        low, high = (np.asarray(bound) for bound in bounds)
    dtype = np.dtype(example.dtype)
    obs_space = Box(np.maximum(low, 0) if dtype.kind == "u" else low, high, example.shape, dtype)
    spec = EnvSpec(obs_space, Discrete(int(env.action_space.n)), id)
    # Environments hold arrays and have no `==`; their methods are equal if they are of the same environment.
    return ForeignDynamics(env.reset, None, spec, reset_one, step_one, info_one, render_one)

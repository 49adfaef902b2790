"""XLand-MiniGrid's environments as dynamics; its last steps with a discount of 0 are terminal."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Space
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, obs_space, own_promotion, raw_key
from polyak.dynamics.names import check_name, xminigrid_names


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of an environment of XLand-MiniGrid, by name.

    Args:
        settings: fields of its `EnvParams`, such as `view_size`, `max_steps` and, of XLand, `ruleset`.

    Raises:
        ImportError: XLand-MiniGrid is not installed.
        ValueError: no such environment.
        TypeError: no such setting.
    """
    with explain_missing("xminigrid", "XLand-MiniGrid"):
        import xminigrid
    check_name("xminigrid", name, xminigrid_names())
    with own_promotion(f"xminigrid/{name}"):
        env, params = xminigrid.make(name, **settings)
    return dynamics_of(env, f"xminigrid/{name}", params)


def dynamics_of(env: Any, id: str, params: Any = None) -> ForeignDynamics:
    """The dynamics of an environment of `xminigrid.make` with its parameters; None for the environment's default parameters."""
    params = env.default_params() if params is None else params

    def reset_one(key: Any) -> ForeignState:
        time_step = env.reset(params, raw_key(key))
        return ForeignState(time_step, time_step.observation)

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        after = env.step(params, state, action)
        terminated = after.last() & (after.discount == 0)
        return ForeignState(after, after.observation), after.reward, terminated, after.last() & ~terminated

    def info_one(state: Any) -> dict[str, Any]:
        return {"is_success": state.discount == 0}

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0)).obs
    spec = EnvSpec(_obs_space(example), Discrete(int(env.num_actions(params))), id)
    # Parameters with arrays, which rulesets are, have no `==`.
    leaves, structure = jax.tree.flatten(params)
    settings = structure, [np.asarray(leaf).tolist() for leaf in leaves]
    return ForeignDynamics(
        env,
        settings,
        spec,
        reset_one,
        step_one,
        info_one,
        render_one=lambda state: env.render(params, state),
        has_costly_reset=True,
    )


def _obs_space(example: Any) -> Space:
    """The observation space; of grids, whose tiles and colours are numbered, with these bounds."""
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES

    if not isinstance(example, jax.ShapeDtypeStruct):
        return Dict({key: _obs_space(part) for key, part in example.items()})
    if example.dtype == jnp.uint8 and example.shape[2:] == (2,):
        return Box(np.zeros(example.shape), np.broadcast_to([NUM_TILES - 1, NUM_COLORS - 1], example.shape), dtype=np.uint8)
    return obs_space(example)

"""Brax environments as dynamics: without Brax's autoreset, and with its time limit as truncation."""

from typing import Any

import jax
import numpy as np

from polyak.core.checks import check_integer
from polyak.core.spaces import Box, EnvSpec
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, obs_space, own_promotion, raw_key
from polyak.dynamics.mujoco_images import mujoco_images
from polyak.dynamics.names import brax_names, check_name
from polyak.dynamics.randomized_model import RandomizedModel

EPISODE_LENGTH = 1000


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of a Brax environment, by name.

    Args:
        settings: `episode_length` and `action_repeat` as in `brax.envs.create`, `randomization_fn`, with which each episode
            draws a model, else arguments of its constructor.

    Raises:
        ImportError: Brax is not installed.
        TypeError, ValueError: no such environment or setting.
    """
    with explain_missing("brax", "brax"):
        from brax import envs
        from brax.envs.wrappers.training import EpisodeWrapper
    check_name("brax", name, brax_names())
    limits = {"episode_length": EPISODE_LENGTH, "action_repeat": 1}
    limits |= {key: value for key, value in settings.items() if key in limits}
    for key, value in limits.items():
        check_integer("make", f"env_kwargs[{key!r}]", value)
    others = {key: value for key, value in settings.items() if key not in (*limits, "randomization_fn")}
    env = EpisodeWrapper(envs.get_environment(name, **others), **limits)
    return dynamics_of(env, f"brax/{name}", settings.get("randomization_fn"))


def dynamics_of(env: Any, id: str, randomization_fn: Any = None) -> ForeignDynamics:
    """The dynamics of an environment of `brax.envs.get_environment` or `create`, with domain randomization.

    An environment without Brax's `EpisodeWrapper` gets one, with 1000 steps, as `create` sets by default: most never end by
    themselves. Actions are in [-1, 1], as Brax's own agents take them. For `randomization_fn` see `RandomizedModel`.

    Raises:
        ValueError: the environment is batched by Brax.
    """
    from brax.envs.wrappers import training

    if isinstance(env, training.AutoResetWrapper):
        env = env.env
    if isinstance(env, training.VmapWrapper | training.DomainRandomizationVmapWrapper):
        raise ValueError(f"make: {id} must not be batched by Brax; create it without batch_size and pass num_envs to make")
    limited = env if isinstance(env, training.EpisodeWrapper) else training.EpisodeWrapper(env, EPISODE_LENGTH, 1)

    model = RandomizedModel(limited.unwrapped, "sys", randomization_fn)

    def reset_one(key: Any) -> ForeignState:
        arrays = model.draw(raw_key(jax.random.fold_in(key, 1)))
        with model.use(arrays):
            state = limited.reset(raw_key(key))
        return ForeignState((state, arrays), state.obs)

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        before, arrays = state
        with model.use(arrays):
            after = limited.step(before, action)
        truncated = after.info["truncation"] > 0
        return ForeignState((after, arrays), after.obs), after.reward, (after.done > 0) & ~truncated, truncated

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0)).obs
    spec = EnvSpec(obs_space(example), Box(-np.ones(env.action_size), np.ones(env.action_size)), id)
    system = getattr(limited.unwrapped, "sys", None)  # Some environments have no physics.
    draw = None if system is None else mujoco_images(system.mj_model, id)

    def render_one(state: Any) -> Any:
        physics = state[0].pipeline_state
        return None if draw is None else draw({"qpos": physics.q, "qvel": physics.qd})

    return ForeignDynamics(
        env,
        randomization_fn,
        spec,
        reset_one,
        step_one,
        info_one=lambda state: state[0].metrics,
        render_one=None if draw is None else render_one,
        render_fps=10.0 if draw is None else 1 / (limited.unwrapped.dt * limited.action_repeat),
        has_costly_reset=True,
    )

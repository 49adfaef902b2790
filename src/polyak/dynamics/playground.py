"""Environments of MuJoCo Playground as dynamics, with their time limit as truncation."""

import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from polyak.core.checks import check_integer
from polyak.core.spaces import Box, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import PyTree
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, obs_space, own_promotion, raw_key
from polyak.dynamics.mujoco_images import mujoco_images
from polyak.dynamics.names import check_name, playground_names
from polyak.dynamics.randomized_model import RandomizedModel

EPISODE_LENGTH = 1000
MENAGERIE = "https://github.com/deepmind/mujoco_menagerie.git"
DOWNLOAD_TIMEOUT = 30
# Targets of some tasks are bodies that motion capture places.
DRAWN = ("qpos", "qvel", "mocap_pos", "mocap_quat", "xfrc_applied")


@struct
class LimitedState:
    """Playground's state, the number of control steps since the reset, and the episode's arrays of the model."""

    state: PyTree
    steps: Int32[Array, ""]
    model: PyTree


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of an environment of `mujoco_playground.registry`.

    Args:
        settings: entries of the environment's config, such as `episode_length` and `action_repeat`; a dot separates the names
            of nested entries. `impl` is `"jax"` on a CPU, where the library's default takes 45 times as long. And
            `randomization_fn`, with which each episode draws a model; True is the library's function for this environment.

    Raises:
        ImportError: MuJoCo Playground is not installed, or the files of a robot cannot be downloaded.
        ValueError: no such environment, a setting of another type, or no such function.
        KeyError: no such setting.
    """
    with explain_missing("playground", "MuJoCo Playground"):
        from mujoco_playground import registry
    check_name("playground", name, playground_names())
    has_impl = "impl" in registry.get_default_config(name)
    on_cpu = {"impl": "jax"} if has_impl and jax.default_backend() == "cpu" else {}
    if name not in registry.dm_control_suite.ALL_ENVS:
        _check_menagerie(f"playground/{name}")
    overrides = on_cpu | {key: value for key, value in settings.items() if key != "randomization_fn"}
    function = settings.get("randomization_fn")
    if function is True and (function := registry.get_domain_randomizer(name)) is None:
        raise ValueError(f"make: playground/{name} has no randomization_fn of its own; pass a function")
    return dynamics_of(registry.load(name, config_overrides=overrides), f"playground/{name}", function or None)


def _check_menagerie(id: str) -> None:
    """Check that the files of robots are there, or that the library can clone them; it would wait for a network forever.

    Raises:
        ImportError: they are neither.
    """
    from mujoco_playground._src import mjx_env

    path, commit = Path(mjx_env.MENAGERIE_PATH), mjx_env.MENAGERIE_COMMIT_SHA
    if path.exists():
        return
    try:
        # Without a terminal, git cannot ask for a password.
        environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        command = ["git", "ls-remote", MENAGERIE, "HEAD"]
        subprocess.run(command, env=environment, timeout=DOWNLOAD_TIMEOUT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        raise ImportError(
            f"{id} needs the robots of the MuJoCo Menagerie, which cannot be downloaded ({reason}); where there is a network, "
            f"run git clone {MENAGERIE} and git checkout {commit}, and copy the folder to {path}"
        ) from error


def dynamics_of(env: Any, id: str, randomization_fn: Any = None) -> ForeignDynamics:
    """The dynamics of an environment of `mujoco_playground.registry.load`, with domain randomization (see `RandomizedModel`).

    After `episode_length` control steps an episode is truncated, unless it has terminated. An action is repeated for
    `action_repeat` control steps, and rewards are summed up to the first of them that terminates the episode. Actions are in
    [-1, 1].

    Raises:
        ValueError: the environment is wrapped for Brax' agents.
    """
    from mujoco_playground import wrapper

    if isinstance(env, wrapper.Wrapper):
        raise ValueError(f"make: {id} must not be wrapped for Brax; pass the environment of registry.load(...)")
    config = env.unwrapped._config
    length, repeat = config.get("episode_length", EPISODE_LENGTH), config.get("action_repeat", 1)
    for setting, value in (("episode_length", length), ("action_repeat", repeat)):
        check_integer("make", f"env_kwargs[{setting!r}]", value)

    model = RandomizedModel(env.unwrapped, "_mjx_model", randomization_fn)

    def reset_one(key: Any) -> ForeignState:
        arrays = model.draw(raw_key(jax.random.fold_in(key, 1)))
        with model.use(arrays):
            state = env.reset(raw_key(key))
        return ForeignState(LimitedState(state, jnp.int32(0), arrays), state.obs)

    def step_one(key: Any, limited: LimitedState, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        def repeat_once(before: Any, _: None) -> tuple[Any, Any]:
            state, terminated = before
            after = env.step(state, action)
            return (after, terminated | (after.done > 0)), jnp.where(terminated, 0.0, after.reward)

        with model.use(limited.model):
            (after, terminated), rewards = jax.lax.scan(repeat_once, (limited.state, jnp.array(False)), None, repeat)
        steps = limited.steps + repeat
        limited = LimitedState(after, steps, limited.model)
        return ForeignState(limited, after.obs), rewards.sum(), terminated, (steps >= length) & ~terminated

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0)).obs
    spec = EnvSpec(obs_space(example), Box(-np.ones(env.action_size), np.ones(env.action_size)), id)
    draw = mujoco_images(env.mj_model, id)
    return ForeignDynamics(
        env,
        randomization_fn,
        spec,
        reset_one,
        step_one,
        info_one=lambda limited: limited.state.metrics,
        render_one=lambda limited: draw({name: getattr(limited.state.data, name) for name in DRAWN}),
        render_fps=1 / (env.dt * repeat),
        has_costly_reset=True,
    )

"""Lists the names of environments without importing JAX or JAX environment libraries."""

import importlib.util
import inspect
from typing import Literal, TypeAlias, get_args

from polyak.dynamics.names import (
    brax_names,
    craftax_names,
    gymnax_names,
    jumanji_names,
    navix_names,
    pgx_names,
    playground_names,
    xminigrid_names,
)

JAX_LIBRARIES = {
    "gymnax": gymnax_names,
    "brax": brax_names,
    "jumanji": jumanji_names,
    "playground": playground_names,
    "craftax": craftax_names,
    "navix": navix_names,
    "xminigrid": xminigrid_names,
    "pgx": pgx_names,
}
"""Functions that list the names of other libraries' environments in JAX, by their prefix; `polyak.dynamics` has them all."""

PACKAGES = {"playground": "mujoco_playground"}
"""Packages of libraries whose prefix is another word."""

JAX_PREFIXES = ("jax/", *(f"{library}/" for library in JAX_LIBRARIES))
JaxName: TypeAlias = Literal["jax/CartPole-v1", "jax/Pendulum-v1", "jax/Acrobot-v1", "jax/MountainCar-v0", "jax/BitFlipping-v0"]


def names() -> dict[str, list[str]]:
    """Return the names that `make` knows, by source; names of other libraries are listed only if the library is installed."""
    import gymnasium

    register_atari()
    # `make` also accepts hundreds of older names of the ALE, which are not listed.
    atari = {name for name, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("ale_py.")}
    # Names of environments that Gymnasium has removed; their entry points raise an error.
    moved = {
        name
        for name, spec in gymnasium.registry.items()
        if inspect.isfunction(spec.entry_point) and spec.entry_point.__module__ == "gymnasium.envs"
    }
    return {
        "jax": list(get_args(JaxName)),
        **{library: [f"{library}/{name}" for name in list_names()] for library, list_names in JAX_LIBRARIES.items()},
        "atari": sorted(name for name in atari if name.startswith("ALE/")),
        "gymnasium": sorted(set(gymnasium.registry) - atari - moved),
    }


def register_atari() -> bool:
    """Register the Atari games with Gymnasium by importing ale-py; returns whether ale-py is installed."""
    if importlib.util.find_spec("ale_py") is None:
        return False
    import ale_py as ale_py

    return True


def register_minatar() -> bool:
    """Register MinAtar's games with Gymnasium, which importing MinAtar does not do; returns whether MinAtar is installed."""
    if importlib.util.find_spec("minatar") is None:
        return False
    import gymnasium
    from minatar.gym import register_envs

    if "MinAtar/Breakout-v1" not in gymnasium.registry:
        register_envs()
    return True

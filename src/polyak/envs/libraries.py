"""Recognizes environments of other libraries, with advice for their conversion. No JAX here: worker processes use this."""

from typing import Any

IN_JAX = ("brax", "craftax", "gymnax", "jumanji", "mujoco_playground", "navix", "pgx", "xminigrid")
"""Packages whose environments are in JAX."""

METHODS = ("reset", "step", "observe")
"""The methods of `autoreset.Dynamics`."""

ADVICE_IN_JAX = "pass the environment in JAX or its class, not a function that creates it"

CONVERSIONS = {
    "dm_control": "convert it with shimmy.DmControlCompatibilityV0(env)",
    "dm_env": "convert it with shimmy.DmControlCompatibilityV0(env)",
    "gym": "convert it with shimmy.GymV26CompatibilityV0(env=env), or GymV21CompatibilityV0 if its step returns four values",
    "pettingzoo": "convert a parallel environment with supersuit.pettingzoo_env_to_vec_env_v1(env)",
    "stable_baselines3": "pass the function that creates one environment, and num_envs",
    **dict.fromkeys(IN_JAX, ADVICE_IN_JAX),
    "polyak": "pass the environment in JAX or its class, and use one that make has created directly",
}


def is_from(library: str, value: Any) -> bool:
    """Return True if a class, or the class of a value, or one of its base classes is defined in a library."""
    kind = value if isinstance(value, type) else type(value)
    return any(base.__module__.partition(".")[0] == library for base in kind.__mro__)


def has_dynamics(env: Any) -> bool:
    """Return True if an environment or a class has the methods of `autoreset.Dynamics`."""
    return all(callable(getattr(env, name, None)) for name in METHODS)


def conversion(env: Any) -> str:
    """Return advice for the conversion of an environment of another library, to append to an error; empty if unknown."""
    known = (advice for library, advice in CONVERSIONS.items() if is_from(library, env))
    advice = next(known, ADVICE_IN_JAX if has_dynamics(env) else "")
    return f"; {advice}" if advice else ""

"""Environments: in JAX (`jax/CartPole-v1`, `gymnax/Asterix-MinAtar`), Atari (`ALE/Breakout-v5`), and Gymnasium's.

Importing this module imports no environment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak.envs.available import names as names
    from polyak.envs.constructors import make as make
    from polyak.envs.env_check import check_env as check_env

__all__ = ["check_env", "make", "names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from polyak.core.suggestions import missing_from_module

        raise AttributeError(missing_from_module("polyak.envs", name, __all__))
    match name:
        case "check_env":
            from polyak.envs import env_check

            return env_check.check_env
        case "make":
            from polyak.envs import constructors

            return constructors.make
    from polyak.envs import available

    return available.names

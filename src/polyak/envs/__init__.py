"""Environments: in JAX (`jax/CartPole-v1`, `gymnax/Asterix-MinAtar`), Atari (`ALE/Breakout-v5`), and Gymnasium's.

Importing this module imports no environment.
"""

from typing import TYPE_CHECKING

from polyak.core.lazy import lazy_attribute

if TYPE_CHECKING:
    from polyak.envs.available import names as names
    from polyak.envs.constructors import make as make
    from polyak.envs.env_check import check_env as check_env

__all__ = ["check_env", "make", "names"]
__getattr__ = lazy_attribute("polyak.envs", {"available": ("names",), "constructors": ("make",), "env_check": ("check_env",)})

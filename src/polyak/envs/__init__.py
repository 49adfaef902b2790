"""The world: environments by name, ours and gymnax's in JAX, Gymnasium's on the host.

`jax/CartPole-v1` is ours, `gymnax/Asterix-MinAtar` gymnax's, `ALE/Breakout-v5` an Atari game, anything else Gymnasium's.
Importing this imports no environment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak.envs.check import check_env as check_env
    from polyak.envs.named import make as make
    from polyak.envs.named import names as names

__all__ = ["check_env", "make", "names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polyak.envs' has no attribute {name!r}")
    from polyak.envs import check, named

    return check.check_env if name == "check_env" else getattr(named, name)

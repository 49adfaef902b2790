"""The world: environments by name, ours and gymnax's in JAX, Gymnasium's on the host.

`jax/CartPole-v1` is ours, `gymnax/Asterix-MinAtar` gymnax's, anything else Gymnasium's. Importing this imports no environment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak.envs.named import make as make
    from polyak.envs.named import names as names

__all__ = ["make", "names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polyak.envs' has no attribute {name!r}")
    from polyak.envs import named

    return getattr(named, name)

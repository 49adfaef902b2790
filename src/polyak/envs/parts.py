"""Splits a batch of environments into parts, for worker processes."""

from dataclasses import dataclass
from typing import Any

import gymnasium

from polyak.core.types import HostEnv
from polyak.envs.constructors import make
from polyak.envs.gymnasium import GymnasiumEnv
from polyak.envs.source import EnvSource


@dataclass(frozen=True)
class EnvPart:
    """Creates environments `start` to `start + num_envs` of a batch of `total`; can be sent to other processes.

    The environments equal a slice of `make(id, num_envs=total, vectorization="sync")` after a reset with the same seed.

    Attributes:
        source: source of the batch.
        registration: Gymnasium's registration of the name, which another process may lack; None for a function.
    """

    source: EnvSource
    start: int
    num_envs: int
    total: int
    registration: Any = None

    def __call__(self) -> HostEnv:
        """Create the environments.

        Raises:
            ValueError: the environments are in JAX, or belong to a vector environment, which has no parts.
        """
        env_id, options = self.source.id, dict(self.source.options)
        if self.registration is not None:
            gymnasium.registry.setdefault(self.registration.id, self.registration)
            env_id = self.registration.id
        env = make(env_id, num_envs=self.num_envs, **options)
        if not isinstance(env, GymnasiumEnv):
            raise ValueError(f"workers need an environment that steps on the host, got {env_id}")
        env.take_part(self.start, self.total)
        return env


def split(source: EnvSource, num_envs: int, parts: int) -> list[EnvPart]:
    """Split a batch of `num_envs` environments into equal parts; the name must be registered in this process.

    Raises:
        ValueError: `num_envs` is no multiple of `parts`.
    """
    if num_envs % parts:
        raise ValueError(f"train: num_envs={num_envs} cannot be split over workers={parts}")
    registration = gymnasium.spec(source.id.rpartition(":")[2]) if isinstance(source.id, str) else None
    size = num_envs // parts
    return [EnvPart(source, i * size, size, num_envs, registration) for i in range(parts)]

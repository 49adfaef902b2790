"""What a preset is: how to train one algorithm in one environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """How to train one algorithm in one environment.

    Attributes:
        env_steps: length of the training, in environment steps.
        num_envs: number of copies of the environment.
        settings: the agent's fields, for a training of that many env_steps (which schedules need to know).
        source: where the numbers come from.
    """

    env_steps: int
    num_envs: int
    settings: Callable[[int], Mapping[str, Any]]
    source: str

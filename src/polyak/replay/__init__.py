"""Replay: transitions of earlier rollouts, stored in the agent's state."""

from typing import Any

from polyak.core.lazy import lazy_attribute
from polyak.core.suggestions import missing_from_module
from polyak.replay.hindsight import HindsightReplay
from polyak.replay.mixed import MixedReplay
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.sequences import SequenceObs, SequenceReplay
from polyak.replay.uniform import UniformReplay

__all__ = [
    "HindsightReplay",
    "MixedReplay",
    "PrioritizedReplay",
    "Replay",
    "ReplayState",
    "SequenceObs",
    "SequenceReplay",
    "Transition",
    "UniformReplay",
    "from_minari",
]


_moved = lazy_attribute("polyak", {"data.loading": ("from_minari",)})
"""Imports a name that `polyak.data` defines now, which is above this package."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _moved(name)
    raise AttributeError(missing_from_module("polyak.replay", name, __all__))

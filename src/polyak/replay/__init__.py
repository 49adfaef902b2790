"""Replay: transitions of earlier rollouts, stored in the agent's state."""

from typing import Any

from polyak.core.suggestions import missing_from_module
from polyak.replay.datasets import from_minari
from polyak.replay.hindsight import HindsightReplay
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.sequences import SequenceObs, SequenceReplay
from polyak.replay.uniform import UniformReplay

__all__ = [
    "HindsightReplay",
    "PrioritizedReplay",
    "Replay",
    "ReplayState",
    "SequenceObs",
    "SequenceReplay",
    "Transition",
    "UniformReplay",
    "from_minari",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_from_module("polyak.replay", name, __all__))

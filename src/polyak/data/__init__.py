"""Data sets: recorded episodes, to learn from without an environment."""

from typing import Any

from polyak.core.suggestions import missing_from_module
from polyak.data.collection import collect
from polyak.data.data_set import DataSet, Episode, Statistics
from polyak.data.loading import from_minari, load, save

__all__ = ["DataSet", "Episode", "Statistics", "collect", "from_minari", "load", "save"]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_from_module(__name__, name, __all__))

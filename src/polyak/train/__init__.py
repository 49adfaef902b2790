"""Training, evaluation and data collection, independent of the algorithm."""

from typing import Any

from polyak.core.suggestions import missing_from_module
from polyak.loops.collect import collect
from polyak.loops.evaluate import Evaluation, evaluate
from polyak.loops.loop import LoopState, TrainingDiverged
from polyak.train import callbacks
from polyak.train.new_training import run
from polyak.train.offline import offline
from polyak.train.result import Result
from polyak.train.resumption import resume
from polyak.train.seeds import run_seeds
from polyak.train.settings import OfflineSettings, SeedSettings, TrainSettings
from polyak.train.statistics import SeedStatistics, seed_statistics
from polyak.train.worker_settings import Workers
from polyak.workers.learner_group import Learners
from polyak.workers.supervise import StoppedBeforeStart

__all__ = [
    "Evaluation",
    "Learners",
    "LoopState",
    "OfflineSettings",
    "Result",
    "SeedSettings",
    "SeedStatistics",
    "StoppedBeforeStart",
    "TrainSettings",
    "TrainingDiverged",
    "Workers",
    "callbacks",
    "collect",
    "evaluate",
    "offline",
    "resume",
    "run",
    "run_seeds",
    "seed_statistics",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_from_module(__name__, name, __all__))

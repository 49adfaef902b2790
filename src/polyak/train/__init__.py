"""Training, evaluation and data collection, independent of the algorithm."""

import sys

from polyak.core.suggestions import UncallableModule
from polyak.loops.collect import collect
from polyak.loops.compiled_loop import compiled
from polyak.loops.compiled_seeds import compiled_seeds
from polyak.loops.evaluate import Evaluation, evaluate
from polyak.loops.host_loop import host
from polyak.loops.loop import LoopState, TrainingDiverged, TrainResult, initial
from polyak.train import callbacks
from polyak.train.new_training import run
from polyak.train.result import Result
from polyak.train.resumption import resume
from polyak.train.seeds import run_seeds
from polyak.train.settings import SeedSettings, TrainSettings
from polyak.train.statistics import SeedStatistics, seed_statistics
from polyak.train.worker_loops import asynchronous, distributed
from polyak.train.worker_settings import Workers
from polyak.workers.learner_group import Learners, StoppedBeforeStart

__all__ = [
    "Evaluation",
    "Learners",
    "LoopState",
    "Result",
    "SeedSettings",
    "SeedStatistics",
    "StoppedBeforeStart",
    "TrainResult",
    "TrainSettings",
    "TrainingDiverged",
    "Workers",
    "asynchronous",
    "callbacks",
    "collect",
    "compiled",
    "compiled_seeds",
    "distributed",
    "evaluate",
    "host",
    "initial",
    "resume",
    "run",
    "run_seeds",
    "seed_statistics",
]


class _Train(UncallableModule):
    instead = "polyak.train.run(agent, env, env_steps=...)"


sys.modules[__name__].__class__ = _Train

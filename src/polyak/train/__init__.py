"""The loops: they know what an agent is, and no algorithm.

`collect`, `compiled`, `host`, `evaluate` and `run` are functions here, and modules of the same names:
`from polyak.train.compiled_loop import start` reads the module, while `polyak.train.compiled_loop` is the function, also after
`import polyak.train.compiled_loop as ...`.
"""

from polyak.train.collect import collect
from polyak.train.compiled_loop import compiled, compiled_seeds
from polyak.train.evaluate import Evaluation, evaluate
from polyak.train.host_loop import host
from polyak.train.loop import LoopState, TrainingDiverged, TrainResult, initial
from polyak.train.run import run

__all__ = [
    "Evaluation",
    "LoopState",
    "TrainResult",
    "TrainingDiverged",
    "collect",
    "compiled",
    "compiled_seeds",
    "evaluate",
    "host",
    "initial",
    "run",
]

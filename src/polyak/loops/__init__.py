"""The loops that train an agent: compiled as one program, or stepping an environment on the host; and evaluation.

`polyak.train.run` picks one of these loops, and adds the run directory, the display and the evaluation.
"""

from polyak.loops.compiled_loop import compiled
from polyak.loops.host_loop import host
from polyak.loops.loop import LoopState, TrainResult, initial
from polyak.loops.seeds_loop import compiled_seeds

__all__ = ["LoopState", "TrainResult", "compiled", "compiled_seeds", "host", "initial"]

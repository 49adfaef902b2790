"""One MLIR context for many programs: JAX loads all its dialects anew for each, a quarter of the time of a small program."""

import functools
import itertools

import jax
from jax._src.interpreters import mlir

# A context keeps the types, locations and constants of its programs.
PROGRAMS = 200


def share():
    """Let `PROGRAMS` programs in a row have one context, from now on in this process."""
    # The function is JAX's own affair: another version may have none, or need it for each program.
    if not jax.__version__.startswith("0.10."):
        return
    numbers, make = itertools.count(), mlir.make_ir_context
    context_of = functools.lru_cache(maxsize=1)(lambda group: make())
    mlir.make_ir_context = lambda: context_of(next(numbers) // PROGRAMS)

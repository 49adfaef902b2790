"""A separate stack for signal handlers, without which a signal may change the numbers of a training."""

import faulthandler


def use_signal_stack() -> None:
    """Let handlers of signals in the main thread, which must call this function, run on a separate stack.

    In some float32 matrix products of JAX on x86 CPUs the stack pointer points into the heap (oneDNN's issue 4845; seen with
    jaxlib 0.10.2 and AVX-512). Without a separate stack, the frame of a handler overwrites arrays there: wrong numbers without
    an error, or an abort of the process.
    """
    # `faulthandler` allocates the stack, which Python's own handlers use too; 2 is the standard error that it may write to.
    if not faulthandler.is_enabled():
        faulthandler.enable(2)

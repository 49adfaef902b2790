"""Ctrl-C and SIGTERM during training: the first signal stops after the current iteration, the second at once."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from polyak.core.signal_stack import use_signal_stack

_DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupt:
    """Records that Ctrl-C or SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False

    @property
    def name(self) -> str:
        """Name of a stop in a result: `"interrupt"` or `"request"`."""
        return "interrupt" if self.received else "request"


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Record the first Ctrl-C or SIGTERM while the block runs; a second signal has its usual effect.

    Handlers that the program has set are kept. Only the main thread receives signals, so other threads record none.
    """
    interrupt = Interrupt()

    def record(number: int, frame: FrameType | None) -> None:
        if not interrupt.received:
            interrupt.received = True
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        use_signal_stack()
    caught = [number for number, default in _DEFAULTS.items() if is_main and signal.getsignal(number) == default]
    for number in caught:
        signal.signal(number, record)
    try:
        yield interrupt
    finally:
        for number in caught:
            signal.signal(number, _DEFAULTS[number])

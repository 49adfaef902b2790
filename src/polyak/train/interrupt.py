"""Ctrl-C and SIGTERM during a training in Python: the first one stops it in order, the second one at once."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupt:
    """Whether Ctrl-C or SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False

    @property
    def name(self) -> str:
        """What a stop is called in a result."""
        return "interrupt" if self.received else "request"


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Record the first Ctrl-C or SIGTERM while the block runs; a second one has its usual effect.

    Handlers that the program has set stay. Outside the main thread, which alone receives signals, nothing is caught.
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
    caught = [number for number, default in _DEFAULTS.items() if is_main and signal.getsignal(number) == default]
    for number in caught:
        signal.signal(number, record)
    try:
        yield interrupt
    finally:
        for number in caught:
            signal.signal(number, _DEFAULTS[number])

"""Ctrl-C and SIGTERM: the first asks training to end in order, the second ends the process at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_SECONDS = 4.5

NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupts:
    """Which signal has come, if any."""

    def __init__(self) -> None:
        self.received: int | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it; 0 if none came."""
        return 0 if self.received is None else 128 + self.received

    def stop_requested(self) -> bool:
        """For a loop's `should_stop`."""
        return self.received is not None


@contextmanager
def catching() -> Iterator[Interrupts]:
    """Catch SIGINT and SIGTERM while the block runs.

    After the first one the block has 4.5 seconds to end; then, or on a second one, the process leaves at once with the same
    exit code. Python handles a signal only between two bytecodes, and a long compilation is one: so a thread, which the
    interpreter wakes through a pipe, keeps the time.
    """
    interrupts = Interrupts()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    done = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        interrupts.received = interrupts.received or number

    def watch() -> None:
        first = os.read(read_end, 1)
        if not first or done.is_set():
            return
        interrupts.received = interrupts.received or first[0]
        leave_at_once = threading.Timer(GRACE_SECONDS, os._exit, (128 + first[0],))
        leave_at_once.daemon = True
        leave_at_once.start()
        second = os.read(read_end, 1)
        if second and not done.is_set():
            os._exit(128 + first[0])
        leave_at_once.cancel()

    before = {number: signal.signal(number, remember) for number in NAMES}
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="polyak-interrupts", daemon=True)
    watcher.start()
    try:
        yield interrupts
    finally:
        done.set()
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        watcher.join(timeout=1.0)
        os.close(read_end)

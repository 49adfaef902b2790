"""Ctrl-C, SIGTERM and a terminal that closes: the first asks training to end in order, the second ends the process at once."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_SECONDS = 4.5

# A signal that comes again so soon is the same one: `timeout` sends its own to the process and to its group.
ECHO_SECONDS = 0.1

NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

LOST = "what was done since the newest checkpoint is lost, and polyak resume does it again"

# A progress bar hides it.
_SHOW_CURSOR = "\x1b[?25h"


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
def catching(grace: float | None = None, lost: str = LOST) -> Iterator[Interrupts]:
    """Catch SIGINT, SIGTERM and SIGHUP while the block runs; SIGHUP not where it is ignored, as under `nohup`.

    After the first one the block has 4.5 seconds to end; then, or on a second one (0.1 seconds later or more), the process
    leaves at once with the same exit code, without a last checkpoint, and says so. Python handles a signal only between two
    bytecodes, and a long compilation is one, as is a chunk of the compiled loop: so a thread, which the interpreter wakes
    through a pipe, keeps the time.

    Args:
        grace: seconds instead of these 4.5.
        lost: what is said where the process leaves at once.
    """
    interrupts = Interrupts()
    seconds = GRACE_SECONDS if grace is None else grace
    late = "it did not end in time" if seconds > 0 else "it was asked to"
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    done = threading.Event()

    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def remember(number: int, frame: FrameType | None) -> None:
        interrupts.received = interrupts.received or number
        if number == signal.SIGHUP:
            silence(*terminals)

    def watch() -> None:
        first = _next_signal(read_end)
        if first is None or done.is_set():
            return
        interrupts.received = interrupts.received or first
        leave_at_once = threading.Timer(seconds, _leave, (first, late, lost))
        leave_at_once.daemon = True
        leave_at_once.start()
        came = time.monotonic()
        while (again := _next_signal(read_end)) is not None and time.monotonic() - came < ECHO_SECONDS:
            pass
        if again is not None and not done.is_set():
            _leave(first, "it was asked twice", lost)
        leave_at_once.cancel()

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, remember) for number in NAMES if number != signal.SIGHUP or not nohup}
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


def nobody_reads(descriptor: int) -> bool:
    """It is a pipe whose other end is closed, as after `| head`."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def silence(*descriptors: int) -> None:
    """What is written there from now on is lost: nobody can read it, and writing would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _next_signal(read_end: int) -> int | None:
    """The next of these signals (the pipe tells of every signal that has a handler), or None once the pipe is closed."""
    while byte := os.read(read_end, 1):
        if byte[0] in NAMES:
            return byte[0]
    return None


def _leave(number: int, why: str, lost: str) -> None:
    """End the process without a last checkpoint."""
    with contextlib.suppress(OSError):
        for descriptor, text in ((1, _SHOW_CURSOR if os.isatty(1) else ""), (2, f"\npolyak: left at once, as {why}; {lost}\n")):
            # A pipe that nobody reads, or a stopped terminal, keeps nobody from leaving.
            os.set_blocking(descriptor, False)
            os.write(descriptor, text.encode())
    os._exit(128 + number)

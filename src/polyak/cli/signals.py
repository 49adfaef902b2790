"""Ctrl-C, SIGTERM and SIGHUP: the first signal stops training after a checkpoint, the second exits at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from polyak.core.output import discard_output
from polyak.core.signal_stack import use_signal_stack
from polyak.core.warn import warn

GRACE_SECONDS = 4.5

# A signal repeated within this time counts as one signal: `timeout` signals the process and its group.
ECHO_SECONDS = 0.1

NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

PROGRESS_LOST = "progress since the last checkpoint is lost (`polyak resume` redoes it)"

# Progress bars hide the cursor.
_SHOW_CURSOR = "\x1b[?25h"


class Signals:
    """Records the first signal received.

    Attributes:
        received: number of the signal.
        handlers: handlers in place, by number.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.handlers: dict[int, Callable[[int, FrameType | None], None]] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in shells; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def stop_requested(self) -> bool:
        """The `should_stop` of a training loop. Restores handlers that an environment has replaced, and warns of them."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
                warn(
                    f"user code, such as the environment, has replaced the handler of {NAMES[number]}; it stops training again"
                )
        return self.received is not None


@contextmanager
def handle_signals(grace: float | None = None, consequence: str = PROGRESS_LOST) -> Iterator[Signals]:
    """Handle SIGINT, SIGTERM and SIGHUP while the block runs; SIGHUP stays ignored under `nohup`.

    After the first signal the block has 4.5 seconds to end. After that, or on a second signal 0.1 seconds later or more, the
    process exits at once with the same exit code and without a last checkpoint. A thread keeps the time: Python handles
    signals only between two bytecodes, and a long compilation or a chunk of the compiled loop is one bytecode.

    Args:
        grace: seconds until the exit; None is 4.5.
        consequence: part of the message when the process exits at once.
    """
    use_signal_stack()
    signals = Signals()
    seconds = GRACE_SECONDS if grace is None else grace
    reason = f"not stopped within {seconds:g} s, " if seconds > 0 else ""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    done = threading.Event()

    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def record(number: int, frame: FrameType | None) -> None:
        signals.received = signals.received or number
        if number == signal.SIGHUP:
            discard_output(*terminals)

    def watch() -> None:
        first = _next_signal(read_end)
        if first is None or done.is_set():
            return
        signals.received = signals.received or first
        timer = threading.Timer(seconds, _exit_now, (first, reason, consequence))
        timer.daemon = True
        timer.start()
        received_at = time.monotonic()
        while (second := _next_signal(read_end)) is not None and time.monotonic() - received_at < ECHO_SECONDS:
            pass
        if second is not None and not done.is_set():
            _exit_now(first, "second signal, ", consequence)
        timer.cancel()

    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, record) for number in NAMES if number != signal.SIGHUP or not has_nohup}
    signals.handlers = dict.fromkeys(before, record)
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="polyak-signals", daemon=True)
    watcher.start()
    try:
        yield signals
    finally:
        done.set()
        signals.handlers = {}
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        watcher.join(timeout=1.0)
        os.close(read_end)


def _next_signal(read_end: int) -> int | None:
    """Return the next signal in `NAMES` (the pipe gets every signal that has a handler), or None once the pipe is closed."""
    while byte := os.read(read_end, 1):
        if byte[0] in NAMES:
            return byte[0]
    return None


def _exit_now(number: int, reason: str, consequence: str) -> None:
    """Exit without a last checkpoint."""
    with contextlib.suppress(OSError):
        for descriptor, text in (
            (1, _SHOW_CURSOR if os.isatty(1) else ""),
            (2, f"\npolyak: {reason}exiting now; {consequence}\n"),
        ):
            # Neither a full pipe nor a suspended terminal may block the exit.
            os.set_blocking(descriptor, False)
            os.write(descriptor, text.encode())
    os._exit(128 + number)

"""A learner: one of several processes that train together, `python -m polyak.workers.learner_process DESCRIPTOR`.

It receives what to do over a socket of the process that started it, joins the others by `jax.distributed`, and sends back what
came of it. It ends when that socket closes: nothing is left of it whatever ends the process that started it.
"""

import contextlib
import os
import pickle
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import jax

from polyak.workers.rollout_worker import Failure, find_sources

STOP, JOINED, TRAINING = b"stop", b"joined", b"training"

MESSAGE_SECONDS = 1.0
"""Minimum seconds between two messages that the first learner is training."""


@dataclass(frozen=True)
class LearnerStart:
    """What a learner is made of.

    Attributes:
        rank: its number, from 0, which is the one that writes.
        learners: how many there are.
        coordinator: host and port at which the first one listens for the others.
        devices: of each; on a CPU it gets as many.
        accelerators: which accelerators of its machine a learner uses, by number; None are all of them.
        heartbeat: seconds without a sign of life after which a learner is dead to the others.
        start_timeout: seconds that the start of all may take.
        paths: where to import modules from.
        function: called as `function(rank, should_stop, note)`, pickled by cloudpickle.
    """

    rank: int
    learners: int
    coordinator: str
    devices: int
    heartbeat: int
    start_timeout: int
    paths: list[str]
    function: bytes
    accelerators: list[int] | None = None


@dataclass(frozen=True)
class LearnerEnd:
    """What came of a learner.

    Attributes:
        result: of its function.
        failure: the exception that ended it, or None.
        may_be_loss: whether the exception may follow from the death of another learner.
        has_joined: whether it found the others.
    """

    result: Any = None
    failure: Failure | None = None
    may_be_loss: bool = False
    has_joined: bool = True


@dataclass(frozen=True)
class LearnerNote:
    """What a learner says while it learns."""

    value: Any


def main() -> None:
    """Learn, send the end, and wait to be ended: the others may still need this process."""
    connection = Connection(int(sys.argv[1]))
    # Bytes of the process that started this one.
    start: LearnerStart = pickle.loads(connection.recv_bytes())
    stop = threading.Event()
    threading.Thread(target=_listen, args=(connection, stop), daemon=True).start()
    if start.rank == 0:
        _hide_output_of_libraries()
    end = _learn(start, stop.is_set, connection)
    try:
        message = cloudpickle.dumps(end)
    except Exception as error:
        message = cloudpickle.dumps(LearnerEnd(failure=Failure.of(error)))
    connection.send_bytes(message)
    threading.Event().wait()


def _learn(start: LearnerStart, should_stop: Callable[[], bool], connection: Connection) -> LearnerEnd:
    try:
        jax.config.update("jax_num_cpu_devices", start.devices)
        jax.distributed.initialize(
            start.coordinator,
            start.learners,
            start.rank,
            local_device_ids=start.accelerators,
            cluster_detection_method="deactivate",
            initialization_timeout=start.start_timeout,
            heartbeat_timeout_seconds=start.heartbeat,
            # The default listens on every interface.
            coordinator_bind_address=start.coordinator if start.rank == 0 else None,
        )
    except Exception as error:
        return LearnerEnd(failure=Failure.of(error), has_joined=False)
    connection.send_bytes(JOINED)

    def note(value: Any) -> None:
        connection.send_bytes(cloudpickle.dumps(LearnerNote(value)))

    sent_at = time.monotonic()

    def check_stop() -> bool:
        """Whether to stop. The loop calls it after each chunk of iterations, so it also tells that the loop goes on."""
        nonlocal sent_at
        # A process that reads nothing, as in a debugger, must not block the training.
        if start.rank == 0 and time.monotonic() - sent_at >= MESSAGE_SECONDS and select.select([], [connection], [], 0)[1]:
            sent_at = time.monotonic()
            connection.send_bytes(TRAINING)
        return should_stop()

    try:
        find_sources(start.paths)
        function = pickle.loads(start.function)
        return LearnerEnd(result=function(start.rank, check_stop, note))
    except Exception as error:
        # What JAX raises when a connection breaks has the type of all its other errors.
        return LearnerEnd(failure=Failure.of(error), may_be_loss=isinstance(error, jax.errors.JaxRuntimeError))


def _listen(connection: Connection, stop: threading.Event) -> None:
    with contextlib.suppress(OSError, EOFError):
        while connection.recv_bytes() == STOP:
            stop.set()
    os._exit(1)


def _hide_output_of_libraries() -> None:
    """Let only Python print: Gloo reports every connection, and XLA the death of another learner with a stack trace."""
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1, encoding="utf-8") for stream in (1, 2))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)


if __name__ == "__main__":
    # Under its own name, so that what is sent has the same classes on both sides.
    from polyak.workers import learner_process

    learner_process.main()

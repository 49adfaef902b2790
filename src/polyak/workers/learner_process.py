"""A learner: one of several processes that train together, `python -m polyak.workers.learner_process DESCRIPTOR`.

A learner receives its task over a socket from the parent process, connects to the other learners by `jax.distributed`, and
sends back its result. A learner ends when the socket closes, so no learner outlives the parent process.
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
    """The settings of a learner process.

    Attributes:
        rank: number of the learner, from 0; only learner 0 writes files.
        learners: number of learners.
        coordinator: host and port at which learner 0 listens for the other learners.
        devices: number of devices of each learner; also the number of CPU devices that JAX creates.
        accelerators: numbers of the accelerators of the machine that the learner uses; None uses all.
        heartbeat: seconds without a heartbeat after which the other learners treat a learner as dead.
        start_timeout: maximum seconds until all learners are connected.
        paths: entries for `sys.path`.
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
    """The result of a learner, or the exception that ended it.

    Attributes:
        result: the return value of the learner's function.
        failure: the exception that ended the learner, or None.
        may_be_loss: the exception may be a consequence of the death of another learner.
        has_joined: the learner was connected to the other learners.
    """

    result: Any = None
    failure: Failure | None = None
    may_be_loss: bool = False
    has_joined: bool = True


@dataclass(frozen=True)
class LearnerNote:
    """A value that a learner sends while it trains."""

    value: Any


def main() -> None:
    """Train, send the result, and wait to be killed: the other learners may still need this process."""
    connection = Connection(int(sys.argv[1]))
    # Trusted bytes: from the parent process.
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
        """Return True if training should stop; each call, one per chunk, also reports that the loop makes progress."""
        nonlocal sent_at
        # A parent process that reads nothing, such as one in a debugger, must not block the training.
        if start.rank == 0 and time.monotonic() - sent_at >= MESSAGE_SECONDS and select.select([], [connection], [], 0)[1]:
            sent_at = time.monotonic()
            connection.send_bytes(TRAINING)
        return should_stop()

    try:
        find_sources(start.paths)
        function = pickle.loads(start.function)
        return LearnerEnd(result=function(start.rank, check_stop, note))
    except Exception as error:
        # JAX raises the same type when a connection breaks as for its other errors.
        return LearnerEnd(failure=Failure.of(error), may_be_loss=isinstance(error, jax.errors.JaxRuntimeError))


def _listen(connection: Connection, stop: threading.Event) -> None:
    with contextlib.suppress(OSError, EOFError):
        while connection.recv_bytes() == STOP:
            stop.set()
    os._exit(1)


def _hide_output_of_libraries() -> None:
    """Hide the output of C++ libraries: Gloo reports every connection, and XLA every death of a learner with a stack trace."""
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1, encoding="utf-8") for stream in (1, 2))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)


if __name__ == "__main__":
    # Imported by its name, so that pickled classes are the same in both processes.
    from polyak.workers import learner_process

    learner_process.main()

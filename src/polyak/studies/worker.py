"""A process that trains trials of a study: `python -m polyak.studies.worker DESCRIPTOR`.

It receives jobs as JSON over a socket of the study's process, and ends with that process.
"""

import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from polyak.studies.jobs import describe
from polyak.studies.training import Bench, Task


def main() -> None:
    """Train jobs until the socket closes."""
    # A signal to all processes of a terminal is for the study's process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), daemon=True).start()

    def send(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    def report(step: int, reward: float) -> bool:
        send(step=step, reward=reward)
        return bool(messages.get()["prunes"])

    start = messages.get()
    sys.path.extend(path for path in start["paths"] if path not in sys.path)
    try:
        with Bench(Task(**start["task"])) as bench:
            while True:
                job = messages.get()
                outcome = bench.train(job["settings"], job["seeds"], Path(job["directory"]), report)
                send(scores=outcome.scores, error=outcome.error)
    except (Exception, SystemExit) as error:
        send(stopped=describe(error))
        # The study's process kills this one.
        threading.Event().wait()


def _listen(connection: Connection, messages: "SimpleQueue[dict[str, Any]]") -> None:
    try:
        while True:
            messages.put(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        # The study's process has ended: nothing may be written any more.
        os._exit(1)


if __name__ == "__main__":
    main()

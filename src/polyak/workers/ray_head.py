"""The process of a private Ray of one training run: `python -m polyak.workers.ray_head CPUS STORE_BYTES DIRECTORY`.

Ray starts its daemons by a fork, which must not happen in a process where JAX runs. This process starts them on loopback,
prints their address as a line of JSON, and ends the daemons, their files and itself when its standard input closes, so
nothing is left behind however the training process ends.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

CLOSE_SECONDS = 2.0

LOOK_SECONDS = 0.5
"""Seconds between checks that Ray's daemons are alive."""

FINAL = (ImportError, AttributeError, TypeError, ValueError)
"""Exceptions of a wrong installation or wrong settings, which a retry repeats. Ray raises others on a slow machine."""

SETTINGS = {
    # Results of up to 1 MB travel in the answer to the call, which is faster than the store; Ray's own limit is a tenth.
    "max_direct_call_object_size": 1_000_000,
    # Imported by worker processes while Ray still starts.
    "preload_python_modules": ["polyak.workers.ray_workers", "polyak.envs.parts"],
    # Unused here: a record of every call (250 MB in ten minutes), and statistics, which fill the logs.
    "task_events_report_interval_ms": 0,
    "event_stats": False,
    "enable_metrics_collection": False,
}
"""System settings of the private Ray."""


def main() -> None:
    """Start Ray, wait until standard input closes, and end Ray.

    If Ray does not start, the line of JSON has the error and `is_final`, which is true if a retry would fail too.
    """
    # All processes of Ray stay in this process group, which is killed at the end.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The preloaded modules import NumPy before Ray sets this, and OpenBLAS would use all cores in every worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray opens its own directory, which has its sockets, to every user of the machine.
    private = sys.argv[3]
    directory = os.path.join(private, "r")
    is_closed = threading.Event()
    # The training process may end while Ray still starts, or while Ray's shutdown hangs.
    threading.Thread(target=_end_with_training, args=(is_closed, private), daemon=True).start()
    try:
        import ray
        from ray._private.node import Node

        # Half a second of a processor each: nothing grows, and nobody reads the logs.
        node: Any = Node
        node.start_monitor = node.start_log_monitor = lambda node: None
        # Without "local", RAY_ADDRESS in the environment would make it a client of another Ray.
        context: Any = ray.init(
            "local",
            num_cpus=int(sys.argv[1]),
            object_store_memory=int(sys.argv[2]),
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=directory,
            _system_config=SETTINGS,
        )
        worker: Any = ray._private.worker
        daemons = worker._global_node
        print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
        # Ray's further output would fill a file that nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        while not is_closed.wait(LOOK_SECONDS):
            if daemons.dead_processes():
                return  # Without one of its daemons Ray hangs for minutes. The training notices that this process has ended.
        ray.shutdown()
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        print(json.dumps({"error": f"{type(error).__name__}: {line}", "is_final": isinstance(error, FINAL)}), flush=True)
    finally:
        _end(private)


def _end_with_training(is_closed: threading.Event, directory: str) -> None:
    """End everything `CLOSE_SECONDS` after standard input closes, unless Ray has shut down before."""
    sys.stdin.read()
    is_closed.set()
    threading.Event().wait(CLOSE_SECONDS)
    _end(directory)


def _end(directory: str) -> None:
    """Kill Ray's processes and this one, then delete their files: a daemon that still starts would write new ones."""
    command = 'kill -9 "-$1"; rm -rf "$2"'
    try:
        subprocess.run(["sh", "-c", command, "sh", str(os.getpgrp()), directory], start_new_session=True, check=False)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

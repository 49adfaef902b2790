"""A private Ray of one training, in a process of its own: `python -m polyak.workers.ray_head CPUS OBJECT_STORE_BYTES`.

Ray starts its daemons by a fork, which must not happen in a process where JAX runs. This process starts them on loopback,
prints their address as a line of JSON, and ends them, their files and itself when its standard input closes: nothing is left
of them whatever ends the training.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from typing import Any

CLOSE_SECONDS = 2.0

WORKER_MODULES = ["polyak.workers.ray_workers", "polyak.envs.parts"]
"""What processes of workers import while Ray still starts."""

INLINE_BYTES = 1_000_000
"""What a result may have to travel in the answer to the call: faster than through the store. Ray's own limit is a tenth."""


def main() -> None:
    """Start Ray, wait for the end of standard input, and end it."""
    # All that Ray starts stays in this process's group, which is killed at the end.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    directory = tempfile.mkdtemp(prefix=f"polyak-ray-{os.getppid()}-")
    is_closed = threading.Event()
    # A training may end while Ray still starts, or while its end hangs.
    threading.Thread(target=_end_with_training, args=(is_closed, directory), daemon=True).start()
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
            _system_config={"max_direct_call_object_size": INLINE_BYTES, "preload_python_modules": WORKER_MODULES},
        )
        print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
        is_closed.wait()
        ray.shutdown()
    finally:
        _end(directory)


def _end_with_training(is_closed: threading.Event, directory: str) -> None:
    """End everything when standard input closes; Ray may end by itself before, for two seconds."""
    sys.stdin.read()
    is_closed.set()
    threading.Event().wait(CLOSE_SECONDS)
    _end(directory)


def _end(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Worker processes with one environment each, started by a fork server (never forked: JAX's threads do not survive a fork).

Gymnasium's `AsyncVectorEnv` forks by default and waits for its workers without a time limit.
No JAX here.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from gymnasium.vector.utils import CloudpickleWrapper

from polyak.core.warn import add_note
from polyak.envs.env_options import EnvOptions
from polyak.envs.single_env import SingleEnv

CLOSE_SECONDS = 1.0

GUARD_HINT = "; is the script's start under `if __name__ == '__main__':`?"


class WorkerProcesses:
    """One process for each environment; each runs one method call at a time.

    Args:
        env_fns: functions that create the environments, one per process.
        name: name of the environment in errors.
        timeout: maximum seconds of a method call, or of the start of a process.
        options: see `EnvOptions`.

    Raises:
        TimeoutError: an environment did not return in time; all processes are ended.
        RuntimeError: a process died; all other processes are ended.
        Exception: an exception of an environment, with its type if it can be pickled, and the worker's traceback as a note.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], name: str, timeout: float, options: EnvOptions) -> None:
        self.name = name
        self.timeout = timeout
        self._make_env = env_fns[0]
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # Calls are numbered, so that results of an interrupted call (Ctrl-C) are not taken for results of the next call.
        self.call_number = 0
        context = multiprocessing.get_context("forkserver")
        try:
            for index, make in enumerate(env_fns):
                own_end, worker_end = context.Pipe()
                self.pipes.append(own_end)
                arguments = (worker_end, CloudpickleWrapper(make), name, index, options)
                process = context.Process(target=_run_worker, args=arguments, daemon=True)
                # The worker must have the only other end, so that each side detects the death of the other at once.
                with worker_end:
                    process.start()
                self.processes.append(process)
                _limit_waits(own_end, timeout)
            self.spaces: list[tuple[Any, Any]] = self._results("start")
        except BaseException:
            self._kill()
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every environment, each with its own arguments, and wait for all results.

        Raises:
            RuntimeError: the workers are closed.
        """
        if not self.pipes:
            raise RuntimeError(f"{self.name}: the environment is closed")
        self.call_number += 1
        for index, (pipe, args) in enumerate(zip(self.pipes, arguments, strict=True)):
            try:
                pipe.send((self.call_number, method, args))
            except BlockingIOError:
                self._raise_timeout(index, method)
            except OSError:
                self._raise_dead(index, method)
        return self._results(method)

    def goal_env(self) -> Any:
        """Create an environment in this process, whose functions of goals can be called."""
        return self._make_env()

    def close(self) -> None:
        """Close the environments and end all processes, after a second by SIGKILL. A second call does nothing.

        Raises:
            Exception: an exception in `close` of an environment, raised after all processes have ended.
        """
        pipes, processes = self.pipes, self.processes
        self.pipes, self.processes = [], []
        raised: list[tuple[int, Any]] = []
        self.call_number += 1
        for pipe in pipes:
            with contextlib.suppress(OSError):
                _limit_waits(pipe, CLOSE_SECONDS)
                pipe.send((self.call_number, "close", ()))
        deadline = time.monotonic() + CLOSE_SECONDS
        for index, pipe in enumerate(pipes):
            # An error means that the process has ended.
            with contextlib.suppress(EOFError, OSError):
                status, result = self._receive(pipe, deadline)
                if status == "raised":
                    raised.append((index, result))
            pipe.close()
        _end(processes, deadline)
        for index, result in raised:
            self._reraise(index, result)

    def _results(self, method: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        results, failed = [], None
        for index, pipe in enumerate(self.pipes):
            try:
                status, result = self._receive(pipe, deadline)
            except BlockingIOError:
                self._raise_timeout(index, method)
            except (EOFError, OSError):
                self._raise_dead(index, method)
            if status == "late":
                self._raise_timeout(index, method)
            if status == "raised" and failed is None:
                failed = index, result
            results.append(result)
        # Raised after the other results have been read from their pipes.
        if failed is not None:
            self._reraise(*failed)
        return results

    def _receive(self, pipe: Connection, deadline: float) -> tuple[str, Any]:
        """Return the result of the last call: `("done" | "raised" | "late", ...)`."""
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            number, status, result = pipe.recv()
            if number == self.call_number:
                return status, result
        return "late", None

    def _raise_timeout(self, first: int, method: str) -> NoReturn:
        others = (index for index, pipe in enumerate(self.pipes) if index > first and not pipe.poll(0))
        late = ", ".join(map(str, (first, *others)))
        self._kill()
        hint = GUARD_HINT if method == "start" else ""
        raise TimeoutError(f"{self.name}: env {late} did not return from {method}() within timeout={self.timeout:g} s{hint}")

    def _raise_dead(self, index: int, method: str) -> NoReturn:
        self.processes[index].join(CLOSE_SECONDS)
        code = self.processes[index].exitcode
        self._kill()
        hint = GUARD_HINT if method == "start" else ""
        raise RuntimeError(f"{self.name}: the process of env {index} died in {method}() with exit code {code}{hint}")

    def _kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        _end(self.processes, time.monotonic())
        self.pipes, self.processes = [], []

    def _reraise(self, index: int, failure: tuple[bytes | None, str, str]) -> NoReturn:
        pickled, summary, text = failure
        # Trusted bytes from a child process, which has unpickled them.
        error = None
        if pickled is not None:
            with contextlib.suppress(Exception):
                error = ForkingPickler.loads(pickled).fn
        if not isinstance(error, Exception):
            error = RuntimeError(f"{self.name}: env {index} raised {summary}")
        add_note(error, f"Traceback in the process of env {index}:\n{text}")
        raise error


def _limit_waits(pipe: Connection, seconds: float) -> None:
    """Make a read or write raise BlockingIOError after so many seconds without a byte: `poll` awaits only the first byte."""
    limit = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _exit_with_trainer() -> None:
    """Exit a second after the death of the trainer, also from a step that does not end."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "runs in a worker"
    trainer.join()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def _end(processes: Sequence[BaseProcess], deadline: float) -> None:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            # SIGKILL, as a suspended or looping environment handles no other signal.
            process.kill()
    for process in processes:
        process.join(CLOSE_SECONDS / 2)
        if process.exitcode is not None:
            process.close()


def _run_worker(pipe: Connection, make: CloudpickleWrapper, name: str, index: int, options: EnvOptions) -> None:
    """Create the environment and run method calls until `close`."""
    # Ctrl-C is sent to all processes of the group; the trainer handles it and still needs its environments.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_trainer, daemon=True).start()
    try:
        env = SingleEnv(make(), name, index, options)
        pipe.send((0, "done", (env.env.observation_space, env.env.action_space)))
    except Exception as error:
        pipe.send((0, "raised", _pickle_exception(error)))
        return
    while True:
        try:
            number, method, arguments = pipe.recv()
        except (EOFError, OSError):
            # The trainer has ended.
            number, method, arguments = 0, "close", ()
        try:
            message = (number, "done", getattr(env, method)(*arguments))
        except Exception as error:
            message = (number, "raised", _pickle_exception(error))
        try:
            pipe.send(message)
        except OSError:
            return
        if method == "close":
            return


def _pickle_exception(error: Exception) -> tuple[bytes | None, str, str]:
    """Return the pickled exception (None if pickling fails), its summary and its traceback."""
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__qualname__}: {error}"
    try:
        # Cloudpickle handles classes defined in the user's script, which pickle does not find in this process.
        sendable: Any = CloudpickleWrapper  # its type hint allows functions only
        pickled = bytes(ForkingPickler.dumps(sendable(error)))
        ForkingPickler.loads(pickled)
    except Exception:
        return None, summary, text
    return pickled, summary, text

"""Environments in processes of their own, one each, started by a fork server (never a fork: JAX's threads do not survive it).

Every wait has an end, and whatever goes wrong in a worker is told with its index. No JAX here.
"""

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from gymnasium.vector.utils import CloudpickleWrapper

from polyak.envs.single import SingleEnv

CLOSE_SECONDS = 1.0


class Workers:
    """One process for each environment, each answering one question at a time.

    Args:
        env_fns: make the environments, each in its process.
        name: how errors call the environment.
        timeout: seconds to wait for an answer before it is an error; a process may also take that long to start.

    Raises:
        TimeoutError: an environment did not answer in time; all processes are ended.
        RuntimeError: a process died, likewise.
        Exception: what an environment raised, of the same type where it can be sent, with the worker's traceback as a note.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # Questions are numbered: the answers to one whose wait was broken off (Ctrl-C) are not those to the next.
        self.number = 0
        context = multiprocessing.get_context("forkserver")
        for index, make in enumerate(env_fns):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, CloudpickleWrapper(make), name, index), daemon=True)
            process.start()
            # The worker must hold the only other end: its death is then seen at once, and ours by it.
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            self.spaces: list[tuple[Any, Any]] = self._answers("start")
        except BaseException:
            self._kill()
            raise

    def ask(self, question: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method of every environment, each with its own arguments, and wait for all answers.

        Raises:
            RuntimeError: the workers are closed.
        """
        if not self.pipes:
            raise RuntimeError(f"{self.name}: the environment is closed")
        self.number += 1
        for index, (pipe, its) in enumerate(zip(self.pipes, arguments, strict=True)):
            try:
                pipe.send((self.number, question, its))
            except OSError:
                self._died(index, question)
        return self._answers(question)

    def close(self) -> None:
        """End all processes: politely for a second, then not. A second call does nothing.

        Raises:
            Exception: what an environment raised in its `close`, after all have ended.
        """
        pipes, processes = self.pipes, self.processes
        self.pipes, self.processes = [], []
        raised: list[tuple[int, Any]] = []
        self.number += 1
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send((self.number, "close", ()))
        deadline = time.monotonic() + CLOSE_SECONDS
        for index, pipe in enumerate(pipes):
            # An error here is a process that has ended, as it should.
            with contextlib.suppress(EOFError, OSError):
                status, answer = self._receive(pipe, deadline)
                if status == "raised":
                    raised.append((index, answer))
            pipe.close()
        _end(processes, deadline)
        for index, answer in raised:
            self._reraise(index, answer)

    def _answers(self, question: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        answers, failed = [], None
        for index, pipe in enumerate(self.pipes):
            try:
                status, answer = self._receive(pipe, deadline)
            except (EOFError, OSError):
                self._died(index, question)
            if status == "late":
                self._late(index, question)
            if status == "raised" and failed is None:
                failed = index, answer
            answers.append(answer)
        # Only now: the other answers had to be taken out of their pipes.
        if failed is not None:
            self._reraise(*failed)
        return answers

    def _receive(self, pipe: Connection, deadline: float) -> tuple[str, Any]:
        """The answer to the last question: `("done" | "raised" | "late", ...)`."""
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            number, status, answer = pipe.recv()
            if number == self.number:
                return status, answer
        return "late", None

    def _late(self, first: int, question: str) -> NoReturn:
        late = ", ".join(str(index) for index, pipe in enumerate(self.pipes) if index >= first and not pipe.poll(0))
        self._kill()
        raise TimeoutError(f"{self.name}: env {late} did not answer {question}() within {self.timeout:g} s")

    def _died(self, index: int, question: str) -> NoReturn:
        self.processes[index].join(CLOSE_SECONDS)
        code = self.processes[index].exitcode
        self._kill()
        hint = "; is the script's start under `if __name__ == '__main__':`?" if question == "start" else ""
        raise RuntimeError(f"{self.name}: the process of env {index} died in {question}() with exit code {code}{hint}")

    def _kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        _end(self.processes, time.monotonic())
        self.pipes, self.processes = [], []

    def _reraise(self, index: int, answer: tuple[bytes | None, str, str]) -> NoReturn:
        pickled, summary, text = answer
        # From our own child, over our own pipe; it loaded there too.
        error = None
        if pickled is not None:
            with contextlib.suppress(Exception):
                error = ForkingPickler.loads(pickled).fn
        if not isinstance(error, Exception):
            error = RuntimeError(f"{self.name}: env {index} raised {summary}")
        error.add_note(f"Traceback in the process of env {index}:\n{text}")
        raise error


def _end(processes: Sequence[BaseProcess], deadline: float) -> None:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            # SIGKILL: a stopped or looping environment would not hear anything less.
            process.kill()
    for process in processes:
        process.join(CLOSE_SECONDS / 2)
        if process.exitcode is not None:
            process.close()


def _work(pipe: Connection, make: CloudpickleWrapper, name: str, index: int) -> None:
    """The life of one process."""
    # Ctrl-C goes to the whole terminal's group; the trainer decides what becomes of it and still needs its environments.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        env = SingleEnv(make(), name, index)
        pipe.send((0, "done", (env.env.observation_space, env.env.action_space)))
    except Exception as error:
        pipe.send((0, "raised", _portable(error)))
        return
    while True:
        try:
            number, question, arguments = pipe.recv()
        except (EOFError, OSError):
            # The trainer is gone.
            number, question, arguments = 0, "close", ()
        try:
            answer = (number, "done", getattr(env, question)(*arguments))
        except Exception as error:
            answer = (number, "raised", _portable(error))
        try:
            pipe.send(answer)
        except OSError:
            return
        if question == "close":
            return


def _portable(error: Exception) -> tuple[bytes | None, str, str]:
    """The exception for the other side: pickled if it survives that, its summary, its traceback."""
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__qualname__}: {error}"
    try:
        # Cloudpickle knows a class of the user's script again, which plain pickling does not find in this process.
        sendable: Any = CloudpickleWrapper  # its signature speaks of functions only
        pickled = bytes(ForkingPickler.dumps(sendable(error)))
        ForkingPickler.loads(pickled)
    except Exception:
        return None, summary, text
    return pickled, summary, text

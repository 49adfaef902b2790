"""Trains trials one after another in this process, or several at once in processes of their own."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from polyak.storage.run_files import RunError
from polyak.studies.training import Bench, Outcome, Report, StudyStopped, Task
from polyak.train.devices import THREADS

MAX_STARTS = 3
"""Processes that may die while they train one trial, before the study stops."""


@dataclass(frozen=True)
class Job:
    """Trainings with one group of settings.

    Attributes:
        name: name in messages.
        settings: the settings that differ from the preset.
        seeds: the seeds.
        directory: directory of the runs.
        report: see `Report`.
    """

    name: str
    settings: Mapping[str, Any]
    seeds: Sequence[int]
    directory: Path
    report: Report


def run_jobs(bench: Bench, jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Outcome]]:
    """Yield each job with its outcome, as it ends; the next job is taken when a process is free.

    Raises:
        StudyStopped: an error of the environment or the machine.
        KeyboardInterrupt: a training was stopped by a signal.
    """
    if workers > 1:
        with contextlib.closing(_run_in_processes(bench.task, iter(jobs), workers)) as ended:
            yield from ended
        return
    for job in jobs:
        try:
            outcome = bench.train(job.settings, job.seeds, job.directory, job.report)
        except (Exception, SystemExit) as error:  # an environment may raise SystemExit
            raise StudyStopped(describe_stop(job.name, job.settings, describe(error))) from error
        yield job, outcome


def describe(error: BaseException) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RunError) else f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_stop(name: str, settings: Mapping[str, Any], reason: str) -> str:
    """Return the message of a `StudyStopped`."""
    of = f" with {json.dumps(dict(settings))}" if settings else ""
    return f"{name}{of} stopped the study: {reason}; the same command continues it when this is mended"


class Worker:
    """A process that trains one job at a time, and ends with this process."""

    def __init__(self, task: Task, workers: int) -> None:
        self.job: Job | None = None
        self.starts = 0
        self._task, self._workers = task, workers
        self._start()

    def _start(self) -> None:
        self.connection, remote = Pipe()
        cores = len(os.sched_getaffinity(0))
        # A new session: only this process handles Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyak.studies.worker", str(remote.fileno())],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            # A GPU has memory for several processes only if none takes most of it at once.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", THREADS: str(max(1, cores // self._workers)), **os.environ},
        )
        remote.close()
        self.send({"paths": sys.path, "task": dataclasses.asdict(self._task)})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send JSON data; a process that died is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def begin(self, job: Job) -> None:
        """Begin a job."""
        self.job, self.starts = job, self.starts + 1
        self.send({"settings": dict(job.settings), "seeds": list(job.seeds), "directory": str(job.directory)})

    def receive(self) -> tuple[Job, Outcome] | None:
        """Handle a message of the process; returns the job and its outcome if it has ended.

        Raises:
            StudyStopped: an error of the environment or the machine.
        """
        job = self.job
        assert job is not None, "only a process with a job is waited for"
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._restart(job)
            return None
        if "reward" in message:
            self.send({"prunes": job.report(message["step"], message["reward"])})
            return None
        if "stopped" in message:
            raise StudyStopped(describe_stop(job.name, job.settings, message["stopped"]))
        self.job, self.starts = None, 0
        return job, Outcome(tuple(message["scores"]), message["error"])

    def _restart(self, job: Job) -> None:
        """Begin the job again in a new process."""
        code = self._process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.connection.close()
        if self.starts >= MAX_STARTS:
            memory = ", as where memory is short" if code == -signal.SIGKILL else ""
            text = f"{MAX_STARTS} processes died while they trained it; the last one {reason}{memory}"
            raise StudyStopped(describe_stop(job.name, job.settings, text))
        print(f"{job.name}: its process {reason}; it begins again", flush=True)
        self._start()
        self.begin(job)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _run_in_processes(task: Task, jobs: Iterator[Job], count: int) -> Generator[tuple[Job, Outcome], None, None]:
    workers: list[Worker] = []
    try:
        while True:
            free = next((worker for worker in workers if worker.job is None), None)
            if (free or len(workers) < count) and (job := next(jobs, None)):
                if free is None:
                    workers.append(free := Worker(task, count))
                free.begin(job)
                continue
            busy = {worker.connection: worker for worker in workers if worker.job is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                ended = busy[connection].receive()  # type: ignore[index]
                if ended is not None:
                    yield ended
    finally:
        for worker in workers:
            worker.kill()

"""A process that has imported polyak and forks for every command: as `polyak` would start, less the seconds of importing.

What importing reads in the environment, and the order of sets, are the same for all its commands; `processes.start` starts
Python anew.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SECONDS = 120
NUMBER = 10


class ForkServer:
    """The process, from the outside; `environment` is that of the commands."""

    def __init__(self, environment):
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                # BLAS has a thread for each core otherwise, and a fork must not leave any behind.
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the tests, and they end the server.
                start_new_session=True,
            )

    def start(self, arguments, directory):
        """`polyak ARGUMENTS` in a fork."""
        request = json.dumps({"words": arguments.split(), "directory": str(directory)})
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the command closes it)
        reads, writes = os.pipe()
        try:
            socket.send_fds(self._channel, [request.encode()], [output.fileno(), writes])
        finally:
            os.close(writes)
        return Command(output, reads)

    def close(self):
        """End it, and with it whatever command still runs."""
        self._channel.close()
        try:
            assert self._process.wait(SECONDS) == 0
        finally:
            self._process.kill()


class Command:
    """A forked command, with what the tests use of `subprocess.Popen`; its output is read once it has ended."""

    def __init__(self, output, reports):
        self.stdout = output
        self.returncode = None
        self._reports = reports
        self._pid = self._next_number(SECONDS)
        assert self._pid is not None, "waited in vain for a fork"

    def poll(self):
        """The exit code, or minus the signal that ended it; None while it lives."""
        return self._ended(0)

    def wait(self, timeout=SECONDS):
        """The exit code, or minus the signal, once it has ended."""
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("polyak", timeout)
        return self.returncode

    def communicate(self, timeout=SECONDS):
        """What it wrote, once it has ended, and None as the stderr of its own."""
        self.wait(timeout)
        with self.stdout:
            self.stdout.seek(0)
            return self.stdout.read(), None

    def send_signal(self, number):
        """Send it, if the command lives."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self):
        """What nobody can catch."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds):
        if self.returncode is None:
            self.returncode = self._next_number(seconds)
            if self.returncode is not None:
                os.close(self._reports)
        return self.returncode

    def _next_number(self, seconds):
        """What the server says next, the pid and then the exit code; None where it says nothing in time."""
        if not select.select([self._reports], [], [], seconds)[0]:
            return None
        said = os.read(self._reports, NUMBER)
        assert said, "the server of forks is gone"
        return int(said)


def serve(channel):
    """Fork as asked, and say how the forks end, until nobody asks any more; returns in a fork alone, the command's words."""
    running = {}
    try:
        while True:
            ready = select.select([channel, *running], [], [])[0]
            for descriptor in running.keys() & set(ready):
                report_end(descriptor, *running.pop(descriptor))
            if channel not in ready:
                continue
            request, descriptors, _, _ = socket.recv_fds(channel, 2**16, 2)
            if not request:
                raise SystemExit(0)
            output, reports = descriptors
            pid = fork()
            if pid == 0:
                break
            os.close(output)
            running[os.pidfd_open(pid)] = pid, reports
            say(reports, pid)
    except BaseException:
        for descriptor, (pid, reports) in running.items():
            os.kill(pid, signal.SIGKILL)
            report_end(descriptor, pid, reports)
        raise
    for descriptor in (channel.detach(), *running, *(reports for _, reports in running.values()), reports):
        os.close(descriptor)
    return become(json.loads(request), output)


def fork():
    """`os.fork`, where nothing but this thread could be lost by it."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == threading.active_count() == 1, f"a fork among {threads} threads"
    return os.fork()


def become(request, output):
    """In a fork: what is a new process's own; returns the command's words."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    sys.argv = ["polyak", *request["words"]]
    return request["words"]


def report_end(descriptor, pid, reports):
    """Say how a fork ended, once it has."""
    os.close(descriptor)
    say(reports, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(reports)


def say(reports, number):
    """To whoever still listens."""
    with contextlib.suppress(BrokenPipeError):
        os.write(reports, str(number).rjust(NUMBER).encode())


if __name__ == "__main__":
    # Before any fork: what commands import, and what JAX and environments import as they start.
    import scipy.linalg  # noqa: F401

    from polyak.cli import main
    from tests import ir_context

    ir_context.share()
    gc.freeze()
    # To look for garbage while programs are traced takes a tenth of the time.
    gc.set_threshold(200_000, 20, 100)
    sys.exit(main(serve(socket.socket(fileno=int(sys.argv[1])))))

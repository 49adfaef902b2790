"""Signals to small processes that do what a training does: work, or a long call that Python cannot interrupt."""

import os
import signal
import subprocess
import sys
import time
import types
from contextlib import ExitStack, contextmanager, nullcontext

import pytest

from polyak.cli import signals, training_run
from polyak.train.display import Screen
from polyak.workers.learner_group import StoppedBeforeStart

PROGRAM = """
import hashlib, signal, time
from polyak.cli import signals
signal.signal(signal.SIGUSR1, lambda *_: None)
signals.GRACE_SECONDS = {grace}
with signals.handle_signals({arguments}) as caught:
    print("ready", flush=True)
    {work}
print("ended in order", flush=True)
raise SystemExit(caught.exit_code)
"""
LOOP = "while not caught.stop_requested(): time.sleep(0.01)"
DEAF = "time.sleep(0.1) or [time.sleep(0.01) for _ in range(3000)]"
# One call into C, of a minute or so, that lets other threads run: as a compilation is.
LONG_CALL = "hashlib.pbkdf2_hmac('sha256', b'', b'', 60_000_000)"


@pytest.fixture
def ready():
    """Starts a process and waits until it works; it does not outlive the test, whatever comes of that."""
    with ExitStack() as stack:

        def start(work, grace=4.5, arguments=""):
            command = [sys.executable, "-c", PROGRAM.format(work=work, grace=grace, arguments=arguments)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def ended(process, within):
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < within
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_requests_a_stop(number, code, ready):
    process = ready(LOOP)
    process.send_signal(number)
    assert ended(process, within=3) == (code, "ended in order\n", "")


def test_a_closed_terminal_does_not_end_the_process():
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(work=LOOP, grace=4.5, arguments="")], stdout=theirs) as process:
        os.close(theirs)
        assert os.read(ours, 100).startswith(b"ready")
        os.close(ours)
        # What is written to it now is an error, but for what silences it.
        process.send_signal(signal.SIGHUP)
        try:
            assert process.wait(timeout=10) == 129
        finally:
            process.kill()


def test_nohup_is_respected(ready):
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = ready(LOOP)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process, within=3)[0] == 143


def test_a_signal_received_twice_at_once_counts_once(ready):
    """As from `timeout`, which sends it to the process and to its group."""
    process = ready(LOOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert ended(process, within=3) == (143, "ended in order\n", "")


@pytest.mark.parametrize("work", [DEAF, LONG_CALL], ids=["in Python", "in a long call"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_the_second_signal_exits_at_once(number, code, work, ready):
    process = ready(work)
    process.send_signal(number)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(number)
    code_got, out, err = ended(process, within=3)
    assert (code_got, out) == (code, "")
    assert "polyak: second signal, exiting now; progress since the last checkpoint is lost" in err


@pytest.mark.parametrize("work", [DEAF, LONG_CALL], ids=["in Python", "in a long call"])
def test_a_process_that_does_not_stop_in_time_exits(work, ready):
    process = ready(work, grace=0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, within=5)
    assert (code, time.monotonic() - began >= 0.5) == (143, True)
    assert "polyak: not stopped within 0.5 s, exiting now; progress since the last checkpoint is lost" in err


def test_without_grace_the_process_exits_at_once(ready):
    process = ready(LONG_CALL, arguments="grace=0.0, consequence='nothing is lost'")
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, within=3)
    assert (code, "\npolyak: exiting now; nothing is lost\n" in err) == (143, True)


def test_the_grace_period_is_below_five_seconds():
    assert signals.GRACE_SECONDS < 5


def test_other_signals_are_ignored(ready):
    process = ready(LOOP, grace=0.2)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process, within=3)[0] == 130


def test_a_full_stderr_pipe_does_not_block_the_exit(ready):
    process = ready("__import__('os').write(2, b'x' * 65536); " + LONG_CALL)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143
    process.communicate()


def test_handlers_and_descriptors_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with signals.handle_signals() as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            while not caught.stop_requested():
                time.sleep(0.01)
        assert (caught.received, caught.exit_code) == (signal.SIGTERM, 143)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_while_learners_wait_for_machines_has_its_exit_code(capsys):
    def start(should_stop):
        os.kill(os.getpid(), signal.SIGTERM)
        while not should_stop():
            time.sleep(0.01)
        raise StoppedBeforeStart("stopped while waiting")

    assert training_run._run([], start, Screen(quiet=True)) == 143
    assert capsys.readouterr().err == "error: stopped while waiting\n"


@pytest.mark.parametrize(
    "handler", [signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None], ids=["ignore", "default", "own"]
)
def test_a_handler_that_an_environment_has_replaced_is_restored_with_a_warning(handler):
    with signals.handle_signals() as caught:
        signal.signal(signal.SIGTERM, handler)
        with pytest.warns(UserWarning, match="has replaced the handler of SIGTERM"):
            assert not caught.stop_requested()
        signal.raise_signal(signal.SIGTERM)
        assert caught.stop_requested() and caught.exit_code == 143
    assert not caught.handlers


def test_without_a_signal_the_exit_code_is_0():
    with signals.handle_signals() as caught:
        pass
    assert (caught.stop_requested(), caught.exit_code) == (False, 0)


@pytest.mark.parametrize(("stopped", "message"), [(None, "training is finished"), ("request", "the stopped training is saved")])
def test_a_signal_after_training_reports_whether_it_was_stopped(stopped, message, monkeypatch):
    """The final evaluation, and writing the summary of a stopped training, exit at once."""
    consequences = []

    @contextmanager
    def handle(grace=None, consequence=""):
        consequences.append(consequence)
        yield signals.Signals()

    monkeypatch.setattr(training_run, "handle_signals", handle)
    monkeypatch.setattr(training_run, "_finish", lambda *_: 0)
    result = types.SimpleNamespace(stopped=stopped, diagnosis=None)
    assert training_run._run([nullcontext()], lambda _: [result], Screen()) == 0
    assert message in consequences[1]

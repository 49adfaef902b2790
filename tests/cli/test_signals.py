"""Signals to small processes that do what a training does: work, or a long call that Python cannot interrupt."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from polyak.cli import signals as interrupts

PROGRAM = """
import hashlib, signal, time
from polyak.cli import signals as interrupts
signal.signal(signal.SIGUSR1, lambda *_: None)
interrupts.GRACE_SECONDS = {grace}
with interrupts.catching({catching}) as caught:
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

        def start(work, grace=4.5, catching=""):
            command = [sys.executable, "-c", PROGRAM.format(work=work, grace=grace, catching=catching)]
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
def test_T5_the_first_signal_asks_for_an_end_in_order(number, code, ready):
    process = ready(LOOP)
    process.send_signal(number)
    assert ended(process, within=3) == (code, "ended in order\n", "")


def test_T5_a_terminal_that_closes_takes_nothing_with_it():
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(work=LOOP, grace=4.5, catching="")], stdout=theirs) as process:
        os.close(theirs)
        assert os.read(ours, 100).startswith(b"ready")
        os.close(ours)
        # What is written to it now is an error, but for what silences it.
        process.send_signal(signal.SIGHUP)
        try:
            assert process.wait(timeout=10) == 129
        finally:
            process.kill()


def test_T5_nohup_is_respected(ready):
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


def test_T5_a_signal_that_comes_in_two_ways_is_one(ready):
    """As from `timeout`, which sends it to the process and to its group."""
    process = ready(LOOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert ended(process, within=3) == (143, "ended in order\n", "")


@pytest.mark.parametrize("work", [DEAF, LONG_CALL], ids=["in Python", "in a long call"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_T5_the_second_signal_ends_the_process_at_once(number, code, work, ready):
    process = ready(work)
    process.send_signal(number)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(number)
    code_got, out, err = ended(process, within=3)
    assert (code_got, out) == (code, "")
    assert "left at once, as it was asked twice" in err


@pytest.mark.parametrize("work", [DEAF, LONG_CALL], ids=["in Python", "in a long call"])
def test_T5_what_does_not_end_in_time_is_ended(work, ready):
    process = ready(work, grace=0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, within=5)
    assert (code, time.monotonic() - began >= 0.5) == (143, True)
    assert "left at once, as it did not end in time; what was done since the newest checkpoint is lost" in err


def test_T5_what_is_saved_already_is_left_at_once(ready):
    process = ready(LONG_CALL, catching="grace=0.0, lost='nothing is'")
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, within=3)
    assert (code, "left at once, as it was asked to; nothing is\n" in err) == (143, True)


def test_the_time_to_end_in_order_leaves_room_below_five_seconds():
    assert interrupts.GRACE_SECONDS < 5


def test_other_signals_are_none_of_its_business(ready):
    process = ready(LOOP, grace=0.2)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process, within=3)[0] == 130


def test_nobody_reading_stderr_keeps_nobody_from_leaving(ready):
    process = ready("__import__('os').write(2, b'x' * 65536); " + LONG_CALL)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143
    process.communicate()


def test_everything_is_put_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with interrupts.catching() as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            while not caught.stop_requested():
                time.sleep(0.01)
        assert (caught.received, caught.exit_code) == (signal.SIGTERM, 143)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.set_wakeup_fd(-1) == -1


def test_without_a_signal_there_is_no_exit_code():
    with interrupts.catching() as caught:
        pass
    assert (caught.stop_requested(), caught.exit_code) == (False, 0)

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from polyak.storage.lock import LockedError, acquire, is_locked

HOLD = """
import sys, time
from pathlib import Path
from polyak.storage.lock import acquire
held = acquire(Path(sys.argv[1]))
{then}
print("held", flush=True)
time.sleep(60)
"""


def hold(path, then=""):
    """A process that holds the lock."""
    command = [sys.executable, "-W", "ignore", "-c", HOLD.format(then=then), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.lock"


def test_lock_error_names_the_owner(path):
    with hold(path) as process:
        try:
            with pytest.raises(LockedError, match=rf"by process {process.pid} on host '.+', since '20\d\d-.+ UTC'"):
                acquire(path)
        finally:
            process.kill()


def test_the_lock_of_a_killed_process_is_free(path):
    with hold(path) as process:
        process.kill()
    acquire(path).release()


def test_one_process_cannot_take_the_lock_twice(path):
    first = acquire(path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        acquire(path)
    first.release()
    first.release()
    acquire(path).release()


# `filelock` closes the file in the child once that runs, so the child says that it does: a busy machine runs it late.
FORK = """
import os
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"1")
    time.sleep(60)
os.read(reader, 1)
print(child, flush=True)
"""


@contextmanager
def hold_with_child(path, then=""):
    """A process that holds the lock, and the id of a child that it forked with the lock's file open."""
    command = [sys.executable, "-W", "ignore", "-c", HOLD.format(then=FORK + then), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == "held\n"
            yield process, child
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(path):
    with hold_with_child(path) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)
        acquire(path).release()


def test_a_released_lock_is_free_while_a_forked_child_lives(path):
    with hold_with_child(path, then="held.release()"):
        acquire(path).release()


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"null", b'{"pid": "x"}', b"\0" * 5000, b'{"pid": 1}'])
def test_the_contents_of_an_unlocked_file_do_not_matter(path, junk):
    path.write_bytes(junk)
    acquire(path).release()
    with hold(path) as process:
        try:
            path.write_bytes(junk)
            with pytest.raises(LockedError, match="by another process"):
                acquire(path)
        finally:
            process.kill()


def test_the_owner_is_printed_without_control_characters(path):
    held = acquire(path)
    path.write_text(json.dumps({"pid": "\x1b[2J", "host": "\x1b[2J", "since": "\x1b[2J"}))
    with pytest.raises(LockedError) as error:
        acquire(path)
    assert str(error.value).isprintable()
    held.release()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_is_locked_by_a_file(path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    held = acquire(path)
    with pytest.raises(LockedError):
        acquire(path)
    held.release()
    acquire(path).release()


def test_a_symbolic_link_is_not_followed(path, tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        acquire(path)
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_the_lock_does_not_depend_on_the_clock(path, monkeypatch):
    held = acquire(path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(LockedError):
        acquire(path)
    held.release()


def test_a_lock_is_tested_without_taking_it(path):
    assert not is_locked(path), "there is no file"
    with hold(path) as process:
        assert is_locked(path)
        process.kill()
    assert not is_locked(path)
    held = acquire(path)
    assert is_locked(path) and is_locked(path)
    held.release()
    assert not is_locked(path) and not is_locked(path.parent)
    acquire(path).release()

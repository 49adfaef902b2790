import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from polyak.storage import lock
from polyak.storage.lock import LockedError, acquire

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


def owner(path, **changes):
    """What a lock file says."""
    path.write_text(json.dumps(lock._this_process() | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.lock"


def test_C9_a_living_owner_is_named(path):
    with hold(path) as process:
        try:
            with pytest.raises(LockedError, match=rf"by process {process.pid} on host '.+', since '20\d\d-.+ UTC'"):
                acquire(path)
        finally:
            process.kill()


def test_C9_a_killed_owner_is_no_obstacle(path):
    with hold(path) as process:
        process.kill()
    acquire(path).release()


def test_C9_one_process_does_not_take_it_twice(path):
    first = acquire(path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        acquire(path)
    first.release()
    first.release()
    acquire(path).release()


FORK = """
import os
child = os.fork()
if child == 0:
    time.sleep(60)
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


def test_C9_a_child_that_outlived_its_dead_parent_is_no_obstacle(path):
    with hold_with_child(path) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)
        acquire(path).release()


def test_a_released_lock_is_free_though_a_child_still_has_the_file_open(path):
    with hold_with_child(path, then="held.release()"):
        acquire(path).release()


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"null", b'{"pid": "x"}', b"\0" * 5000, b'{"pid": 1}'])
def test_what_stands_in_an_unlocked_file_does_not_matter(path, junk):
    path.write_bytes(junk)
    acquire(path).release()
    with hold(path) as process:
        try:
            path.write_bytes(junk)
            with pytest.raises(LockedError, match="by another process"):
                acquire(path)
        finally:
            process.kill()


def test_C9_without_the_kernel_s_locks_the_written_owner_decides(path, monkeypatch):
    monkeypatch.setattr(lock, "try_lock", lambda descriptor: None)
    owner(path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        acquire(path)
    with subprocess.Popen(["true"]) as process:
        pass
    for stale in ({"pid": process.pid}, {"boot": "another"}, {"start": 1}, {"pid": 2**70}):
        owner(path, **stale)
        acquire(path).release()
    owner(path, host="elsewhere", boot="another")
    with pytest.raises(LockedError, match="on host 'elsewhere'"):
        acquire(path)


def test_C9_the_owner_s_name_is_printed_safely(path, monkeypatch):
    monkeypatch.setattr(lock, "try_lock", lambda descriptor: None)
    owner(path, host="\x1b[2J", since="\x1b[2J")
    with pytest.raises(LockedError) as error:
        acquire(path)
    assert str(error.value).isprintable()


def test_S7_a_link_is_not_followed(path, tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        acquire(path)
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_T6_a_lock_outlives_a_clock_that_jumps(path, monkeypatch):
    held = acquire(path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(LockedError):
        acquire(path)
    held.release()

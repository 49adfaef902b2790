"""The budget of time by file: what is over it fails, and what is listed exists."""

import types
from pathlib import Path

import pytest

from tests.budget import LONGER, SECONDS, FileTimes

ROOT = Path(__file__).parent.parent


def test_every_listed_file_exists():
    assert not [file for file in LONGER if not (ROOT / file).exists()]


@pytest.mark.parametrize(
    ("file", "seconds", "status"),
    [
        ("tests/test_a.py", SECONDS + 1, pytest.ExitCode.TESTS_FAILED),
        ("tests/test_a.py", SECONDS - 1, pytest.ExitCode.OK),
        (next(iter(LONGER)), SECONDS + 1, pytest.ExitCode.OK),
    ],
)
def test_a_file_over_budget_fails_the_session_unless_it_is_listed(file, seconds, status):
    times, session = FileTimes(), types.SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    for test in ("test_one", "test_two"):
        times.pytest_runtest_logreport(types.SimpleNamespace(nodeid=f"{file}::{test}", duration=seconds / 2))
    times.pytest_sessionfinish(session)
    assert session.exitstatus == status

"""The budget of time by file: what is over it fails, and what is listed exists."""

import types
from pathlib import Path

import pytest

from tests.budget import LONGER, FileTimes, pytest_configure

ROOT = Path(__file__).parent.parent
SECONDS = 30


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
    times, session = FileTimes(SECONDS), types.SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    for test in ("test_one", "test_two"):
        times.pytest_runtest_logreport(types.SimpleNamespace(nodeid=f"{file}::{test}", duration=seconds / 2))
    times.pytest_sessionfinish(session)
    assert session.exitstatus == status


@pytest.mark.parametrize(("limit", "is_measured"), [("30", True), ("", False)])
def test_files_are_measured_where_a_limit_is_set(limit, is_measured, pytestconfig, monkeypatch):
    assert pytestconfig.pluginmanager.hasplugin("tests.budget")
    monkeypatch.setenv("MAX_FILE_SECONDS", limit)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    plugins = pytest.PytestPluginManager()
    pytest_configure(types.SimpleNamespace(pluginmanager=plugins))
    assert plugins.hasplugin("file times") == is_measured

"""The time of each file of tests: `.ci/run` fails where a file takes more than `SECONDS` and is not in `LONGER`."""

import collections
import os

import pytest

SECONDS = 30

# Files that may take longer, with the reason.
LONGER = {
    "tests/test_docs.py": "trains on every page of the documentation and builds the site",
}


class FileTimes:
    """A pytest plugin that adds up the setup, call and teardown of each file's tests, over all processes."""

    def __init__(self):
        self.seconds = collections.Counter()

    def too_long(self):
        """The files over budget that are not listed, with their seconds."""
        return {file: time for file, time in self.seconds.items() if time > SECONDS and file not in LONGER}

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session):
        if self.too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("slowest files")
        for file, time in self.seconds.most_common(10):
            terminalreporter.line(f"{time:6.1f} s  {file}")
        for file, time in self.too_long().items():
            terminalreporter.line(f"{file} took {time:.0f} s of at most {SECONDS} s: shorten it, or list it in tests/budget.py")


def pytest_configure(config):
    """Measure where the tests are reported, and only in CI: a busy machine fails nobody's tests."""
    if os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FileTimes())

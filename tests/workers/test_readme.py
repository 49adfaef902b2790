"""The table of faults names tests that are there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [line for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]


def test_every_fault_has_tests_that_are_there():
    assert len(ROWS) >= 20
    for row in ROWS:
        tests = re.findall(r"`(\S+)::(\w+)`", row)
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (HERE / file).read_text(), f"{file}::{name}"

"""The table of cases is complete, and names tests that are there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [line for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]
CASES = {"U": 18, "N": 9, "P": 14, "A": 16, "E": 16, "T": 12, "C": 18, "F": 9, "S": 14}


def test_every_case_has_a_row():
    ids = [row.split("|")[1].strip() for row in ROWS]
    assert ids == [f"{section}{number}" for section, count in CASES.items() for number in range(1, count + 1)]


def test_every_test_in_the_table_is_there():
    for row in ROWS:
        last = row.split("|")[4]
        tests = re.findall(r"`(\S+)::(\w+)`", last)
        assert tests or last.strip() == "none", row
        for file, name in tests:
            assert f"def {name}(" in (HERE / file).read_text(), f"{file}::{name}"

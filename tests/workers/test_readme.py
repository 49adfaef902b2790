"""The table of faults names tests that are there, and that carry the id."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [line for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]


def test_every_fault_has_tests_with_its_id():
    assert len(ROWS) >= 20
    for row in ROWS:
        ids = row.split("|")[1].strip().split(", ")
        tests = re.findall(r"`(\S+)::(\w+)`", row)
        assert tests, row
        for file, name in tests:
            text = (HERE / file).read_text()
            body = text.partition(f"def {name}(")[2].partition("\ndef ")[0]
            about = body.partition('"""')[2].partition('"""')[0] + text.partition('"""')[2].partition('"""')[0]
            assert any(re.search(rf"\b{id}\b", about) for id in ids), f"{file}::{name} does not carry {ids}"

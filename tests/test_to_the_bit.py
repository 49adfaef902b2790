"""What is promised to the bit, with the compiler as users have it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(1000)
def test_what_is_promised_to_the_bit_holds_with_the_optimising_compiler():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.to_the_bit" in path.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "to_the_bit", *marked],
        cwd=ROOT,
        # Signatures are checked where everything else is.
        env={**os.environ, "XLA_FLAGS": "", "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
        # 70 s on two quiet cores.
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed, \d+ deselected in", done.stdout)
    assert counted and int(counted[1]) >= 2, done.stdout

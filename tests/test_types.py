"""The types that users see: type checkers accept a script of typical calls, and infer what it states."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyak

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("users_script.py")
SOURCES = Path(polyak.__file__).parents[1]
# mypy finds an installed polyak by itself, and refuses to run when MYPYPATH names site-packages.
ENVIRONMENT = os.environ | ({} if SOURCES.name == "site-packages" else {"MYPYPATH": str(SOURCES)})


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=SCRIPT.parents[1])


def test_mypy_accepts_a_users_script_and_rejects_wrong_calls(tmp_path):
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from polyak import envs\nenvs.make('CartPole-v1', num_env=2)\nenvs.make('CartPole-v1', num_envs='2')\n")
    done = run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(SCRIPT), str(wrong))
    errors = {line.split(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line}
    assert errors == {f"{wrong}:2", f"{wrong}:3"}, done.stdout + done.stderr


def test_pyright_accepts_a_users_script():
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    done = run(pyright, "--pythonpath", sys.executable, str(SCRIPT))
    assert done.returncode == 0, done.stdout

"""Ctrl-C in a shell, outside of the repository, with an environment and an agent of one's own.

The rest of a user's week, `users_week.py`, is run by `.ci/run`, with the core install on every Python.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyak
from polyak.storage.run_directory import open_run
from tests.users_week import MINE, run

pytestmark = pytest.mark.slow


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(polyak.__file__).parents[1]))
    # Both processes compile the same programs.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_ctrl_c_in_the_shell_is_continued_by_resume(elsewhere):
    command = "train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 10_000_000 --run-dir stopped"
    words = [sys.executable, "-m", "polyak", *command.split()]
    with subprocess.Popen(words, cwd=elsewhere, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        while "compiled in" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped by Ctrl-C at " in out
    done = open_run(elsewhere / "stopped").read_summary()["env_steps"]
    again = f"resume stopped --agent mine:make_agent --env mine:Corridor --env-steps {done + 16} --eval-episodes 2"
    assert "greedy return" in run(elsewhere, "-m", "polyak", *again.split())

"""Two learners on a Ray cluster, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.test_ray import environment, skip_without_ray

pytest.importorskip("ray")

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "ray_learners_script.py"
NO_RAY = 77


def test_a_learner_on_another_machine_dies_and_costs_no_bit(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280
    )
    if done.returncode == NO_RAY:
        skip_without_ray(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["leaves"] > 10 and len(report["killed"][0]) == 1
    assert [(event["learner"], event["detail"]) for event in report["events"]] == [(1, "was killed by SIGKILL")]
    assert "learners=4 needs 3 machines in addition to this one, the Ray cluster at" in report["error"]
    assert report["left"] == []

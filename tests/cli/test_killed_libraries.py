"""Trainings in other libraries' environments, really killed; each where its library is installed."""

import importlib.util
import signal

import pytest

from tests.cli.processes import SETTINGS, finish, last_checkpoint, metrics, rows, start, wait_until

# Craftax compiles for minutes, once.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Short episodes: initial states are taken from the pool, and drawn anew.
TRAININGS = {
    "mujoco_playground": "playground/CartpoleBalance --env-kwargs episode_length=20",
    "craftax": "craftax/Craftax-Classic-Symbolic-v1 --env-kwargs max_timesteps=20",
    "xminigrid": "xminigrid/MiniGrid-EmptyRandom-5x5 --env-kwargs max_steps=20",
    "navix": "navix/Navix-Dynamic-Obstacles-5x5-Random-v0 --env-kwargs max_steps=20",
    "pgx": "pgx/2048",
}
OPTIONS = f"--env-steps 2000 --report-every 40 --checkpoint-every 40 {SETTINGS}"


@pytest.mark.parametrize("library", TRAININGS)
def test_killed_and_resumed_is_the_same_as_uninterrupted(library, tmp_path, jax_cache):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    code, out = finish(start(f"train ppo {TRAININGS[library]} --run-dir whole {OPTIONS}", tmp_path, jax_cache), 1200)
    assert code == 0, out
    process = start(f"train ppo {TRAININGS[library]} --run-dir killed {OPTIONS}", tmp_path, jax_cache)
    for more in (7, 10):
        enough = rows(tmp_path / "killed") + more
        wait_until(lambda enough=enough: rows(tmp_path / "killed") >= enough, process, 600)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        process = start("resume killed --eval-episodes 2", tmp_path, jax_cache)
    code, out = finish(process, 600)
    assert code == 0, out
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "whole")
    reports = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == reports
    if library == "mujoco_playground":
        assert all("env/reward/upright" in report for report in reports)
    if library == "craftax":
        assert any("env/Achievements/collect_sapling" in report for report in reports)

"""Atari through the command line: settings that are kept, whole games that are counted, runs that go on with new episodes."""

import json

import pytest

from polyak.runs import read_config
from polyak.storage.run_directory import open_run

pytestmark = pytest.mark.slow

# Too small for convolutions, so that little is compiled.
SETTINGS = {"img_height": 8, "img_width": 8, "stack_num": 1, "max_num_frames_per_episode": 240}


def test_a_run_keeps_its_settings_and_counts_whole_games(command, train, workdir):
    words = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    out = train("ALE/Breakout-v5", "run", "--env-steps 200 --env-kwargs", words)
    config = read_config(open_run(workdir / "run"))
    assert config.env_kwargs == SETTINGS and config.agent.spec.obs.shape == (1, 8, 8)
    assert "greedy return" in out and "over 2 episodes" in out
    last = json.loads((workdir / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    # A life is lost after about twenty steps; a game has five, and is cut after sixty.
    assert last["rollout/ep_len_mean"] == 60
    code, out, _ = command("evaluate run --episodes 2")
    assert code == 0 and "(mean length 60.0)" in out
    with pytest.warns(
        UserWarning, match="resume is not bit-exact because env ALE/Breakout-v5 has no state.*new episodes start"
    ):
        code, _, err = command("resume run --env-steps 216 --eval-episodes 1")
    assert code == 0, err


def test_a_preset_with_a_replay_trains(command, workdir):
    settings = "--env-steps 128 --capacity 512 --learning-starts 64 --batch-size 4 --hidden 16 --eval-episodes 0"
    # The smallest images for convolutions.
    images = "--env-kwargs img_height=36 img_width=36"
    code, _, err = command(f"train rainbow ALE/Breakout-v5 --run-dir run {settings} {images}")
    assert code == 0, err
    agent = read_config(open_run(workdir / "run")).agent
    assert (agent.replay.frame_stack, agent.target_period, agent.spec.obs.shape) == (4, 2_000, (4, 36, 36))
    last = json.loads((workdir / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["replay/size"] == 128 and last["train/n_updates"] == 18 and last["train/loss"] > 0

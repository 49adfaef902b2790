"""DQN through the command line: trains, resumes to the bit with its replay, evaluates and exports."""

from pathlib import Path

import numpy as np
import pytest

import polyak
from polyak.agents.dqn import DQN
from polyak.cli import main
from tests.cli.processes import last_checkpoint
from tests.test_second_algorithm import config_of

SETTINGS = "--num-envs 2 --learning-starts 32 --capacity 128 --hidden 16 --report-every 64 --checkpoint-every 64"


def polyak_command(text):
    return main(text.split())


@pytest.mark.parametrize("env", ["CartPole-v1", "jax/CartPole-v1"])
def test_train_resume_to_the_bit_evaluate_and_export(env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # 384 transitions: the replay wraps around twice before the checkpoint in the middle, and once after it.
    assert polyak_command(f"train dqn {env} --run-dir whole --env-steps 384 {SETTINGS} --eval-episodes 0") == 0
    agent = config_of("whole").agent
    assert isinstance(agent, DQN) and agent.network == polyak.q_mlp((16,)) and agent.epsilon.env_steps == 0.16 * 384
    assert '"train/td_error"' in Path("whole/metrics.jsonl").read_text()

    assert (
        polyak_command(
            f"train dqn {env} --run-dir parts --env-steps 384 {SETTINGS} --eval-episodes 0 --epsilon 0.1 --learning-rate 1e-3"
        )
        == 0
    )
    assert (
        polyak_command(
            f"train dqn {env} --run-dir other --env-steps 256 {SETTINGS} --eval-episodes 0 --epsilon 0.1 --learning-rate 1e-3"
        )
        == 0
    )
    assert polyak_command("resume other --env-steps 384 --eval-episodes 0") == 0
    assert last_checkpoint("other") == last_checkpoint("parts")

    assert polyak_command("evaluate whole --episodes 3") == 0
    assert "greedy return" in capsys.readouterr().out
    obs = np.linspace(-0.1, 0.1, 12, dtype=np.float32).reshape(3, 4)
    actions = np.asarray(polyak.load_policy("whole").predict(obs)[0])
    assert polyak_command("export whole --format stablehlo") == 0
    np.testing.assert_array_equal(np.asarray(polyak.load_policy("whole/policy.stablehlo").predict(obs)[0]), actions)


def test_settings_are_checked_before_anything_is_created(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert polyak_command("train dqn Pendulum-v1 --run-dir run --env-steps 64") == 2
    assert "DQN: actions must be Discrete" in capsys.readouterr().err
    assert polyak_command("train dqn CartPole-v1 --run-dir run --num-envs 3 --updates-per-step 0.1 --env-steps 64") == 2
    assert "must be a whole number of gradient steps" in capsys.readouterr().err
    assert polyak_command("train dqn CartPole-v1 --run-dir run --log-std 0.5 --env-steps 64") == 2
    capsys.readouterr()
    assert not Path("run").exists()

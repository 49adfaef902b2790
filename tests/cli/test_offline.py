"""`polyak train ALGO [ENV] --data PATH`, and resuming such a run."""

import dataclasses
import json

import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.cli.offline import OfflineFlags

TINY = "--gradient-steps 12 --batch-size 8 --hidden 8 --no-compilation-cache"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "cartpole.npz"
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    polyak.data.save(polyak.data.collect(polyak.policies.Uniform(env.spec), env, 100), path)
    return path


@pytest.mark.slow
def test_a_run_is_trained_on_data_evaluated_and_continued(tmp_path, data, capsys):
    run = tmp_path / "run"
    flags = f"--data {data} {TINY} --learning-rate linear:0.001 --run-dir {run} --eval-episodes 2"
    assert main(f"train dqn jax/CartPole-v1 {flags}".split()) == 0
    output = capsys.readouterr().out
    assert "12 of 12 gradient steps" in output and "over 2 episodes" in output
    config = json.loads((run / "config.json").read_text())
    assert (config["loop"], config["data"], config["env"], config["env_steps"]) == (
        "offline",
        "cartpole.npz",
        "jax/CartPole-v1",
        12,
    )
    assert main(f"resume {run} --env-steps 20 --eval-episodes 0 --no-compilation-cache".split()) == 0
    assert "learning_rate stays at 0 after 12 gradient steps, where its schedule ends" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 20
    assert main(f"resume {run} --eval-episodes 0".split()) == 0
    assert "finished at 20 gradient steps" in capsys.readouterr().out
    assert main(f"evaluate {run} --episodes 1 --no-compilation-cache".split()) == 0
    assert " at 20 gradient steps: greedy return" in capsys.readouterr().out
    assert main(f"resume {run} --gradient-steps 30".split()) == 2
    assert "--gradient-steps of a run is --env-steps in polyak resume" in capsys.readouterr().err
    for flag in (
        "--workers 2",
        "--learners 2",
        "--worker-timeout 3",
        "--env mine:Env",
        "--agent mine:Agent",
        "--env-kwargs a=1",
    ):
        assert main(f"resume {run} --env-steps 30 {flag}".split()) == 2
        assert f"{flag.split()[0]} must be left out: {run} learns from data" in capsys.readouterr().err
    action, _ = polyak.load_policy(run).predict(np.zeros(4, np.float32))
    assert action in (0, 1)


WRONG = {
    "data": ("none.npz", "minari:none-v0", "none.csv"),
    "gradient-steps": ("0", "-1", "1.5"),
    "seed": ("-1", "4294967296"),
    "run-dir": (),
    "eval-episodes": ("-1", "3"),
    "eval-max-steps": ("0",),
    "report-every": ("0",),
    "eval-every": ("0", "5"),
    "checkpoint-every": ("0",),
    "track": ("comet",),
    "compilation-cache": ("1",),
}


def test_every_flag_has_its_wrong_values():
    assert set(WRONG) == {field.name.replace("_", "-") for field in dataclasses.fields(OfflineFlags)}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in WRONG.items() for value in values])
def test_wrong_values_are_one_error_and_write_nothing(flag, value, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = f"--data {data}" if flag != "data" else ""
    try:
        code = main(f"train dqn {given} --{flag} {value}".split())
    except SystemExit as error:
        code = error.code
    assert code == 2 and list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert flag in captured.err or value in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ppo", "polyak train: PPO has no replay to learn from data"),
        ("ppo --data none.npz", "PPO has no replay to learn from data"),
        ("dnq", "unknown algorithm 'dnq'; did you mean 'dqn'"),
        ("", "an algorithm is missing"),
        ("dqn --env mine:Env", "--env must be left out with --data"),
        ("dqn --seed 2 CartPole-v1", "unexpected CartPole-v1, as no flag takes it; ENV comes before the flags"),
        ("dqn CartPole-v1 Pendulum-v1", "takes one ENV; got CartPole-v1 Pendulum-v1"),
        ("dqn jax/Pendulum-v1", "is of another environment"),
        ("dqn --num-envs 4", "--num-envs needs --env-steps N, to collect beside --data\n"),
        ("bc --num-envs 2", "--num-envs must be left out, as BC learns from data alone\n"),
        ("bc --seeds 2", "--seeds must be left out, as BC learns from data alone; on data alone one process trains one seed\n"),
        ("dqn --seeds 2", "--seeds needs --env-steps N, to collect beside --data; on data alone one process trains one seed"),
        ("dqn --env-steps 60", "--env-steps needs an environment; without it, --gradient-steps trains on the data alone"),
        ("dqn jax/CartPole-v1 --env_steps 60 --gradient-steps 5", "--env-steps collects steps beside --data, --gradient-steps"),
        ("ppo jax/CartPole-v1 --env-steps 60", "PPO has no replay to learn from data"),
    ],
)
def test_other_errors(arguments, message, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["train", *arguments.split(), *([] if "--data" in arguments else ["--data", str(data)])])
    except SystemExit as error:
        code = error.code
    assert code == 2 and message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_flow_has_no_standard_deviation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arrays = {"observations": np.zeros((4, 1)), "actions": np.zeros((4, 1)), "rewards": np.zeros(4), "terminations": np.ones(4)}
    polyak.data.save(polyak.data.load(arrays), "box.npz")
    assert main(["train", "bc", "--data", "box.npz", "--flow-steps", "5", "--log-std", "-1", "--run-dir", "run"]) == 2
    wanted = "error: --log-std -1.0: the flow of --flow-steps has no standard deviation; remove one\n"
    assert capsys.readouterr().err == wanted and not (tmp_path / "run").exists()


def test_help_shows_the_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "dqn", "--data", "x", "--help"])
    output = capsys.readouterr().out
    assert exit_.value.code == 0 and "--gradient-steps" in output and "--num-envs" not in output


@pytest.mark.slow
def test_data_stay_beside_the_replay_of_a_training_with_env_steps(tmp_path, data, capsys):
    run, small = (
        tmp_path / "run",
        "--batch-size 8 --learning-starts 20 --num-envs 2 --hidden 8 --capacity 500 --no-compilation-cache",
    )
    words = f"train dqn jax/CartPole-v1 --data {data} --env-steps 60 {small} --eval-episodes 0"
    assert main(f"{words} --run-dir {run} --data-share 0.25".split()) == 0
    config = json.loads((run / "config.json").read_text())
    assert (config["loop"], config["data"]) == ("compiled", "cartpole.npz")
    assert config["agent"]["replay"]["share"] == 0.25
    assert main(f"resume {run} --env-steps 90 --eval-episodes 0 --no-compilation-cache".split()) == 0
    assert json.loads((run / "summary.json").read_text())["env_steps"] >= 90
    capsys.readouterr()
    assert main(f"{words} --seeds 2 --run-dir {tmp_path / 'seeds'}".split()) == 2
    assert "must be left out" in capsys.readouterr().err and not (tmp_path / "seeds").exists()

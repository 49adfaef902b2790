"""`polyak evaluate RUN --data PATH`."""

import dataclasses
import re

import numpy as np
import pytest

import polyak
from tests.cli.processes import SETTINGS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Episodes of one step with random actions, half of which any greedy policy would have taken."""
    rng = np.random.default_rng(0)
    arrays = {
        "observations": rng.normal(size=(200, 4)).astype(np.float32),
        "actions": rng.integers(0, 2, 200),
        "rewards": np.ones(200),
        "terminations": np.ones(200, bool),
        "log_probs": np.full(200, np.log(0.5)),
    }
    path = tmp_path_factory.mktemp("data") / "cartpole.npz"
    polyak.data.save(polyak.data.load(arrays, spec=polyak.envs.make("jax/CartPole-v1").spec), path)
    return path


@pytest.mark.filterwarnings("ignore:evaluate_offline")
@pytest.mark.parametrize("method", ["is", pytest.param("fqe", marks=pytest.mark.slow)])
def test_a_run_is_evaluated_on_data(run, command, data, method):
    gradient_steps = " --gradient-steps 160" if method == "fqe" else ""
    code, out, err = command(f"evaluate run --data {data} --method {method} --gamma 0.5{gradient_steps}")
    assert (code, err) == (0, "")
    found = re.fullmatch(
        rf"ppo CartPole-v1 at 4\d\d env_steps: discounted return by {method}: (\S+), "
        r"95 % interval \[(\S+), (\S+)\], gamma 0.5, \d+ episodes(, effective [\d.]+)?\n",
        out,
    )
    estimate = polyak.evaluate_offline(polyak.load_policy(run), polyak.data.load(data), method="is", gamma=0.5)
    if method == "is":
        assert float(found[1]) == pytest.approx(estimate.value, rel=0.1)
    assert float(found[2]) <= float(found[1]) <= float(found[3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method dm", "--method"),
        ("--gamma 1.5", "--gamma must be a number in [0, 1], got 1.5"),
        ("--gradient-steps 0", "--gradient-steps must be an integer >= 1, got 0"),
        ("--gradient-steps 100 --method is", "--gradient-steps is for --method fqe and dr, got --method is"),
        ("--gradient-steps 100", "gradient_steps=100 must be in [4000, "),
        ("--seed -1", "--seed must be an integer"),
        ("--episodes 3", "--episodes"),
    ],
)
def test_usage_errors_name_the_flag(run, command, data, words, message):
    code, out, err = command(f"evaluate run --data {data} {words}")
    assert (code, out) == (2, "")
    assert message in err


def test_data_that_do_not_fit_are_errors(run, command, workdir, data):
    for source, message in (("none.npz", "there is no such file"), ("run", "replay")):
        code, out, err = command(f"evaluate run --data {source}")
        assert (code, out) == (2, "") and message in err
    bare = dataclasses.replace(polyak.data.load(data), log_prob=None)
    polyak.data.save(bare, workdir / "bare.npz")
    code, out, err = command("evaluate run --data bare.npz --method wis")
    assert code == 2 and "needs the probabilities with which the data's actions were chosen" in err
    arrays = {"observations": np.zeros((4, 2)), "actions": np.zeros(4, int), "rewards": np.ones(4), "terminations": np.ones(4)}
    np.savez(workdir / "other.npz", **arrays)
    code, out, err = command("evaluate run --data=other.npz")
    assert (code, out) == (2, "") and "observations" in err


def test_box_actions_are_for_fqe_alone(command):
    assert command(f"train ppo jax/Pendulum-v1 --run-dir box --env-steps 64 {SETTINGS}")[0] == 0
    for method in ("is", "wis", "dr"):
        code, out, err = command(f"evaluate box --data none.npz --method {method}")
        assert (code, out) == (2, "") and f"--method {method} is not for actions of Box" in err and "use --method fqe" in err


def test_help_shows_the_flags(command):
    code, out, err = command("evaluate run --data DATA --help")
    assert (code, err) == (0, "") and all(flag in out for flag in ("--method", "--gamma", "--gradient-steps"))
    assert "With --data DATA its value is estimated" in " ".join(command("evaluate --help")[1].split())

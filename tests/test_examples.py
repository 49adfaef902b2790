"""The examples as a person runs them; those that need not learn train for fewer steps."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.code_to_read import code_lines

from tests.run_page import shorten

EXAMPLES = Path(__file__).parent.parent / "examples"


# Lines of code of the examples in Stable-Baselines3's documentation of which these are ports.
LINES_THERE = {
    "save_and_load.py": 15,
    "processes.py": 24,
    "dict_observations.py": 5,
    "best_model.py": 45,
    "normalization.py": 19,
    "feature_extractor.py": 28,
    "schedules.py": 9,
}
PRINTS = {
    "save_and_load.py": r"the loaded policy.s return: \d+",
    "processes.py": r"Result\(ppo CartPole-v1: \d+ of 320",
    "dict_observations.py": r"Result\(ppo <lambda>: [\d,]+ of 320",
    "best_model.py": r"env_steps: Evaluation\(.*\n(.*\n)*best action for a pole that leans to the right: [01]",
    "normalization.py": r"torque of the loaded policy: \[-?\d.*\]\nEvaluation\(-",
    "feature_extractor.py": r"Result\(ppo ALE/Breakout-v5: [\d,]+ of 128",
    "schedules.py": r"Result\(ppo CartPole-v1: [\d,]+ of 320",
}


def output(path, **environment):
    # Not the eight devices of the tests.
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"} | environment
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, timeout=250, env=env)
    assert done.stderr == ""
    return done.stdout


def output_of_shortened(name, directory, **environment):
    program = shorten((EXAMPLES / name).read_text())
    (directory / name).write_text(program)
    return output(directory / name, **environment)


def test_every_example_is_tested_here():
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES_THERE)
def test_a_port_of_stable_baselines3s_example_runs_and_is_no_longer(name, tmp_path):
    if name == "feature_extractor.py":
        pytest.importorskip("ale_py")
    assert len(code_lines(EXAMPLES / name)) <= LINES_THERE[name]
    # Convolutions are slow without the optimizing compiler.
    environment = {"XLA_FLAGS": ""} if name == "feature_extractor.py" else {}
    assert re.search(PRINTS[name], output_of_shortened(name, tmp_path, **environment))


@pytest.mark.slow
def test_an_environment_of_your_own_is_learned():
    assert "one episode: 8 9 10" in output(EXAMPLES / "own_environment.py")


@pytest.mark.slow
def test_a_network_of_your_own_learns():
    mean_return = re.search(r"greedy return (-?\d+)", output(EXAMPLES / "own_network.py", XLA_FLAGS=""))
    assert float(mean_return[1]) > -600


@pytest.mark.slow
def test_a_foreign_policy_plans_in_both_loops():
    lines = output(EXAMPLES / "foreign_policy.py").splitlines()
    returns = [float(line.split("mean return ")[1].split(",")[0]) for line in lines]
    # Random torques: about -1200.
    assert len(returns) == 2 and min(returns) > -600


@pytest.mark.slow
def test_several_seeds_are_trained_at_once(capsys):
    spec = importlib.util.spec_from_file_location("compiled_seeds", EXAMPLES / "compiled_seeds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(env_steps=2_048, seeds=2).shape == (2,)
    assert "greedy returns" in capsys.readouterr().out

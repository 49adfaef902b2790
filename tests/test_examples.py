"""The examples as a person runs them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def output(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=True, timeout=200)
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_tested_here():
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, path.name


def test_an_environment_of_your_own_is_learned():
    assert "one episode: 8 9 10" in output("own_environment.py")


def test_a_network_of_your_own_learns():
    _, _, mean_return, *_ = output("own_network.py").split()
    assert float(mean_return) > -600


def test_a_foreign_policy_plans_in_both_loops():
    lines = output("foreign_policy.py").splitlines()
    returns = [float(line.split("mean return ")[1].split(",")[0]) for line in lines]
    # Random torques: about -1200.
    assert len(returns) == 2 and min(returns) > -600


def test_several_seeds_are_trained_at_once(capsys):
    spec = importlib.util.spec_from_file_location("compiled_seeds", EXAMPLES / "compiled_seeds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(env_steps=2_048, seeds=2).shape == (2,)
    assert "greedy returns" in capsys.readouterr().out

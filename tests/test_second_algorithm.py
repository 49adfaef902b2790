"""An agent from outside of the package goes all the way through the command line."""

from pathlib import Path

import numpy as np
import pytest

import polyak
from polyak.agents import AGENTS
from polyak.cli import main
from polyak.runs import read_config
from polyak.storage.run_directory import open_run
from polyak.train.devices import choose_threads
from tests.cli.processes import last_checkpoint
from tests.reinforce import Reinforce

TRAIN = "--num-envs 2 --step-size 0.1 --eval-episodes 2 --report-every 64 --checkpoint-every 64"


def polyak_command(text):
    return main(text.split())


def config_of(run):
    return read_config(open_run(Path(run)))


@pytest.fixture(autouse=True)
def _registered(monkeypatch, tmp_path):
    monkeypatch.setitem(AGENTS, "monte_carlo", "tests.reinforce:Reinforce")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("env", ["CartPole-v1", "jax/CartPole-v1"])
def test_a_registered_agent_trains_resumes_to_the_bit_evaluates_and_exports(env, capsys):
    assert polyak_command(f"train monte_carlo {env} --run-dir whole --env-steps 256 {TRAIN}") == 0
    assert "monte_carlo" in capsys.readouterr().out
    config = config_of("whole")
    assert config.algorithm == "monte_carlo" and isinstance(config.agent, Reinforce)
    assert config.agent.step_size == 0.1 and config.agent.network == polyak.MLP(
        (5,), activation="relu", head=polyak.PolicyAndValue()
    )
    assert "train/loss" in Path("whole/metrics.jsonl").read_text()

    assert polyak_command(f"train monte_carlo {env} --run-dir parts --env-steps 128 {TRAIN}") == 0
    assert polyak_command("resume parts --env-steps 256 --eval-episodes 0") == 0
    assert last_checkpoint("parts") == last_checkpoint("whole")

    assert polyak_command("evaluate whole --episodes 3") == 0
    assert "greedy return" in capsys.readouterr().out
    obs = np.linspace(-0.1, 0.1, 12, dtype=np.float32).reshape(3, 4)
    actions = np.asarray(polyak.load_policy("whole").predict(obs)[0])
    for kind, name in (("numpy", "policy.npz"), ("stablehlo", "policy.stablehlo")):
        assert polyak_command(f"export whole --format {kind}") == 0
        np.testing.assert_array_equal(np.asarray(polyak.load_policy(f"whole/{name}").predict(obs)[0]), actions)


def test_flags_are_the_agents_fields_and_network_flags_change_its_default(capsys):
    with pytest.raises(SystemExit):
        polyak_command("train monte_carlo CartPole-v1 --help")
    text = capsys.readouterr().out
    assert "--step-size" in text and "step size of gradient ascent" in text and "--clip-range" not in text
    words = "--run-dir run --env-steps 32 --eval-episodes 0 --num-envs 2 --activation tanh"
    assert polyak_command(f"train monte_carlo CartPole-v1 {words}") == 0
    assert config_of("run").agent.network == polyak.MLP((5,), activation="tanh", head=polyak.PolicyAndValue())


def test_a_registered_agent_is_listed(capsys):
    assert polyak_command("list") == 0
    entries = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert entries["monte_carlo"] == "REINFORCE with a running baseline."


def test_settings_and_environments_are_checked_by_the_agent(capsys):
    assert polyak_command("train monte_carlo CartPole-v1 --step-size 0") == 2
    assert "Reinforce: step_size" in capsys.readouterr().err
    assert polyak_command("train monte_carlo CartPole-v1 --num-envs 65 --env-steps 1040") == 2
    assert "Reinforce: num_envs=65 must be at most 64" in capsys.readouterr().err


def test_threads_are_asked_of_the_agent(monkeypatch):
    monkeypatch.setattr("polyak.train.devices.is_jax_started", lambda: False)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    spec = polyak.envs.make("jax/CartPole-v1").spec
    assert choose_threads(Reinforce(spec), 1, 8) == 1


def test_a_run_of_an_agent_that_is_not_registered_is_rejected(monkeypatch, capsys):
    assert polyak_command("train monte_carlo CartPole-v1 --run-dir run --num-envs 2 --env-steps 64 --eval-episodes 0") == 0
    monkeypatch.delitem(AGENTS, "monte_carlo")
    assert polyak_command("evaluate run") == 2
    said = capsys.readouterr().err
    assert "unknown class name 'Reinforce'" in said
    assert "pass a user-defined agent again as agent= (--agent in a shell)" in " ".join(said.split())

"""The flags of random network distillation: each setting is one, agents that take it, and what is rejected."""

import dataclasses

import pytest

import polyak
from polyak import envs
from polyak.agents import AGENTS, action_scaling_of
from polyak.cli.flags import UsageError
from polyak.cli.intrinsic_flags import add_intrinsic_reward, intrinsic_flags, intrinsic_flags_in_help
from polyak.cli.new_run import run_directory
from polyak.cli.train import _parse
from polyak.presets.preset import LinearOverTraining
from polyak.runs import algorithm_name, read_config
from polyak.storage.run_directory import open_run
from polyak.train.new_training import make_agent
from tests.cli.processes import SETTINGS

CARTPOLE = envs.make("jax/CartPole-v1").spec
MODULE = """
from polyak.core.struct import struct
import polyak


@struct
class Mine(polyak.PPO):
    pass


def make_agent(spec):
    return polyak.RND(Mine(spec, num_steps=16))
"""
OBJECTS = {"agent", "network", "value", "optimizer"}


def test_every_setting_of_rnd_but_its_objects_is_a_flag_with_its_default():
    settings = {f"rnd_{field.name}": field.default for field in dataclasses.fields(polyak.RND) if field.name not in OBJECTS}
    flags = {field.name: field.default for field in dataclasses.fields(intrinsic_flags())}
    assert flags == settings | {"intrinsic_reward": None}


def test_flags_and_preset_files_set_the_settings_that_are_passed(tmp_path):
    file = tmp_path / "best.toml"
    file.write_text("intrinsic_reward = 'rnd'\nrnd_coefficient = 0.25\nrnd_num_epochs = 2\n")
    words = ["--preset", str(file), "--rnd-num-epochs", "3", "--rnd-learning-rate", "linear:0.01", "--gamma", "0.9"]
    flags, _, given = _parse("ppo", None, "jax/CartPole-v1", words)
    assert flags.algorithm.gamma == 0.9 and flags.intrinsic.rnd_learning_rate == LinearOverTraining(0.01)
    agent = polyak.PPO(CARTPOLE)
    wanted = polyak.RND(agent, coefficient=0.25, num_epochs=3, learning_rate=polyak.Linear(0.01, 0.0, 500))
    assert add_intrinsic_reward(agent, given, 500) == wanted
    _, _, alone = _parse("ppo", None, "jax/CartPole-v1", ["--intrinsic-reward", "rnd"])
    assert add_intrinsic_reward(agent, alone, 500) == polyak.RND(agent)
    _, _, none = _parse("ppo", None, "jax/CartPole-v1", ["--preset", str(file), "--intrinsic-reward", "None"])
    file.write_text("rnd_num_epochs = 4\n")
    _, _, default = _parse("ppo", None, "jax/CartPole-v1", ["--preset", str(file)])
    with pytest.raises(UsageError, match="--rnd-num-epochs needs --intrinsic-reward rnd"):
        add_intrinsic_reward(agent, default, 500)
    with pytest.raises(UsageError, match="--rnd-coefficient needs --intrinsic-reward rnd"):
        add_intrinsic_reward(agent, none, 500)


@pytest.mark.parametrize("algorithm", [*AGENTS, None])
def test_help_shows_the_flags_to_the_algorithms_that_take_them(algorithm):
    own = dataclasses.fields(intrinsic_flags_in_help(algorithm))
    is_hidden = all("Suppress" in str(field.type) for field in own)
    # A3C is A2C whose workers send gradients; None is an agent of --agent.
    if algorithm in ("a3c", None):
        assert is_hidden
        return
    scaling = action_scaling_of(algorithm)
    spec = envs.make("jax/Pendulum-v1", action_scaling=scaling).spec if scaling == "rescale" else CARTPOLE
    agent = make_agent(algorithm, spec, None, 100, None)
    flags = {"intrinsic_reward": "rnd"}
    if is_hidden:
        with pytest.raises(
            TypeError, match=f"RND: agent must learn from rollouts, such as PPO or A2C, got {type(agent).__name__}"
        ):
            add_intrinsic_reward(agent, flags, 100)
    else:
        assert add_intrinsic_reward(agent, flags, 100).agent is agent


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppo CartPole-v1 --rnd-coefficient 0.5", "--rnd-coefficient needs --intrinsic-reward rnd"),
        ("dqn CartPole-v1 --intrinsic-reward rnd", "RND: agent must learn from rollouts, such as PPO or A2C, got DQN"),
        ("ppo CartPole-v1 --intrinsic-reward rnd --rnd-coefficient -1", "RND: coefficient must be"),
        ("ppo CartPole-v1 --intrinsic-reward rnd --rnd-num-minibatches 7", "RND: num_minibatches=7 must divide"),
        ("ppo CartPole-v1 --intrinsic-reward icm", "--intrinsic-reward must be one of"),
        ("a2c CartPole-v1 --intrinsic-reward rnd --capacity 9", "--capacity: a2c has no replay"),
        ("a3c CartPole-v1 --intrinsic-reward rnd --workers 2", "RND sends no gradients; use A2C or IMPALA"),
        ("ppo CartPole-v1 --intrinsic-reward rnd --coefficient 0.3", "rnd_dqn has it, or --rnd-coefficient"),
        ("--agent none:Agent CartPole-v1 --intrinsic-reward rnd", "--intrinsic-reward must be left out with --agent"),
    ],
)
def test_wrong_flags_are_rejected_before_a_run_begins(words, message, command, workdir):
    code, _, err = command(f"train {words}")
    assert code == 2 and message in " ".join(err.split()), err
    assert not list(workdir.iterdir())


def test_the_name_of_a_run_tells_the_agent_inside():
    name = algorithm_name(polyak.RND(polyak.A2C(CARTPOLE)))
    assert name == "rnd(a2c)"
    assert run_directory(name, "jax/CartPole-v1", seed=0).name.startswith("rnd-a2c-jax-CartPole-v1-0-")


@pytest.mark.slow
def test_the_function_of_an_agent_may_return_rnd_around_it(command, workdir, monkeypatch):
    (workdir / "mine_of_rnd.py").write_text(MODULE)
    monkeypatch.syspath_prepend(workdir)
    agent = "--agent mine_of_rnd:make_agent"
    flags = "--env-steps 32 --num-envs 2 --eval-episodes 0 --run-dir mine"
    for words in (
        f"train {agent} jax/CartPole-v1 {flags}",
        f"resume mine {agent} --env-steps 64",
        f"evaluate mine {agent} --episodes 2",
    ):
        code, _, err = command(words)
        assert code == 0, err


@pytest.mark.slow
def test_runs_of_several_seeds_have_the_agent_with_flags_for_both_and_resume(command, workdir):
    settings = SETTINGS.replace("--eval-episodes 2", "--eval-episodes 0")
    flags = "--intrinsic-reward rnd --rnd-num-minibatches 1 --rnd-num-epochs 1 --gamma 0.9 --seeds 2"
    code, _, err = command(f"train ppo jax/CartPole-v1 {settings} {flags} --env-steps 64 --run-dir several")
    assert code == 0, err
    first, second = sorted((workdir / "several").glob("seed-*"))
    configs = [read_config(open_run(run)) for run in (first, second)]
    agent = configs[0].agent
    assert [config.algorithm for config in configs] == ["rnd(ppo)", "rnd(ppo)"] and configs[0].agent == configs[1].agent
    assert (agent.num_epochs, agent.agent.num_epochs, agent.agent.gamma, agent.agent.network.hidden) == (1, 1, 0.9, (4,))
    code, _, err = command("resume", first, "--rnd-coefficient 1")
    assert code == 2 and "--rnd-coefficient is the run's" in err
    code, _, err = command("resume", first, "--env-steps 96")
    assert code == 0, err

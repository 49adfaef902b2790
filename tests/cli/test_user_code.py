"""Agents, environments and wrappers of a person's own, named on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import polyak
from polyak.cli.user_flags import UserFlags, resume_flags
from polyak.runs import read_config
from polyak.storage.checkpoint import steps
from polyak.storage.run_directory import open_run
from tests.cli.processes import SETTINGS, last_checkpoint

MODULE = """
import dataclasses

import gymnasium
import jax.numpy as jnp
from flax import nnx

import polyak
from polyak.core.spaces import Box, Discrete


class Scaled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2.0 * reward


def make_pole(length=20):
    return gymnasium.make("CartPole-v1", max_episode_steps=length)


@dataclasses.dataclass(frozen=True)
class Count:
    # An environment in JAX that ends after `length` steps.
    length: int = 20
    spec = polyak.EnvSpec(Box(0.0, 100.0, (1,)), Discrete(2))

    def reset(self, key, num_envs):
        return jnp.zeros(num_envs)

    def step(self, state, action, key):
        return state + 1, jnp.ones_like(state), state + 1 >= self.length, jnp.zeros_like(state, bool)

    def observe(self, state):
        return state[:, None]

    def render(self, state):
        import numpy as np

        return np.full((8, 8, 3), int(state), np.uint8)


def make_count():
    return Count()


class Net(nnx.Module):
    def __init__(self, spec, rngs):
        self.policy = nnx.Linear(spec.obs.shape[0], spec.action.n, rngs=rngs)
        self.value = nnx.Linear(spec.obs.shape[0], 1, rngs=rngs)

    def __call__(self, obs):
        return self.policy(obs), self.value(obs)[..., 0]


def make_agent(spec):
    return polyak.PPO(spec, network=polyak.FlaxNNX(Net), num_steps=8, num_epochs=1, num_minibatches=1)


def make_impatient(spec):
    return dataclasses.replace(make_agent(spec), gamma=0.5)


def make_wrong(spec):
    return polyak.PPO(spec, num_steps="8")


def make_number(spec):
    return 3


NUMBER = 3
"""
OWN = "--agent mine_of_me:make_agent --env mine_of_me:make_pole"
SHORT = "--num-envs 2 --eval-episodes 2"


@pytest.fixture(autouse=True)
def _module(workdir, monkeypatch):
    """`mine_of_me.py` in the working directory, which is found there."""
    (workdir / "mine_of_me.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "mine_of_me", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])


@pytest.mark.slow
def test_an_own_agent_and_environment_train_resume_evaluate_and_export(command):
    assert command(f"train {OWN} --run-dir whole --env-steps 200", SHORT)[0] == 0
    code, out, err = command(f"train {OWN} --run-dir parts --env-steps 100", SHORT)
    assert code == 0, err
    assert "ppo mine_of_me:make_pole: compiling" in out
    for words in (
        "resume parts --env-steps 200 --eval-episodes 2",
        "evaluate parts --episodes 2",
        "export parts --format numpy",
        "pack parts -o own.zip",
    ):
        code, _, err = command(words)
        assert (code, "pass it again as agent= (--agent in a shell)" in err) == (2, True), err
    code, _, err = command("resume parts --env-steps 200 --agent mine_of_me:make_agent")
    message = "was trained in mine_of_me:make_pole with --env mine_of_me:make_pole, which a run does not store; give --env mine"
    assert code == 2 and message in err, err
    code, _, err = command(f"resume parts --env-steps 200 --eval-episodes 2 {OWN}")
    assert code == 0, err
    assert last_checkpoint("parts") == last_checkpoint("whole")
    code, out, err = command(f"evaluate parts --episodes 3 {OWN}")
    assert code == 0 and "over 3 episodes (mean length" in out, err
    assert command(f"export parts --format stablehlo {OWN}")[0] == 0
    code, out, err = command(f"pack parts -o own.zip {OWN}")
    assert code == 0 and "polyak.load_policy('own.zip', agent=agent)" in out, err
    code, out, err = command(f"evaluate own.zip --episodes 3 {OWN}")
    assert code == 0 and "over 3 episodes (mean length" in out, err
    code, _, err = command("export parts --format numpy --agent mine_of_me:make_wrong --env mine_of_me:make_pole")
    assert code == 2 and "error: PPO: num_steps must be an integer" in err, err


@pytest.mark.slow
def test_an_own_agent_with_other_settings_resumes_by_force_only(command):
    words = "--num-envs 2 --eval-episodes 0 --env-steps 16"
    assert command("train --agent mine_of_me:make_agent CartPole-v1 --run-dir run", words)[0] == 0
    before = Path("run/config.json").read_text()
    words = "resume run --env-steps 32 --eval-episodes 0 --agent mine_of_me:make_impatient"
    code, _, err = command(words)
    message = f"agent must have the settings of {Path('run').absolute()}, got gamma=0.5 (the run has 0.99); --force accepts"
    assert code == 2 and message in err, err
    assert Path("run/config.json").read_text() == before
    code, _, err = command(words, "--force")
    assert code == 0, err
    assert open_run("run").read_config()["agent"]["gamma"] == 0.5


def test_a_failure_prints_the_flags_that_resume_needs(command, monkeypatch, workdir):
    def fail(*_):
        raise RuntimeError("of the test")

    monkeypatch.setattr("polyak.cli.training_run.train_run", fail)
    words = "--env mine_of_me:make_pole --env-kwargs length=5"
    code, out, _ = command(f"train ppo {words} --run-dir own", SETTINGS)
    assert (code, out.splitlines()[-1].partition(" with: ")[2]) == (1, f"polyak resume {workdir / 'own'} {words}")
    _, out, _ = command("train ppo CartPole-v1 --run-dir run", SETTINGS)
    assert out.splitlines()[-1].endswith(f" with: polyak resume {workdir / 'run'}")
    _, out, _ = command("train ppo gymnasium:CartPole-v1 --run-dir named", SETTINGS)
    assert out.splitlines()[-1].endswith(f" with: polyak resume {workdir / 'named'} --import gymnasium")
    words = "gymnasium:CartPole-v1 --wrapper mine_of_me:Scaled"
    _, out, _ = command(f"train ppo {words} --run-dir wrapped", SETTINGS)
    assert out.splitlines()[-1].endswith(f"{workdir / 'wrapped'} --wrapper mine_of_me:Scaled --import gymnasium")


def test_a_wrapper_is_named_again_too(command):
    assert command("train ppo CartPole-v1 --wrapper mine_of_me:Scaled --run-dir run --env-steps 64", SETTINGS)[0] == 0
    code, _, err = command("evaluate run --episodes 2")
    message = "was trained in CartPole-v1 with --wrapper mine_of_me:Scaled, which a run does not store; give --wrapper mine"
    assert code == 2 and message in err, err
    code, out, err = command("evaluate run --episodes 2 --wrapper mine_of_me:Scaled")
    assert code == 0, err
    greedy, length = float(out.split("greedy return ")[1].split()[0]), float(out.split("mean length ")[1].rstrip(")\n"))
    assert greedy == pytest.approx(2 * length)


def test_texts_for_the_environment_are_never_taken_from_a_file(command):
    words = "train ppo CartPole-v1 --run-dir run --env-steps 64 --env-kwargs render_mode=rgb_array"
    code, _, err = command(words, SETTINGS)
    assert code == 0, err
    assert "rgb_array" not in Path("run/config.json").read_text()
    code, _, err = command("resume run --env-steps 128 --eval-episodes 2")
    message = "with --env-kwargs render_mode=..., which a run does not store; give --env-kwargs render_mode=... again"
    assert code == 2 and message in err, err
    code, _, err = command("resume run --env-steps 128 --eval-episodes 2 --env-kwargs render_mode=rgb_array")
    assert code == 0, err


def test_a_missing_or_another_flag_of_the_environment_is_an_error_that_names_it(command):
    words = "train ppo --env mine_of_me:make_pole --wrapper mine_of_me:Scaled --env-kwargs length=7 --run-dir run"
    assert command(words, SETTINGS, "--env-steps 64")[0] == 0
    for given, missing in (
        ("", "--env mine_of_me:make_pole --wrapper mine_of_me:Scaled"),
        ("--env mine_of_me:make_pole", "--wrapper mine_of_me:Scaled"),
        ("--wrapper mine_of_me:Scaled", "--env mine_of_me:make_pole"),
        ("--env-kwargs length=7", "--env mine_of_me:make_pole --wrapper mine_of_me:Scaled"),
    ):
        for subcommand in ("evaluate run", "resume run --env-steps 128"):
            code, _, err = command(f"{subcommand} {given}")
            assert code == 2 and err.rstrip().endswith(f"give {missing} again"), err
    code, _, err = command("evaluate run --env mine_of_me:make_other --wrapper mine_of_me:Scaled")
    message = "was trained with --env mine_of_me:make_pole, got --env mine_of_me:make_other; give the same"
    assert code == 2 and message in err, err


@pytest.mark.slow
def test_a_run_is_not_resumed_in_another_environment_than_its_own(command):
    assert command("train ppo CartPole-v1 --run-dir run --env-steps 100", SHORT)[0] == 0
    code, _, err = command("resume run --env-steps 200 --wrapper mine_of_me:Scaled")
    assert code == 2 and "run: was not trained with --wrapper mine_of_me:Scaled; leave it out" in err, err


def test_settings_of_an_own_environment_are_those_of_the_training(command):
    words = "train ppo --env mine_of_me:make_pole --env-kwargs length=7 --run-dir run --env-steps 64"
    assert command(words, SETTINGS)[0] == 0
    for given, length in (("", 7), ("--env-kwargs length=5", 5)):
        code, out, err = command(f"evaluate run --episodes 2 --env mine_of_me:make_pole {given}")
        assert code == 0 and f"mean length {length}.0" in out, err
    code, _, err = command("resume run --env-steps 128 --eval-episodes 2 --env mine_of_me:make_pole")
    assert code == 0, err
    assert open_run("run").read_summary()["eval_mean_length"] == 7


@pytest.mark.slow
def test_an_own_environment_in_jax_trains_resumes_evaluates_and_is_filmed(command):
    words = "train ppo --env mine_of_me:Count --env-kwargs length=7"
    code, out, err = command(f"{words} --run-dir whole --env-steps 128", SETTINGS)
    assert code == 0 and "greedy return 7.0 ± 0.0 over 2 episodes" in out, err
    assert command(f"{words} --run-dir run --env-steps 64", SETTINGS)[0] == 0
    assert open_run("run").read_config()["loop"] == "compiled"
    code, _, err = command("evaluate run --episodes 2")
    assert code == 2 and err.rstrip().endswith("give --env mine_of_me:Count again"), err
    for given, length in (("", 7), ("--env-kwargs length=5", 5)):
        code, out, err = command(f"evaluate run --episodes 3 --env mine_of_me:Count {given}")
        assert code == 0 and f"mean length {length}.0" in out, err
    code, out, err = command("video run --env mine_of_me:Count -o run.gif")
    assert code == 0 and "1 episode, return 7.0" in out, err
    code, _, err = command("resume run --env-steps 128 --env mine_of_me:Count")
    assert code == 0, err
    assert last_checkpoint("run") == last_checkpoint("whole")
    result = polyak.resume("whole", env=sys.modules["mine_of_me"].Count, env_steps=192, progress=False)
    assert set(result.evaluation.lengths.tolist()) == {7}


@pytest.mark.slow
@pytest.mark.parametrize("env", ["make_pole --loop host", "Count"])
def test_a_module_that_starts_jax_trains_and_resumes_on_two_devices(env, workdir):
    (workdir / "starting.py").write_text(MODULE + "\nHALF = jnp.float32(1.0) / 2\n")
    small = "--num-steps 8 --num-envs 2 --num-epochs 1 --num-minibatches 1 --hidden 4 --eval-episodes 2"
    words = f"train ppo --env starting:{env} --run-dir run --env-steps 64 --devices 2 {small}"
    for arguments in (words, f"resume run --env-steps 96 --env starting:{env.split()[0]}"):
        process = subprocess.run(
            [sys.executable, "-m", "polyak", *arguments.split()], capture_output=True, text=True, timeout=300, check=False
        )
        assert process.returncode == 0, process.stderr
    assert open_run("run").read_config()["devices"] == 2


@pytest.mark.slow
def test_seeds_train_in_parallel_in_an_own_environment_in_jax(command):
    words = "train ppo --env mine_of_me:Count --env-kwargs length=7 --run-dir runs --seeds 2 --env-steps 64"
    code, out, err = command(words, SETTINGS)
    assert code == 0 and "return over 2 seeds: mean 7.0" in out, err


def test_runs_that_do_not_store_their_flags_can_be_evaluated(command):
    assert command(f"train {OWN} --run-dir run --env-steps 64", SHORT)[0] == 0
    path = Path("run/config.json")
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("user_flags", "sha256")}
    path.write_text(json.dumps(config | {"env_kwargs": {}}))
    code, _, err = command("evaluate run --episodes 2 --agent mine_of_me:make_agent")
    assert code == 2 and "with --env, --wrapper or a text in --env-kwargs, which a run does not store; give them again" in err
    code, _, err = command(f"evaluate run --episodes 2 {OWN}")
    assert code == 0, err


def test_own_environments_take_settings(command):
    code, out, err = command(
        "train ppo --env mine_of_me:make_pole --env-kwargs length=5 --run-dir run --env-steps 64", SETTINGS
    )
    assert code == 0 and "± 0.0 over 2 episodes" in out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --agent mine_of_me:make_agent", "an environment is missing"),
        ("train --env mine_of_me:make_pole", "an algorithm is missing"),
        ("train ppo --env mine_of_me:nothing", "--env mine_of_me:nothing: the module mine_of_me has no 'nothing'"),
        ("train ppo --env mine_of_me:NUMBER", "--env mine_of_me:NUMBER: must be a function or a class, got 3"),
        ("train ppo --env yours_of_you:make", "is it in this directory or on PYTHONPATH?"),
        ("train --agent mine_of_me:make_number CartPole-v1", "must be a function of an EnvSpec that returns an agent, got 3"),
        ("train ppo CartPole-v1 --env mine_of_me:make_pole", "takes the place of ENV; got ppo CartPole-v1 too"),
        ("train ppo jax/CartPole-v1 --wrapper mine_of_me:Scaled", "wraps Gymnasium's environments, got jax/CartPole-v1 in JAX"),
        (
            "train ppo ALE/Pong-v5 --wrapper mine_of_me:Scaled",
            "ALE/Pong-v5 plays all games in one vector environment",
        ),
        (
            "train ppo --env mine_of_me:Count --wrapper mine_of_me:Scaled",
            "wraps Gymnasium's environments, got mine_of_me:Count in JAX",
        ),
        ("train ppo --env mine_of_me:make_count", "got Count; pass the environment in JAX or its class, not a function"),
        ("train a3c --env mine_of_me:Count --workers 2", "whose workers step no JAX environment"),
        ("train ppo --env mine_of_me:make_pole --loop compiled", "mine_of_me:make_pole steps on the host"),
        ("train ppo brax/ant --wrapper mine_of_me:Scaled", "wraps Gymnasium's environments, got brax/ant"),
        ("train ppo jumanji/Snake-v1 --wrapper mine_of_me:Scaled", "wraps Gymnasium's environments, got jumanji/Snake-v1"),
        ("train --agent mine_of_me:make_agent CartPole-v1 --gamma 0.5", "--gamma"),
    ],
)
def test_usage_errors_name_the_flag(words, message, command):
    code, _, err = command(words)
    assert code == 2 and message in err, err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("gru", "GRU"), ("mlp", "MLP")])
def test_the_network_is_named(kind, name, command):
    words = "--num-envs 2 --num-steps 8 --num-epochs 1 --num-minibatches 1 --eval-episodes 0 --env-steps 16"
    code, _, err = command(f"train ppo jax/CartPole-v1 --run-dir run --network {kind}", words)
    assert code == 0, err
    assert type(read_config(open_run("run")).agent.network).__name__ == name


def test_evaluation_while_training_keeps_the_best(command):
    code, out, err = command("train ppo jax/CartPole-v1 --run-dir run --env-steps 200 --eval-every 50", SETTINGS)
    assert code == 0, err
    rows = {row["env_steps"]: row["eval/mean_reward"] for row in open_run("run").read_metrics() if "eval/mean_reward" in row}
    (best,) = steps(Path("run/best"))
    assert len(rows) == 4 and rows[best] == max(rows.values())
    code, out, _ = command("evaluate run/best --episodes 2")
    assert code == 0 and f"at {best:,} env_steps" in out


def test_the_command_that_resumes_names_the_ray_cluster(command, workdir):
    flags = UserFlags(env="my:make")
    assert resume_flags(flags, "host:6379") == "--env my:make --ray-address host:6379"
    assert resume_flags(UserFlags(), "auto") == "--ray-address auto" and resume_flags(UserFlags(), None) == ""


def test_a_ray_address_that_nothing_answers_at_leaves_no_run(command, workdir):
    code, _, err = command("train ppo CartPole-v1 --num-envs 4 --workers 2 --run-dir run --ray-address 127.0.0.1:1")
    assert code == 2 and err.startswith("error: train: nothing answers at the Ray address") and "Traceback" not in err
    assert not (workdir / "run").exists()

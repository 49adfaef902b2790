"""A user's week, outside of the repository: an environment and a network of one's own, from Python and from the shell."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyak

MINE = """
import gymnasium
import numpy as np
from flax import nnx

import polyak


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, self.steps = int(self.np_random.integers(10)), 0
        return np.array([self.cell], np.float32), {}

    def step(self, action):
        self.cell, self.steps = max(self.cell + (1 if action == 1 else -1), 0), self.steps + 1
        obs, is_out = np.array([self.cell], np.float32), self.cell == 10
        return obs, -1.0, is_out, self.steps >= 30, {"is_success": is_out}

    def get_state(self):
        return {"cell": self.cell, "steps": self.steps, "random": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.cell, self.steps = state["cell"], state["steps"]
        self.np_random.bit_generator.state = state["random"]


class Net(nnx.Module):
    def __init__(self, spec, rngs):
        self.policy = nnx.Linear(spec.obs.shape[0], spec.action.n, rngs=rngs)
        self.value = nnx.Linear(spec.obs.shape[0], 1, rngs=rngs)

    def __call__(self, obs):
        return self.policy(obs), self.value(obs)[..., 0]


def make_agent(spec):
    return polyak.PPO(spec, network=polyak.FlaxNNX(Net), num_steps=8, num_epochs=1, num_minibatches=1)


def make_env():
    return polyak.envs.make(Corridor, num_envs=2)
"""

MONDAY = """
import mine, os, polyak, signal

env = mine.make_env()
agent = mine.make_agent(env.spec)
options = {"env_steps": 600, "seed": 1, "eval_every": 100, "eval_episodes": 4}
whole = polyak.train.run(agent, env, **options, run_dir="whole")
assert whole.stopped is None and "eval/success_rate" in whole.metrics

sent = []

def ctrl_c(progress, metrics, state):
    if progress.env_steps >= 300 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))

half = polyak.train.run(agent, env, **options, run_dir="mine_run", callbacks=[ctrl_c])
assert half.stopped == "interrupt" and half.progress.env_steps < 400
print(half)
"""

TUESDAY = """
import jax, mine, numpy as np, polyak

try:
    polyak.resume("mine_run")
except polyak.storage.config.ConfigError as error:
    assert "agent=" in str(error), error
env = mine.make_env()
agent = mine.make_agent(env.spec)
try:
    polyak.resume("mine_run", agent=agent)
except ValueError as error:
    assert "env=" in str(error), error
result = polyak.resume("mine_run", agent=agent, env=env)
whole = polyak.load_policy("whole", agent=agent)
for kept, resumed in zip(jax.tree.leaves(whole), jax.tree.leaves(result.policy), strict=True):
    np.testing.assert_array_equal(kept, resumed)
assert len(result.evaluate(5).returns) == 5
best = polyak.load_policy("mine_run/best", agent=agent)
assert best.predict([3.0])[0] in (0, 1)
for name in FORMATS:
    result.export("policy" + name)
np.save("actions", result.policy.predict(np.arange(10, dtype=np.float32)[:, None])[0])
"""

WEDNESDAY = """
import numpy as np, polyak

policy = polyak.load_policy("policy.stablehlo")
np.testing.assert_array_equal(policy.predict(np.arange(10, dtype=np.float32)[:, None])[0], np.load("actions.npy"))
"""

SHELL = """
train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 300 --eval-every 100 --run-dir shell
resume shell --agent mine:make_agent --env mine:Corridor --env-steps 400 --eval-episodes 4
evaluate shell --agent mine:make_agent --env mine:Corridor --episodes 5
evaluate shell/best --agent mine:make_agent --env mine:Corridor --episodes 5
export shell --agent mine:make_agent --env mine:Corridor --format stablehlo
train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 100 --seeds 3 --eval-episodes 4 --run-dir seeds
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    directory = tmp_path_factory.mktemp("week")
    (directory / "mine.py").write_text(MINE)
    return directory


def python(directory, *arguments, timeout=300):
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    environment["PYTHONPATH"] = str(Path(polyak.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_week_in_python(elsewhere):
    out = python(elsewhere, "-c", MONDAY)
    assert "ppo Corridor: compiling …" in out and " of 600 env_steps" in out
    assert "stopped by interrupt at 3" in out and "Result(ppo Corridor: 3" in out
    # The NumPy format is for polyak's own networks; ONNX needs an extra.
    formats = (".stablehlo", ".onnx") if importlib.util.find_spec("onnx") else (".stablehlo",)
    python(elsewhere, "-c", TUESDAY.replace("FORMATS", repr(formats)))
    python(elsewhere, "-c", WEDNESDAY)


def test_a_week_in_the_shell(elsewhere):
    for command in SHELL.strip().splitlines():
        out = python(elsewhere, "-m", "polyak", *command.split())
        if "--seeds" in command:
            assert re.search(r"return over 3 seeds: mean -[\d.]+, IQM -[\d.]+, 95 % interval of the IQM \[", out)
    assert polyak.load_policy(elsewhere / "shell/policy.stablehlo").predict([3.0])[0] in (0, 1)


def test_ctrl_c_in_the_shell_is_continued_by_resume(elsewhere):
    command = "train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 10_000_000 --run-dir stopped"
    environment = {**os.environ, "PYTHONPATH": str(Path(polyak.__file__).parents[1])}
    words = [sys.executable, "-m", "polyak", *command.split()]
    with subprocess.Popen(words, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while "compiled in" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped by Ctrl-C at " in out
    done = polyak.storage.run_directory.open_run(elsewhere / "stopped").read_summary()["env_steps"]
    again = f"resume stopped --agent mine:make_agent --env mine:Corridor --env-steps {done + 16} --eval-episodes 2"
    assert "greedy return" in python(elsewhere, "-m", "polyak", *again.split())

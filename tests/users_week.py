"""A user's week outside of the repository, with an environment and a network of one's own, in Python and in the shell.

`python tests/users_week.py` does it in a temporary directory, with the installed polyak: .ci/run in the core install on each
Python, `test_users_week.py` with all extras. A script asserts what it must show, so each needs nothing but polyak.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

TRAIN_AND_INTERRUPT = """
import mine, os, polyak, signal

env = mine.make_env()
agent = mine.make_agent(env.spec)
options = {"env_steps": 600, "seed": 1, "eval_every": 100, "eval_episodes": 4}
whole = polyak.train.run(agent, env, **options, run_dir="whole")
assert whole.stopped is None and "eval/success_rate" in whole.metrics

# A shell that starts this in the background has it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sent = []

def ctrl_c(progress, metrics, state):
    if progress.env_steps >= 300 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))

half = polyak.train.run(agent, env, **options, run_dir="half", callbacks=[ctrl_c])
assert half.stopped == "interrupt" and half.progress.env_steps < 400
print(half)
"""

RESUME_EVALUATE_EXPORT = """
import importlib.util, jax, mine, numpy as np, polyak

try:
    polyak.resume("half")
except polyak.storage.config.ConfigError as error:
    assert "agent=" in str(error), error
env = mine.make_env()
agent = mine.make_agent(env.spec)
try:
    polyak.resume("half", agent=agent)
except ValueError as error:
    assert "env=" in str(error), error
result = polyak.resume("half", agent=agent, env=env)
whole = polyak.load_policy("whole", agent=agent)
for uninterrupted, resumed in zip(jax.tree.leaves(whole), jax.tree.leaves(result.policy), strict=True):
    np.testing.assert_array_equal(uninterrupted, resumed)
assert len(result.evaluate(5).returns) == 5
best = polyak.load_policy("half/best", agent=agent)
assert best.predict([3.0])[0] in (0, 1)

result.export("own.stablehlo")
has_onnx = importlib.util.find_spec("onnx") is not None
try:
    result.export("own.onnx")
    assert has_onnx
except ImportError as error:
    assert not has_onnx and "polyak[onnx]" in str(error), error
built_in = polyak.train.run("ppo", mine.Corridor, env_steps=512, progress=False)
for name in ("built_in.stablehlo", "built_in.npz", *(["built_in.onnx"] if has_onnx else [])):
    built_in.export(name)
obs = np.arange(10, dtype=np.float32)[:, None]
np.savez("actions", own=result.policy.predict(obs)[0], built_in=built_in.policy.predict(obs)[0])
"""

LOAD_IN_A_FRESH_PROCESS = """
import numpy as np, polyak

actions = np.load("actions.npz")
obs = np.arange(10, dtype=np.float32)[:, None]
for name in ("own.stablehlo", "built_in.stablehlo", "built_in.npz"):
    got = polyak.load_policy(name).predict(obs)[0]
    np.testing.assert_array_equal(got, actions[name.partition(".")[0]], err_msg=name)
"""

COMPARE_SEEDS = """
import mine, polyak

env = mine.make_env()
results = polyak.train.run_seeds(mine.make_agent(env.spec), env, env_steps=300, seeds=3, eval_episodes=5, run_dir="seeds")
returns = [result.evaluation.mean_return for result in results]
assert polyak.train.seed_statistics(returns).count == 3
agent = mine.make_agent(env.spec)
assert polyak.load_policy("seeds/seed-2", agent=agent).predict([3.0])[0] == results[2].policy.predict([3.0])[0]
"""

SHELL = """
train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 300 --eval-every 100 --run-dir shell
resume shell --agent mine:make_agent --env mine:Corridor --env-steps 400 --eval-episodes 4
evaluate shell --agent mine:make_agent --env mine:Corridor --episodes 5
evaluate shell/best --agent mine:make_agent --env mine:Corridor --episodes 5
export shell --agent mine:make_agent --env mine:Corridor --format stablehlo
train --agent mine:make_agent --env mine:Corridor --num-envs 2 --env-steps 100 --seeds 3 --eval-episodes 4 --run-dir shells
"""

INTERVAL = r"return over 3 seeds: mean -[\d.]+, IQM -[\d.]+, 95 % interval of the IQM \["


def run(directory, *arguments):
    """The output of this Python, started anew in the directory; fails if it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def week_in_python(directory):
    """Train with progress, interrupt, resume to the bit, evaluate, keep the best, export, load, compare seeds."""
    (directory / "mine.py").write_text(MINE)
    out = run(directory, "-c", TRAIN_AND_INTERRUPT)
    assert "ppo Corridor: compiling …" in out and " of 600 env_steps" in out, out
    assert "stopped by interrupt at 3" in out and "Result(ppo Corridor: 3" in out, out
    run(directory, "-c", RESUME_EVALUATE_EXPORT)
    run(directory, "-c", LOAD_IN_A_FRESH_PROCESS)
    out = run(directory, "-c", COMPARE_SEEDS)
    assert re.search(INTERVAL, out), out


def week_in_the_shell(directory):
    """The same through the command line."""
    (directory / "mine.py").write_text(MINE)
    for command in SHELL.strip().splitlines():
        out = run(directory, "-m", "polyak", *command.split())
        assert "--seeds" not in command or re.search(INTERVAL, out), out
    load = "import polyak; assert polyak.load_policy('shell/policy.stablehlo').predict([3.0])[0] in (0, 1)"
    run(directory, "-c", load)


if __name__ == "__main__":
    started = time.monotonic()
    # Away from the sources, so that what is installed is what runs.
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, ThreadPoolExecutor() as pool:
        weeks = [pool.submit(week_in_python, Path(one)), pool.submit(week_in_the_shell, Path(other))]
        for week in weeks:
            week.result()
    print(f"a user's week took {time.monotonic() - started:.0f} s")

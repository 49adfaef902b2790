"""`polyak.train.run`, its result and `polyak.resume`: what the command line does, from Python."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
from flax import nnx

import polyak
from polyak.cli import main
from polyak.core.types import Progress
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole
from polyak.envs.source import source_of
from polyak.replay.mixed import MixedReplay
from polyak.runs import read_config
from polyak.storage.checkpoint import steps
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import RunError, open_run
from polyak.train import evaluation
from polyak.train.new_training import prepare
from polyak.train.settings import TrainSettings
from polyak.train.training import resume_command
from tests.cli.processes import SETTINGS, last_checkpoint

SMALL = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": polyak.MLP((4,))}
OBS = np.array([0.01, 0.0, 0.05, 0.0], np.float32)


class Pole(gymnasium.Wrapper):
    """An environment of one's own whose state can be saved."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1").unwrapped)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        obs, reward, terminated, _, _ = super().step(action)
        return obs, reward, terminated, self.steps >= 50, {"is_success": self.steps >= 50}


class Net(nnx.Module):
    """A network of one's own."""

    def __init__(self, spec, rngs):
        self.policy = nnx.Linear(spec.obs.shape[0], spec.action.n, rngs=rngs)
        self.value = nnx.Linear(spec.obs.shape[0], 1, rngs=rngs)

    def __call__(self, obs):
        return self.policy(obs), self.value(obs)[..., 0]


def small(env, **changes):
    return polyak.PPO(spec=env.spec, **SMALL | changes)


def jax_env(num_envs=2):
    return polyak.envs.make("jax/CartPole-v1", num_envs=num_envs)


def train(env, env_steps=64, **options):
    return polyak.train.run(small(env), env, env_steps=env_steps, **options)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(*(jax.random.key_data(v) if is_key(v) else v for v in (x, y)))


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_directory_equals_that_of_the_command_line(directory):
    words = f"train ppo CartPole-v1 --run-dir shell --env-steps 400 --seed 3 {SETTINGS}"
    assert main(words.split()) == 0
    result = polyak.train.run(
        "ppo", "CartPole-v1", env_steps=400, seed=3, num_envs=2, settings=SMALL, run_dir="python", eval_episodes=2
    )
    assert last_checkpoint("python") == last_checkpoint("shell")
    assert {path.name for path in Path("python").iterdir()} == {path.name for path in Path("shell").iterdir()}
    # The command line chooses the number of threads, which Python leaves alone; of small products it changes no bit.
    shell, python = (open_run(name).read_config() | {"threads": None} for name in ("shell", "python"))
    assert shell == python
    shell, python = (open_run(name).read_summary() for name in ("shell", "python"))
    clocks = {"wall_seconds", "train_seconds", "compile_seconds", "fps"}
    assert {k: v for k, v in shell.items() if k not in clocks} == {k: v for k, v in python.items() if k not in clocks}
    assert result.evaluation.mean_return == python["eval_mean_return"]
    assert (python["target_env_steps"], python["env_steps"]) == (400, result.progress.env_steps)


@pytest.mark.slow
def test_nothing_is_written_without_a_run_directory(directory, capsys):
    env = jax_env()
    result = train(env)
    assert list(directory.iterdir()) == []
    assert capsys.readouterr().out.startswith("ppo jax/CartPole-v1: compiling …\n")
    assert result.stopped is None and result.run_dir is None and result.evaluation is None
    assert result.policy.predict(OBS)[0] in (0, 1)


@pytest.mark.parametrize(("env_steps", "is_said"), [(15, True), (16, False)])
def test_a_rollout_that_is_longer_than_the_training_is_said_before(env_steps, is_said, monkeypatch, capsys):
    def loop(*_, **__):
        raise RuntimeError("nothing is trained")

    monkeypatch.setattr("polyak.train.training.compiled", loop)
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    with pytest.raises(RuntimeError, match="nothing is trained"):
        polyak.train.run(polyak.PPO(env.spec, **SMALL), env, env_steps=env_steps)
    said = "trains on one rollout of num_steps * num_envs = 16 steps, not 15"
    assert (said in capsys.readouterr().out) == is_said


@pytest.mark.slow
def test_a_finished_run_says_nothing_of_a_rollout_or_of_the_limit_of_its_evaluation(tmp_path, capsys):
    train(jax_env(), 400, run_dir=tmp_path / "run")
    polyak.resume(tmp_path / "run", progress=True, eval_episodes=2)
    said = capsys.readouterr().out
    assert "evaluating 2 episodes" in said and "trains on one rollout" not in said and "no episode has ended" not in said


def test_progress_can_be_switched_off(capsys):
    train(jax_env(), progress=False)
    assert capsys.readouterr().out == ""


def test_a_seed_is_its_key_and_both_are_rejected():
    env = jax_env()
    same(train(env, seed=5).state, train(env, key=jax.random.key(5)).state)
    with pytest.raises(ValueError, match=r"train\.run: pass key or seed, not both"):
        train(env, seed=5, key=jax.random.key(5))


def test_a_key_that_is_an_int_is_rejected_by_name(unchecked):
    with pytest.raises(TypeError, match=r"train: key must be a JAX key, got 7; pass key=jax.random.key\(7\)"):
        train(jax_env(), key=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loop": "both"},
            "train.run: loop must be one of 'auto', 'compiled', 'host', 'distributed', 'asynchronous', got 'both'",
        ),
        ({"seed": -1}, r"train.run: seed must be an integer in \[0, 4294967295\], got -1"),
        ({"env_steps": 0}, "env_steps must be an integer >= 1, got 0"),
        ({"num_envs": 3}, "num_envs must be None where env is made, which has 2 copies, got 3"),
        ({"settings": {"gamma": 0.5}}, "settings must be None where agent is made"),
        ({"eval_every": 10, "report_every": 20}, "eval_every=10 must be at least report_every=20"),
        ({"checkpoint_every": 10, "report_every": 20}, "checkpoint_every=10 must be at least report_every=20"),
        ({"checkpoint_replay": False}, "checkpoint_replay=False: PPO has no replay; leave it out"),
        ({"eval_every": 10, "eval_episodes": 0}, "eval_episodes must be an integer >= 1, got 0"),
        ({"env_steps_done": 32}, "env_steps_done=32 needs resume_from"),
    ],
)
def test_wrong_arguments_are_rejected_by_name_before_anything_is_written(options, message, directory, unchecked):
    with pytest.raises(ValueError, match=message):
        train(jax_env(), **{"env_steps": 64, "run_dir": "run", **options})
    assert list(directory.iterdir()) == []


def test_the_compiled_loop_needs_an_environment_in_jax():
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    with pytest.raises(ValueError, match=r"loop='compiled' needs an environment in JAX .* got CartPole-v1"):
        train(env, loop="compiled")


@pytest.mark.slow
def test_an_environment_of_a_name_is_made_with_the_scaling_of_the_agent():
    spec = polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec
    small = {
        "actor": polyak.Actor((4,)),
        "critics": polyak.Critics((4,)),
        "replay": polyak.UniformReplay(64),
        "learning_starts": 8,
    }
    agent = polyak.SAC(spec, batch_size=4, **small)
    result = polyak.train.run(agent, "jax/Pendulum-v1", env_steps=16, num_envs=2, progress=False)
    assert result.progress.env_steps == 16
    with pytest.raises(
        ValueError, match=r"agent's spec is rescale, .* clip; make the environment with action_scaling='rescale'"
    ):
        polyak.train.run(agent, polyak.envs.make("jax/Pendulum-v1"), env_steps=16, progress=False)


def test_a_field_of_the_agent_among_the_arguments_is_named():
    with pytest.raises(TypeError, match=r"unknown argument 'gamma' .*; a field of the agent goes into settings={'gamma': ...}"):
        polyak.train.run("ppo", "CartPole-v1", env_steps=100, gamma=0.9)
    with pytest.raises(TypeError, match=r"unknown argument 'env_kwargs' .*; use polyak\.envs\.make\(ID, env_kwargs="):
        polyak.train.run("ppo", "CartPole-v1", env_steps=100, env_kwargs={"sutton_barto_reward": True})
    # A name that is only similar to an argument is rather a field.
    for name in ("learning_starts", "n_step", "num_steps"):
        with pytest.raises(TypeError, match=rf"unknown argument '{name}' \(.*goes into settings={{'{name}': ...}}"):
            polyak.train.run("sac", "Pendulum-v1", env_steps=100, **{name: 3})
    with pytest.raises(TypeError, match=r"unknown argument 'env_step'; did you mean 'env_steps'\? \([^;]*\)$"):
        polyak.train.run("ppo", "CartPole-v1", env_step=100)
    with pytest.raises(TypeError, match=r"unknown argument 'gamma' \([^;]*\)$"):
        polyak.train.run(polyak.PPO(jax_env().spec), jax_env(), env_steps=100, gamma=0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", np.array([0.5, 0.9])),
        ("learning_rate", jax.numpy.array([1e-3])),
        ("learning_rate", polyak.Linear(np.array([1e-3]), env_steps=64)),
    ],
)
def test_an_array_of_numbers_is_no_setting_of_a_single_agent(name, value, unchecked):
    env = jax_env(num_envs=2)
    said = f"{name} of PPO must have single numbers, got .*; loops.compiled_seeds trains a batch"
    for agent, settings in ((dataclasses.replace(small(env), **{name: value}), None), ("ppo", {name: value})):
        with pytest.raises(ValueError, match=f"train.run: {said}"):
            polyak.train.run(agent, env, env_steps=64, settings=settings)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (lambda spec, two: polyak.RND(polyak.PPO(spec, gamma=two)), "gamma of PPO"),
        (lambda spec, two: polyak.RND(polyak.PPO(spec), learning_rate=two), "learning_rate of RND"),
        (lambda spec, two: polyak.DQN(spec, replay=polyak.PrioritizedReplay(1000, alpha=two)), "alpha of PrioritizedReplay"),
        (
            lambda spec, two: polyak.DQN(
                spec, replay=MixedReplay(polyak.PrioritizedReplay(1000, beta=polyak.Linear(two, 1.0)))
            ),
            "beta of PrioritizedReplay",
        ),
    ],
)
def test_nor_is_one_inside_its_replay_or_its_inner_agent(agent, said, unchecked):
    env = jax_env(num_envs=2)
    with pytest.raises(ValueError, match=f"train.run: {said} must have single numbers, got .*"):
        polyak.train.run(agent(env.spec, np.array([0.5, 0.9])), env, env_steps=64)


def test_an_environment_without_a_name_is_shown_by_its_class(capsys):
    class Unnamed(type(jax_env().dynamics)):
        @property
        def spec(self):
            return dataclasses.replace(super().spec, id="")

    train(AutoReset(Unnamed(), num_envs=2))
    assert capsys.readouterr().out.startswith("ppo Unnamed: compiling …\n")


def test_an_unknown_algorithm_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"train.run: unknown algorithm 'pp'; did you mean 'ppo'"):
        polyak.train.run("pp", "jax/CartPole-v1", env_steps=10)


def test_what_a_callback_adds_to_the_metrics_is_written(directory):
    def count(progress, metrics, state):
        metrics["my/iterations"] = float(progress.iteration)

    result = train(jax_env(), run_dir="run", callbacks=[count])
    rows = open_run("run").read_metrics()
    assert [row["my/iterations"] for row in rows] == [row["time/iterations"] for row in rows]
    assert result.metrics["my/iterations"] == result.progress.iteration


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax/CartPole-v1", "CartPole-v1"])
def test_evaluation_while_training_changes_no_bit_and_keeps_the_best(name, directory):
    env = polyak.envs.make(name, num_envs=2)
    plain = train(env, 400)
    result = train(env, 400, eval_every=100, eval_episodes=3, run_dir="run")
    same(result.loop_state, plain.loop_state)
    assert len(result.evaluations) == 4 and all(len(e.returns) == 3 for e in result.evaluations.values())
    assert result.evaluation is result.evaluations[result.progress.env_steps]
    rows = {row["env_steps"]: row["eval/mean_reward"] for row in open_run("run").read_metrics() if "eval/mean_reward" in row}
    assert rows == {step: e.mean_return for step, e in result.evaluations.items()}
    (best,) = steps(Path("run/best"))
    assert rows[best] == max(rows.values())
    policy = polyak.load_policy("run/best")
    same(policy, result.best_policy)
    same(result.evaluate(3).returns, result.evaluations[result.progress.env_steps].returns)


@pytest.mark.slow
def test_evaluation_while_training_leaves_the_target_as_it_is():
    env = jax_env()
    settings = {"replay": polyak.UniformReplay(128), "learning_starts": 32, "batch_size": 8, "target_period": 7, "tau": 0.5}
    agent = polyak.DQN(env.spec, network=polyak.MLP((4,)), **settings)
    plain = polyak.train.run(agent, env, env_steps=200)
    result = polyak.train.run(agent, env, env_steps=200, eval_every=50, eval_episodes=2)
    online, target = (jax.tree.leaves(x.params) for x in (plain.state.copies.online, plain.state.copies.target))
    assert len(result.evaluations) == 4 and any((np.asarray(a) != b).any() for a, b in zip(online, target, strict=True))
    same(result.loop_state, plain.loop_state)


@pytest.mark.slow
def test_evaluation_goes_on_after_resuming_as_if_never_stopped(directory):
    env = jax_env()
    options = {"eval_every": 100, "eval_episodes": 3}
    whole = train(env, 400, run_dir="whole", **options)
    train(env, 200, run_dir="parts", **options)
    parts = polyak.resume("parts", env_steps=400)
    same(parts.loop_state, whole.loop_state)
    assert steps(Path("parts/best")) == steps(Path("whole/best"))
    assert parts.evaluations[parts.progress.env_steps].mean_return == whole.evaluation.mean_return
    assert polyak.resume("parts", env_steps=432, eval_episodes=5).evaluation.episodes == 5


@pytest.mark.slow
def test_an_environment_reports_its_success_rate(directory):
    env = polyak.envs.make(Pole, num_envs=2)
    result = train(env, 64, eval_every=64, eval_episodes=2)
    assert 0 <= result.metrics["eval/success_rate"] <= 1


@pytest.mark.slow
def test_an_environment_object_cannot_be_copied_for_evaluation(directory):
    env = polyak.envs.make(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"eval_env must be passed: CartPole-v1 was given to polyak.envs.make as an object"):
        train(env, 64, eval_every=64)
    other = polyak.envs.make("CartPole-v1")
    assert len(train(env, 64, eval_env=other, eval_episodes=2, run_dir="run").evaluation.returns) == 2
    before = Path("run/config.json").read_text()
    with pytest.raises(ValueError, match="eval_env must be passed"):
        polyak.resume("run", env=env, env_steps=128)
    assert Path("run/config.json").read_text() == before
    assert len(polyak.resume("run", env=env, env_steps=128, eval_env=other).evaluation.returns) == 2


def test_an_environment_object_that_can_be_called_stays_open(directory):
    class Called(gymnasium.Wrapper):
        closed = False

        def __call__(self):
            return self

        def close(self):
            self.closed = True

    env = Called(gymnasium.make("CartPole-v1"))
    spec = polyak.envs.make("CartPole-v1").spec
    polyak.train.run(polyak.PPO(spec=spec, **SMALL), env, env_steps=16, progress=False)
    assert not env.closed
    with pytest.raises(ValueError, match="eval_env must be passed"):
        polyak.train.run(polyak.PPO(spec=spec, **SMALL), env, env_steps=16, eval_every=16, progress=False)


def test_settings_of_an_environment_in_numbers_of_numpy_are_stored(directory):
    env = polyak.envs.make("CartPole-v1", env_kwargs={"max_episode_steps": np.int64(9), "sutton_barto_reward": np.bool_(True)})
    with prepare(small(env), env, TrainSettings(env_steps=16, run_dir="run"), source=source_of(env)) as training:
        assert not training.config.is_user_env
    stored = read_config(open_run("run")).env_kwargs
    assert stored == {"max_episode_steps": 9, "sutton_barto_reward": True}
    env = polyak.envs.make("Pendulum-v1", env_kwargs={"g": np.float32(9.5)})
    assert type(env._batch.group.envs[0].env.unwrapped.g) is float


@pytest.mark.slow
def test_an_error_of_close_costs_no_result(directory):
    class Stuck(Pole):
        def close(self):
            raise OSError("the window is gone")

    spec = polyak.envs.make("CartPole-v1").spec
    says = r"close\(\) raised OSError: the window is gone; the results are not affected"
    with pytest.warns(UserWarning, match=says) as warned:
        result = polyak.train.run(polyak.PPO(spec=spec, **SMALL), Stuck, env_steps=16, eval_episodes=1, progress=False)
    # Those of the training and those of the evaluation.
    assert len(warned) == 2 and result.progress.env_steps >= 16 and result.evaluation.episodes == 1


def test_environments_for_evaluation_are_checked_before_training(directory, unchecked):
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    before = env.reset(0)
    for eval_env, every, error, message in (
        (env, 64, ValueError, "eval_env must not be env with eval_every"),
        ("CartPole-v1", None, TypeError, "eval_env must be created with polyak.envs.make"),
        (polyak.envs.make("Acrobot-v1"), None, ValueError, "eval_env: obs of the agent's spec is"),
    ):
        with pytest.raises(error, match=message):
            train(env, 64, eval_env=eval_env, eval_every=every, eval_episodes=2, run_dir="run")
    assert not Path("run").exists()
    same(env.reset(0), before)
    train(jax_env(), 64, run_dir="run")
    with pytest.raises(ValueError, match="resume: eval_env: obs of the agent's spec is"):
        polyak.resume("run", env_steps=128, eval_env=polyak.envs.make("jax/Pendulum-v1", num_envs=1), eval_episodes=2)
    assert open_run("run").read_summary()["env_steps"] < 128


def test_an_evaluation_that_does_not_end_costs_no_training(directory):
    with pytest.warns(UserWarning, match="this evaluation is skipped") as left_out:
        result = train(jax_env(), 64, eval_every=32, eval_episodes=2, eval_max_steps=5, run_dir="run")
    assert result.progress.env_steps >= 64 and steps(Path("run/checkpoints"))
    # At the end it is not played a second time.
    assert len(left_out) == 2
    assert not result.evaluations and result.evaluation is None and "eval/mean_reward" not in result.metrics
    assert open_run("run").read_summary()["eval_mean_return"] is None
    with pytest.raises(TimeoutError, match="within max_steps=5 steps of each environment"):
        result.evaluate(2)
    assert result.evaluate(2, max_steps=1000).episodes == 2
    with pytest.warns(UserWarning, match="within max_steps=5 steps"):
        assert polyak.resume("run", env_steps=96, progress=False).evaluation is None


def test_a_mean_return_that_is_nan_is_never_the_best(monkeypatch):
    returns = iter([np.nan, 1.0, np.nan, 2.0, 1.5])
    monkeypatch.setattr(
        evaluation, "evaluate_if_it_ends", lambda *_: evaluation.Evaluation(np.array([next(returns)]), np.array([1]))
    )
    agent = types.SimpleNamespace(policy=lambda state: state)
    evaluate = evaluation.PeriodicEvaluation(agent, None, every=1, episodes=1, max_steps=1, seed=0)
    best = []
    for step in range(1, 6):
        evaluate(Progress(step, 10, step, 1.0, 1.0, 1.0), {}, types.SimpleNamespace(agent=step))
        best.append(evaluate.best_policy)
    assert best == [None, 2, 2, 4, 4]


def test_a_request_to_stop_ends_an_evaluation_and_the_state_is_saved(directory):
    env, is_asked = polyak.envs.make("CartPole-v1", num_envs=2), itertools.count()
    with pytest.warns(UserWarning, match="stopped before all episodes of CartPole-v1 had ended; this evaluation is skipped"):
        result = train(
            env, run_dir="run", env_steps=10_000, eval_every=32, eval_episodes=10_000, should_stop=lambda: next(is_asked) > 50
        )
    assert result.stopped == "request" and not result.evaluations and result.progress.env_steps < 100
    assert polyak.resume("run", env_steps=result.progress.env_steps, eval_episodes=0, progress=False).loop_state.iteration > 0


@pytest.mark.parametrize("every", [None, 32])
def test_the_limit_of_an_evaluation_is_shown_before_it_where_no_episode_has_ended(every, capsys):
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=2)
    with pytest.warns(UserWarning, match="this evaluation is skipped"):
        train(env, eval_every=every, eval_episodes=1, eval_max_steps=99)
    assert "no episode has ended yet; eval_max_steps=99 ends the evaluation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_state_goes_on_with_new_episodes_in_an_environment_that_is_made_for_it():
    options = {"num_envs": 2, "progress": False, "settings": {"num_steps": 8, "num_minibatches": 1}}
    first = polyak.train.run("ppo", "CartPole-v1", env_steps=32, **options)
    for num_envs, state, error in ((4, first.loop_state, ValueError), (2, first, TypeError)):
        with pytest.raises(error, match=r"resume_from must be (of num_envs=4, as env is, got 2|the loop_state of a result)"):
            polyak.train.run(first.agent, "CartPole-v1", env_steps=64, num_envs=num_envs, progress=False, resume_from=state)
    more = polyak.train.run(
        first.agent, "CartPole-v1", env_steps=64, num_envs=2, progress=False, resume_from=first.loop_state, env_steps_done=32
    )
    assert more.progress.env_steps >= 64
    # Two environments since their new start: no episode is longer than what they stepped.
    assert np.asarray(more.loop_state.episodes.lengths).max() <= 16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["jax/CartPole-v1", "CartPole-v1"])
def test_an_interrupt_returns_the_result_which_resumes_to_the_bit(number, name, directory):
    env = polyak.envs.make(name, num_envs=2)
    whole = train(env, 400)

    sent = []

    def interrupt(progress, metrics, state):
        if progress.env_steps >= 200 and not sent:
            sent.append(os.kill(os.getpid(), number))

    result = train(env, 400, run_dir="run", callbacks=[interrupt])
    assert result.stopped == "interrupt" and 200 <= result.progress.env_steps < 300
    assert open_run("run").read_summary()["stopped"] == "interrupt"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    same(polyak.resume("run").loop_state, whole.loop_state)


def test_a_second_interrupt_raises():
    def twice(progress, metrics, state):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(jax_env(), callbacks=[twice])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_trains_too():
    results = []
    thread = threading.Thread(target=lambda: results.append(train(jax_env())))
    thread.start()
    thread.join()
    assert results[0].stopped is None


def test_a_handler_of_the_program_stays():
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        result = train(jax_env(), callbacks=[lambda *_: None if received else os.kill(os.getpid(), signal.SIGINT)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.stopped, received) == (None, [True])


def test_a_result_is_saved_and_resumed_from_there(directory, unchecked):
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    whole, half = train(env, 400), train(env, 200)
    half.evaluate(2)
    for wrong in (0, -1, "3", 2.5):
        with pytest.raises((TypeError, ValueError), match=r"Result\.evaluate: episodes must be an integer"):
            half.evaluate(wrong)
    env.reset(seed=9)  # What is saved is the state at the end of the training.
    assert half.save("saved") == directory / "saved"
    same(polyak.load_policy("saved"), half.policy)
    same(polyak.resume("saved", env_steps=400).loop_state, whole.loop_state)
    with pytest.raises(RunError, match="holds a run already"):
        half.save("saved")


def test_a_result_with_a_run_directory_is_saved_with_its_metrics(directory):
    result = train(jax_env(), run_dir="run")
    result.save("saved")
    steps = polyak.load_run("run").metrics["env_steps"].tolist()
    assert polyak.load_run("saved").metrics["env_steps"].tolist() == steps and steps[-1] == result.progress.env_steps
    polyak.resume("run", env_steps=2 * result.progress.env_steps, progress=False)
    result.save("as it was")
    assert polyak.load_run("as it was").metrics["env_steps"].tolist() == steps
    shutil.rmtree("run")
    with pytest.warns(UserWarning, match="state alone has no metrics, as .*run has none any more"):
        result.save("state alone")
    same(polyak.load_policy("state alone"), result.policy)


@pytest.mark.slow
def test_a_key_without_a_seed_is_kept_in_the_checkpoint(directory):
    env = jax_env()
    key = jax.random.split(jax.random.key(0))[1]
    whole = train(env, 400, key=key)
    train(env, 200, key=key, run_dir="run")
    assert open_run("run").read_config()["seed"] is None
    same(polyak.resume("run", env_steps=400).loop_state, whole.loop_state)


@pytest.mark.parametrize(("name", "suffix"), [("stablehlo", ".stablehlo"), ("numpy", ".npz")])
def test_a_result_is_exported_in_the_format_of_its_suffix(name, suffix, directory):
    result = train(jax_env())
    assert result.export(f"policy{suffix}")[0] == result.export("named", name)[0].with_name(f"policy{suffix}")
    assert polyak.load_policy(f"policy{suffix}").predict(OBS)[0] == result.policy.predict(OBS)[0]
    with pytest.raises(ValueError, match=r"Result.export: path must end with .stablehlo, .onnx, .npz, got policy.pt"):
        result.export("policy.pt")


def test_a_result_prints_in_few_lines():
    result = train(jax_env(), 400, eval_episodes=2)
    lines = repr(result).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert lines[0].startswith("Result(ppo jax/CartPole-v1: 4") and " of 400 env_steps in " in lines[0]
    assert "greedy return: " in repr(result)


def test_options_of_an_environment_of_ones_own_are_stored_and_used_again(directory):
    env = polyak.envs.make(Pole, num_envs=2, nonfinite="pass", info_metrics=("speed",))
    with prepare(small(env), env, TrainSettings(env_steps=16, run_dir="run"), source=source_of(env)):
        config = read_config(open_run("run"))
    assert config.is_user_env and config.env_options == {"nonfinite": "pass", "info_metrics": ["speed"]}
    again = evaluation.make_again(open_run("run"), config, Pole, 2)
    assert again.source.options["nonfinite"] == "pass" and list(again.source.options["info_metrics"]) == ["speed"]
    # Options of Gymnasium's environments are none of those in JAX, and another environment than the run's has its own.
    scaling = {"action_scaling": "clip"}
    assert evaluation.run_source(config, "jax/CartPole-v1").options == scaling
    assert evaluation.run_source(dataclasses.replace(config, is_user_env=False), Pole).options == scaling


class Walk(CartPole):
    """An environment in JAX of one's own."""


def test_the_class_of_an_environment_in_jax_has_the_settings_of_the_run(directory):
    env = polyak.envs.make(Walk, num_envs=2, reset_pool=3)
    with prepare(small(env), env, TrainSettings(env_steps=16, run_dir="run"), source=source_of(env)):
        config = read_config(open_run("run"))
    assert config.is_user_env and config.env_options == {"reset_pool": 3}
    config = dataclasses.replace(config, env_kwargs={"max_episode_steps": 7})
    again = evaluation.make_again(open_run("run"), config, Walk, 2)
    assert again == AutoReset(Walk(max_episode_steps=7), 2, reset_pool=3)
    config = dataclasses.replace(config, user_flags={"env": "mine:Walk", "env_kwargs": ["mode"]})
    with pytest.raises(ValueError, match=r"texts in env_kwargs \(mode\), .*; pass env=polyak.envs.make\(Walk, num_envs="):
        evaluation.make_again(open_run("run"), config, Walk, 2)


@pytest.mark.slow
def test_an_environment_and_a_network_of_ones_own_are_passed_again(directory):
    env = polyak.envs.make(Pole, num_envs=2)
    agent = small(env, network=polyak.FlaxNNX(Net))
    whole = polyak.train.run(agent, env, env_steps=200, seed=0)
    polyak.train.run(agent, env, env_steps=100, run_dir="run")
    with pytest.raises(
        ConfigError, match=r"could not be stored with the run; rebuild it in Python and pass it again as agent="
    ):
        polyak.resume("run", env_steps=200)
    with pytest.raises(ValueError, match=r"polyak.resume: env must be passed: 'Pole' of .* is a user-defined environment"):
        polyak.resume("run", agent=agent, env_steps=200)
    again = polyak.envs.make(Pole, num_envs=3)
    with pytest.raises(ValueError, match="env must have the run's num_envs=2, got 3"):
        polyak.resume("run", agent=agent, env=again, env_steps=200)
    with pytest.warns(UserWarning, match="new episodes start"):
        result = polyak.resume("run", agent=agent, env=Pole, env_steps=200)
    assert result.progress.env_steps >= 200 and whole.progress.env_steps >= 200
    assert read_config(open_run("run"), agent).is_user_env


def test_a_run_with_parts_of_ones_own_is_continued_from_python(directory):
    for name, env, network, own in (
        ("env", polyak.envs.make(Pole, num_envs=2), polyak.MLP((4,), head=polyak.PolicyAndValue()), "env=..."),
        ("agent", jax_env(), polyak.FlaxNNX(Net), "agent=..."),
        ("both", polyak.envs.make(Pole, num_envs=2), polyak.FlaxNNX(Net), "env=..., agent=..."),
    ):
        with prepare(
            small(env, network=network), env, TrainSettings(env_steps=100, run_dir=name), source=source_of(env)
        ) as training:
            assert resume_command(training) == f"polyak.resume('{Path(name).absolute()}', {own})"


def test_the_command_that_continues_a_run_imports_the_module_of_its_environment(directory):
    env = polyak.envs.make(Pole, num_envs=2)
    with prepare(small(env), env, TrainSettings(env_steps=100, run_dir="run")) as training:
        config = dataclasses.replace(training.config, env="mine:Pole-v0")
        for flags, module in (("--env-kwargs file=x.xml", " --import mine"), ("--env mine:make", "")):
            changed = dataclasses.replace(training, config=config, resume_flags=flags)
            assert resume_command(changed) == f"polyak resume {Path('run').absolute()} {flags}{module}"


def test_a_failure_is_written_to_the_summary(directory):
    def fail(progress, metrics, state):
        raise ZeroDivisionError("no more")

    with pytest.raises(ZeroDivisionError):
        train(jax_env(), run_dir="run", callbacks=[fail])
    assert open_run("run").read_summary()["stopped"] == "ZeroDivisionError: no more"


def test_resume_rejects_fewer_steps_than_were_done(directory):
    train(jax_env(), 64, run_dir="run")
    with pytest.raises(TypeError, match=r"polyak.resume: should_stop must be a function without arguments, got 1"):
        polyak.resume("run", should_stop=1)
    with pytest.raises(ValueError, match=r"polyak.resume: env_steps=10: .* has already done 7"):
        polyak.resume("run", env_steps=10)


@pytest.mark.slow
def test_a_training_in_python_can_be_continued_by_the_command_line(directory):
    whole = train(jax_env(), 400)
    train(jax_env(), 200, run_dir="run")
    assert main(["resume", "run", "--env-steps", "400", "--eval-episodes", "2"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["env_steps"] == whole.progress.env_steps
    same(polyak.load_policy("run"), whole.policy)


def test_importing_polyak_takes_no_time():
    program = "import time; t = time.perf_counter(); import polyak; print(time.perf_counter() - t)"
    times = [float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout) for _ in range(5)]
    assert min(times) < 0.1


class Restless(Pole):
    """Prints, and changes the working directory, as a careless environment does."""

    def step(self, action):
        print("step", self.steps)
        os.chdir("/")
        return super().step(action)


@pytest.mark.slow
def test_an_environment_that_prints_and_changes_directory_moves_no_file_of_the_run(directory):
    env = polyak.envs.make(Restless, num_envs=2)
    result = train(env, 200, run_dir="run", eval_every=100, eval_episodes=2)
    os.chdir(directory)
    assert {path.name for path in directory.iterdir()} == {"run"}
    assert {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "best"} <= set(os.listdir("run"))
    assert polyak.load_policy("run").predict(OBS)[0] in (0, 1)
    assert result.progress.env_steps >= 200


@pytest.mark.parametrize(("before", "after"), [("jax/CartPole-v1", "CartPole-v1"), ("CartPole-v1", "jax/CartPole-v1")])
def test_a_state_of_another_loop_is_rejected(before, after):
    options = {"env_steps": 16, "progress": False, "eval_episodes": 0}
    settings = {"num_steps": 8, "num_minibatches": 1}
    first = polyak.train.run("ppo", before, num_envs=2, settings=settings, **options)
    env = polyak.envs.make(after, num_envs=2)
    with pytest.raises(ValueError, match=r"resume_from must be a state of the (host|compiled) loop, got a state of"):
        polyak.train.run(first.agent, env, resume_from=first.loop_state, **options)


def test_an_environment_in_jax_without_a_state_is_resumed():
    made = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    _, start = made.init(jax.random.key(0))

    class Bandit:
        spec, num_envs = made.spec, made.num_envs

        def init(self, key):
            return (), start

        def step(self, state, action, key):
            del action
            return state, dataclasses.replace(start, first=jax.numpy.zeros(2, bool), reward=jax.random.uniform(key, (2,)))

    first = train(Bandit(), env_steps=16)
    with pytest.raises(ValueError, match="env_steps=15: resume_from has already done 16"):
        train(Bandit(), env_steps=15, resume_from=first.loop_state, env_steps_done=16)
    with pytest.raises(ValueError, match="env_steps_done must be an integer >= 0, got -16"):
        train(Bandit(), env_steps=48, resume_from=first.loop_state, env_steps_done=-16)
    assert train(Bandit(), env_steps=48, resume_from=first.loop_state).progress.env_steps == 48


def test_a_state_of_the_host_loop_in_an_environment_in_jax_needs_the_wrapped_environment():
    options = {"env_steps": 16, "progress": False, "loop": "host"}
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    first = polyak.train.run(small(env), env, **options)
    with pytest.raises(ValueError, match="wrap the JAX environment with JaxEnvOnHost"):
        polyak.train.run(first.agent, env, resume_from=first.loop_state, **options)


def test_a_finished_run_that_is_resumed_without_an_evaluation_keeps_its_own(tmp_path):
    settings = {"num_steps": 8, "num_minibatches": 1, "num_epochs": 1}
    options = {"num_envs": 2, "env_steps": 16, "settings": settings, "run_dir": tmp_path / "run", "progress": False}
    polyak.train.run("ppo", "jax/CartPole-v1", eval_episodes=2, **options)
    before = open_run(tmp_path / "run").read_summary()
    assert polyak.resume(tmp_path / "run", eval_episodes=0, progress=False).evaluation is None
    assert open_run(tmp_path / "run").read_summary() == before
    assert before["eval_episodes"] == 2

"""Trainings with two learners, processes of one CPU device each, against one process with two devices."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.loops.compiled_loop import start_compiled
from polyak.runs import read_config, run_key
from polyak.storage.checkpoint import restore, steps
from polyak.storage.run_directory import open_run
from polyak.train.learners import _stop_at, drop_incomplete_programs
from polyak.train.training import Start
from tests.cli.conftest import compiled_once
from tests.cli.processes import environment
from tests.workers.setting import assert_same_bits

ENV, NUM_ENVS = "jax/CartPole-v1", 4
FLAGS = "--hidden 4 --num-steps 8 --num-envs 4 --num-epochs 1 --num-minibatches 1 --eval-episodes 0"


def make_agent(env):
    return polyak.PPO(env.spec, network=polyak.MLP((4,)), num_steps=8, num_epochs=2, num_minibatches=1)


def make_env():
    return polyak.envs.make(ENV, num_envs=NUM_ENVS)


def train_here(agent, env_steps, devices=2):
    return polyak.train.run(agent, make_env(), env_steps=env_steps, devices=devices, progress=False)


@pytest.fixture(autouse=True)
def _compile_once(tmp_path_factory, unchecked):
    """Learners use the cache of the process that starts them."""
    with compiled_once(tmp_path_factory.getbasetemp() / "jax-cache"):
        yield


@pytest.mark.slow
def test_learners_have_the_bits_of_devices_and_are_exchanged_for_them(tmp_path):
    """One update of two learners is that of two devices, which `test_ppo_devices` has; then one process with two devices."""
    agent, run_dir = make_agent(make_env()), tmp_path / "run"
    first = polyak.train.run(agent, make_env(), env_steps=1, learners=2, run_dir=run_dir, progress=False)
    expected = train_here(agent, 1)
    assert_same_bits(first.loop_state, expected.loop_state)
    assert first.metrics == expected.metrics and first.stopped is None
    assert first.progress.env_steps == expected.progress.env_steps
    assert open_run(run_dir).read_config()["learners"] == 2
    polyak.resume(run_dir, env_steps=300, learners=1, progress=False)
    last = polyak.resume(run_dir, env_steps=450, progress=False, eval_episodes=2)
    assert_same_bits(last.loop_state, train_here(agent, 450).loop_state)
    assert len(last.evaluation.returns) == 2
    rows = [row["env_steps"] for row in open_run(run_dir).read_metrics()]
    assert rows == sorted(set(rows)) and rows[-1] == last.progress.env_steps


@pytest.mark.slow
def test_a_death_costs_no_bit_and_nothing_is_left_of_a_killed_supervisor(tmp_path):
    words = f"train ppo {ENV} --learners 2 {FLAGS} --env-steps 100000000 --report-every 200 --checkpoint-every 400"
    process = subprocess.Popen(
        [sys.executable, "-m", "polyak", *words.split(), "--run-dir", "run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    checkpoints, learners = tmp_path / "run" / "checkpoints", []
    try:
        wait_for(lambda: steps(checkpoints), process)
        learners = learners_of(process.pid)
        assert len(learners) == 2
        os.kill(learners[1], 9)
        killed_at, killed = time.monotonic(), learners
        wait_for(lambda: not any(map(is_running, killed)), process)
        assert time.monotonic() - killed_at < 10, "without a wait for the heartbeat"
        saved = max(steps(checkpoints))
        wait_for(lambda: max(steps(checkpoints)) > saved, process)
        assert time.monotonic() - killed_at < 60
        learners = learners_of(process.pid)
    finally:
        process.kill()
        output, _ = process.communicate()
    wait_for(lambda: not any(map(is_running, learners)))
    assert len(learners) == 2 and not set(learners) & set(killed)
    assert "learner 1 was killed by SIGKILL; restarting all learners from the newest checkpoint" in output
    assert "Gloo" not in output and "warning" not in output.lower()
    events = [json.loads(line) for line in (tmp_path / "run" / "workers.jsonl").read_text().splitlines()]
    assert [(event["learner"], event["event"]) for event in events] == [(1, "failed")]
    config = read_config(open_run(tmp_path / "run"))
    restored = restore(checkpoints, jax.eval_shape(lambda: start_compiled(config.agent, make_env(), run_key(0))))
    assert_same_bits(restored.tree, train_here(config.agent, restored.step).loop_state)


@pytest.mark.slow
def test_a_death_loses_no_evaluation(tmp_path):
    """Those before the checkpoint from which the new group goes on are not repeated."""
    checkpoints, killed, options = tmp_path / "run" / "checkpoints", [], {"eval_every": 1000, "eval_episodes": 2}

    def kill():
        wait_for(lambda: steps(checkpoints))
        killed.append(learners_of(os.getpid())[1])
        os.kill(killed[0], 9)

    threading.Thread(target=kill, daemon=True).start()
    agent = make_agent(make_env())
    with pytest.warns(UserWarning, match="learner 1 was killed by SIGKILL; restarting all learners from the newest checkpoint"):
        learned = polyak.train.run(
            agent,
            make_env(),
            env_steps=10_000,
            learners=2,
            run_dir=tmp_path / "run",
            progress=False,
            checkpoint_every=1000,
            **options,
        )
    here = polyak.train.run(agent, make_env(), env_steps=10_000, devices=2, progress=False, checkpoint_every=1000, **options)
    assert (tmp_path / "run" / "workers.jsonl").exists() and len(here.evaluations) == 10
    assert list(learned.evaluations) == list(here.evaluations)
    for env_steps, evaluation in here.evaluations.items():
        np.testing.assert_array_equal(learned.evaluations[env_steps].returns, evaluation.returns)


@pytest.fixture
def stopped_group(monkeypatch):
    """A group that is asked to stop by SIGINT while no learner trains; it has noted evaluations of steps 1 and 10**6."""

    def run_group(*_, on_note, should_stop, **__):
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(should_stop)
        for env_steps in (1, 10**6):
            on_note((env_steps, f"evaluation {env_steps}"))
        raise polyak.train.StoppedBeforeStart("train: stopped")

    monkeypatch.setattr("polyak.train.learners.run_group", run_group)


@pytest.mark.slow
def test_a_stop_while_no_learner_trains_returns_the_newest_checkpoint(tmp_path, stopped_group, capsys):
    agent, run_dir = make_agent(make_env()), tmp_path / "run"
    whole = polyak.train.run(agent, make_env(), env_steps=40, devices=2, run_dir=run_dir, progress=False)
    last, *_ = reversed((run_dir / "metrics.jsonl").read_text().splitlines())
    rows = [json.loads(last) | {"train/of_the_test": None}, {"env_steps": 10**6, "train/loss": 1e9}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    result = polyak.resume(run_dir, learners=2, env_steps=80)
    assert_same_bits(result.loop_state, whole.loop_state)
    assert result.stopped == "interrupt" and result.progress.env_steps == whole.progress.env_steps
    assert result.progress.iteration == whole.progress.iteration
    # The checkpoint's last report: not a later one.
    expected = {name: float(value) for name, value in whole.metrics.items()} | {"train/of_the_test": math.nan}
    assert dict(result.metrics) == pytest.approx(expected, nan_ok=True)
    # The next group repeats the other one.
    assert result.evaluations == {1: "evaluation 1"}
    summary = open_run(run_dir).read_summary()
    assert (summary["stopped"], summary["env_steps"], summary["target_env_steps"]) == (
        "interrupt",
        whole.progress.env_steps,
        80,
    )
    assert f"continue with: polyak resume {run_dir}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stop_with_damaged_metrics_returns_the_checkpoint_and_warns(tmp_path, unchecked):
    agent, run_dir = make_agent(make_env()), tmp_path / "run"
    polyak.train.run(agent, make_env(), env_steps=40, devices=2, run_dir=run_dir, progress=False)
    (run_dir / "metrics.jsonl").write_text("damaged\n{}\n")
    run = open_run(run_dir)
    saved = Start(types.SimpleNamespace(iteration=2), 40)
    with pytest.warns(UserWarning, match=r"the result has no metrics: .*metrics.jsonl, line 1"):
        result = _stop_at(saved, types.SimpleNamespace(env_steps=80), run)
    assert (result.progress.env_steps, dict(result.metrics), result.stopped) == (40, {}, "request")


@pytest.mark.slow
def test_a_stop_before_the_first_checkpoint_raises_and_is_in_the_summary(tmp_path, stopped_group):
    run_dir = tmp_path / "run"
    with pytest.raises(polyak.train.StoppedBeforeStart, match="train: stopped"):
        polyak.train.run(make_agent(make_env()), make_env(), env_steps=40, learners=2, run_dir=run_dir, progress=False)
    assert open_run(run_dir).read_summary()["stopped"] == "interrupt"


@pytest.mark.slow
def test_the_command_that_was_stopped_before_the_first_checkpoint_says_how_to_start_again(tmp_path, stopped_group, capsys):
    words = f"train ppo {ENV} --learners 2 {FLAGS} --env-steps 100 --run-dir {tmp_path / 'run'}"
    assert main(words.split()) == 130
    output = capsys.readouterr()
    assert output.err == "error: train: stopped\n"
    assert f"no checkpoint was saved; start again with: polyak resume {tmp_path / 'run'}" in output.out
    assert open_run(tmp_path / "run").read_summary()["stopped"] == "Ctrl-C"


def learners_of(pid):
    """The process ids of the learners that a process has started, by rank."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (path / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "learner_process" in words:
            found.append(int(path.name))
    return sorted(found)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, process=None, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_dir": None}, r"learners=2 needs run_dir"),
        ({"env": "CartPole-v1"}, r"learners=2 needs an environment in JAX .* got CartPole-v1"),
        ({"devices": 3, "num_envs": 6}, r"devices=3 must be a multiple of learners=2"),
        ({"num_envs": 3}, r"num_envs=3 cannot be split over devices=2"),
        ({"callbacks": [print]}, r"callbacks must be left out with learners=2"),
        ({"loop": "host"}, r"loop must be left out with learners=2"),
        ({"eval_env": object()}, r"eval_env must be left out with learners=2"),
        ({"workers": 2}, r"workers must be left out with learners=2"),
        ({"learners": 0}, r"learners must be an integer in \[1, 4096\]"),
    ],
)
def test_what_learners_cannot_do_is_an_error_before_anything_is_written(arguments, message, tmp_path):
    run_dir = tmp_path / "run"
    call = {"env": ENV, "env_steps": 100, "num_envs": 4, "learners": 2, "run_dir": run_dir} | arguments
    with pytest.raises(ValueError, match=message):
        polyak.train.run("ppo", call.pop("env"), **call)
    assert not run_dir.exists()


@pytest.mark.slow
def test_a_run_is_resumed_with_learners_that_divide_its_devices_only(tmp_path):
    agent = make_agent(make_env())
    polyak.train.run(agent, make_env(), env_steps=40, devices=2, run_dir=tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"learners=3 must divide the run's devices=2"):
        polyak.resume(tmp_path / "run", learners=3, env_steps=80)
    with pytest.raises(ValueError, match="callbacks must be left out with learners=2"):
        polyak.resume(tmp_path / "run", learners=2, env_steps=80, callbacks=[print])
    with pytest.raises(ValueError, match="eval_env must be left out with learners=2"):
        polyak.resume(tmp_path / "run", learners=2, env_steps=80, eval_env=make_env())


def test_a_program_that_may_be_incomplete_leaves_the_cache(tmp_path):
    for name, age in (("old-cache", 60), ("new-cache", 0), ("new-atime", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    drop_incomplete_programs(tmp_path)
    drop_incomplete_programs(None)
    assert {path.name for path in tmp_path.iterdir()} == {"old-cache", "new-atime"}

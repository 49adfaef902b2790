"""Runs with workers: run directories, killed learners, and resuming with any number of workers."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.networks.recurrent import LSTM
from polyak.train import Workers
from polyak.workers.in_process_workers import InProcessWorkers
from tests.workers.setting import FaultyWorkers, assert_same_bits, make_agent

ENV, ENV_STEPS, NUM_ENVS, EVERY = "CartPole-v1", 2_000, 8, 300


def run(run_dir, engine=InProcessWorkers, workers=4, **options):
    agent = make_agent(polyak.envs.make(ENV).spec)
    how = Workers(number=workers, make_engine=engine)
    settings = {"num_envs": NUM_ENVS, "checkpoint_every": EVERY, "report_every": EVERY, "seed": 3, "progress": False}
    return polyak.train.run(agent, ENV, env_steps=ENV_STEPS, run_dir=run_dir, workers=how, **settings, **options)


def resume(run_dir, workers):
    how = Workers(number=workers, make_engine=InProcessWorkers) if workers else 0
    return polyak.resume(run_dir, workers=how, progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four workers that nobody disturbed, and what a SIGKILL after each of its reports would have left."""
    directory = tmp_path_factory.mktemp("whole")

    def copy(progress, metrics, state):
        shutil.copytree(directory / "run", directory / f"at-{progress.env_steps}")

    result = run(directory / "run", callbacks=[copy])
    # Before the first checkpoint there is nothing to resume from.
    left = sorted(directory.glob("at-*/checkpoints/0*"), key=lambda path: path.name)
    return result, sorted({path.parents[1] for path in left}, key=lambda path: int(path.name[3:]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 2, 1, 0])
def test_what_a_killed_learner_leaves_continues_to_the_bit_with_any_number_of_workers(whole, workers):
    """The state of the loop is that of the run that was never killed."""
    result, left = whole
    assert len(left) >= 4
    assert_same_bits(resume(left[workers - 1 if workers else 3], workers).loop_state, result.loop_state)


@pytest.mark.slow
def test_another_number_of_workers_that_act_in_jax_is_a_warning(tmp_path):
    """Several workers draw random numbers of their own."""
    agent = make_agent(polyak.envs.make(ENV).spec, network=LSTM(hidden=(), width=4))
    how = Workers(number=2, make_engine=InProcessWorkers)
    polyak.train.run(agent, ENV, env_steps=200, num_envs=NUM_ENVS, workers=how, run_dir=tmp_path / "run", progress=False)
    more = {"env_steps": 300, "progress": False}
    for workers in (how, Workers(number=4, make_engine=InProcessWorkers), 0):
        number = getattr(workers, "number", 0)
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"copy-{number}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            polyak.resume(copy, workers=workers, **more)
        said = [str(one.message) for one in caught if "the policy acts in JAX" in str(one.message)]
        assert len(said) == (number != 2) and all(f"workers={number}, the run has 2: " in text for text in said)


@pytest.mark.slow
def test_a_learner_that_is_killed_loses_a_checkpoint_interval_at_most(whole, tmp_path):
    """SIGKILL of the process, with its workers inside."""
    code = "import sys; from tests.train.test_killed_learners import run; run(sys.argv[1])"
    learner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while not any((tmp_path / "run").glob("checkpoints/0*")) and learner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    learner.kill()
    assert learner.wait() == -signal.SIGKILL
    assert_same_bits(resume(tmp_path / "run", 2).loop_state, whole[0].loop_state)


@pytest.mark.slow
def test_what_happens_to_workers_is_in_the_run_directory(whole, tmp_path):
    """When, which worker, and why."""
    with pytest.warns(UserWarning, match=r"worker \d died: of a test; starting it again"):
        result = run(tmp_path / "run", lambda: FaultyWorkers({6: "lost"}), workers=2)
    events = [json.loads(line) for line in (tmp_path / "run" / "workers.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "started", "failed", "restarted"]
    assert events[2]["worker"] == events[3]["worker"] and events[2]["detail"] == "died: of a test"
    assert {(event["node"], event["pid"]) for event in events} == {(platform.node(), os.getpid())}
    assert_same_bits(result.loop_state, whole[0].loop_state)


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_workers():
    engine = FaultyWorkers({})

    def fail(progress, metrics, state):
        raise KeyError("of a test")

    with pytest.raises(KeyError, match="of a test"):
        run(None, lambda: engine, callbacks=[fail])
    assert engine._workers == []


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"workers need Ray: pip install 'polyak\[ray\]'"):
        run(None, None)


@pytest.mark.slow
def test_a_run_with_lag_one_resumes_to_the_bit(tmp_path):
    """Also what was under way."""
    agent = make_agent(polyak.envs.make(ENV).spec, values_when="collect")
    how = Workers(lag=1, number=2, make_engine=InProcessWorkers)
    settings = {"num_envs": NUM_ENVS, "checkpoint_every": EVERY, "report_every": EVERY, "seed": 3, "progress": False}

    def copy(progress, metrics, state):
        if 600 < progress.env_steps < 1_000 and not (tmp_path / "copy").exists():
            shutil.copytree(tmp_path / "run", tmp_path / "copy")

    whole = polyak.train.run(
        agent, ENV, env_steps=ENV_STEPS, run_dir=tmp_path / "run", workers=how, callbacks=[copy], **settings
    )
    resumed = polyak.resume(tmp_path / "copy", workers=how, progress=False)
    assert_same_bits(resumed.loop_state, whole.loop_state)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(whole.state.copies.online.params))

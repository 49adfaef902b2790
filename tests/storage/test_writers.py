import dataclasses
import json
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Discrete, EnvSpec
from polyak.core.types import Histogram, HostEnv, Progress
from polyak.storage import writers
from polyak.storage.checkpoint import CheckpointError, restore, save, steps
from polyak.storage.progress import save_state, snapshot_of
from polyak.storage.run_directory import RunError, create, open_run
from polyak.storage.writers import checkpointer, jsonl_logger, tensorboard_logger, with_time
from tests.storage.test_tensorboard import read

STATE = {"agent": jnp.arange(3.0), "key": jax.random.key(0)}


class Counter:
    """A host environment whose whole state is a count and a generator."""

    num_envs = 1

    def __init__(self, snapshot=True):
        self.spec = EnvSpec(Discrete(2), Discrete(2), id="Counter-v0")
        self.rng = np.random.default_rng(1)
        self.has_state = snapshot

    def reset(self, seed):
        raise AssertionError

    def step(self, action):
        raise AssertionError

    def snapshot(self):
        return {"rng": self.rng.bit_generator.state, "obs": np.float32([np.nan, 1])} if self.has_state else None

    def restore(self, snapshot):
        self.rng.bit_generator.state = snapshot["rng"]

    def close(self):
        pass


def at(env_steps, *, target=1000, env=None):
    return Progress(env_steps, target, env_steps // 10, 2.0, 1.0, 500.0, env)


@pytest.fixture
def run(tmp_path):
    with create(tmp_path / "run", {"seed": 1}) as made:
        yield made


def test_time_metrics_use_stable_baselines3_names():
    assert with_time(at(100), {"train/loss": 1.0}) == {
        "train/loss": 1.0,
        "time/fps": 500.0,
        "time/iterations": 10,
        "time/time_elapsed": 2.0,
        "time/total_timesteps": 100,
    }
    assert with_time(at(100), {"time/fps": 1.0})["time/fps"] == 1.0


def test_a_row_is_on_the_disk_when_the_callback_returns(run):
    log = jsonl_logger(run)
    log(at(10), {"rollout/ep_rew_mean": float("nan")}, STATE)
    (row,) = map(json.loads, run.metrics.read_text().splitlines())
    assert row == {
        "env_steps": 10,
        "time/fps": 500.0,
        "time/iterations": 1,
        "time/time_elapsed": 2.0,
        "time/total_timesteps": 10,
        "rollout/ep_rew_mean": None,
    }
    log(at(20), {}, STATE)
    assert [row["env_steps"] for row in run.read_metrics()] == [10, 20]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_tag_on_the_axis_of_env_steps(run):
    log = tensorboard_logger(run)
    for step in (10, 20):
        log(at(step), {"train/loss": step / 8}, STATE)
    shown = read(run.tensorboard)
    assert shown["train/loss"] == [(10, 1.25), (20, 2.5)]
    assert shown["time/total_timesteps"] == [(10, 10.0), (20, 20.0)]


def test_without_the_tensorboard_package_no_event_file_is_written(run, monkeypatch):
    monkeypatch.setattr(writers, "package_version", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package tensorboard: pip install 'polyak\[tensorboard\]'"):
        tensorboard_logger(run)
    assert not run.tensorboard.exists()


def test_a_file_in_the_place_of_the_event_directory_is_an_error(run):
    run.tensorboard.write_text("mine")
    with pytest.raises(RunError, match="tb: cannot be created: File exists"):
        tensorboard_logger(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_histograms_where_there_are_some(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spread = Histogram(*(np.float32(x) for x in (0.0, 1.0)), np.ones(4, np.float32), np.float32(2.0), np.float32(1.5))
    log = tensorboard_logger(run)
    log(at(10), {"a": 1.0}, STATE)
    log(dataclasses.replace(at(20), histograms={"histogram/actions": spread}), {"a": 1.0}, STATE)
    shown = accumulator.EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in shown.Histograms("histogram/actions")] == [20]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_resume_writes_no_row_twice(run):
    for step in (10, 20, 30):
        jsonl_logger(run)(at(step), {"a": 1.0}, STATE)
    log = tensorboard_logger(run)
    for step in (10, 20, 30):
        log(at(step), {"a": 1.0}, STATE)
    run.close()
    with open_run(run.directory, write=True) as again:
        again.rewind(20)
        jsonl, board = jsonl_logger(again), tensorboard_logger(again, resumed_at=20)
        for step in (25, 35):
            jsonl(at(step), {"a": 2.0}, STATE)
            board(at(step), {"a": 2.0}, STATE)
        wanted = [(10, 1.0), (20, 1.0), (25, 2.0), (35, 2.0)]
        assert [(row["env_steps"], row["a"]) for row in again.read_metrics()] == wanted
        assert read(again.tensorboard)["a"] == wanted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_logs_stay_in_order_when_the_clock_goes_backwards(run, monkeypatch):
    for second, now in enumerate((1e9, 5e8, -1.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        tensorboard_logger(run, resumed_at=10 * second)(at(10 * second + 10), {"a": 1.0}, STATE)
    assert [step for step, _ in read(run.tensorboard)["a"]] == [10, 20, 30]


@pytest.mark.parametrize("make", [jsonl_logger, tensorboard_logger])
def test_full_disk_drops_rows_with_one_warning(run, full_disk, make):
    log = make(run)
    log(at(10), {"a": 1.0}, STATE)
    with full_disk(300), pytest.warns(UserWarning, match="too large; rows are lost while this lasts, training goes on") as seen:
        for step in range(20, 100, 10):
            log(at(step), {"a": 1.0}, STATE)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(at(100), {"a": 1.0}, STATE)
    if make is jsonl_logger:
        written = [row["env_steps"] for row in run.read_metrics()]
        assert (written[0], written[-1]) == (10, 100)
        assert len(written) < 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_event_file_that_begins_on_a_full_disk_is_whole_later(run, full_disk):
    log = tensorboard_logger(run)
    with full_disk(10), pytest.warns(UserWarning, match="training goes on"):
        log(at(10), {"a": 1.0}, STATE)
    log(at(20), {"a": 2.0}, STATE)
    assert read(run.tensorboard)["a"] == [(20, 2.0)]
    (path,) = run.tensorboard.iterdir()
    assert path.read_bytes().count(b"brain.Event:2") == 1


def test_checkpoint_interval_counts_from_the_last_save(run):
    save_due = checkpointer(run, 100, keep=10)
    for step in (30, 99, 130, 199, 229, 230, 555, 600, 656):
        save_due(at(step), {}, STATE)
    assert steps(run.checkpoints) == [130, 230, 555, 656]


def test_the_last_report_is_saved_once(run):
    save_due = checkpointer(run, 600)
    for step in (500, 1008, 1008):
        save_due(at(step), {}, STATE)
    assert steps(run.checkpoints) == [1008]


def test_checkpoint_interval_counts_from_the_restored_step(run):
    for step in (100, 200, 900):
        save(run.checkpoints, STATE, step=step, meta={}, keep=10)
    save_due = checkpointer(run, 100, keep=10)
    for step in (250, 310, 350, 420):
        save_due(at(step), {}, STATE)
    assert steps(run.checkpoints) == [100, 200, 310, 420], "900 is of a training that this one did not come from"


def test_checkpoint_stores_progress_and_environment(run):
    env = Counter()
    assert isinstance(env, HostEnv)
    checkpointer(run, 1)(at(50, env=env), {}, STATE)
    restored = restore(run.checkpoints, STATE)
    assert restored.meta["progress"] == {
        "env_steps": 50,
        "target_env_steps": 1000,
        "iteration": 5,
        "seconds": 2.0,
        "compile_seconds": 1.0,
    }
    assert restored.meta["resume"] == "bit-exact"
    other = Counter()
    other.rng = np.random.default_rng(2)
    other.restore(restored.meta["env"])
    assert other.rng.integers(1 << 60) == env.rng.integers(1 << 60)
    np.testing.assert_array_equal(restored.tree["agent"], STATE["agent"])


def test_checkpoint_records_why_resume_is_not_bit_exact(run):
    progress = at(50, env=Counter(snapshot=False))
    save_state(run, progress, STATE, snapshot_of(progress))
    meta = restore(run.checkpoints, STATE).meta
    assert meta["env"] is None
    assert meta["resume"] == "resume is not bit-exact because env Counter-v0 has no state"
    save_state(run, at(60), STATE, None)
    assert restore(run.checkpoints, STATE).meta["resume"] == "bit-exact"


def test_a_checkpoint_that_cannot_be_saved_ends_the_training(run, full_disk):
    with full_disk(100), pytest.raises(CheckpointError, match="too large"):
        checkpointer(run, 1)(at(10), {}, STATE)
    bad = {"agent": jnp.array([jnp.nan])}
    with pytest.raises(CheckpointError, match=r"NaN or infinity in \['agent'\]"):
        checkpointer(run, 1)(at(10), {}, bad)
    assert steps(run.checkpoints) == []


def test_wrong_arguments_and_readers_are_rejected_at_once(run):
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        checkpointer(run, 0)
    with pytest.raises(ValueError, match="keep must be an integer >= 1, got 0"):
        checkpointer(run, 1, keep=0)
    reader = open_run(run.directory)
    for make in (jsonl_logger, tensorboard_logger, lambda run: checkpointer(run, 1)):
        with pytest.raises(RunError, match="opened for reading"):
            make(reader)

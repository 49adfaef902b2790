import json
import os
import shutil

import numpy as np
import pytest

import polyak
from polyak.reports.records import RunRecord
from polyak.storage.run_directory import RunError, open_run
from tests.reports.written_runs import linear_rows, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", linear_rows(20, every=5), stopped=None, eval_every=500)


def test_settings_summary_and_metrics_are_read(run):
    record = polyak.load_run(run)
    assert (record.name, record.algorithm, record.env, record.seed, record.status) == (
        "run",
        "ppo",
        "jax/CartPole-v1",
        0,
        "done",
    )
    assert record.directory == run and record.summary["eval_mean_return"] == 1.5 and "python" in record.system
    assert record.metrics["env_steps"].tolist() == [100 * n for n in range(1, 21)]
    steps, values = record.curve()
    assert steps.tolist() == [100 * n for n in range(1, 21)] and values.tolist() == list(range(1, 21))
    assert record.evaluations["env_steps"].tolist() == [500, 1000, 1500, 2000]
    assert record.evaluations["eval/mean_reward"].tolist() == [1005, 1010, 1015, 1020]
    assert (record.checkpoints, record.best_checkpoint, record.worker_events) == ([], None, [])
    assert repr(record) == "RunRecord('run', ppo jax/CartPole-v1, seed 0, done)"


def test_settings_are_plain_data_by_name(tmp_path):
    agent = {
        "learning_rate": {"$class": "Linear", "start": 0.1, "end": {"$float": "nan"}},
        "network": {"$class": "MLP", "hidden": {"$tuple": [4, 5]}, "head": {"$class": "QValues", "dueling": True}},
        "noise": {"$array": {"dtype": "float32", "shape": [2], "values": [0.5, 1.5]}},
        "reward": {"$unsupported": "<function f>"},
        "num_envs": 3,
    }
    settings = polyak.load_run(write_run(tmp_path / "run", agent=agent, env_kwargs={"length": 1.5})).settings
    wanted = {
        "learning_rate": "Linear",
        "learning_rate.start": 0.1,
        "network": "MLP",
        "network.hidden": [4, 5],
        "network.head": "QValues",
        "network.head.dueling": True,
        "noise": [0.5, 1.5],
        "reward": "<function f>",
        "num_envs": 8,
        "agent.num_envs": 3,
        "env_kwargs.length": 1.5,
        "gamma": 0.99,
        "threads": None,
    }
    assert {name: settings[name] for name in wanted} == wanted
    assert np.isnan(settings["learning_rate.end"]) and not any(name.startswith("spec") for name in settings)


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"stopped": None, "env_steps": 2000}, "done"),
        ({"stopped": None, "env_steps": 1500}, "killed"),  # a resumption to more steps was killed
        ({"stopped": "interrupt", "env_steps": 1500}, "stopped"),
        ({"stopped": "callback", "env_steps": 1500}, "stopped"),
        ({"stopped": "diverged", "env_steps": 1500}, "diverged"),
        ({"stopped": "TrainingDiverged: loss was NaN", "env_steps": 1500}, "diverged"),
        ({"stopped": "RuntimeError: no luck", "env_steps": None}, "failed"),
        (None, "killed"),
    ],
)
def test_the_status_follows_from_the_summary(run, summary, status):
    (run / "summary.json").unlink()
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    record = polyak.load_run(run)
    assert (record.status, record.failure) == (status, summary and summary["stopped"])


def test_a_run_that_is_written_is_read_as_far_as_it_goes(run):
    with open_run(run, write=True) as writer:
        record = polyak.load_run(run)
        assert (record.status, record.summary) == ("training", None)
        writer.append_metrics({"env_steps": 2100, "rollout/ep_rew_mean": 7.0})
        with writer.metrics.open("a") as file:
            file.write('{"env_steps": 2200, "rollout/ep_r')
        assert record.read_last_metrics() == {"env_steps": 2100, "rollout/ep_rew_mean": 7.0}
        assert record.metrics["env_steps"][-1] == 2100
        writer.append_metrics({"x": 0})  # ends the incomplete line
        assert record.metrics["env_steps"][-1] == 2100, "what was read stays"
    assert polyak.load_run(run).status == "done"


@pytest.mark.parametrize("stopped", [None, "interrupt", "RuntimeError: no luck"])
def test_a_resumed_run_that_is_killed_has_not_the_status_of_its_earlier_end(run, stopped):
    earlier = open_run(run).read_summary() | {"stopped": stopped}
    (run / "summary.json").write_text(json.dumps(earlier))
    with open_run(run, write=True) as writer:
        writer.rewind(2000)
        os.utime(run / "summary.json", (2**32, 2**32))  # newer than the lock
        assert polyak.load_run(run).status == "training"
    record = polyak.load_run(run)
    assert (record.status, record.summary, record.failure) == ("killed", None, None)
    assert open_run(run).read_summary() == earlier | {"stopped": "killed"}, "the times are needed if nothing more is trained"
    with open_run(run, write=True) as writer:
        writer.rewind(2000)
        writer.write_summary(earlier)
    assert polyak.load_run(run).summary == earlier


def test_a_damaged_summary_is_no_obstacle_to_a_resumption(run):
    (run / "summary.json").write_text("{")
    with open_run(run, write=True) as writer:
        writer.rewind(1000)
    assert open_run(run).read_metrics()[-1]["env_steps"] == 1000


def test_a_run_that_is_removed_meanwhile_is_an_error(run):
    record = polyak.load_run(run)
    shutil.rmtree(run)
    for read in (record.read_last_metrics, lambda: record.metrics):
        with pytest.raises(RunError, match="run: was moved or removed meanwhile"):
            read()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "{}", "config.json: has no algorithm; it is not from polyak train"),
        ("config.json", '{"algorithm": "a", "env": "e", "env_steps": true}', "config.json: has no env_steps"),
        ("config.json", '{"sha256": "0"}', "config.json: was edited or damaged"),
        ("summary.json", "[]", r"summary.json: must be a JSON object, got \[\]"),
        ("system.json", "", "system.json: not valid JSON"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(run, file, content, message):
    (run / file).write_text(content)
    with pytest.raises(RunError, match=message):
        polyak.load_run(run)


def test_a_path_without_a_run_is_an_error(tmp_path, run):
    for path, message in (
        (tmp_path / "nothing", "there is no such directory"),
        (run / "config.json", "not a directory"),
        (tmp_path, "holds no run .*; give one of .*run"),
        ("a" * 5000, "there is no such directory"),
    ):
        with pytest.raises(RunError, match=message):
            polyak.load_run(path)


def test_a_tag_that_does_not_exist_is_an_error_with_the_nearest(run):
    with pytest.raises(
        ValueError, match=r"run: unknown tag 'train/los'; did you mean 'train/loss'\? \(tags: time/time_elapsed, "
    ):
        polyak.load_run(run).curve("train/los")


def test_metrics_are_a_frame_where_pandas_is_installed(run):
    pandas = pytest.importorskip("pandas")
    frame = polyak.load_run(run).to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.shape == (20, 5)
    assert frame["eval/mean_reward"].count() == 4


def test_without_pandas_the_error_is_the_command_that_installs_it(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas needs pandas: pip install 'polyak\[pandas\]'"):
        polyak.load_run(run).to_pandas()


def test_a_symbolic_link_in_a_run_is_not_followed(run, tmp_path):
    (tmp_path / "secret").write_text('{"env_steps": 1}\n')
    (run / "metrics.jsonl").unlink()
    os.symlink(tmp_path / "secret", run / "metrics.jsonl")
    with pytest.raises(RunError, match="is a symbolic link"):
        _ = polyak.load_run(run).metrics


def test_the_policy_and_the_checkpoints_of_a_trained_run(trained, tmp_path):
    record = polyak.load_run(trained.save(tmp_path / "saved"))
    action, _ = record.load_policy().predict(np.zeros(4, np.float32))
    assert action == trained.policy.predict(np.zeros(4, np.float32))[0]
    assert record.checkpoints == [trained.progress.env_steps] and isinstance(record, RunRecord)
    # The reports of a training without a run directory are saved with it.
    assert record.metrics["env_steps"].tolist() == [row["env_steps"] for row in trained.history]
    assert record.settings["num_steps"] == 8 and record.status == "done"

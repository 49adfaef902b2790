import dataclasses
import json

import numpy as np
import pytest

import polyak
from polyak.reports.flat_settings import WITHOUT_EFFECT
from polyak.runs import RunConfig
from polyak.storage.run_directory import RunError
from tests.reports.written_runs import linear_rows, write_run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two learning rates with two seeds each, as deep as studies nest them, and another algorithm."""
    root = tmp_path_factory.mktemp("study")
    for trial, rate in enumerate((0.1, 0.01)):
        for seed in (0, 1):
            rows = linear_rows(10, slope=trial + 1, start=seed)
            directory = root / f"trials/trial-{trial}/seed-{seed}"
            write_run(directory, rows, seed=seed, agent={"learning_rate": rate}, threads=seed)
    write_run(root / "trials/dqn", linear_rows(5), algorithm="dqn", summary=False)
    return root


def test_runs_are_found_at_any_depth_and_by_name(study):
    runs = polyak.load_runs(study)
    names = [record.name for record in runs]
    assert names == ["trials/dqn", *(f"trials/trial-{t}/seed-{s}" for t in (0, 1) for s in (0, 1))]
    assert runs["trials/trial-1/seed-0"] is runs[3] and runs[1:3][0].seed == 0
    assert runs.differences == ["algorithm", "learning_rate"] and runs.unreadable == {}
    with pytest.raises(KeyError, match=r"unknown run 'trials/trial-1/seed-9'; did you mean"):
        runs["trials/trial-1/seed-9"]
    # A run directory is its own; several paths have names from their common parent.
    assert [one.name for one in polyak.load_runs(study / "trials/dqn", study / "trials/trial-0")] == [
        "dqn",
        "trial-0/seed-0",
        "trial-0/seed-1",
    ]


def test_a_table_has_a_row_for_each_run(study):
    table = polyak.load_runs(study).columns()
    assert list(table)[:6] == ["run", "algorithm", "env", "seed", "learning_rate", "status"]
    assert table["status"].tolist() == ["killed", *["done"] * 4]
    assert table["env_steps"].tolist() == [500, 1000, 1000, 1000, 1000] and table["seed"].dtype == np.int64
    np.testing.assert_array_equal(table["learning_rate"], [np.nan, 0.1, 0.1, 0.01, 0.01])
    np.testing.assert_array_equal(table["return"], [5, 10, 11, 20, 21])
    np.testing.assert_array_equal(table["eval_mean_return"], [np.nan, 1.5, 1.5, 1.5, 1.5])


def test_a_table_of_tags_has_a_row_for_each_report(study):
    table = polyak.load_runs(study).columns("rollout/ep_rew_mean", "train/loss")
    assert {len(column) for column in table.values()} == {45}
    is_run = table["run"] == "trials/trial-1/seed-1"
    assert table["rollout/ep_rew_mean"][is_run].tolist() == [2 * n + 1 for n in range(1, 11)]
    assert set(table["learning_rate"][is_run]) == {0.01}
    with pytest.raises(ValueError, match="load_runs: unknown tag 'train/los'; did you mean 'train/loss'"):
        polyak.load_runs(study).columns("train/los")


def test_tables_are_frames_of_pandas(study):
    pytest.importorskip("pandas")
    frame = polyak.load_runs(study).to_pandas("rollout/ep_rew_mean")
    last = frame[frame.env_steps == 1000].groupby("learning_rate")["rollout/ep_rew_mean"].mean()
    assert last.to_dict() == {0.01: 20.5, 0.1: 10.5}


def test_the_text_is_a_short_table(study):
    lines = repr(polyak.load_runs(study)).splitlines()
    assert lines[0].split()[:5] == ["run", "algorithm", "env", "seed", "learning_rate"] and len(lines) == 6
    assert lines[1].split()[:5] == ["trials/dqn", "dqn", "jax/CartPole-v1", "0", "—"]


def test_a_bad_run_hides_no_other(tmp_path):
    write_run(tmp_path / "good", linear_rows(3))
    (write_run(tmp_path / "edited") / "config.json").write_text("{}")
    damaged = write_run(tmp_path / "damaged", linear_rows(3))
    (damaged / "metrics.jsonl").write_text('{"env_steps": 1}\n{\n{"env_steps": 3}\n{\n')
    runs = polyak.load_runs(tmp_path)
    assert [record.name for record in runs] == ["damaged", "good"]
    assert runs.unreadable == {"edited": f"{tmp_path}/edited/config.json: has no algorithm; it is not from polyak train"}
    assert "1 cannot be read, see .unreadable" in repr_of(runs)
    with pytest.warns(UserWarning, match="damaged/metrics.jsonl, line 2: not valid JSON"):
        table = runs.columns("rollout/ep_rew_mean")
    assert set(table["run"]) == {"good"}
    with pytest.raises(KeyError, match="it is not from polyak train"):
        runs["edited"]


def repr_of(runs):
    with pytest.warns(UserWarning, match="damaged/metrics.jsonl, last line"):
        return repr(runs)


def test_no_run_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", r"empty: holds no run \(it has no config.json\)"),
        (tmp_path / "nothing", "nothing: there is no such directory"),
    ):
        with pytest.raises(RunError, match=message):
            polyak.load_runs(path)
    with pytest.raises(TypeError, match=r"pass load_runs\('runs'\)"):
        polyak.load_runs()
    (write_run(tmp_path / "only") / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"only/config\.json: has no algorithm"):
        polyak.load_runs(tmp_path)


def test_a_directory_without_permission_is_listed(tmp_path, monkeypatch):
    write_run(tmp_path / "good", linear_rows(3))
    (tmp_path / "closed").mkdir()
    scandir, access = __import__("os").scandir, __import__("os").access

    def closed_scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", closed_scandir)  # root may read everything
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("closed") and access(path, mode))
    runs = polyak.load_runs(tmp_path)
    assert runs.unreadable == {"closed": f"{tmp_path}/closed: cannot be read: permission denied"}


def test_a_run_that_is_found_twice_is_one(tmp_path):
    write_run(tmp_path / "study/0", linear_rows(3), seed=0)
    (tmp_path / "link").symlink_to(tmp_path / "study")
    runs = polyak.load_runs(tmp_path / "study", tmp_path / "link", tmp_path / "study/0")
    assert [record.directory for record in runs.records] == [tmp_path / "study/0"]


def test_results_of_an_earlier_policy_are_left_out_where_a_resumed_run_was_killed(tmp_path):
    path = write_run(tmp_path / "0", linear_rows(10), env_steps=2000) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"env_steps": 400}))
    columns = polyak.load_runs(tmp_path).columns()
    assert columns["env_steps"].tolist() == [1000] and columns["eval_mean_return"].tolist() == [None]


def test_directories_that_begin_with_a_dot_hold_no_runs(tmp_path):
    write_run(tmp_path / "0", linear_rows(3), seed=0)
    (tmp_path / ".editor").mkdir()
    (tmp_path / ".editor/config.json").write_text("{}")
    runs = polyak.load_runs(tmp_path)
    assert len(runs.records) == 1 and not runs.unreadable


def test_every_setting_of_a_run_has_an_effect_or_is_listed_as_without():
    with_effect = {"algorithm", "env", "num_envs", "loop", "agent", "action_scaling", "env_kwargs", "is_user_env", "user_flags"}
    with_effect |= {"env_options", "workers", "lag", "shared_optimizer", "max_staleness", "max_bad", "on_env_error"}
    with_effect |= {"min_workers", "learners", "data"}
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    assert with_effect | set(WITHOUT_EFFECT) == fields and not with_effect & set(WITHOUT_EFFECT)

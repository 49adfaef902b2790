"""Tracked runs: settings, metrics, videos and checkpoints, also of a resumed run, and no training that a tracker ends."""

import json
import math
import sys
import types
from pathlib import Path

import pytest

import polyak
from polyak.cli import main
from polyak.core.types import Progress
from polyak.tracking.to_mlflow import MlflowTracker
from polyak.train import callbacks

SETTINGS = {"num_steps": 16, "num_epochs": 1, "num_minibatches": 1}


def train(run_dir, **settings):
    given = {"env_steps": 300, "num_envs": 2, "settings": SETTINGS, "eval_every": 150, "eval_episodes": 2, "progress": False}
    return polyak.train.run("ppo", "jax/CartPole-v1", run_dir=run_dir, **given | settings)


def train_until_evaluated(run_dir, **settings):
    evaluated = []

    def note(progress, metrics, state):
        evaluated.append("eval/mean_reward" in metrics)

    return train(run_dir, callbacks=[note], should_stop=lambda: any(evaluated), **settings)


class Fake:
    """The smallest `wandb`: what it was told, by the id of the run."""

    def __init__(self, breaks=()):
        self.runs, self.breaks = {}, breaks

    def init(self, *, project, name, id, resume, reinit):
        if "init" in self.breaks:
            raise ConnectionError("no server")
        run = Run(self, id or f"{name}-1")
        self.runs.setdefault(run.id, []).append(run)
        run.project = project
        return run

    def Video(self, path, format):
        return path, format

    def Artifact(self, name, type):
        files = {}
        return types.SimpleNamespace(name=name, files=files, add_file=lambda path, name: files.update({name: path}))


class Run:
    def __init__(self, fake, id):
        self.fake, self.id, self.rows, self.artifacts, self.is_finished = fake, id, [], {}, False
        self.config = Config()

    def log(self, metrics, step):
        if "log" in self.fake.breaks:
            raise ConnectionError("no server")
        self.rows.append((step, metrics))

    def log_artifact(self, artifact):
        self.artifacts[artifact.name] = artifact.files

    def finish(self, exit_code):
        self.is_finished, self.exit_code = True, exit_code


class Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)


@pytest.fixture
def wandb(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_resumed_run_continues_the_same_tracked_run(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "poles")
    run = tmp_path / "pole"
    train_until_evaluated(run, track="wandb")
    assert json.loads((run / "tracking.json").read_text()) == {"tracker": "wandb", "id": "pole-1"}
    polyak.resume(run, progress=False)
    ((before, after),) = wandb.runs.values()
    assert before.is_finished and after.is_finished and before.project == "poles" and after.exit_code == 0
    assert before.config["agent"]["num_steps"] == 16 and before.config["seed"] == 0
    steps = [step for one in (before, after) for step, metrics in one.rows]
    assert steps == sorted(steps) and steps[-1] >= 300
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in metrics.items() if v is None or math.isfinite(v)} for _, metrics in before.rows + after.rows] == [
        {k: v for k, v in row.items() if k != "env_steps" and v is not None} for row in rows
    ]
    # The artifact is a run directory.
    assert set(after.artifacts) == {"checkpoint-pole-1", "best-pole-1"}
    for inside, path in after.artifacts["checkpoint-pole-1"].items():
        target = tmp_path / "downloaded" / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(path).read_bytes())
    policy, again = polyak.load_policy(tmp_path / "downloaded"), polyak.load_policy(run)
    assert policy.predict([0.1, 0.2, 0.0, 0.1])[0] == again.predict([0.1, 0.2, 0.0, 0.1])[0]


def test_a_tracker_that_fails_warns_once_and_ends_no_training(wandb, tmp_path):
    wandb.breaks = ("log",)
    with pytest.warns(UserWarning, match="track=wandb: ConnectionError: no server; training goes on") as warned:
        settings = SETTINGS | {"learning_rate": 1e-3, "clip_range": 0.2}
        assert train(tmp_path / "a", track="wandb", settings=settings).progress.env_steps >= 300
    assert len(warned) == 1
    wandb.breaks = ("init",)
    with pytest.raises(ConnectionError, match="no server"):
        train(tmp_path / "b", track="wandb")
    with pytest.warns(UserWarning, match="track=wandb: ConnectionError: no server; training goes on without it"):
        polyak.resume(tmp_path / "a", env_steps=400, progress=False)


def test_a_training_that_fails_is_a_failed_run_of_the_tracker(wandb, tmp_path):
    def fail(progress, metrics, state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "pole", track="wandb", callbacks=[fail])
    ((run,),) = wandb.runs.values()
    assert run.exit_code == 1
    status = []
    client = types.SimpleNamespace(set_terminated=lambda *terminated: status.append(terminated))
    for failed in (True, False):
        MlflowTracker(client, "1", {}).close(failed)
    assert status == [("1", "FAILED"), ("1", "FINISHED")]


def test_seeds_that_diverge_are_failed_runs_of_the_tracker(wandb, tmp_path):
    diverging = SETTINGS | {"learning_rate": 1e30, "max_grad_norm": None, "max_skipped_updates": 2}
    settings = {"env_steps": 400, "num_envs": 2, "settings": diverging, "eval_episodes": 0, "progress": False}
    with pytest.warns(UserWarning, match="has diverged"):
        polyak.train.run_seeds("ppo", "jax/Pendulum-v1", seeds=2, run_dir=tmp_path / "seeds", track="wandb", **settings)
    assert [run.exit_code for (run,) in wandb.runs.values()] == [1, 1]


def test_videos_are_logged_once_each(wandb, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    train(tmp_path / "filmed", track="wandb", video_every=150)
    ((run,),) = wandb.runs.values()
    videos = [(step, metrics["video"][0]) for step, metrics in run.rows if "video" in metrics]
    assert [path for _, path in videos] == sorted(map(str, (tmp_path / "filmed" / "videos").iterdir())) and len(videos) == 2
    assert all(f"{step:012d}" in path for step, path in videos)


def test_seeds_that_train_together_are_tracked_apart(wandb, tmp_path):
    settings = {"env_steps": 100, "num_envs": 2, "settings": SETTINGS, "eval_episodes": 0, "progress": False}
    polyak.train.run_seeds("ppo", "jax/CartPole-v1", seeds=2, run_dir=tmp_path / "seeds", track="wandb", **settings)
    assert {id: run.config["seed"] for id, (run,) in wandb.runs.items()} == {"seed-0-1": 0, "seed-1-1": 1}


def test_callbacks_log_the_settings_of_the_training(tmp_path):
    run = Run(Fake(), "mine")
    train(tmp_path / "run", callbacks=[callbacks.log_to_wandb(run)])
    assert run.config["agent"]["num_steps"] == 16 and run.rows[-1][1]["time/fps"] > 0 and not run.is_finished
    progress = Progress(100, 1000, 10, 2.0, 1.0, 50.0)
    callbacks.log_to_trackio(Run(Fake(), "loop"))(progress, {"train/loss": 0.5}, None)


def test_a_missing_package_is_named_before_anything_is_created(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=rf"track='{name}' needs {name}: pip install 'polyak\[{name}\]'"):
            train(tmp_path / "run", track=name)
        assert main(["train", "ppo", "jax/CartPole-v1", "--track", name, "--run-dir", "run"]) == 2
        assert f"pip install 'polyak[{name}]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^train.run: track must be"):
        train(tmp_path / "run", track="comet")


def test_a_tracked_run_needs_a_directory(wandb):
    with pytest.raises(ValueError, match=r"^train.run: track='wandb' needs run_dir"):
        train(None, track="wandb")
    with pytest.raises(ValueError, match=r"^train.offline: track='wandb' needs run_dir"):
        polyak.train.offline("dqn", "none.npz", gradient_steps=1, track="wandb")


# With the packages themselves, offline.


def stopped_and_resumed(run, track):
    train_until_evaluated(run, track=track, video_every=150)
    polyak.resume(run, progress=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["env_steps"]: row["time/iterations"] for row in rows}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_itself(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    reported = stopped_and_resumed(tmp_path / "pole", "mlflow")
    client = mlflow.MlflowClient()
    (tracked,) = client.search_runs([client.get_experiment_by_name("polyak").experiment_id])
    assert tracked.data.params["agent.num_steps"] == "16" and tracked.info.status == "FINISHED"
    history = client.get_metric_history(tracked.info.run_id, "time/iterations")
    assert {metric.step: metric.value for metric in history} == reported
    artifacts = tmp_path / "artifacts"
    client.download_artifacts(tracked.info.run_id, "", str(artifacts.mkdir() or artifacts))
    assert len(list(artifacts.glob("videos/*.mp4"))) == 2
    polyak.load_policy(artifacts / "best")
    # The callback, in the active run.
    with mlflow.start_run():
        train(tmp_path / "own", callbacks=[callbacks.log_to_mlflow()])
        assert client.get_run(mlflow.active_run().info.run_id).data.params["agent.num_steps"] == "16"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_itself(tmp_path, monkeypatch):
    pytest.importorskip("wandb.sdk")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    stopped_and_resumed(tmp_path / "pole", "wandb")
    id = json.loads((tmp_path / "pole" / "tracking.json").read_text())["id"]
    parts = sorted((tmp_path / "wandb").glob(f"offline-run-*-{id}"))
    assert len(parts) in (1, 2) and all(list(part.glob("run-*.wandb")) for part in parts)
    assert len([file for part in parts for file in part.glob("files/media/videos/*.mp4")]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trackio_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    reported = stopped_and_resumed(tmp_path / "pole", "trackio")
    name = json.loads((tmp_path / "pole" / "tracking.json").read_text())["id"]
    (run,) = trackio.Api().runs("polyak")
    assert run.name == name and run.config["agent"]["num_steps"] == 16
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("polyak", name)
    assert {row["step"]: row["time/iterations"] for row in rows if "time/iterations" in row} == reported
    assert len([row for row in rows if "video" in row]) == 2

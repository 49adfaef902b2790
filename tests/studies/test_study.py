import json
import os
import random
import signal
import sys
import time
import tomllib

import pytest

import polyak
from polyak.cli import main
from polyak.storage.run_files import RunError
from polyak.storage.toml_files import write_toml
from polyak.studies import jobs, training
from polyak.studies.training import Bench, StudyStopped, Task
from tests.cli.fork_server import ForkServer
from tests.cli.processes import environment, finish, wait_until

pytest.importorskip("optuna")

# Only numbers vary, so that all trials are one program.
SPACE = {"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "gamma": [0.9, 0.99], "normalize_reward": [None, "return"]}
SPACE_FILE = """
learning_rate = { low = 1e-5, high = 1e-2, log = true }
gamma = [0.9, 0.99]
normalize_reward = ["None", "return"]
"""
TINY = {
    "env_steps": 512,
    "num_envs": 2,
    "evaluations": 2,
    "eval_episodes": 2,
    "fresh_seeds": 2,
    "space": SPACE,
    "pruner": "none",
}


def study(directory, trials=3, **changes):
    return polyak.study("a2c", "jax/CartPole-v1", directory=directory, trials=trials, **TINY | changes)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A study of three trials of two seeds, of which one has settings that the agent rejects."""
    directory = tmp_path_factory.mktemp("studies") / "found"
    return study(directory, seeds=2, space=SPACE | {"network": {"hidden": [[16], [32]]}}, progress=False)


@pytest.mark.slow
def test_a_study_ends_with_its_files(found):
    directory = found.directory
    assert [trial.number for trial in found.trials] == [0, 1, 2] and found.trials[0].settings == {}
    assert all(trial.state == "complete" and len(trial.scores) == 2 for trial in found.trials)
    assert found.best.score == max(trial.score for trial in found.trials)
    assert len(found.best.fresh_scores) == len(found.trials[0].fresh_scores) == 2
    summary = json.loads((directory / "study.json").read_text())
    assert summary["best"] == found.best.number and len(summary["trials"]) == 3
    runs = polyak.load_runs(directory)
    assert {name.split("/")[0] for name in (run.name for run in runs)} == {"fresh", "trial-000", "trial-001", "trial-002"}
    assert {run.seed for run in runs if run.name.startswith("fresh")} == {2, 3}
    assert set(runs.differences) >= {"learning_rate", "network.hidden"}


@pytest.mark.slow
def test_the_best_settings_train_by_their_file_and_the_runs_have_a_report(found, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Of any trial, as the preset's settings may be the best.
    settings = found.trials[1].settings
    write_toml(tmp_path / "one.toml", {"env_steps": 512, "num_envs": 2, **settings}, "trial 1")
    assert tomllib.loads((tmp_path / "one.toml").read_text())["hidden"] == settings["hidden"]
    assert main(["train", "a2c", "jax/CartPole-v1", "--preset", "one.toml", "--run-dir", "run", "--eval-episodes", "0"]) == 0
    trained = polyak.load_run("run").config
    assert trained["agent"] == polyak.load_run(found.directory / "trial-001" / "seed-0").config["agent"]
    assert polyak.report(found.directory, output=tmp_path / "report.html").stat().st_size > 1000
    best = tomllib.loads((found.directory / "best.toml").read_text())
    texts = {name: "None" if value is None else value for name, value in found.best.settings.items()}
    assert best == {"env_steps": 512, "num_envs": 2} | texts


@pytest.mark.slow
def test_the_same_call_trains_nothing_twice_and_more_trials_continue(found, monkeypatch):
    space = SPACE | {"network": {"hidden": [[16], [32]]}}
    trained = []
    monkeypatch.setattr(
        training.Bench, "train", lambda *arguments: trained.append(arguments[1]) or training.Outcome((-1.0, -1.0))
    )
    again = study(found.directory, seeds=2, space=space, progress=False)
    assert again == found and trained == []
    more = study(found.directory, trials=5, seeds=2, space=space, progress=False)
    assert len(trained) == 2 and more.trials[:3] == found.trials and more.best == found.best


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "study: trials must be an integer >= 1, got 0"),
        ({"seeds": 0}, "study: seeds must be an integer >= 1, got 0"),
        ({"workers": 1000}, r"study: workers must be an integer in \[1, 256\], got 1000"),
        ({"evaluations": 513}, r"study: evaluations must be an integer in \[1, 512\], got 513"),
        ({"fresh_seeds": -1}, "study: fresh_seeds must be an integer >= 0, got -1"),
        ({"space": {"gama": [0.9]}}, "unknown setting 'gama'; did you mean 'gamma'"),
        ({"space": {"gamma": [1.9]}}, r"gamma must be a number in \[0, 1\], got 1.9"),
        ({"space": {}}, "must have at least one setting"),
        ({"space": "none.toml"}, "none.toml: cannot be read"),
        ({"pruner": "best"}, "study: pruner must be one of"),
        ({"sampler": "grid"}, "study: sampler must be one of"),
        ({"seed": -1}, "seed"),
        ({"env_steps": 0}, "study: env_steps must be an integer >= 1 or None, got 0"),
    ],
)
def test_invalid_arguments_change_nothing(tmp_path, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        study(tmp_path / "s", **changes)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"), [(("pgo", "jax/CartPole-v1"), "did you mean"), (("ppo", "jax/CartPol-v1"), "jax/CartPole")]
)
def test_unknown_names_change_nothing(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        polyak.study(*words, trials=1, directory=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("package", ["optuna", "cmaes"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"a study needs {package}: pip install 'polyak\[study\]'"):
        study(tmp_path / "s")


def test_an_error_of_the_machine_stops_the_study_and_the_same_call_continues(tmp_path, monkeypatch):
    calls = []

    def fail_once(*arguments, **options):
        calls.append(options["settings"])
        raise RuntimeError("the simulator\nis gone")

    monkeypatch.setattr(training, "run_seeds", fail_once)
    says = "trial 0 stopped the study: RuntimeError: the simulator is gone; the same command continues it when this is mended"
    for _ in range(2):
        with pytest.raises(StudyStopped, match=says):
            study(tmp_path / "s", progress=False)
    assert calls == [{}, {}] and (tmp_path / "s" / "trials.jsonl").exists() is False


def test_a_study_without_a_complete_trial_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Bench, "train", lambda *arguments: training.Outcome(error="diverged: loss is NaN"))
    with pytest.raises(RunError, match="no trial is complete; the last error: diverged: loss is NaN"):
        study(tmp_path / "s", progress=False)


def test_a_process_that_dies_three_times_stops_the_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    wanted = [jobs.Job(f"trial {n}", {"gamma": 0.9}, [0], tmp_path / str(n), lambda *report: False) for n in range(3)]
    task = Task("ppo", "jax/CartPole-v1", 1000, 8, 4, 2)
    with Bench(task) as bench, pytest.raises(StudyStopped, match=r'with {"gamma": 0.9} stopped the study: 3 processes died'):
        list(jobs.run_jobs(bench, wanted, 2))
    assert "its process ended with exit code 1; it begins again" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_train_all_trials_although_one_is_killed(tmp_path, monkeypatch, capsys):
    receive, killed = jobs.Worker.receive, []

    def kill_once(worker):
        if worker.job.name == "trial 1" and not killed:
            killed.append(worker)
            worker._process.kill()
        return receive(worker)

    monkeypatch.setattr(jobs.Worker, "receive", kill_once)
    # With many trials the median answers by a bool of NumPy.
    result = study(tmp_path / "s", trials=12, workers=2, fresh_seeds=0, pruner="median")
    assert {trial.state for trial in result.trials} <= {"complete", "pruned"} and len(killed) == 1
    assert len(result.trials) == 12
    out = capsys.readouterr().out
    assert "trial 1: its process was killed by SIGKILL; it begins again" in out
    with pytest.raises(ProcessLookupError):
        os.kill(killed[0]._process.pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_study_killed_at_random_moments_equals_one_that_was_not(tmp_path):
    (tmp_path / "space.toml").write_text(SPACE_FILE)
    changes = {"trials": 6, "space": "space.toml", "pruner": "median", "fresh_seeds": 1}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in (TINY | changes).items())
    words = f"study a2c jax/CartPole-v1 {flags} --directory"
    # Commands without the seconds of importing, which change nothing.
    forks = ForkServer(environment(tmp_path / "cache"))
    try:
        code, out = finish(forks.start(f"{words} whole", tmp_path), 600)
        assert code == 0, out
        draw = random.Random(0)
        # While the first trial compiles, between and in the others, and in the fresh trainings at the end.
        for count in (0, 1, 2, 4, 6):
            process = forks.start(f"{words} cut", tmp_path)
            wait_until((tmp_path / "cut" / "options.json").exists, process)
            wait_until(lambda count=count: count_records(tmp_path / "cut") >= count, process)
            # A trial takes about twice as long on a quiet machine.
            time.sleep(draw.uniform(0, 0.3))
            process.kill()
            assert process.wait() == -signal.SIGKILL
            process.stdout.close()
        code, out = finish(forks.start(f"{words} cut", tmp_path), 600)
        assert code == 0, out
    finally:
        forks.close()
    whole, again = (json.loads((tmp_path / name / "study.json").read_text()) for name in ("whole", "cut"))
    assert again == whole and len(whole["trials"]) == 6
    assert (tmp_path / "cut" / "best.toml").read_text() == (tmp_path / "whole" / "best.toml").read_text()


def count_records(directory):
    """The trials and fresh trainings that a study has recorded."""
    path = directory / "trials.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0

"""The long training with workers of `benchmarks/soak.py`: its threads and figures where something is missing."""

import importlib
import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    """The module; its settings of JAX do not reach this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    monkeypatch.delitem(sys.modules, "soak", raising=False)
    module = importlib.import_module("soak")
    monkeypatch.setattr(module, "few_threads", lambda number: None)
    monkeypatch.setattr(module, "jax", types.SimpleNamespace(config=types.SimpleNamespace(update=lambda *_: None)))
    monkeypatch.setattr(module, "SAMPLE_SECONDS", 0.01)
    handler = signal.getsignal(signal.SIGTERM)
    yield module
    signal.signal(signal.SIGTERM, handler)
    for name in ("soak", "harness"):
        sys.modules.pop(name, None)


def sample(time, **others):
    return {
        "time": time,
        "learner memory": 100.0,
        "run files": 1.0,
        **{name.replace("_", " "): x for name, x in others.items()},
    }


def train_until_stopped(run, should_stop, first_report):
    first_report.set()
    while not should_stop():
        time.sleep(0.001)
    progress = types.SimpleNamespace(env_steps=1, iteration=1)
    return types.SimpleNamespace(progress=progress, metrics={})


def start(soak, monkeypatch, *words, train=train_until_stopped):
    monkeypatch.setattr(soak, "train", train)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "0.005", *words])
    soak.main()


def test_samples_without_workers_do_not_count_for_them(soak):
    judged = soak.judge_all([sample(t, worker_memory=50.0) if t != 3 else sample(t) for t in range(1, 7)])
    assert judged["worker memory"] == {"median": 50.0, "per_hour": 0.0, "flat": True}
    assert judged["learner memory"]["median"] == 100.0


@pytest.mark.parametrize("samples", [[], [sample(1.0, worker_memory=50.0)], [sample(1.0), sample(2.0)]])
def test_too_few_samples_are_an_error(soak, samples):
    with pytest.raises(ValueError, match=r"soak: 2 samples with workers are needed, got [012]; train for longer"):
        soak.judge_all(samples)


def test_an_error_of_a_sample_ends_the_benchmark(soak, monkeypatch):
    def measure(run):
        raise ArithmeticError("of a test")

    monkeypatch.setattr(soak, "measure", measure)
    with pytest.raises(ArithmeticError, match="of a test"):
        start(soak, monkeypatch, "--minutes", "10")


def test_samples_are_written_into_a_directory_that_is_made(soak, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(soak, "measure", lambda run: {name: 50.0 for name in ("learner memory", "worker memory", "run files")})
    with pytest.raises(SystemExit) as end:
        start(soak, monkeypatch, "--json", str(tmp_path / "new" / "soak.json"))
    assert end.value.code == 0 and "worker memory" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "new" / "soak.samples").read_text())) >= 2


def test_sigterm_before_the_first_report_says_that_there_are_no_samples(soak, monkeypatch):
    def train(run, should_stop, first_report):
        os.kill(os.getpid(), signal.SIGTERM)
        while not should_stop():
            time.sleep(0.001)

    with pytest.raises(ValueError, match="soak: 2 samples with workers are needed, got 0"):
        start(soak, monkeypatch, train=train)


def test_processes_that_end_while_workers_are_killed_are_left_out(soak, monkeypatch):
    """The second one ends before its name is read, and the first one before it is killed."""
    is_over, killed = threading.Event(), []

    def name_of(pid):
        if pid == 2:
            raise FileNotFoundError
        return "worker"

    def kill(pid, number):
        killed.append(pid)
        is_over.set()
        raise ProcessLookupError

    monkeypatch.setattr(soak, "children", lambda pid: [2, 1])
    monkeypatch.setattr(soak, "name_of", name_of)
    monkeypatch.setattr(soak, "os", types.SimpleNamespace(getpid=os.getpid, kill=kill))
    soak.kill_workers(0.001, is_over)
    assert killed == [1]

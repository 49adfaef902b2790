"""Runs with workers from Python, all in this process: what `polyak train ... --workers N` does on Ray."""

import dataclasses
import json
import platform
import re
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest

import polyak
import polyak.core.spaces
from polyak.runs import RunConfig, read_config
from polyak.storage.run_directory import create
from polyak.train.resumption import with_workers
from polyak.train.worker_settings import CONFIG_FIELDS, Workers, config_fields, options_of
from polyak.workers.in_process_workers import InProcessWorkers
from polyak.workers.rollout_worker import WorkerRollout
from polyak.workers.supervise import WorkerLost
from polyak.workers.worker_group import WorkerOptions
from tests.workers.setting import assert_same_bits

SPEC = polyak.core.spaces.EnvSpec(polyak.core.spaces.Box([-1.0], [1.0]), polyak.core.spaces.Discrete(2))
CONFIG = RunConfig(
    algorithm="a3c",
    env="CartPole-v1",
    num_envs=8,
    seed=0,
    env_steps=100,
    loop="asynchronous",
    devices=1,
    report_every=None,
    checkpoint_every=100,
    agent=polyak.A2C(SPEC),
    workers=2,
)
SETTINGS = {"num_steps": 8, "network": polyak.MLP((8,))}


def workers(number=2, **options):
    return Workers(number=number, make_engine=InProcessWorkers, **options)


def says(directory):
    """How exactly the newest checkpoint resumes."""
    newest = max((directory / "checkpoints").iterdir())
    return json.loads((newest / "manifest.json").read_text())["meta"]["resume"]


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.slow
def test_a3c_trains_evaluates_and_goes_on_with_other_workers_and_without(tmp_path):
    split = workers(max_staleness=8, shared_optimizer=False)
    result = polyak.train.run(
        "a3c",
        "CartPole-v1",
        env_steps=300,
        num_envs=4,
        settings=SETTINGS,
        run_dir=tmp_path / "run",
        workers=split,
        report_every=100,
        eval_episodes=2,
        progress=False,
    )
    config = config_of(tmp_path / "run")
    written = {name: config[name] for name in ("algorithm", "loop", "workers", "lag", "max_staleness", "shared_optimizer")}
    assert written == {
        "algorithm": "a3c",
        "loop": "asynchronous",
        "workers": 2,
        "lag": 0,
        "max_staleness": 8,
        "shared_optimizer": False,
    }
    assert result.evaluation is not None and np.asarray(result.policy.predict(np.zeros(4, np.float32))[0]) in (0, 1)
    events = [json.loads(line) for line in (tmp_path / "run" / "workers.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("started") == 2

    assert "not bit-exact because the gradients of workers arrive in any order" in says(tmp_path / "run")

    more = polyak.resume(tmp_path / "run", env_steps=450, workers=workers(4), progress=False)
    assert more.progress.env_steps >= 450 and more.config.loop == "asynchronous"
    alone = polyak.resume(tmp_path / "run", env_steps=600, workers=0, progress=False)
    assert alone.progress.env_steps >= 600 and alone.config.loop == "host"
    assert int(alone.state.env_steps) == alone.progress.env_steps, "all that was learned from, in three parts"


class NeverBegins(InProcessWorkers):
    """Workers whose start takes for ever; the first wait for them raises a signal, if a test says so."""

    def __init__(self, signals=()):
        super().__init__()
        self.signals = list(signals)

    def wait(self, calls, seconds):
        for number in self.signals:
            self.signals.remove(number)
            signal.raise_signal(number)
        time.sleep(0.01)
        return []


def never_begin(*signals):
    return Workers(number=2, make_engine=lambda: NeverBegins(signals), start_timeout=10.0, restarts=0)


SMALL = {"env_steps": 100, "num_envs": 4}


def test_a_request_to_stop_ends_the_start_of_workers(tmp_path):
    agent = polyak.A2C(polyak.envs.make("CartPole-v1").spec, network=polyak.MLP((8,)), num_steps=8)
    arguments = {**SMALL, "workers": never_begin(), "should_stop": lambda: True}
    for loop in ("distributed", "asynchronous"):
        with pytest.raises(polyak.train.StoppedBeforeStart, match="before the workers had started"):
            polyak.train.run(agent, "CartPole-v1", loop=loop, run_dir=tmp_path / loop, progress=False, **arguments)
        assert json.loads((tmp_path / loop / "summary.json").read_text())["stopped"] == "request"
    with pytest.raises(polyak.train.StoppedBeforeStart):
        polyak.resume(tmp_path / "distributed", progress=False, workers=never_begin(), should_stop=lambda: True)


def test_ctrl_c_ends_the_start_of_workers():
    agent = polyak.A2C(polyak.envs.make("CartPole-v1").spec, network=polyak.MLP((8,)), num_steps=8)
    with pytest.raises(polyak.train.StoppedBeforeStart):
        polyak.train.run(agent, "CartPole-v1", **SMALL, workers=never_begin(signal.SIGINT), progress=False)


def test_the_number_of_workers_comes_first():
    assert (Workers(4, lag=2).number, Workers(4, lag=2).lag) == (4, 2)
    with pytest.raises(TypeError, match="positional"):
        Workers(4, 2)
    with pytest.raises(ValueError, match="min_workers=5 must be at most workers=4"):
        Workers(4, min_workers=5)


class LastDies(InProcessWorkers):
    """The rollouts of a second worker, and of those in its place, end in its death."""

    def result(self, call):
        if isinstance(call.result, WorkerRollout) and call.worker is not self.first:
            raise WorkerLost("died: of a test")
        return super().result(call)

    def call(self, handle, method, arguments):
        self.first = self._workers[0]
        call = super().call(handle, method, arguments)
        call.worker = handle
        return call


@pytest.mark.slow
def test_training_goes_on_without_a_worker_that_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    split = Workers(2, min_workers=1, make_engine=LastDies)
    result = polyak.train.run(
        "a2c", "CartPole-v1", env_steps=100, num_envs=4, settings=SETTINGS, workers=split, run_dir=tmp_path / "run"
    )
    assert result.stopped is None and result.metrics["workers/alive"] == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "workers.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["worker"] == 1][-1] == "lost"
    assert "worker 1 died: of a test; it is not started again" in capsys.readouterr().out


def test_without_progress_failures_of_workers_are_warnings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    split = Workers(2, min_workers=1, make_engine=LastDies)
    arguments = {"env_steps": 40, "num_envs": 4, "workers": split}
    with pytest.warns(UserWarning, match="train: worker 1 died: of a test; starting it again"):
        polyak.train.run("a2c", "CartPole-v1", settings=SETTINGS, run_dir=tmp_path / "run", progress=False, **arguments)
    assert capsys.readouterr().out == "" and (tmp_path / "run" / "workers.jsonl").exists()


def test_a_cluster_is_told_where_the_workers_are_before_training(capsys):
    result = polyak.train.run(
        "a2c", "CartPole-v1", env_steps=40, num_envs=4, settings=SETTINGS, workers=workers(address="auto"), progress=False
    )
    assert result.progress.env_steps >= 40
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("workers: ")]
    number = r"\d+\.\d+"
    versions = rf"python {number}\S*, polyak \S+, jax {number}\S*, numpy {number}\S*, gymnasium \S+"
    assert len(lines) == 1
    assert re.fullmatch(rf"workers: 2 on {re.escape(platform.node())} \(a call takes {number} ms\); {versions}", lines[0])


def test_what_ray_needs_is_checked_before_a_run_directory_is_made(tmp_path, monkeypatch):
    arguments = {"env_steps": 40, "num_envs": 4, "settings": SETTINGS, "run_dir": tmp_path / "run"}
    with pytest.raises(RuntimeError, match="nothing answers at the Ray address"):
        polyak.train.run("a2c", "CartPole-v1", workers=Workers(2, address="127.0.0.1:1"), **arguments)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="workers need Ray"):
        polyak.train.run("a2c", "CartPole-v1", workers=2, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [Workers, polyak.train.Learners])
def test_an_address_is_not_empty(kind):
    with pytest.raises(ValueError, match="ray_address must be HOST:PORT or auto"):
        kind(2, address="")


def test_an_environment_that_cannot_be_sent_to_workers_is_an_error_before_they_start(tmp_path):
    lock = threading.Lock()

    def make_env():
        with lock:
            return gymnasium.make("CartPole-v1")

    message = "the function that creates the environment cannot be sent to workers: TypeError: cannot pickle .*lock.*inside it"
    with pytest.raises(TypeError, match=message):
        polyak.train.run("a2c", make_env, env_steps=40, num_envs=4, workers=workers(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_algorithm_of_workers_takes_four_where_none_are_given(monkeypatch):
    monkeypatch.setattr("polyak.train.worker_loops.check_ray", lambda address: None)
    monkeypatch.setattr("polyak.train.worker_loops.RayWorkers", lambda number, address, should_stop: InProcessWorkers())
    result = polyak.train.run("A3C", "CartPole-v1", env_steps=40, settings=SETTINGS, progress=False)
    assert (result.config.loop, result.config.workers, result.config.num_envs) == ("asynchronous", 4, 8)


@pytest.mark.parametrize(
    ("agent", "arguments", "message"),
    [
        ("ppo", {"loop": "asynchronous", "workers": workers()}, "PPO sends no gradients; use A2C or IMPALA"),
        ("a2c", {"loop": "asynchronous"}, "loop='asynchronous' needs workers=N"),
        ("a2c", {"loop": "host", "workers": workers()}, "workers must be None with loop='host'"),
        ("a3c", {"workers": workers(), "loop": "host"}, "a3c always uses loop='asynchronous'; remove loop='host'"),
        ("a2c", {"workers": workers(max_staleness=3)}, "max_staleness is for loop='asynchronous'"),
        ("a2c", {"workers": workers(shared_optimizer=False)}, "shared_optimizer=False is for loop='asynchronous'"),
        ("a2c", {"workers": workers(max_bad=3)}, "max_bad is for loop='asynchronous'"),
        ("a3c", {"workers": workers(lag=2)}, "lag=2: workers that push gradients do not wait"),
        ("a3c", {"workers": workers(), "devices": 2}, "devices=2: the asynchronous loop supports one device only"),
        ("a3c", {"workers": workers(3)}, "num_envs=4 cannot be split over workers=3"),
        ("ppo", {"workers": workers(lag=1)}, "lag=1, but PPO with these settings"),
    ],
)
def test_what_does_not_fit_is_rejected_before_a_run_directory_is_made(tmp_path, agent, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        polyak.train.run(agent, "CartPole-v1", env_steps=100, num_envs=4, run_dir=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_a3c_steps_no_environment_in_jax_and_trains_no_seeds_at_once():
    with pytest.raises(ValueError, match="whose workers step no JAX environment"):
        polyak.train.run("a3c", "jax/CartPole-v1", env_steps=100)
    with pytest.raises(ValueError, match="a3c trains with workers, which are of one run"):
        polyak.train.run_seeds("a3c", "CartPole-v1", seeds=2, env_steps=100)


def test_what_workers_leave_out_is_the_runs():
    config = dataclasses.replace(CONFIG, max_staleness=8, shared_optimizer=False)
    again, split = with_workers(config, Workers(number=4, timeout=7.0))
    assert (split.number, split.timeout, split.max_staleness, split.shared_optimizer) == (4, 7.0, 8, False)
    assert (again.workers, again.worker_timeout, again.max_staleness, again.shared_optimizer) == (4, 7.0, 8, False)
    assert with_workers(config, Workers(number=4, max_staleness=2))[1].max_staleness == 2


NOT_THE_DEFAULT = {
    "lag": 4,
    "timeout": 600.0,
    "start_timeout": 30.0,
    "restarts": 7,
    "on_env_error": "restart",
    "min_workers": 2,
    "shared_optimizer": False,
    "max_staleness": 3,
    "max_bad": 2,
}


@pytest.mark.parametrize("workers", [None, 2, 4, Workers(number=4)])
def test_every_option_of_workers_is_stored_and_resumed_with(workers):
    options = WorkerOptions(**NOT_THE_DEFAULT)
    assert [field.name for field in dataclasses.fields(WorkerOptions)] == list(NOT_THE_DEFAULT)
    config = dataclasses.replace(CONFIG, loop="distributed", **config_fields(options))
    again, split = with_workers(config, workers)
    assert split.options() == options_of(again) == options


@pytest.mark.parametrize("name", NOT_THE_DEFAULT)
def test_an_option_that_is_given_wins_also_where_it_is_the_default(name):
    config = dataclasses.replace(CONFIG, loop="distributed", **config_fields(WorkerOptions(**NOT_THE_DEFAULT)))
    given = {"max_staleness": 10**9, "min_workers": 1}.get(name, getattr(WorkerOptions(), name))
    again, split = with_workers(config, Workers(number=2, **{name: given}))
    wanted = WorkerOptions(**{**NOT_THE_DEFAULT, name: given})
    assert split.options() == options_of(again) == wanted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lag", 1025),
        ("worker_timeout", 0.0),
        ("worker_start_timeout", "300"),
        ("worker_restarts", -1),
        ("on_env_error", "ignore"),
        ("min_workers", 0),
        ("max_bad", 2**31),
        ("max_staleness", 2**31),
    ],
)
def test_options_of_workers_in_a_config_are_checked(field, value, unchecked):
    with pytest.raises((TypeError, ValueError), match=f"run: {field} must be"):
        dataclasses.replace(CONFIG, loop="distributed", **{field: value})


def test_a_run_that_needs_more_workers_than_it_is_resumed_with_needs_these():
    config = dataclasses.replace(CONFIG, workers=8, min_workers=6)
    assert with_workers(config, 2)[1].min_workers == with_workers(config, 2)[0].min_workers == 2
    assert with_workers(config, None)[1].min_workers == 6


def test_a_config_of_an_older_version_has_the_default_options(tmp_path):
    data = CONFIG.to_json()
    for field in set(CONFIG_FIELDS.values()) - {"lag", "shared_optimizer", "max_staleness"}:
        del data[field]
    with create(tmp_path / "run", data) as run:
        assert options_of(read_config(run)) == WorkerOptions()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asynchronous", "distributed"])
def test_a_loop_state_is_continued_with_workers(loop):
    options = {"num_envs": 4, "settings": SETTINGS, "loop": loop, "progress": False}
    first = polyak.train.run("a2c", "CartPole-v1", env_steps=100, workers=workers(), **options)
    done = first.progress.env_steps
    more = {"resume_from": first.loop_state, "env_steps_done": done}
    second = polyak.train.run("a2c", "CartPole-v1", env_steps=done + 100, workers=workers(4), **more, **options)
    assert int(second.state.env_steps) == second.progress.env_steps >= done + 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", [polyak.UniformReplay, polyak.PrioritizedReplay])
def test_a_run_with_a_replay_and_workers_resumes_to_the_bit_also_with_others(kind, tmp_path):
    replay = {"replay": kind(128), "batch_size": 8, "learning_starts": 32}
    agent = polyak.DQN(
        polyak.envs.make("CartPole-v1").spec,
        network=polyak.MLP((8,)),
        num_steps=4,
        epsilon=0.2,
        updates_per_step=0.25,
        **replay,
    )
    options = {"num_envs": 4, "progress": False, "report_every": 40, "checkpoint_every": 80}
    whole = polyak.train.run(agent, "CartPole-v1", env_steps=400, workers=workers(), run_dir=tmp_path / "whole", **options)
    polyak.train.run(agent, "CartPole-v1", env_steps=200, workers=workers(), run_dir=tmp_path / "run", **options)
    assert says(tmp_path / "run") == "bit-exact"
    resumed = polyak.resume(tmp_path / "run", env_steps=400, workers=workers(4), progress=False)
    # The replay has wrapped around before and after.
    assert int(whole.state.updates) > 40 and resumed.progress.env_steps == whole.progress.env_steps
    assert_same_bits(resumed.loop_state, whole.loop_state)


def test_a_run_with_a_lag_of_two_says_that_it_is_not_exact(tmp_path):
    polyak.train.run(
        "impala",
        "CartPole-v1",
        env_steps=100,
        num_envs=4,
        settings=SETTINGS,
        workers=workers(lag=2),
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert "not bit-exact because workers are several rollouts ahead" in says(tmp_path / "run")

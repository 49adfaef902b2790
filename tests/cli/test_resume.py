"""Stopped, resumed and finished is the same as never stopped, to the bit; what cannot be resumed is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest

from polyak import envs
from polyak.runs import read_config
from polyak.storage.checkpoint import read_manifest, steps
from polyak.storage.run_directory import open_run
from polyak.train.resumption import restore_start
from polyak.train.training import writers
from polyak.workers.worker_group import WorkerOptions
from tests.cli.processes import (
    SETTINGS,
    check_that_its_config_runs_again_to_the_same_bits,
    edit_config,
    environment,
    last_checkpoint,
    metrics,
)
from tests.storage.test_checkpoint import forge

# Box2D warns while it is imported, and dies where warnings are errors; its lander leaves its observation space.
BOX2D = pytest.mark.filterwarnings("ignore:builtin type", "ignore:LunarLander-v3. env")


@pytest.fixture
def stopped_at(monkeypatch):
    """Have the next training sent a SIGTERM at the first report from this env step on."""
    # Out of time, it would end this very process.
    monkeypatch.setattr("polyak.cli.signals.GRACE_SECONDS", 120.0)

    def arrange(env_steps):
        sent = []

        def with_signal(run, config, start):
            def interrupt(progress, metrics, state):
                if progress.env_steps >= env_steps and not sent:
                    sent.append(os.kill(os.getpid(), signal.SIGTERM))

            return (interrupt, *writers(run, config, start))

        monkeypatch.setattr("polyak.train.training.writers", with_signal)

    return arrange


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("jax/CartPole-v1", "--env-steps 400"),
        pytest.param("jax/CartPole-v1", "--env-steps 400 --loop host", marks=pytest.mark.slow),
        ("CartPole-v1", "--env-steps 400 --normalize-obs --normalize-reward return"),
        pytest.param("InvertedPendulum-v5", "--env-steps 400 --action-scaling rescale", marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_is_the_same_as_uninterrupted(env, words, train, command, stopped_at, workdir):
    train(env, "whole", words)
    stopped_at(200)
    code, out, _ = command("train ppo", env, "--run-dir parts", SETTINGS, words)
    assert code == 143
    assert "stopped by SIGTERM at" in out
    assert f"continue with: polyak resume {workdir / 'parts'}" in out
    half = open_run("parts").read_summary()
    assert half["stopped"] == "SIGTERM"
    assert half["eval_mean_return"] is None
    assert 200 <= half["env_steps"] == steps(workdir / "parts/checkpoints")[-1] < 400
    assert read_manifest("parts/checkpoints").meta["resume"] == "bit-exact"

    stopped_at(10**9)
    code, out, _ = command("resume parts")
    assert code == 0
    assert last_checkpoint("parts") == last_checkpoint("whole")
    whole, parts = (open_run(name).read_metrics() for name in ("whole", "parts"))
    assert [row["env_steps"] for row in parts] == sorted({row["env_steps"] for row in parts})
    # The report at the stop is one more, after which the means over updates are over fewer of them.
    means = [{row["env_steps"]: row.get("rollout/ep_rew_mean") for row in rows} for rows in (whole, parts)]
    assert means[0].items() <= means[1].items() and None not in list(means[0].values())[-3:]
    assert metrics("parts")[-1] == metrics("whole")[-1]
    assert open_run("parts").read_summary()["eval_mean_return"] == open_run("whole").read_summary()["eval_mean_return"]


@pytest.mark.slow
def test_several_seeds_are_stopped_together_and_resumed_one_by_one(command, stopped_at):
    stopped_at(200)
    code, out, _ = command("train ppo jax/CartPole-v1 --run-dir parts --env-steps 400 --seeds 2", SETTINGS)
    assert code == 143
    assert out.count("stopped by SIGTERM at") == 2
    stopped_at(10**9)
    for seed in (0, 1):
        assert open_run(f"parts/seed-{seed}").read_summary()["stopped"] == "SIGTERM"
        assert command(f"resume parts/seed-{seed} --eval-episodes 2")[0] == 0
        assert open_run(f"parts/seed-{seed}").read_summary()["env_steps"] >= 400


def test_a_run_that_had_finished_when_a_signal_came_is_finished(command, stopped_at):
    """As one of several seeds may have."""
    stopped_at(400)
    code, out, _ = command("train ppo jax/CartPole-v1 --run-dir parts --env-steps 400", SETTINGS)
    summary = open_run("parts").read_summary()
    assert (code, summary["stopped"], summary["eval_episodes"]) == (143, None, 0)
    assert "stopped by" not in out and "evaluating" not in out and "not evaluated; evaluate with: polyak resume" in out
    assert command("resume parts --eval-episodes 2")[0] == 0
    assert open_run("parts").read_summary()["eval_episodes"] == 2


@pytest.mark.slow
def test_later_seeds_are_not_started_after_a_signal(command, stopped_at, workdir):
    stopped_at(200)
    code, out, _ = command("train ppo CartPole-v1 --env-steps 400 --seeds 2 --run-dir", Path("my parts"), SETTINGS)
    assert code == 143
    assert [path.name for path in (workdir / "my parts").iterdir()] == ["seed-0"]
    assert out.splitlines()[-1] == f"not started: --seed 1 --run-dir '{workdir / 'my parts/seed-1'}'"
    # As a shell takes it.
    assert out.splitlines()[-2].endswith(f"continue with: polyak resume '{workdir / 'my parts/seed-0'}'")


def test_a_finished_run_can_be_extended_and_its_config_is_updated(run, command):
    before = open_run(run).read_config()
    code, out, _ = command("resume run --env-steps 600 --eval-episodes 3")
    assert code == 0
    assert "note: learning_rate stays at 0 after 400 env_steps, where its schedule ends\n" in out
    assert open_run(run).read_config() == before | {"env_steps": 600}
    check_that_its_config_runs_again_to_the_same_bits(run)
    summary = open_run(run).read_summary()
    assert summary["env_steps"] >= 600
    assert summary["eval_episodes"] == 3
    assert steps(run / "checkpoints")[-1] == summary["env_steps"]


def test_resume_continues_to_the_env_steps_last_set(run, command, stopped_at):
    stopped_at(500)
    assert command("resume run --env-steps 600 --eval-episodes 2")[0] == 143
    stopped_at(10**9)
    assert "run: env_steps changed from 600 to 560" in command("resume run --env-steps 560 --eval-episodes 2")[1]
    assert command("resume run --env-steps 600 --eval-episodes 2")[0] == 0
    assert open_run(run).read_summary()["env_steps"] >= 600
    code, out, _ = command("resume run")
    assert (code, ": finished at 6" in out) == (0, True)


TOY = """
import pathlib, gymnasium
pathlib.Path('imported').touch()
gymnasium.register('Toy-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=10)
"""


@pytest.mark.slow
def test_a_module_is_imported_only_if_it_is_named_on_the_command_line(train, command, workdir, monkeypatch):
    (workdir / "toymod.py").write_text(TOY)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    train("toymod:Toy-v0", "new", "--env-steps 64")

    def forget():
        sys.modules.pop("toymod", None)
        gymnasium.registry.pop("Toy-v0", None)
        (workdir / "imported").unlink(missing_ok=True)

    for words in ("resume new --env-steps 128 --eval-episodes 2", "evaluate new --episodes 2"):
        forget()
        code, _, err = command(words)
        assert (code, err) == (
            2,
            "error: the run's environment toymod:Toy-v0 would import 'toymod'; if you trust it, add --import toymod\n",
        )
        code, _, err = command(words, "--import os")
        assert (code, err) == (
            2,
            "error: --import os: the run's environment is toymod:Toy-v0, which needs --import toymod\n",
        )
        assert not (workdir / "imported").exists()
        code, _, err = command(words, "--import toymod")
        assert (code, err) == (0, "")
        assert (workdir / "imported").exists()
    forget()


def test_a_run_that_has_ended_is_left_alone(run, command, workdir):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    code, out, err = command("resume run")
    assert (code, err) == (0, "")
    assert ": finished at 4" in out
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_run_with_a_damaged_summary_is_evaluated_again(run, command):
    (run / "summary.json").write_text("{")
    assert command("resume run --eval-episodes 2")[0] == 0
    assert open_run(run).read_summary()["eval_episodes"] == 2


def test_a_run_that_has_ended_is_evaluated_over_as_many_episodes_as_asked_for(run, command):
    code, out, _ = command("resume run --eval-episodes 3")
    assert (code, ": finished at" in out) == (0, False)
    assert open_run(run).read_summary()["eval_episodes"] == 3
    assert ": finished at 4" in command("resume run --eval-episodes 3")[1]
    assert ": finished at 4" in command("resume run --eval-episodes 0")[1]


@pytest.mark.parametrize(("words", "episodes"), [("", 2), ("--eval-episodes 3", 3)])
def test_a_run_that_was_ended_before_its_evaluation_gets_it(words, episodes, run, command):
    os.remove(run / "summary.json")
    code, _, _ = command("resume run", words)
    assert code == 0
    assert open_run(run).read_summary()["eval_episodes"] == episodes


TIMES = ("env_steps", "wall_seconds", "train_seconds", "compile_seconds", "fps")


def test_an_evaluation_afterwards_leaves_the_times_of_the_training(run, command, monkeypatch):
    before = open_run(run).read_summary()
    (run / "summary.json").write_text(json.dumps(before | {"eval_episodes": 0, "eval_mean_return": None}))
    with monkeypatch.context() as patched:
        patched.setattr("polyak.train.training.evaluate_if_it_ends", lambda *_: 1 / 0)
        assert command("resume run --eval-episodes 2")[0] == 1
    failed = open_run(run).read_summary()
    assert failed["stopped"] == "ZeroDivisionError: division by zero"
    assert command("resume run --eval-episodes 2")[0] == 0
    after = open_run(run).read_summary()
    assert (after["eval_episodes"], after["stopped"]) == (2, None)
    for name in TIMES:
        assert after[name] == failed[name] == before[name] > 0


@pytest.mark.parametrize("left", [None, {"env_steps": 128, "train_seconds": 1.0, "compile_seconds": 1.0, "fps": 128.0}])
def test_times_that_nobody_has_written_or_of_another_training_are_none(run, command, left):
    os.remove(run / "summary.json")
    if left is not None:
        (run / "summary.json").write_text(json.dumps(left))
    assert command("resume run --eval-episodes 2")[0] == 0
    after = open_run(run).read_summary()
    assert after["env_steps"] >= 400 and after["wall_seconds"] > 0
    assert [after[name] for name in TIMES[2:]] == [None] * 3


def test_a_run_that_was_ended_before_its_first_checkpoint_starts_again_and_says_so(run, command):
    wanted = last_checkpoint(run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    code, out, _ = command("resume run --eval-episodes 2")
    assert code == 0
    assert "was stopped before its first checkpoint; starting from the beginning" in out
    assert last_checkpoint(run) == wanted
    env_steps = [row["env_steps"] for row in open_run(run).read_metrics()]
    assert env_steps == sorted(set(env_steps))


def test_a_run_that_lost_its_checkpoints_never_starts_from_the_beginning(run, command):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    code, _, err = command("resume run")
    assert code == 2
    assert "no checkpoint found, but the metrics reach 4" in err
    assert len(open_run(run).read_metrics()) > 10


def test_a_damaged_checkpoint_falls_back_to_the_previous_one_with_a_warning(run, command):
    wanted = last_checkpoint(run)
    (run / "summary.json").unlink()
    arrays = run / "checkpoints" / wanted[0] / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])
    before = steps(run / "checkpoints")[-2]
    with pytest.warns(UserWarning, match=f"using the checkpoint of step {before}"):
        code, _, _ = command("resume run --eval-episodes 2")
    assert code == 0
    assert last_checkpoint(run) == wanted


@pytest.mark.slow
@BOX2D
def test_an_environment_without_snapshots_starts_new_episodes_with_a_warning(train, command):
    train("LunarLander-v3", "new", "--env-steps 100")
    promise = "resume is not bit-exact because env LunarLander-v3 has no state"
    assert read_manifest("new/checkpoints").meta["resume"] == promise
    with pytest.warns(UserWarning, match=f"{promise}; new episodes start"):
        code, _, _ = command("resume new --env-steps 200 --eval-episodes 1")
    assert code == 0


@BOX2D
def test_new_episodes_start_with_the_first_flag(train):
    train("LunarLander-v3", "new", "--env-steps 100")
    run = open_run("new")
    config = read_config(run)
    env = envs.make(config.env, num_envs=config.num_envs)
    with pytest.warns(UserWarning, match="new episodes start"):
        start = restore_start(run, config, env)
    assert np.all(start.state.time_step.first)
    assert not np.any(start.state.time_step.reward)
    assert not np.any(start.state.episodes.returns)
    assert start.env_steps == steps(run.checkpoints)[-1]
    first = env.reset(int(jax.random.bits(jax.random.split(jax.random.key(0), 3)[1], dtype=jax.numpy.uint32) >> 1))
    assert not np.array_equal(first.obs, start.state.time_step.obs), "the episodes that the run began with"
    env.close()


def test_two_processes_never_write_the_same_run(run, command):
    with open_run(run, write=True):
        code, _, err = command("resume run --env-steps 600")
    assert code == 2
    assert f"is being written by process {os.getpid()}" in err


def test_flags_of_workers_reach_them_and_those_left_out_are_the_runs(run, command, monkeypatch):
    seen = []
    monkeypatch.setattr("polyak.cli.resume.split_over_workers", lambda env, num_envs, workers: seen.append(workers) or 1 / 0)
    flags = "--worker-timeout 5 --worker-start-timeout 6 --worker-restarts 7 --on-env-error restart --ray-address a:1"
    edit_config(run, '"worker_restarts": 100', '"worker_restarts": 3')
    for words in ("", flags):
        with pytest.raises(ZeroDivisionError):
            command("resume run --env-steps 900 --force --workers 2", words)
    left_out, given = seen
    assert left_out.options() == WorkerOptions(restarts=3) and left_out.number == 2
    assert given.options() == WorkerOptions(timeout=5.0, start_timeout=6.0, restarts=7, on_env_error="restart")
    assert (given.number, given.address) == (2, "a:1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("resume nothing", "nothing: there is no such directory; a run was expected"),
        ("resume run/checkpoints", "run/checkpoints: holds no run"),
        ("resume run --env-steps 0", "--env-steps must be an integer >= 1, got 0"),
        ("resume run --env-steps 100", "--env-steps 100: run has already done 4"),
        ("resume run --env-steps 500 --import os", "--import os: the run's environment is CartPole-v1, which needs none"),
        ("resume run --eval-episodes -1", "--eval-episodes must be an integer >= 0, got -1"),
        ("resume run --env-step 500", "--env-steps"),
        (
            "resume run --gamma 0.5",
            "--gamma is the run's; an agent with other settings is given by --agent MODULE:NAME --force",
        ),
        (
            "resume run --hidden 9",
            "--hidden is the run's; an agent with other settings is given by --agent MODULE:NAME --force",
        ),
        ("resume run --num-envs 9", "--num-envs of a run cannot be changed"),
        ("resume run --env-steps 500 --env-steps 600", "--env-steps is set more than once"),
        ("resume run --env-steps 500 --worker-restarts 5", "--worker-restarts 5 needs workers; give --workers N"),
        ("resume run --workers 2 --worker-restarts -1", "--worker-restarts must be an integer in [0, 2147483647], got -1"),
        ("resume run --workers 2 --min-workers 0", "--min-workers must be an integer >= 1, got 0"),
        ("resume run --workers 2 --worker-timeout 0", "--worker-timeout must be a number in (0, inf), got 0.0"),
        ("resume run --workers 2 --worker-start-timeout 0", "--worker-start-timeout must be a number"),
        ("resume run --workers 2 --on-env-error ignore", "--on-env-error"),
    ],
)
def test_usage_errors_name_the_flag(words, message, run, command, workdir):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    code, out, err = command(words)
    assert (code, out) == (2, "")
    assert message in err
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 4', '"format": 5', "has format 5, this version reads 4; upgrade polyak"),
        (
            '"format": 4',
            '"format": 2',
            "has format 2, this version reads 4; it is from an earlier version, whose runs cannot be",
        ),
        ('"gamma": ', '"gama": ', "unknown field 'gama'; did you mean 'gamma'?"),
        ('"gamma": 0.98', '"gamma": 2.0', "gamma must be a number in [0, 1], got 2.0"),
        ('"$class": "PPO"', '"$class": "os.system"', "unknown class name 'os.system'"),
        ('"num_envs": 2', '"num_envs": 0', "num_envs must be an integer in [1, 1048576], got 0"),
        ('"devices": 1', '"devices": 0', "devices must be an integer in [1, 1024], got 0"),
        ('"threads": null', '"threads": 100000', "threads must be an integer in [1, 1024] or None, got 100000"),
        ('"devices": 1', '"devices": 9', "num_envs=2 cannot be split over devices=9"),
        (
            '"loop": "host"',
            '"loop": "hosts"',
            "loop must be one of 'compiled', 'host', 'distributed', 'asynchronous', 'offline', got 'hosts'",
        ),
        ('"seed": 0', '"seed": -1', "seed must be an integer in [0, 4294967295], got -1"),
        ('"env": "CartPole-v1"', '"env": "planted:CartPole-v1"', "would import 'planted'"),
        ('"env": "CartPole-v1"', '"env": "Pendulum-v1"', "of the environment 'Pendulum-v1'"),
        ('"loop": "host",', "", "fields missing: ['loop']"),
    ],
)
def test_a_config_that_does_not_match_is_rejected_by_name(old, new, message, run, command):
    (run / "summary.json").unlink()
    edit_config(run, old, new)
    code, _, err = command("resume run --env-steps 600")
    assert code == 2
    assert message in err
    assert last_checkpoint(run)


def test_a_run_on_more_devices_than_exist_is_rejected_unchanged(run, command, monkeypatch):
    edit_config(run, '"devices": 1', '"devices": 2')
    (run / "summary.json").unlink()
    monkeypatch.setattr("jax.local_device_count", lambda: 1)
    # Which commands were run on which machine is recorded, and who held the lock last.
    before = {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in ("system.json", "run.lock")
    }
    code, _, err = command("resume run --env-steps 600")
    assert (code, "devices=2, but JAX sees 1" in err, "Traceback" in err) == (2, True, False), err
    assert all(path.read_bytes() == data for path, data in before.items())


def last_step(run):
    return max(steps(run / "checkpoints"))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"gamma": 0.98', '"gamma": 0.5', "'agent.gamma' is 0.5, the checkpoint has '0.98'"),
        ('"seed": 0', '"seed": 7', "'seed' is 7, the checkpoint has '0'"),
        ('"env_kwargs": {}', '"env_kwargs": {"max_episode_steps": 9}', "'env_kwargs.max_episode_steps' is 9"),
    ],
)
def test_settings_that_the_checkpoint_was_not_trained_with_are_rejected_by_name(old, new, changed, run, command):
    (run / "summary.json").unlink()
    edit_config(run, old, new)
    code, _, err = command("resume run --env-steps 600")
    assert code == 2
    assert "config.json: differs from the checkpoint of step" in err and changed in err and "--force" in err
    if "env_kwargs" not in old:
        code, _, err = command("resume run --env-steps 600 --force")
        assert code == 0, err
        assert command("evaluate run --episodes 2")[0] == 0


def test_an_edited_config_is_rejected_until_it_is_accepted(run, command):
    path = run / "config.json"
    path.write_text(path.read_text().replace('"checkpoint_every": ', '"checkpoint_every": 1'))
    for words in ("evaluate run --episodes 2", "export run --format numpy", "resume run"):
        code, _, err = command(words)
        assert (code, "was edited or damaged since it was written" in err) == (2, True), err
    assert command("resume run --force")[0] == 0
    assert command("evaluate run --episodes 2")[0] == 0


DROPPED = object()
WRONG_EPISODES = (
    [1, 2.0, 3],
    [0, 2.0, 3, {}],
    [True, 2.0, 3, {}],
    [1, 2, 3, {}],
    [1, 2.0, -3, {}],
    [1, 2.0, {"$int": hex(10**30)}, {}],
    [1, 2.0, 3, {"a": 1}],
    [1, 2.0, 3, {"a": {"$tuple": [1, "2.0"]}}],
)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"progress": {}}, "meta.progress.env_steps must be"),
        ({"progress": None}, "meta.progress.env_steps must be"),
        ({"progress": {"env_steps": -5}}, "meta.progress.env_steps must be"),
        ({"progress": {"env_steps": True}}, "meta.progress.env_steps must be"),
        ({"progress": {"env_steps": {"$int": hex(10**30)}}}, "meta.progress.env_steps must be"),
        *[({"env": env}, "meta.env must be a dict if meta.has_env_state, else None") for env in ([1], None)],
        ({"has_env_state": False}, "meta.env must be a dict if meta.has_env_state, else None"),
        *[({"has_env_state": value}, "meta.has_env_state must be a bool") for value in (None, [], 2)],
        ({"resume": 3}, "meta.resume must be printable text"),
        ({"resume": "\x1b[2Jok"}, "meta.resume must be printable text"),
        *[({"config": config}, "meta.config must be a dict of texts") for config in ([1], None)],
        *[({"episodes": [{"$tuple": entry}]}, "meta.episodes must be") for entry in WRONG_EPISODES],
        *[({"episodes": value}, "meta.episodes must be") for value in (None, 3, [3], [{"$tuple": [1, 2.0, 3, {}]}] * 101)],
        *[({name: DROPPED}, f"meta.{name}") for name in ("progress", "episodes", "env", "has_env_state", "resume", "config")],
    ],
)
def test_a_malformed_checkpoint_is_rejected_by_the_name_of_its_field(meta, message, run, command):
    def change(document):
        changed = {name: value for name, value in (document["meta"] | meta).items() if value is not DROPPED}
        return document | {"meta": changed}

    forge(run / "checkpoints", change, last_step(run))
    (run / "summary.json").unlink()
    code, _, err = command("resume run --env-steps 600")
    assert (code, message in err) == (2, True), err


@pytest.mark.slow
def test_control_characters_from_files_are_escaped_before_they_reach_the_terminal(run, workdir):
    forge(run / "checkpoints", lambda document: document | {"meta": {"\x1b[2J": {"$x": 1}}}, last_step(run))
    for words in (["evaluate", "run", "--episodes", "1"], ["evaluate", "run/\x1b[2J"]):
        done = subprocess.run([sys.executable, "-m", "polyak", *words], capture_output=True, text=True, env=environment())
        assert "\x1b" not in done.stderr + done.stdout, (words, done.stderr)
        assert "\\x1b[2J" in done.stderr, (words, done.stderr)


def test_rows_without_env_steps_and_no_checkpoint_are_an_error_that_names_the_line(run, command):
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("{}\n")
    code, _, err = command("resume run --env-steps 600")
    assert (code, "metrics.jsonl, line 1: env_steps=null must be an integer" in err) == (2, True), err

"""`polyak.train.run_seeds`: several seeds from Python, as `polyak train --seeds` trains them."""

import os
import signal

import jax
import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.storage.run_directory import RunError, open_run
from polyak.train import run_seeds
from polyak.train.devices import configure_devices_for_seeds
from tests.cli.processes import SETTINGS, last_checkpoint

SMALL = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": polyak.MLP((4,))}
COMMON = {"env_steps": 64, "num_envs": 2, "settings": SMALL}


@pytest.mark.slow
@pytest.mark.parametrize("env", ["jax/CartPole-v1", "CartPole-v1"])
def test_the_runs_equal_those_of_the_command_line(env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(f"train ppo {env} --run-dir shell --env-steps 64 --seed 3 --seeds 2 {SETTINGS}".split()) == 0
    shell = capsys.readouterr().out
    results = run_seeds("ppo", env, seeds=[3, 4], run_dir="python", eval_episodes=2, **COMMON)
    python = capsys.readouterr().out
    for seed, result in zip((3, 4), results, strict=True):
        assert last_checkpoint(f"python/seed-{seed}") == last_checkpoint(f"shell/seed-{seed}")
        returns = [open_run(f"{name}/seed-{seed}").read_summary()["eval_mean_return"] for name in ("python", "shell")]
        assert returns == [result.evaluation.mean_return] * 2
        assert result.config.seed == seed and result.stopped is None
    assert str(polyak.train.seed_statistics([result.evaluation.mean_return for result in results])) in python
    assert shell.splitlines()[-1] == python.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["jax/CartPole-v1", "CartPole-v1"])
def test_each_seed_has_its_own_callbacks(env):
    seen = {0: [], 1: []}

    def callbacks(seed):
        return [lambda progress, metrics, state: seen[seed].append(progress.env_steps)]

    results = run_seeds("ppo", env, seeds=2, callbacks=callbacks, eval_every=32, eval_episodes=2, progress=False, **COMMON)
    assert [seen[0][-1], seen[1][-1]] == [result.progress.env_steps for result in results]
    assert list(results[1].evaluations) and results[1].best_policy is not None


def test_ctrl_c_ends_the_seed_and_starts_no_other(tmp_path):
    sent = []

    def callbacks(seed):
        def ctrl_c(progress, metrics, state):
            if seed == 1 and not sent:
                sent.append(os.kill(os.getpid(), signal.SIGINT))

        return [ctrl_c]

    results = run_seeds(
        "ppo", "CartPole-v1", seeds=3, callbacks=callbacks, run_dir=tmp_path / "runs", eval_episodes=0, **COMMON
    )
    assert [result.stopped for result in results] == [None, "interrupt"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["seed-0", "seed-1"]
    assert polyak.resume(tmp_path / "runs/seed-1", progress=False).stopped is None


@pytest.mark.parametrize("env", ["jax/CartPole-v1", "CartPole-v1"])
def test_a_seed_that_had_finished_before_ctrl_c_is_not_evaluated(env):
    def callbacks(seed):
        def ctrl_c(progress, metrics, state):
            if seed == 0 and progress.env_steps >= progress.target_env_steps:
                os.kill(os.getpid(), signal.SIGINT)

        return [ctrl_c]

    finished, *others = run_seeds("ppo", env, seeds=2, callbacks=callbacks, eval_episodes=2, progress=False, **COMMON)
    assert (finished.stopped, finished.evaluation) == (None, None)
    # Seeds in JAX train together; on the host the second one is not started.
    assert len(others) == env.startswith("jax/")


@pytest.mark.slow
def test_seeds_that_diverge_are_named(capsys):
    settings = SMALL | {"max_skipped_updates": 2, "learning_rate": 1e30, "max_grad_norm": None}
    with pytest.warns(UserWarning, match="diverged"):
        results = run_seeds("ppo", "jax/Pendulum-v1", seeds=2, env_steps=400, num_envs=2, settings=settings, eval_episodes=2)
    assert [result.stopped for result in results] == ["diverged"] * 2 and results[0].diagnosis.startswith("PPO: 2 consecutive")
    assert "seed 1 diverged: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seeds", "error", "message"),
    [
        (0, ValueError, "seeds must be an integer >= 1, got 0"),
        ([], TypeError, r"seeds must be their number or a sequence of integers, got \[\]"),
        ("01", TypeError, "sequence of integers, got '01'"),
        ([1, 1], ValueError, r"seeds must differ, got \[1, 1\]"),
        ([1, -1], ValueError, r"each of seeds must be an integer in \[0, 4294967295\], got -1"),
        (np.ones(2), TypeError, r"each of seeds must be an integer in \[0, 4294967295\], got 1\.0"),
    ],
)
def test_seeds_that_are_none_are_rejected_before_anything_is_created(seeds, error, message, tmp_path, unchecked):
    with pytest.raises(error, match=message):
        run_seeds("ppo", "jax/CartPole-v1", seeds=seeds, run_dir=tmp_path / "runs", **COMMON)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"report_every": 10, "eval_every": 5}, "eval_every=5 must be at least report_every=10"),
        ({"eval_episodes": -1}, "eval_episodes must be an integer >= 0, got -1"),
        ({"run_dir": ""}, "run_dir must be a directory or None, got an empty name"),
        ({"settings": ["gamma"]}, r"settings must be a dict or None, got \['gamma'\]"),
        ({"should_stop": None}, "should_stop must be a function without arguments, got None"),
        ({"eval_max_steps": 0}, "eval_max_steps must be an integer >= 1, got 0"),
        ({"num_envs": 0}, "num_envs must be an integer >= 1 or None, got 0"),
        ({"settings": {"gamma": np.ones(2)}}, "gamma of PPO must have single numbers, got array"),
    ],
)
def test_errors_name_the_function_that_was_called(changes, said, unchecked):
    with pytest.raises((TypeError, ValueError), match=rf"^train.run_seeds: {said}"):
        run_seeds("ppo", "jax/CartPole-v1", seeds=2, **COMMON | changes)


def test_invalid_settings_create_no_directory(tmp_path):
    with pytest.raises(ValueError, match="num_minibatches=3 must divide"):
        run_seeds(
            "ppo",
            "jax/CartPole-v1",
            seeds=2,
            run_dir=tmp_path / "runs",
            **COMMON | {"settings": SMALL | {"num_minibatches": 3}},
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/file").touch()
    with pytest.raises(RunError, match="need a directory that is new or empty"):
        run_seeds("ppo", "jax/CartPole-v1", seeds=2, run_dir=tmp_path / "runs", **COMMON)


def test_devices_that_the_caller_has_configured_stay(monkeypatch):
    # The tests have eight devices.
    monkeypatch.setattr(jax.config, "update", lambda *change: pytest.fail(f"changed {change}"))
    configure_devices_for_seeds(4)

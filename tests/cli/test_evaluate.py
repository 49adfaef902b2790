import re
import shutil

import pytest

import polyak
from polyak.train.evaluation import evaluate_policy
from polyak.train.statistics import seed_statistics
from polyak.train.summary import format_return
from tests.cli.processes import edit_config


def test_a_run_is_evaluated_by_its_last_checkpoint(run, command):
    code, out, err = command("evaluate run --episodes 3")
    assert (code, err) == (0, "")
    pattern = r"ppo CartPole-v1 at 4\d\d env_steps: greedy return [\d.]+ ± [\d.]+ over 3 episodes \(mean length [\d.]+\)\n"
    assert re.fullmatch(pattern, out)


def test_the_same_seed_gives_the_same_episodes_and_another_one_others(run, command):
    first, again, other = (command(f"evaluate run --episodes 5 --seed {seed}")[1] for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_fewer_episodes_than_environments_in_jax_start_as_those_of_the_training(command, workdir):
    settings = {"num_steps": 4, "num_epochs": 1, "num_minibatches": 1, "network": polyak.MLP((4,))}
    options = {"env_steps": 16, "num_envs": 4, "eval_episodes": 2, "progress": False}
    result = polyak.train.run("ppo", "jax/CartPole-v1", settings=settings, run_dir=workdir / "jax", **options)
    said = command("evaluate jax --episodes 2")[1]
    assert f"greedy return {format_return(result.evaluation)} " in said


def test_it_leaves_the_run_as_it_was(run, command, workdir):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    command("evaluate run --episodes 2")
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate nothing", "nothing: there is no such directory; a run was expected"),
        ("evaluate run/tb", "run/tb: holds no run"),
        ("evaluate run other", "polyak evaluate takes one RUN, or the directory of several; got run other"),
        ("evaluate run --episodes 0", "--episodes must be an integer >= 1, got 0"),
        ("evaluate run --seed -1", "--seed must be an integer in [0, 4294967295], got -1"),
        ("evaluate run --seed 4294967296", "--seed must be an integer in [0, 4294967295]"),
        ("evaluate run --max-steps 0", "--max-steps must be an integer >= 1, got 0"),
        ("evaluate run --episode 3", "--episodes"),
        ("evaluate run --episodes three", "--episodes"),
    ],
)
def test_usage_errors_name_the_flag(run, command, words, message):
    code, out, err = command(words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
def test_the_runs_in_a_directory_are_evaluated_each_and_seeds_together(command, train, workdir):
    for seed in (10, 9):
        train("CartPole-v1", workdir / "runs" / f"seed-{seed}", f"--env-steps 400 --seed {seed}")
    train("CartPole-v1", workdir / "runs" / "wide", "--env-steps 400 --gamma 0.9 --seed 9")
    code, out, err = command("evaluate runs --episodes 3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    first = [line.split(":")[0].split()[0] for line in lines]
    assert first == ["CartPole-v1", "seed-9", "seed-10", "return", "CartPole-v1", "wide"]
    returns = [float(line.split()[-4]) for line in lines[1:3]]
    statistics = seed_statistics(returns)
    said = re.match(r"return over 2 seeds: mean ([\d.]+), IQM ([\d.]+), 95 %", lines[3])
    assert [float(number) for number in said.groups()] == pytest.approx([statistics.mean, statistics.iqm], abs=0.11)
    for seed, value in zip((9, 10), returns, strict=True):
        assert f"greedy return {value} ±" in command(f"evaluate runs/seed-{seed} --episodes 3")[1]


def test_a_damaged_run_among_several_is_named_and_the_others_are_evaluated(run, command, workdir):
    for name in ("seed-0", "seed-1"):
        shutil.copytree(run, workdir / "runs" / name)
    for path in (workdir / "runs" / "seed-0" / "checkpoints").glob("0*"):
        path.rename(workdir / path.name)
    code, out, err = command("evaluate runs --episodes 3")
    header, evaluated, failed = out.splitlines()
    assert (code, header.split()[0], evaluated.split(":")[0]) == (1, "CartPole-v1", "seed-1")
    assert failed.startswith("seed-0  — (") and "no valid checkpoint" in failed
    assert err == "error: 1 of 2 runs could not be evaluated\n"
    code, out, err = command("evaluate runs --policy module:rule")
    assert (code, out) == (2, "")
    assert "--policy is compared with one run; give one of runs/seed-0, runs/seed-1" in err


def test_an_evaluation_ends_after_max_steps(run, command):
    code, out, err = command("evaluate run --episodes 2 --max-steps 5")
    assert (code, out) == (1, "") and "not all episodes of CartPole-v1 ended within max_steps=5 steps" in err


def test_an_environment_that_raises_costs_its_own_run_alone(run, command, workdir, monkeypatch):
    for name in ("seed-0", "seed-1"):
        shutil.copytree(run, workdir / "runs" / name)
    played, play = [], evaluate_policy

    def fail_once(*args):
        played.append(args)
        if len(played) == 1:
            raise RuntimeError("the simulator is lost")
        return play(*args)

    monkeypatch.setattr("polyak.cli.evaluate.evaluate_policy", fail_once)
    code, out, err = command("evaluate runs --episodes 2")
    assert code == 1 and out.splitlines()[-1] == "seed-0  — (RuntimeError: the simulator is lost)"
    assert "seed-1: ppo at" in out and "the simulator is lost" in err


@pytest.mark.slow
def test_runs_of_several_environments_and_seeds_in_a_directory_of_their_own_are_one_table(run, command, train, workdir):
    for name in ("pole", "poles/seed-0", "poles/seed-1"):
        shutil.copytree(run, workdir / "runs" / name)
    train("Acrobot-v1", workdir / "runs" / "acrobot", "--env-steps 64")
    code, out, err = command("evaluate runs --episodes 2")
    assert (code, err) == (0, "")
    header, *rows, together = out.splitlines()
    assert header.split()[:3] == ["run", "environment", "return"]
    names = [(line.split(":")[0], line.split()[5]) for line in rows]
    assert names == [
        ("acrobot", "Acrobot-v1"),
        *((name, "CartPole-v1") for name in ("pole", "poles/seed-0", "poles/seed-1")),
    ]
    assert together.startswith("pole: ppo at 4") and "return over 3 seeds" in together


def test_an_environment_with_other_spaces_is_rejected(run, command):
    edit_config(run, '"env": "CartPole-v1"', '"env": "Acrobot-v1"')
    code, out, err = command("evaluate run --episodes 2")
    assert (code, out) == (2, "")
    assert "polyak evaluate: obs of the agent's spec is Box(" in err and "of the environment 'Acrobot-v1' Box(" in err


def test_a_run_without_a_checkpoint_is_rejected(run, command, workdir):
    for path in (run / "checkpoints").glob("0*"):
        path.rename(workdir / path.name)
    code, _, err = command("evaluate run")
    assert code == 2
    assert "no valid checkpoint" in err


@pytest.mark.parametrize("flags", ["", "--wrapper gymnasium.wrappers:RecordEpisodeStatistics"])
def test_an_environment_named_in_a_file_imports_no_module(flags, run, command, workdir, monkeypatch):
    (workdir / "planted.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(workdir)
    edit_config(run, '"env": "CartPole-v1"', '"env": "planted:CartPole-v1"')
    code, _, err = command("evaluate run", flags)
    assert code == 2
    assert "would import 'planted'" in err
    assert not (workdir / "imported").exists()

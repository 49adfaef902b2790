"""What `polyak train` makes, and what it refuses to make."""

import gc
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import polyak
from polyak.agents import AGENTS
from polyak.cli import main, new_run
from polyak.cli.train import without_garbage_collection
from polyak.runs import read_config, run_key
from polyak.storage.checkpoint import read_manifest, restore, steps
from polyak.storage.run_directory import open_run
from tests.cli.processes import SETTINGS, check_that_its_config_runs_again_to_the_same_bits, last_checkpoint
from tests.loops.sick import Sick


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_directory_holds_everything(run):
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "system.json",
        "metrics.jsonl",
        "tb",
        "checkpoints",
        "summary.json",
        "run.lock",
    }
    assert stat.S_IMODE(os.stat(run).st_mode) == 0o700


def test_the_summary_holds_the_result(run):
    summary = summary_of(run)
    wanted = "algorithm env seed target_env_steps env_steps wall_seconds train_seconds compile_seconds fps eval_mean_return "
    wanted += "eval_std_return"
    assert set(summary) == {*wanted.split(), "eval_mean_length", "eval_episodes", "stopped"}
    assert (summary["algorithm"], summary["env"], summary["seed"]) == ("ppo", "CartPole-v1", 0)
    assert 400 <= summary["env_steps"] < 400 + 2 * 8
    assert (summary["eval_episodes"], summary["stopped"]) == (2, None)
    assert 1 <= summary["eval_mean_return"] <= 500
    assert summary["eval_mean_length"] == summary["eval_mean_return"]
    assert 0 < summary["train_seconds"] + summary["compile_seconds"] < summary["wall_seconds"]
    assert summary["fps"] == pytest.approx(summary["env_steps"] / summary["train_seconds"])


def test_the_system_is_described(run):
    system = json.loads((run / "system.json").read_text())
    assert system["packages"]["polyak"] == polyak.__version__
    assert system["packages"]["jax"] == jax.__version__


def test_metrics_carry_the_tags_of_stable_baselines3_on_the_axis_of_env_steps(run):
    rows = open_run(run).read_metrics()
    env_steps = [row["env_steps"] for row in rows]
    assert env_steps == sorted(set(env_steps))
    assert env_steps[-1] == summary_of(run)["env_steps"]
    tags = "rollout/ep_rew_mean rollout/ep_len_mean time/fps time/iterations time/time_elapsed time/total_timesteps "
    tags += (
        "train/approx_kl train/clip_fraction train/clip_range train/entropy_loss train/explained_variance train/learning_rate "
    )
    tags += "train/loss train/n_updates train/policy_gradient_loss train/value_loss"
    assert set(tags.split()) <= set(rows[-1])


def test_tensorboard_reads_the_same_numbers(run):
    events = EventAccumulator(str(run / "tb")).Reload()
    rows = open_run(run).read_metrics()
    read = {event.step: event.value for event in events.Scalars("train/loss")}
    assert read == {row["env_steps"]: pytest.approx(row["train/loss"], rel=1e-6) for row in rows}


def test_checkpoints_are_kept_and_the_last_is_the_end(run):
    assert len(steps(run / "checkpoints")) == 3
    assert steps(run / "checkpoints")[-1] == summary_of(run)["env_steps"]
    assert read_manifest(run / "checkpoints").meta["resume"] == "bit-exact"


def test_the_config_runs_again_to_the_same_bits(run):
    check_that_its_config_runs_again_to_the_same_bits(run)


def test_the_same_seed_makes_the_same_checkpoint_and_another_seed_another(run, train):
    train("CartPole-v1", "again", "--env-steps 400")
    train("CartPole-v1", "other", "--env-steps 400 --seed 1")
    assert last_checkpoint("again") == last_checkpoint(run)
    assert last_checkpoint("other")[1] != last_checkpoint(run)[1]


def test_reports_and_checkpoints_change_no_bit(run, train):
    train("CartPole-v1", "again", "--env-steps 400 --report-every 150 --checkpoint-every 400")
    assert last_checkpoint("again") == last_checkpoint(run)


@pytest.mark.slow
def test_without_a_terminal_progress_is_plain_lines(train):
    lines = train("jax/CartPole-v1", "new", "--env-steps 400").splitlines()
    assert lines[0] == "ppo jax/CartPole-v1: compiling …"
    assert lines[1].startswith("ppo jax/CartPole-v1: compiled in ")
    assert 8 <= sum("of 400 env_steps" in line for line in lines) <= 12
    assert "greedy return" in lines[-2]
    assert lines[-1].endswith("/new")
    assert "\x1b" not in "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_evaluations_while_training_are_printed(seeds, train):
    out = train("jax/CartPole-v1", "new", f"--env-steps 400 --eval-every 200 --seeds {seeds}")
    whose = "seed 0 " if seeds > 1 else ""
    (first,) = re.findall(rf"{whose}evaluated at 2\d\d env_steps: mean return [\d.]+ \(best, saved in best/\)", out)
    assert out.index("compiled in") < out.index(first) < out.index("evaluated at 4")
    assert re.search(r"400 env_steps in [\d.]+ s \(.*/s, compiled in [\d.]+ s; [\d.]+ s in all, with evaluations\)", out)


def test_a_run_is_put_into_runs_by_default(command, workdir):
    code, out, _ = command("train ppo jax/CartPole-v1 --env-steps 32", SETTINGS)
    assert code == 0
    (directory,) = (workdir / "runs").iterdir()
    assert directory.name.startswith("ppo-jax-CartPole-v1-0-")
    assert out.splitlines()[-1] == f"run: {directory}"


@pytest.mark.slow
def test_the_loops_are_chosen_by_name_and_make_the_same_parameters_in_a_jax_environment(train, workdir):
    train("jax/CartPole-v1", "compiled", "--env-steps 400")
    train("jax/CartPole-v1", "host", "--env-steps 400 --loop host")
    agents = []
    for name in ("compiled", "host"):
        config = read_config(open_run(name))
        # Without --loop it is the environment's name that decides.
        assert config.loop == name
        like = jax.eval_shape(config.agent.init, run_key(0))
        agents.append(restore(workdir / name / "checkpoints", like, prefix=".agent").tree.copies.online)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), *agents)


def test_settings_given_as_flags_reach_the_agent(train):
    words = (
        "--env-steps 64 --gamma 0.5 --learning-rate linear:0.01:0.001 --activation relu --max-grad-norm None --normalize-obs"
    )
    train("jax/Pendulum-v1", "new", words, "--action-scaling rescale --log-std -1 --shared-torso --squash-mean")
    agent = read_config(open_run("new")).agent
    assert (agent.gamma, agent.max_grad_norm, agent.normalize_obs) == (0.5, None, True)
    assert (agent.learning_rate.start, agent.learning_rate.end, agent.learning_rate.env_steps) == (0.01, 0.001, 64)
    network = agent.network
    assert network.activation == "relu" and network.head == polyak.PolicyAndValue(
        log_std=-1.0, shared_torso=True, squash_mean=True
    )
    assert agent.spec.action_scaling == "rescale"


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["compiled", "host"])
def test_several_seeds_have_a_run_each(loop, train, workdir):
    out = train("jax/CartPole-v1", "many", f"--env-steps 100 --seeds 2 --seed 5 --loop {loop}")
    assert stat.S_IMODE(os.lstat("many").st_mode) == 0o700
    assert sorted(path.name for path in (workdir / "many").iterdir()) == ["seed-5", "seed-6"]
    for seed in (5, 6):
        run = workdir / f"many/seed-{seed}"
        assert summary_of(run)["seed"] == read_config(open_run(run)).seed == seed
        assert steps(run / "checkpoints")[-1] == summary_of(run)["env_steps"] >= 100
        assert open_run(run).read_metrics()[-1]["env_steps"] >= 100
    assert out.count("greedy return") == 2
    assert all(f"ppo jax/CartPole-v1, seed {label}: 1" in out for label in ("5 (1 of 2)", "6 (2 of 2)"))
    header, *rows = (line.split() for line in out.splitlines()[-4:-1])
    assert header == ["seed", "env_steps", "return", "±", "mean", "length"]
    means = [f"{summary_of(workdir / f'many/seed-{seed}')['eval_mean_return']:.1f}" for seed in (5, 6)]
    assert [(row[0], row[2]) for row in rows] == list(zip("56", means, strict=True))
    assert re.fullmatch(r"return over 2 seeds: mean [\d.]+, IQM [\d.]+, 95 % interval of the IQM \[.*\]", out.splitlines()[-1])
    assert last_checkpoint(workdir / "many/seed-5")[1] != last_checkpoint(workdir / "many/seed-6")[1]


def test_a_misspelt_algorithm_suggests_the_nearest(command):
    code, _, err = command("train pp CartPole-v1")
    assert (code, err) == (2, f"error: unknown algorithm 'pp'; did you mean 'ppo'? (algorithms: {', '.join(AGENTS)})\n")


@pytest.mark.parametrize(
    ("env", "nearest"),
    [("CartPol-v1", "CartPole-v1"), ("jax/Pendulm-v1", "jax/Pendulum-v1"), ("HalfCheeta-v5", "HalfCheetah-v5")],
)
def test_a_misspelt_environment_suggests_the_nearest(env, nearest, command, workdir):
    code, _, err = command("train ppo", env)
    assert code == 2
    assert f"unknown environment {env!r}; did you mean {nearest!r}?" in err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--env-steps 5", "--env-steps 5 CartPole-v1"])
def test_an_environment_has_to_be_named_before_the_flags(arguments, command):
    code, _, err = command(f"train ppo {arguments}")
    assert code == 2
    assert "an environment is missing; it comes before the flags: polyak train ppo CartPole-v1" in err


EXTRAS = {
    "mujoco": ("mujoco", "HalfCheetah-v5"),
    "box2d": ("Box2D", "LunarLander-v3"),
    "atari": ("ale_py", "ALE/Breakout-v5"),
    "gymnax": ("gymnax", "gymnax/CartPole-v1"),
}


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """For each extra `(exit code, stderr, what is in the directory)` of a training in a process that lacks it."""
    program = f"""
import contextlib, io, json, os, sys
found = {{}}
for extra, (module, env) in {EXTRAS}.items():
    sys.modules[module] = None
    from polyak.cli import main, new_run
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["train", "ppo", env])
    found[extra] = code, err.getvalue(), os.listdir()
print(json.dumps(found))
"""
    directory = tmp_path_factory.mktemp("without-extras")
    return json.loads(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, cwd=directory).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_names_its_pip_command(extra, without_extras):
    code, err, left = without_extras[extra]
    assert (code, left) == (2, [])
    assert f"pip install 'polyak[{extra}]'" in err
    assert "Traceback" not in err


def test_more_devices_than_exist_are_rejected(command, workdir):
    code, _, err = command("train ppo CartPole-v1 --devices 16 --num-envs 16")
    assert code == 2
    assert "devices=16, but JAX sees 8" in err
    assert list(workdir.iterdir()) == []


def test_environments_that_devices_cannot_share_are_rejected(command, workdir):
    code, _, err = command("train ppo CartPole-v1 --devices 3")
    assert code == 2
    assert "num_envs=8 cannot be split over devices=3" in err
    assert list(workdir.iterdir()) == []


QUITTING = """
import sys, gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
class Quitting(CartPoleEnv):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps > 150: sys.exit(7)
        return super().step(action)
gymnasium.register("Quitting-v0", Quitting, max_episode_steps=50)
"""


def test_an_environment_that_raises_system_exit_ends_the_training_as_any_error(command, workdir, monkeypatch):
    (workdir / "quitting.py").write_text(QUITTING)
    monkeypatch.syspath_prepend(workdir)
    begun = {"100": "continue from the last checkpoint with", "400": "no checkpoint was saved; start again with"}
    for checkpoints, said in begun.items():
        words = f"--env-steps 400 --checkpoint-every {checkpoints} --report-every 50 --run-dir {checkpoints}"
        code, out, err = command("train ppo quitting:Quitting-v0", words, SETTINGS)
        assert code == 1 and "error: SystemExit: 7" in err
        assert f"{said}: polyak resume {workdir / checkpoints} --import quitting\n" in out
        summary = open_run(checkpoints).read_summary()
        assert summary["stopped"] == "SystemExit: 7"
        # What was reported before the error stays known.
        assert 50 <= summary["env_steps"] < 400 and summary["train_seconds"] > 0 and summary["fps"] > 0


def test_the_evaluation_is_announced_and_can_be_skipped(train, command):
    assert "evaluating 2 episodes" in train("CartPole-v1", "one", "--env-steps 64").splitlines()[-4]
    without = SETTINGS.replace("--eval-episodes 2", "--eval-episodes 0")
    code, out, _ = command("train ppo CartPole-v1 --env-steps 64 --run-dir none", without)
    lines = out.splitlines()
    assert code == 0 and "greedy" not in out
    assert "evaluating" not in "".join(lines) and "greedy" not in lines[-2]
    before = open_run("none").read_summary()
    assert before["eval_mean_return"] is None
    # There is nothing to do then: what the training took stays written.
    code, out, _ = command("resume none --eval-episodes 0")
    assert (code, ": finished at" in out, open_run("none").read_summary()) == (0, True, before)


@pytest.mark.parametrize("flag", ["--log-std -1", "--squash-mean"])
def test_flags_of_box_actions_are_rejected_where_there_are_none(flag, command, workdir):
    code, _, err = command(f"train ppo jax/CartPole-v1 {flag}")
    assert (code, list(workdir.iterdir())) == (2, [])
    assert re.search(r"Box.*got Discrete\(n=2", err)


@pytest.mark.slow
def test_several_devices_share_the_environments(train):
    train("jax/CartPole-v1", "new", "--env-steps 64 --devices 2")
    assert read_config(open_run("new")).devices == 2


def test_parallel_seeds_reject_devices(command, workdir):
    code, _, err = command("train ppo jax/CartPole-v1 --seeds 2 --devices 2")
    assert (code, list(workdir.iterdir())) == (2, [])
    assert "--devices 2 must be left out with --seeds 2, which train in parallel" in err


def test_seeds_beyond_32_bits_are_rejected(command, workdir):
    code, _, err = command("train ppo CartPole-v1 --seed 4294967295 --seeds 2")
    assert (code, list(workdir.iterdir())) == (2, [])
    assert "--seed + --seeds - 1 must be an integer in [0, 4294967295], got 4294967296" in err


def test_a_run_is_never_overwritten(run, command):
    before = last_checkpoint(run)
    code, _, err = command("train ppo CartPole-v1 --run-dir run")
    assert code == 2
    assert "holds a run already; resume it (polyak resume run) or choose another directory" in err
    assert last_checkpoint(run) == before


def make_file(path):
    path.write_text("")


def make_other_things(path):
    path.mkdir()
    (path / "thesis.tex").write_text("")


def make_link(path):
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("seeds", ["", "--seeds 2"])
@pytest.mark.parametrize("make", [make_file, make_other_things, make_link], ids=["a file", "not empty", "a link"])
def test_a_directory_in_use_is_rejected(make, seeds, command, workdir):
    make(workdir / "taken")
    before = sorted(workdir.rglob("*"))
    code, _, err = command("train ppo CartPole-v1 --run-dir taken", seeds)
    assert code == 2
    assert err.startswith("error: taken: ")
    assert sorted(workdir.rglob("*")) == before


def test_commands_that_start_in_the_same_second_have_directories_of_their_own(monkeypatch):
    monkeypatch.setattr(new_run.time, "strftime", lambda form: "20260101-000000")
    names = []
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        names.append(new_run.run_directory("ppo", "CartPole-v1", seed=0))
    assert names[0] != names[1] and names[0].name.startswith("ppo-CartPole-v1-0-20260101-000000")


def test_a_directory_that_cannot_be_created_is_rejected(command):
    code, _, err = command("train ppo CartPole-v1 --run-dir /proc/run")
    assert code == 2
    assert err.startswith("error: /proc/run: cannot be created")


def test_a_relative_path_may_lead_elsewhere(train, workdir, monkeypatch):
    (workdir / "deep").mkdir()
    monkeypatch.chdir(workdir / "deep")
    train("jax/CartPole-v1", "../new", "--env-steps 32")
    assert (workdir / "new/summary.json").exists()


def test_an_environment_that_fails_while_training_is_exit_code_1_with_its_traceback(command, monkeypatch, workdir):
    def broken(self, action):
        raise ZeroDivisionError("the pole is gone")

    monkeypatch.setattr("gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv.step", broken)
    code, out, err = command("train ppo CartPole-v1 --run-dir new", SETTINGS)
    assert code == 1
    assert "in broken" in err and "src/polyak" not in err
    assert "ZeroDivisionError" in err.splitlines()[-1]
    assert "the pole is gone" in err.splitlines()[-1]
    assert "polyak resume" in out
    assert "the pole is gone" in summary_of(workdir / "new")["stopped"]


INVALID = """
import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
class Invalid(CartPoleEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float("nan"), *rest
gymnasium.register("Invalid-v0", Invalid, max_episode_steps=50)
"""


def test_an_invalid_value_of_an_environment_is_an_error_of_one_line(command, workdir, monkeypatch):
    (workdir / "invalid.py").write_text(INVALID)
    monkeypatch.syspath_prepend(workdir)
    code, _, err = command("train ppo invalid:Invalid-v0 --env-steps 64 --run-dir new", SETTINGS)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("error: InvalidValue: ") and "the reward must be finite, got nan" in line


def test_training_that_diverges_is_exit_code_1_and_names_the_quantity(command, monkeypatch, workdir):
    monkeypatch.setattr("polyak.agents.ppo.PPO.diagnose", lambda self, metrics: "PPO: the first bad quantity is 'reward'")
    code, out, err = command("train ppo CartPole-v1 --run-dir new", SETTINGS)
    assert (code, err) == (1, "error: PPO: the first bad quantity is 'reward'\n")
    *_, where, advice = out.splitlines()
    assert where == f"run: {workdir / 'new'}" and "a smaller learning rate" in advice
    assert summary_of(workdir / "new")["stopped"].endswith("'reward'")


@pytest.mark.slow
def test_of_several_seeds_at_once_those_that_diverge_are_exit_code_1_and_the_others_finish(command, monkeypatch, workdir):
    make = polyak.envs.make
    monkeypatch.setattr("polyak.envs.make", lambda *args, **options: Sick(make(*args, **options), run_key(0)))
    words = "--env-steps 400 --report-every 20 --checkpoint-every 20 --seeds 2 --max-skipped-updates 3"
    with pytest.warns(UserWarning, match=r"training with keys\[0\] has diverged: PPO: 3 consecutive updates"):
        code, out, err = command("train ppo jax/CartPole-v1 --run-dir many", SETTINGS, words)
    assert code == 1
    assert err.count("error: ") == 1
    assert f"error: {workdir / 'many/seed-0'}: PPO: 3 consecutive updates" in err
    ill, well = (summary_of(workdir / f"many/seed-{seed}") for seed in (0, 1))
    assert ill["stopped"].startswith("TrainingDiverged: PPO: 3 consecutive updates")
    assert (ill["eval_mean_return"], well["stopped"], well["eval_episodes"]) == (None, None, 2)
    assert 0 < steps(workdir / "many/seed-0/checkpoints")[-1] <= ill["env_steps"] < 60
    assert steps(workdir / "many/seed-1/checkpoints")[-1] == well["env_steps"] >= 400
    assert out.count("greedy return") == 1
    shown = [line for line in out.splitlines() if " of 400 env_steps" in line]
    assert 8 <= len(shown) <= 12, "progress of those that still learn"


def test_a_checkpoint_that_cannot_be_saved_is_exit_code_1(command, monkeypatch):
    def full(*arguments, **options):
        raise polyak.storage.checkpoint.CheckpointError("no space left on device")

    monkeypatch.setattr("polyak.storage.progress.save", full)
    code, _, err = command("train ppo CartPole-v1 --run-dir new --env-steps 400", SETTINGS)
    assert code == 1
    assert err.splitlines()[-1] == "error: no space left on device" and "Traceback" not in err


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_run_directory_that_is_moved_or_removed_ends_the_training(command, workdir, monkeypatch, is_moved):
    step = CartPoleVectorEnv.step

    def move(env, action):
        if steps("new/checkpoints"):
            os.rename("new", "moved") if is_moved else shutil.rmtree("new")
        return step(env, action)

    monkeypatch.setattr(CartPoleVectorEnv, "step", move)
    code, out, err = command("train ppo CartPole-v1 --run-dir new --env-steps 400 --checkpoint-every 100", SETTINGS)
    assert code == 1
    assert err.splitlines() == [line for line in err.splitlines() if line.startswith(f"error: {workdir / 'new'}: was moved, ")]
    assert "with: polyak resume" not in out
    assert [path.name for path in workdir.iterdir()] == ["moved"] * is_moved


def test_main_takes_its_arguments_from_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["polyak", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("polyak ")


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("is_own_process", [True, False])
def test_what_exists_is_exempt_in_a_process_of_the_commands_own_alone(is_own_process, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with without_garbage_collection(is_own_process=is_own_process):
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [True] * is_own_process


def test_a_collector_that_was_off_stays_off_and_other_garbage_is_collected_later():
    gc.disable()
    try:
        with without_garbage_collection(is_own_process=False):
            cycle = weakref.ref(Cycle())
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert cycle() is None

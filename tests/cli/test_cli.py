import dataclasses
import os
import subprocess
import sys
import time

import pytest

import polyak
from polyak.cli import main
from polyak.cli.evaluate import EvaluateFlags
from polyak.cli.export import ExportFlags
from polyak.cli.resume import ResumeFlags
from polyak.cli.user_flags import UserFlags


def test_help_takes_less_than_a_second_and_imports_no_jax():
    program = "import sys; from polyak.cli import main; code = main(['--help']); sys.exit(code or 10 * ('jax' in sys.modules))"
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - began)
        assert done.returncode == 0
    assert done.stdout.startswith("usage: polyak COMMAND")
    assert min(seconds) < 1


def test_the_short_flag_prints_help(capsys):
    assert main(["-h"]) == 0
    assert "exit codes" in capsys.readouterr().out


def test_without_a_command_usage_is_printed_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: polyak")


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"polyak {polyak.__version__}\n"


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert main(["evalute", "runs/x"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'evalute'; did you mean 'evaluate'?")


@pytest.mark.parametrize("name", ["train", "resume", "evaluate", "record", "export", "report", "plot", "pack", "study", "list"])
def test_every_command_prints_its_usage(name, command):
    code, out, err = command(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: polyak {name}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("resume", ResumeFlags), ("evaluate", EvaluateFlags), ("export", ExportFlags)],
    ids=["resume", "evaluate", "export"],
)
def test_help_of_a_run_shows_every_flag_whether_or_not_a_run_is_named(name, kind, command):
    _, out, _ = command(name, "--help")
    names = [field.name for group in (kind, UserFlags) for field in dataclasses.fields(group)]
    for flag in (name for name in names if name != "user"):
        assert f"--{flag.replace('_', '-').replace('imports', 'import')}" in out
    assert "ALGO" not in out
    assert command(name, "some/run --help")[1] == out.replace(f"polyak {name} RUN", f"polyak {name} some/run")


@pytest.mark.parametrize("name", ["resume", "evaluate", "export"])
def test_a_command_without_its_run_is_a_usage_error(name, command):
    for words in (name, f"{name} --agent a:b"):
        code, out, err = command(words)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: a run directory is missing: polyak {name} RUN [flags]")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "ppo", "CartPole-v1", "--run-dir", ""], "--run-dir"),
        (["train", "ppo", "CartPole-v1", "--run-dir="], "--run-dir"),
        (["evaluate", ""], "evaluate"),
        (["plot", "runs", "", "-o", "a.svg"], "runs"),
    ],
)
def test_an_empty_argument_does_not_mean_the_working_directory(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: the argument after {named} is empty; is a shell variable unset?\n"
    assert not list(tmp_path.iterdir())


def test_train_without_arguments_is_a_usage_error(command):
    code, out, err = command("train")
    assert (code, out) == (2, "")
    assert err.startswith("usage: polyak train")


def test_ctrl_c_outside_of_training_is_130(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("polyak.cli._command", lambda name, **_: interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_ctrl_c_while_modules_are_imported_is_130_and_one_line():
    # An import may make another error of it, as of any that is raised inside.
    program = (
        "import os, signal; from polyak import cli\n"
        "def importing(name, **_):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); [None for _ in range(10**7)]\n"
        "    except BaseException: raise ImportError('interrupted')\n"
        "cli._command = importing; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program, "list"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    # A program's own: its `finally` runs.
    own = program.replace("cli.main()", "\ntry: cli.main(['list'])\nfinally: print('ended in order')")
    done = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "ended in order\n")


def test_the_installed_command_is_the_same_main():
    done = subprocess.run([sys.executable, "-m", "polyak", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown command 'nothing'" in done.stderr


def test_a_broken_pipe_of_stdout_is_exit_code_141():
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "polyak", "--help"], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_of_something_else_is_an_error(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("the simulator's socket")

    monkeypatch.setattr("polyak.cli._command", lambda name, **_: broken)
    with open(os.devnull, "w") as output, pytest.raises(BrokenPipeError, match="the simulator's socket"):
        monkeypatch.setattr("sys.stdout", output)
        main(["list"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("CartPole-v1", "the algorithm comes first: polyak train ppo CartPole-v1"),
        ("CartPole-v1 ppo", "the algorithm comes first: polyak train ppo CartPole-v1"),
        ("ppo CartPole-v1 --total-timesteps 1000", "in polyak --total-timesteps is --env-steps"),
        ("ppo CartPole-v1 --batch_size=64", "--batch-size is --num-minibatches, num_steps * num_envs / batch_size"),
        ("ppo CartPole-v1 --n-steps 64", "in polyak --n-steps is --num-steps"),
        ("dqn CartPole-v1 --n-steps 3", "in polyak --n-steps is --n-step"),
        ("dqn CartPole-v1 --buffer-size 9", "in polyak --buffer-size is --capacity"),
        ("dqn CartPole-v1 --train-freq 4", "in polyak --train-freq is --num-steps"),
        ("dqn CartPole-v1 --gradient-steps 1", "in polyak --gradient-steps is --updates-per-step, per transition"),
        ("dqn CartPole-v1 --exploration-fraction 0.1", "in polyak --exploration-fraction is --epsilon"),
        (
            "dqn CartPole-v1 --target-update-interval 9",
            "in polyak --target-update-interval is --target-period, in gradient steps",
        ),
        ("sac Pendulum-v1 --ent-coef 0.1", "in polyak --ent-coef is --alpha; None learns it"),
        ("sac Pendulum-v1 --use-sde", "in polyak --use-sde is --sde-sample-freq"),
        ("ppo CartPole-v1 --policy MlpPolicy", "in polyak --policy is --network, --hidden and --activation"),
        ("ppo CartPole-v1 --tensorboard-log logs", "in polyak --tensorboard-log is --run-dir"),
        ("ppo CartPole-v1 --device cuda", "in polyak --device is the environment variable JAX_PLATFORMS"),
    ],
)
def test_command_lines_of_other_libraries_get_the_right_words(words, message, capsys):
    assert main(["train", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *("dqn CartPole-v1 --batch-size x", "sac CartPole-v1 --n-epochs 3"),
        "ppo CartPole-v1 --verbose 1",
    ],
)
def test_a_flag_that_an_algorithm_has_or_has_no_other_name_for_is_no_other_library_s(words, capsys):
    assert main(["train", *words.split()]) == 2
    assert "error: in polyak" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_name_of_an_algorithm_may_be_in_capitals(tmp_path, capsys):
    words = f"train PPO jax/CartPole-v1 --env-steps 20 --num-envs 2 --run-dir {tmp_path / 'run'} --eval-episodes 0"
    assert main(words.split()) == 0


@pytest.mark.parametrize(
    "settings", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_characters_that_the_output_cannot_encode_are_replaced(settings):
    words = [sys.executable, "-m", "polyak", "train", "dqn", "CartPole-v1", "--help"]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--epsilon" in done.stdout


def test_characters_without_an_encoding_have_plain_ones():
    shown = r"'500.0 \xb1 0.0, compiling \u2026, \u03c0'"
    program = f"from polyak import cli; cli._command = lambda *_, **__: lambda _: print({shown}); cli.main()"
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", program, "list"]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    assert done.stdout == "500.0 +- 0.0, compiling ..., ?\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_an_error(unbuffered):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "polyak", "--help"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("name", ["evaluate", "resume", "export --format numpy"])
def test_a_run_whose_name_is_too_long_is_a_usage_error(command, name):
    name, *flags = name.split()
    code, _, err = command(" ".join([name, "a" * 300, *flags]))
    assert (code, err) == (2, f"error: {'a' * 300}: there is no such directory; a run was expected\n")


@pytest.mark.parametrize("words", ["resume run", "train ppo CartPole-v1"])
def test_a_variable_that_jax_cannot_read_is_a_usage_error(words):
    environment = {**os.environ, "JAX_ENABLE_X64": "maybe"}
    words = [sys.executable, "-m", "polyak", *words.split()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ppo CartPole-v1 --kl-beta 1", "--kl-beta is a setting of ppo_kl only; polyak train ppo_kl has it"),
        ("dqn CartPole-v1 --gae-lambda=0.9", "--gae-lambda is a setting of a2c, "),
        ("a2c CartPole-v1 --batch-size 64", "--batch-size is a setting of bc, bootstrapped_dqn, bro, c51, "),
    ],
)
def test_a_flag_of_other_algorithms_names_them(command, words, says):
    code, _, err = command(f"train {words}")
    assert code == 2 and err.startswith(f"error: {says}")


def test_errors_of_environments_name_no_function(command):
    code, _, err = command("train ppo CartPoel-v1")
    assert code == 2 and err.startswith("error: unknown environment 'CartPoel-v1'; did you mean 'CartPole-v1'")

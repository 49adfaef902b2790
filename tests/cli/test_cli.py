import os
import subprocess
import sys
import time

import pytest

import polyak
from polyak.cli import main


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


@pytest.mark.parametrize("name", ["train", "resume", "evaluate", "list"])
def test_every_command_prints_its_usage(name, capsys):
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: polyak {name}")
    assert err == ""


@pytest.mark.parametrize("name", ["train", "resume", "evaluate"])
def test_a_command_without_its_argument_is_a_usage_error(name, capsys):
    assert main([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"usage: polyak {name}")


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
        ("CartPole-v1", "it comes before the environment: polyak train ppo CartPole-v1"),
        ("ppo CartPole-v1 --total-timesteps 1000", "--total-timesteps is --env-steps in polyak"),
        ("ppo CartPole-v1 --batch_size=64", "--batch-size is --num-minibatches (num_steps * num_envs / batch size) in polyak"),
    ],
)
def test_command_lines_of_other_libraries_get_the_right_words(words, message, capsys):
    assert main(["train", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["dqn CartPole-v1 --batch-size x", "a2c CartPole-v1 --batch-size 64", "sac CartPole-v1 --n-epochs 3"],
)
def test_a_flag_that_an_algorithm_has_or_has_no_other_name_for_is_no_other_library_s(words, capsys):
    with pytest.raises(SystemExit):
        main(["train", *words.split()])
    assert "in polyak" not in capsys.readouterr().err


def test_the_name_of_an_algorithm_may_be_in_capitals(tmp_path, capsys):
    words = f"train PPO jax/CartPole-v1 --env-steps 20 --num-envs 2 --run-dir {tmp_path / 'run'} --eval-episodes 0"
    assert main(words.split()) == 0

"""Runs a page of the documentation: `python tests/run_page.py README.md`, in an empty directory, with the installed polyak.

A page's `python` blocks share one namespace and run in order; the `polyak` commands of its `sh` blocks run between them, in the
same directory. Trainings are shortened; everything else runs as it is printed. .ci/run does the README in the core install, and
`test_docs.py` every page with all extras, so this file needs nothing but polyak.
"""

import re
import shlex
import sys
import time
from pathlib import Path

from polyak.cli import main

TINY = "--env-steps 128 --num-steps 8 --num-envs 2 --eval-episodes 2"
TINY_OF = {
    "ppo": "--num-epochs 1 --num-minibatches 1",
    "pqn": "--num-minibatches 2",
    **dict.fromkeys(("bootstrapped_dqn", "c51", "dqn", "iqn", "qrdqn", "rnd_dqn"), "--learning-starts 32 --batch-size 16"),
    **dict.fromkeys(("naf", "qt_opt", "rainbow"), "--learning-starts 32 --batch-size 16 --capacity 256 --hidden 16"),
    **dict.fromkeys(
        ("crossq", "ddpg", "droq", "fast_td3", "flash_sac", "redq", "sac", "simbav2", "td3", "tqc", "xqc"),
        "--learning-starts 32 --batch-size 16 --capacity 256 --hidden 16 --value-hidden 16 --updates-per-step 1",
    ),
}
TINY_OF["bro"] = f"{TINY_OF['tqc']} --reset-period 48"  # a warning says if no network was reset
OFFLINE = "--gradient-steps 40 --batch-size 16 --hidden 16"
AT_MOST = {"env_steps": 320, "gradient_steps": 40, "num_envs": 16, "episodes": 3}
SHORTER = {"train": TINY, "resume": "--eval-episodes 2", "evaluate": "--episodes 2"}
# `watch` opens a window.
POLYAK_COMMANDS = {"train", "resume", "evaluate", "video", "export", "list", "plot", "pack", "report", "study"}
NOT_RUN = {"pip", "tensorboard", "python", "pytest", "ruff", "mypy", "bash", "pre-commit"}


def blocks(text, languages="python|sh"):
    """The fenced blocks of a page: (language, line number, text)."""
    for found in re.finditer(rf"^```({languages})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], text[: found.start(2)].count("\n"), found[2]


def shorten(program):
    """The program with shorter trainings and evaluations, in fewer environments."""
    # FQE rejects fewer gradient steps than its discount needs.
    names = rf"(?<!FQE\()\b({'|'.join(AT_MOST)})"
    return re.sub(rf"{names}=([\d_]+)", lambda found: f"{found[1]}={min(int(found[2]), AT_MOST[found[1]])}", program)


def run_command(line):
    """Run a `polyak` command in this process; its exit code."""
    longer = r"--(env-steps|gradient-steps|episodes|eval-episodes|value-hidden)( [\d_]+)+"
    words = shlex.split(re.sub(longer, "", line), comments=True)
    shorter = f"{SHORTER.get(words[1], '')} {TINY_OF.get(words[2], '') if words[1] == 'train' else ''}"
    if "--data" in words and words[1] == "evaluate":
        shorter = "--gradient-steps 800"  # the fewest with --gamma 0.9
    elif "--data" in words:
        shorter = OFFLINE + ("" if words[3].startswith("-") else " --eval-episodes 2")
    if words[1] == "resume":
        # A command that trains further than planned follows one that resumes.
        shorter += f" --env-steps {384 if '--env-steps' in line else 256}"
    return main(words[1:] + shorter.split())


def run_page(name, text):
    """Run the blocks of a page in order."""
    namespace = {"__name__": "__main__"}
    for language, line, block in blocks(text):
        if language == "python":
            # Padded, so that a traceback shows the line of the page.
            exec(compile("\n" * line + shorten(block), name, "exec"), namespace)
            continue
        for command in block.replace("\\\n", " ").splitlines():
            if command.startswith("polyak "):
                assert run_command(command) == 0, command
            else:
                assert not command or command.split()[0] in NOT_RUN, f"{name}: {command} is not run by this test"


if __name__ == "__main__":
    started = time.monotonic()
    path = Path(sys.argv[1])
    run_page(path.name, path.read_text())
    print(f"{path.name} ran in {time.monotonic() - started:.0f} s")

"""The README's programs and commands, as they stand there but for how long they train."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from polyak.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TINY = "--env-steps 128 --hidden 4 --num-steps 8 --num-envs 2 --num-epochs 1 --num-minibatches 1 --eval-episodes 2"
STEPS = {"train": TINY, "resume": "--env-steps 256 --eval-episodes 2", "evaluate": "--episodes 2", "export": "", "list": ""}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pole(tmp_path_factory):
    """The run that the README's commands begin with; not to be changed."""
    directory = tmp_path_factory.mktemp("pole") / "run"
    assert main(shlex.split(f"train ppo CartPole-v1 --run-dir {directory} {TINY}")) == 0
    return directory


def test_the_readme_opens_with_what_it_is_for_and_two_commands_that_do_all_the_set_up():
    title, purpose, commands = README.split("\n\n")[:3]
    assert title == "# polyak"
    assert len(purpose.split()) < 120
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == [
        "pip install . && polyak train ppo CartPole-v1",
        "pip install '.[dev]' && pytest",
    ]


def test_the_python_programs_run_one_after_another(unchecked, pole):
    shutil.copytree(pole, "runs/pole")
    names = {}
    for program in blocks("python"):
        short = re.sub(r"env_steps=[\d_]+", "env_steps=2_048", program).replace("episodes=100", "episodes=5")
        exec(compile(short, "README.md", "exec"), names)
    assert names["action"] in (0, 1)
    assert names["evaluation"].mean_return >= 8
    assert len(names["results"]) == 4
    assert names["result"].progress.env_steps >= 2048


def test_the_answer_to_a_misspelt_setting_is_the_one_shown():
    call, shown = re.search(r"`polyak\.(PPO\([^`]*)` answers \*(.*?)\*", README, re.DOTALL).groups()
    import polyak

    names = {"PPO": polyak.PPO, "env": polyak.envs.make("jax/CartPole-v1")}
    with pytest.raises(TypeError, match=re.escape(shown)):
        eval(call, names)


def test_the_commands_run_one_after_another(unchecked):
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert {line.split()[1] for line in lines} == set(STEPS)
    for line in lines:
        words = re.sub(r"--(env-steps|episodes) \d+", "", line)
        assert main(shlex.split(words)[1:] + STEPS[line.split()[1]].split()) == 0, line


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_every_file_of_a_run_directory_is_named(pole):
    named = set(re.findall(r"^\| `([\w.]+)/?` \|", README, re.MULTILINE))
    assert {path.name for path in pole.iterdir()} - {"run.lock"} == named


def test_named_environments_and_extras_exist():
    import polyak

    metadata = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"pip install '\.\[(\w+)\]'", README):
        assert re.search(rf"^{extra} = ", metadata, re.MULTILINE), extra
    known = [name for names in polyak.envs.names().values() for name in names]
    for name in re.findall(r"`((?:jax/)?[A-Z][A-Za-z]+-v\d)`", README):
        assert name in known

"""A subclass of one of polyak's agents on the command line: flags, resume, evaluation and export, as its page says."""

import re
from pathlib import Path

import pytest

import polyak
from polyak.cli import main
from tests.cli.processes import last_checkpoint

PAGE = Path(__file__).parents[2] / "docs/tutorials/extend-agent.md"
SETTINGS = "--penalty 0.25 --capacity 512 --hidden 8 --learning-starts 64 --eval-episodes 0 --report-every 100"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the module of the page."""
    (tmp_path / "conservative.py").write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_term_is_added_in_25_lines(here):
    code = (here / "conservative.py").read_text()
    assert len([line for line in code[code.index("@struct") :].splitlines() if line.strip()]) <= 25


def test_its_own_setting_and_those_of_its_base_are_flags(here, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--agent", "conservative:ConservativeSAC", "jax/Pendulum-v1", "--help"])
    text = capsys.readouterr().out
    assert all(f"{flag} " in text for flag in ("--penalty", "--policy-delay", "--gamma", "--num-critics", "--capacity"))
    assert "--dueling" not in text and "coefficient of the difference" in text


@pytest.mark.slow
# It learns from a few steps.
@pytest.mark.filterwarnings("ignore:.*no gradient step was taken")
def test_it_trains_resumes_to_the_bit_evaluates_and_is_exported(here, capsys):
    agent = "--agent conservative:ConservativeSAC"
    train = f"train {agent} jax/Pendulum-v1 {SETTINGS}"
    assert main(f"{train} --env-steps 300 --checkpoint-every 100 --run-dir whole".split()) == 0
    assert main(f"{train} --env-steps 200 --checkpoint-every 100 --run-dir parts".split()) == 0
    assert '"penalty": 0.25' in Path("parts/config.json").read_text()
    assert main(f"resume parts {agent} --env-steps 300".split()) == 0
    assert last_checkpoint("parts") == last_checkpoint("whole")
    assert main(f"evaluate parts {agent} --episodes 1".split()) == 0
    assert main(f"export parts {agent} --format stablehlo".split()) == 0
    assert polyak.load_policy("parts/policy.stablehlo").predict([1.0, 0.0, 0.5])[0].shape == (1,)
    capsys.readouterr()
    # Without the class the run is not loaded: a file never runs code.
    assert main(["resume", "parts", "--env-steps", "400"]) != 0
    assert "pass a user-defined agent again as agent= (--agent in a shell)" in capsys.readouterr().err


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The agent of the page on agents of one's own, whose optimizer no file can hold."""
    page = (PAGE.parent / "own-agent.md").read_text()
    (tmp_path / "own.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_a_class_with_an_optimizer_of_its_own_resumes_with_the_settings_of_the_run(own, capsys):
    agent = "--agent own:TargetActorCritic"
    words = f"train {agent} jax/CartPole-v1 --num-envs 2 --env-steps 64 --tau 0.5 --eval-episodes 0 --run-dir run"
    assert main(words.split()) == 0
    assert main(f"resume run {agent} --env-steps 128 --eval-episodes 1".split()) == 0
    assert main(f"evaluate run {agent} --episodes 1".split()) == 0
    assert '"tau": 0.5' in Path("run/config.json").read_text()
    assert main(f"resume run {agent} --env-steps 192 --eval-episodes 0 --force".split()) == 0
    assert '"tau": 0.05' in Path("run/config.json").read_text()
    capsys.readouterr()


def test_a_setting_with_the_name_of_another_flag_is_no_flag(tmp_path, monkeypatch, capsys):
    text = "import polyak\nclass Agent(polyak.SAC):\n    capacity: int = 3\n    num_envs: int = 4\n    mine: int = 5\n"
    (tmp_path / "named.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--agent", "named:Agent", "jax/Pendulum-v1", "--help"])
    shown = capsys.readouterr().out
    assert "--mine " in shown and shown.count("--num-envs ") == 1 and shown.count("--capacity ") == 1

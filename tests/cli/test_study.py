"""polyak study: its spaces, and arguments that are wrong."""

import sys

import pytest

from polyak.presets.spaces import SPACES

pytest.importorskip("optuna")


def test_the_list_has_every_space(command):
    code, out, err = command("study --list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == sorted(SPACES)
    assert "learning_rate 1e-05 to 0.002 (log)" in out and "hidden [64] | [64,64] | [256,256]" in out


def test_help_shows_every_flag(command):
    code, out, _ = command("study ppo CartPole-v1 --help")
    assert code == 0
    for flag in ("--trials", "--space", "--seeds", "--workers", "--sampler", "--pruner", "--fresh-seeds", "--directory"):
        assert flag in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ppo --trials 3", "error: polyak study takes an algorithm and an environment, got ppo: polyak study ALGO ENV"),
        ("--trials 3", "error: polyak study takes an algorithm and an environment, got none"),
        ("pgo CartPole-v1 --trials 3", "error: unknown algorithm 'pgo'; did you mean 'ppo'"),
        ("ppo CartPole-v1 --trials 0", "error: study: trials must be an integer >= 1, got 0"),
        ("ppo CartPole-v1 --trials 3 --workers 0", "error: study: workers must be an integer in [1, 256], got 0"),
        ("ppo CartPole-v1 --trials 3 --space none.toml", "error: none.toml: cannot be read: No such file or directory"),
        ("ppo CartPole-v1 --trials 3 --sampler-seed -1", "error: study: seed must be an integer in [0,"),
        ("ppo jax/CartPol-v1 --trials 3", "error: unknown environment"),
        ("ppo CartPole-v1 --trials 3 --trials 4", "error: --trials is set more than once"),
        ("ppo CartPole-v1 --trials 3 --directory file", "error: file: exists and is no study; pass a new directory"),
        ("ppo CartPole-v1", "error: --trials is missing"),
        ("ppo CartPole-v1 --trials many", "error: --trials: must be an integer, got 'many'"),
        ("ppo CartPole-v1 --trials 3 --sampler grid", "error: --sampler must be one of 'tpe', 'cma-es', got 'grid'"),
        (
            "ppo CartPole-v1 --trials 3 --pruner best",
            "error: --pruner must be one of 'median', 'hyperband', 'none', got 'best'",
        ),
        ("ppo CartPole-v1 --trials 3 --seed 1", "error: unknown flag --seed"),
    ],
)
def test_bad_arguments_are_one_sentence_and_write_nothing(command, workdir, words, says):
    (workdir / "file").touch()
    code, out, err = command("study", words)
    assert (code, out) == (2, "") and err.startswith(says) and len(err.splitlines()) == 1
    assert [path.name for path in workdir.iterdir()] == ["file"]


def test_the_missing_extra_is_named(command, workdir, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = command("study ppo CartPole-v1 --trials 3")
    assert (code, out, err) == (2, "", "error: a study needs optuna: pip install 'polyak[study]'\n")
    assert list(workdir.iterdir()) == []

import pytest

from polyak.presets import DEFAULTS, PRESETS


def test_algorithms_presets_and_environments_are_listed(command):
    code, out, err = command("list")
    assert (code, err) == (0, "")
    entries = dict(line.split(maxsplit=1) for line in out.partition("\n\n")[0].splitlines()[1:] if line[2] != " ")
    assert entries["ppo"].startswith("PPO for") and entries["rainbow"].startswith("Rainbow: C51 with")
    assert entries["fast_td3"].startswith("FastTD3") and entries["flash_sac"].startswith("FlashSAC")
    assert len({line.index(entries[line.split()[0]]) for line in out.splitlines()[1 : len(entries)] if line[2] != " "}) == 1
    for _, env_id in PRESETS:
        assert f" {env_id} " in out
    assert entries["a3c"] == "A3C: A2C whose workers send gradients" and entries["td3"] == "TD3 for Box actions."
    assert "HalfCheetah-v2" not in out and "GymV21Environment-v0" not in out
    for name in ("jax/CartPole-v1", "CartPole-v1", "HalfCheetah-v5", "LunarLander-v3", "ALE/Breakout-v5"):
        assert f" {name}" in out


def test_lines_fit_into_110_columns(command):
    _, out, _ = command("list")
    assert max(len(line) for line in out.splitlines()) <= 110


def test_lines_fit_into_the_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    _, out, _ = command("list")
    assert max(len(line) for line in out.splitlines()) <= 72


def test_what_is_not_installed_names_its_extra(command, monkeypatch):
    monkeypatch.setattr("polyak.envs.names", lambda: {"brax": []})
    assert command("list")[1].endswith("  brax: not installed; pip install 'polyak[brax]'\n")


def test_it_takes_no_arguments(command):
    code, out, err = command("list presets")
    assert (code, out) == (2, "")
    assert err == "error: polyak list takes no arguments, got presets\n"


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_algorithm_of_presets_is_described_and_not_by_the_source_of_its_numbers(name):
    assert DEFAULTS[name].source[0].isupper() and "code" not in DEFAULTS[name].source

import pytest

from polyak.cli.flags import UsageError
from polyak.cli.train import _parse
from polyak.presets.preset import LinearOverTraining


def parse(file, *arguments):
    return _parse("ppo", None, "jax/CartPole-v1", ["--preset", str(file), *arguments])[:2]


def test_flags_override_a_preset_file(tmp_path):
    file = tmp_path / "best.toml"
    file.write_text(
        "env_steps = 2000\nlearning_rate = 0.5\ngamma = 0.9\nnormalize_obs = true\n"
        "target_kl = 'None'\nclip_range = 'linear:0.2'\n"
        "[network]\nhidden = [64, 32]\nlog_std = -1.0\n"
    )
    flags, settings = parse(file, "--gamma", "0.8", "--gae-lambda=0.95")
    assert settings.keys() == {"learning_rate", "gamma", "normalize_obs", "target_kl", "clip_range", "gae_lambda"}
    assert flags.training.env_steps == 2000
    assert (flags.algorithm.learning_rate, flags.algorithm.gamma, flags.algorithm.normalize_obs) == (0.5, 0.8, True)
    assert flags.algorithm.target_kl is None and flags.algorithm.clip_range == LinearOverTraining(0.2)
    assert flags.network.hidden == (64, 32) and flags.network.log_std == -1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama = 0.9", "unknown setting 'gama'; did you mean 'gamma'"),
        ("preset = 'a.toml'", "unknown setting 'preset'"),
        ("agent = 'os:system'", "unknown setting 'agent'"),
        ("env = 'os:system'", "unknown setting 'env'"),
        ("run_dir = '/tmp/x'", "unknown setting 'run_dir'"),
        ("hidden = ['--agent', 'os:system']", "hidden must be a number, a text"),
        ("gamma = []", "gamma must be a number, a text"),
        ("hidden = [3]\n[network]\nhidden = [64]", "hidden is set twice, at the top and in \\[network\\]"),
        ("num_envs = [1, 2]", r"num_envs must be a number or a text, got \[1, 2\]"),
        ("gamma = {a = 1}", "gamma must be a number, a text, a boolean or a list"),
        ("normalize_obs = 'yes'", "normalize_obs must be true or false, got 'yes'"),
        ("normalize_obs = 1", "normalize_obs must be true or false, got 1"),
        ("noisy = 1", "noisy must be true or false, got 1"),
        ("gamma = true", "gamma must not be true or false, got True"),
        ("", "must have at least one setting, got none"),
        ("gamma", "must be a TOML file"),
    ],
)
def test_an_invalid_preset_file_is_rejected(tmp_path, text, message):
    file = tmp_path / "best.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"--preset .*best.toml: .*{message}"):
        parse(file)


def test_an_invalid_value_names_its_flag(tmp_path):
    file = tmp_path / "best.toml"
    file.write_text("gamma = 'high'")
    with pytest.raises(UsageError, match="--gamma: must be a number, got 'high'"):
        parse(file)

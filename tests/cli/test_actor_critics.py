"""DDPG, TD3, SAC and TQC through the command line and by name: rescaled actions, resume to the bit, exports."""

import json
from pathlib import Path

import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.cli.change_parts import change_parts
from polyak.cli.flags import UsageError
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.replay_flags import ReplayFlags
from tests.cli.processes import last_checkpoint
from tests.test_second_algorithm import config_of

SETTINGS = (
    "--learning-starts 32 --capacity 96 --hidden 16 --batch-size 8 --report-every 64 --checkpoint-every 64 --ema-tau 0.05"
)


def polyak_command(text):
    return main(text.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "env"),
    [
        ("sac", "Pendulum-v1 --policy-delay 3 --target-entropy auto"),
        ("td3", "jax/Pendulum-v1 --sde-sample-freq 4 --replay prioritized --n-step 3 --normalize-obs"),
        ("ddpg", "Pendulum-v1"),
    ],
)
def test_train_resume_to_the_bit_and_export(algorithm, env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = f"train {algorithm} {env} {SETTINGS} --learning-rate 1e-3 --eval-episodes 0"
    assert polyak_command(f"{train} --run-dir whole --env-steps 256") == 0
    assert polyak_command(f"{train} --run-dir parts --env-steps 128") == 0
    assert polyak_command("resume parts --env-steps 256 --eval-episodes 0") == 0
    assert last_checkpoint("whole") == last_checkpoint("parts")
    config = config_of("whole")
    assert config.action_scaling == "rescale" and config.agent.actor.hidden == config.agent.critics.hidden == (16,)
    assert json.loads(Path("whole/metrics.jsonl").read_text().splitlines()[-1])["train/n_updates"] > 0
    obs = np.linspace(-1.0, 1.0, 9, dtype=np.float32).reshape(3, 3)
    actions = np.asarray(polyak.load_policy("whole").predict(obs)[0])
    assert actions.shape == (3, 1) and (np.abs(actions) <= 2.0).all() and np.ptp(actions) > 0
    for name, file in (("stablehlo", "policy.stablehlo"), ("numpy", "policy.npz")):
        assert polyak_command(f"export whole --format {name}") == 0
        np.testing.assert_allclose(polyak.load_policy(f"whole/{file}").predict(obs)[0], actions, atol=1e-5)


@pytest.mark.slow
def test_an_agent_by_name_gets_rescaled_actions():
    result = polyak.train.run(
        "SAC",
        "jax/Pendulum-v1",
        env_steps=8,
        seed=0,
        progress=False,
        settings={"replay": polyak.UniformReplay(64), "learning_starts": 0},
    )
    assert result.agent.spec.action_scaling == "rescale"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "std"),
    [
        ("sac MountainCarContinuous-v0 --sde-sample-freq None --learning-starts 64 --num-steps 1", "state"),
        (
            "ppo jax/Pendulum-v1 --sde-sample-freq 4 --network mlp --num-steps 8 --num-minibatches 1 --num-epochs 1",
            "sde",
        ),
    ],
)
# The trainings are too short to learn.
@pytest.mark.filterwarnings("ignore:.*no gradient step was taken")
def test_noise_of_the_network_follows_state_dependent_exploration(command, std, tmp_path):
    assert polyak_command(f"train {command} --env-steps 8 --eval-episodes 0 --run-dir {tmp_path / 'run'}") == 0
    agent = config_of(tmp_path / "run").agent
    assert (agent.network.head if command.startswith("ppo") else agent.actor).std == std


def test_flags_of_the_critics_leave_the_actor_as_it_is():
    spec = polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec
    flags = NetworkFlags(hidden=(8,), value_hidden=(16, 16), value_activation="silu", num_critics=3, norm="layer", dropout=0.1)
    for agent in (polyak.SAC(spec), polyak.TQC(spec, num_quantiles=7)):
        changed = change_parts("td3", agent, flags, ReplayFlags(), 100)
        assert changed.actor == polyak.Actor((8,))
        quantiles = 7 if isinstance(agent, polyak.TQC) else None
        assert changed.critics == polyak.Critics(
            (16, 16), activation="silu", num_critics=3, norm="layer", dropout=0.1, num_quantiles=quantiles
        )
    own_width = change_parts("td3", polyak.TD3(spec), NetworkFlags(value_hidden=(16,)), ReplayFlags(), 100)
    assert (own_width.actor.hidden, own_width.critics.hidden) == ((256, 256), (16,))
    with pytest.raises(UsageError, match="--num-critics, --dropout: ppo has no such network setting"):
        change_parts("ppo", polyak.PPO(spec), NetworkFlags(num_critics=3, dropout=0.1), ReplayFlags(), 100)


def test_residual_blocks_are_of_actor_and_critics_and_their_normalization_of_the_critics():
    spec = polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec
    flags = NetworkFlags(hidden=(8,), value_hidden=(16, 16), residual="pre_norm", norm="batch")
    changed = change_parts("sac", polyak.SAC(spec), flags, ReplayFlags(), 100)
    assert changed.actor == polyak.Actor((8,), residual="pre_norm", norm="layer")
    assert changed.critics == polyak.Critics((16, 16), residual="pre_norm", norm="batch")
    xqc = change_parts("xqc", polyak.XQC(spec), NetworkFlags(hidden=(8,), residual="hypersphere"), ReplayFlags(), 100)
    assert xqc.actor == polyak.Actor((8,), residual="hypersphere"), "without the default's normalization"
    assert xqc.critics == polyak.Critics((8,), residual="hypersphere", num_atoms=101)
    bro = change_parts("bro", polyak.BRO(spec), NetworkFlags(hidden=(8,), residual="inverted"), ReplayFlags(), 100)
    assert (bro.actor.residual, bro.actor.orthogonal) == ("inverted", False), "without the default's orthogonal weights"
    assert bro.critics.residual == bro._optimistic_actor.residual == "inverted"
    with pytest.raises(ValueError, match="BRO: optimistic_actor must not have residual='hypersphere'"):
        change_parts("bro", polyak.BRO(spec, weight_norm=True), NetworkFlags(residual="hypersphere"), ReplayFlags(), 100)
    both = NetworkFlags(hidden=(8,), residual="hypersphere", norm="layer")
    with pytest.raises(ValueError, match="Critics: norm must be None with residual='hypersphere', got 'layer'"):
        change_parts("xqc", polyak.XQC(spec), both, ReplayFlags(), 100)
    with pytest.raises(UsageError, match="--residual: ppo has no such network setting"):
        change_parts("ppo", polyak.PPO(spec), NetworkFlags(residual="pre_norm"), ReplayFlags(), 100)


@pytest.mark.parametrize("algorithm", ["td3", "ddpg"])
def test_a_standard_deviation_of_an_actor_without_a_distribution_is_rejected(algorithm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert polyak_command(f"train {algorithm} jax/Pendulum-v1 --log-std -1") == 2
    assert f"--log-std -1.0: {algorithm} has no distribution; --exploration-noise sets its noise" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_two_critics_of_ddpg_are_rejected_before_a_run_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert polyak_command("train ddpg jax/Pendulum-v1 --num-critics 2") == 2
    assert "critics must be one critic" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cell_is_put_before_the_layers_of_actor_and_critics():
    agent = polyak.SAC(polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec)
    made = change_parts("sac", agent, NetworkFlags(network="gru", hidden=(8,)), ReplayFlags(burn_in=2), 100)
    actor, critics = polyak.GRU(head=polyak.Actor((8,))), polyak.GRU(head=polyak.Critics((8,)))
    assert (made.actor, made.critics, made.replay) == (actor, critics, polyak.SequenceReplay(1_000_000, burn_in=2))
    with_tanh = change_parts("sac", agent, NetworkFlags(network="gru", activation="tanh"), ReplayFlags(), 100)
    assert with_tanh.actor == polyak.GRU(activation="tanh", head=polyak.Actor(activation="tanh"))
    of_critics = change_parts("sac", made, NetworkFlags(value_activation="elu"), ReplayFlags(), 100)
    assert of_critics.critics == polyak.GRU(activation="elu", head=polyak.Critics((8,), activation="elu"))
    assert of_critics.actor == actor
    # Later flags change the layers after the cell, or the cell.
    wider = change_parts("sac", made, NetworkFlags(value_hidden=(16,)), ReplayFlags(), 100)
    assert (wider.actor, wider.critics) == (actor, polyak.GRU(head=polyak.Critics((16,))))
    assert change_parts("sac", made, NetworkFlags(network="lstm"), ReplayFlags(), 100).actor == polyak.LSTM(
        head=polyak.Actor((8,))
    )


@pytest.mark.parametrize(
    ("flags", "settings", "num_steps"),
    [
        (ReplayFlags(), {}, 8),
        (ReplayFlags(burn_in=10), {}, 5),  # 6 steps are learned from, and 6 does not divide the capacity.
        (ReplayFlags(capacity=999_999), {}, 7),
        (ReplayFlags(), {"num_steps": 1}, 1),
        (ReplayFlags(), {"num_steps": 2}, 2),
    ],
)
def test_a_recurrent_state_is_stored_every_few_steps(flags, settings, num_steps, capsys):
    spec = polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec
    agent = polyak.SAC(spec, **settings)
    made = change_parts("sac", agent, NetworkFlags(network="gru"), flags, 100, settings, 3)
    made.check(3)
    assert made.num_steps == num_steps
    assert ("every" in capsys.readouterr().out) is not bool(settings)


def test_a_new_recurrent_network_gets_minibatches_of_whole_environments(capsys):
    agent = polyak.PPO(polyak.envs.make("jax/CartPole-v1").spec)
    flags = NetworkFlags(network="lstm")
    assert change_parts("ppo", agent, flags, ReplayFlags(), 100, num_envs=12).num_minibatches == 4
    assert "num_minibatches=4: minibatches of a recurrent network are whole environments" in capsys.readouterr().out
    assert change_parts("ppo", agent, flags, ReplayFlags(), 100).num_minibatches == agent.num_minibatches
    assert capsys.readouterr().out == ""

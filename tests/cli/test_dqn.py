"""DQN through the command line: trains, resumes to the bit with its replay, evaluates and exports."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.agents.dqn import DQN
from polyak.cli import main
from polyak.cli.change_parts import change_parts
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.replay_flags import ReplayFlags
from polyak.storage.checkpoint import CheckpointError, read_manifest
from polyak.storage.run_directory import open_run
from polyak.train.new_training import make_agent
from tests.cli.processes import last_checkpoint
from tests.test_second_algorithm import config_of

SETTINGS = "--num-envs 2 --learning-starts 32 --capacity 128 --hidden 16 --report-every 64 --checkpoint-every 64"


def polyak_command(text):
    return main(text.split())


def test_train_resume_to_the_bit_evaluate_and_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env = "jax/CartPole-v1"  # the other loop is in test_killed
    # 384 transitions: the replay wraps around twice before the checkpoint in the middle, and once after it.
    assert polyak_command(f"train dqn {env} --run-dir whole --env-steps 384 {SETTINGS} --eval-episodes 0") == 0
    agent = config_of("whole").agent
    assert isinstance(agent, DQN) and agent.epsilon.env_steps == 0.16 * 384
    assert agent.network == polyak.MLP((16,), norm="layer", head=polyak.QValues())
    assert '"train/td_error"' in Path("whole/metrics.jsonl").read_text()

    assert (
        polyak_command(
            f"train dqn {env} --run-dir parts --env-steps 384 {SETTINGS} --eval-episodes 0 --epsilon 0.1 --learning-rate 1e-3"
        )
        == 0
    )
    assert (
        polyak_command(
            f"train dqn {env} --run-dir other --env-steps 256 {SETTINGS} --eval-episodes 0 --epsilon 0.1 --learning-rate 1e-3"
        )
        == 0
    )
    assert polyak_command("resume other --env-steps 384 --eval-episodes 0") == 0
    assert last_checkpoint("other") == last_checkpoint("parts")

    assert polyak_command("evaluate whole --episodes 3") == 0
    assert "greedy return" in capsys.readouterr().out
    obs = np.linspace(-0.1, 0.1, 12, dtype=np.float32).reshape(3, 4)
    actions = np.asarray(polyak.load_policy("whole").predict(obs)[0])
    assert polyak_command("export whole --format stablehlo") == 0
    np.testing.assert_array_equal(np.asarray(polyak.load_policy("whole/policy.stablehlo").predict(obs)[0]), actions)


@pytest.mark.slow
def test_without_the_replay_checkpoints_are_small_and_learning_waits_after_a_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"{SETTINGS} --eval-episodes 0 --no-checkpoint-replay".replace("--capacity 128", "--capacity 100000")
    words = words.replace("--learning-starts 32", "--learning-starts 64")
    assert polyak_command(f"train dqn CartPole-v1 --run-dir run --env-steps 256 {words}") == 0
    checkpoints = Path("run/checkpoints")
    assert sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()) < 300_000
    assert not (checkpoints / "segments").exists()
    reason = "resume is not bit-exact because the checkpoint has no replay"
    manifest = read_manifest(checkpoints)
    assert manifest.meta["resume"] == reason
    assert not [leaf.path for leaf in manifest.leaves if leaf.path.startswith(".agent.replay")]
    polyak.load_policy("run").predict(np.zeros(4, np.float32))

    with pytest.warns(UserWarning, match=f"^{reason}; learning waits until the replay is filled$"):
        assert polyak_command("resume run --env-steps 512 --eval-episodes 0") == 0
    before, after = manifest.meta["progress"]["iteration"], 0
    rows = {row["time/iterations"]: row["train/n_updates"] for row in open_run("run").read_metrics()}
    for iterations in (iterations for iterations in rows if iterations > before):
        # Rollouts of 8 rows: the eighth makes 64, and 4 gradient steps follow each from then on.
        assert rows[iterations] - rows[before] == 4 * max(0, iterations - before - 7)
        after += 1
    assert after >= 3 and rows[before] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:polyak.resume. learning_rate stays")
def test_a_damaged_replay_is_noticed_where_it_is_needed_and_only_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"{SETTINGS} --eval-episodes 0".replace("--capacity 128", "--capacity 2000")
    assert polyak_command(f"train dqn jax/CartPole-v1 --run-dir run --env-steps 256 {words}") == 0
    for path in Path("run/checkpoints/segments").iterdir():
        path.write_bytes(b"x" * path.stat().st_size)
    assert polyak.load_policy("run").predict(np.zeros(4, np.float32)) is not None
    assert polyak_command("evaluate run --episodes 1") == 0
    assert polyak_command("export run --format stablehlo") == 0
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*has another SHA-256 than its name"):
        polyak.resume("run", env_steps=512)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_for_its_policy_without_the_replay(tmp_path):
    result = polyak.train.run(
        "dqn", "jax/CartPole-v1", num_envs=2, env_steps=128, eval_every=64, eval_episodes=2, run_dir=tmp_path / "run",
        progress=False, settings={"replay": polyak.UniformReplay(2000), "learning_starts": 32},
    )  # fmt: skip
    assert not (tmp_path / "run/best/segments").exists() and (tmp_path / "run/checkpoints/segments").is_dir()
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    best = polyak.load_policy(tmp_path / "run/best")
    np.testing.assert_array_equal(best.predict(obs)[0], result.best_policy.predict(obs)[0])


@pytest.mark.slow
def test_rainbow_trains_resumes_and_is_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = f"{SETTINGS} --eval-episodes 0 --epsilon 0.1 --learning-rate 1e-3 --priority-beta 0.5"
    assert polyak_command(f"train rainbow jax/CartPole-v1 --run-dir whole --env-steps 128 {settings}") == 0
    assert polyak_command(f"train rainbow jax/CartPole-v1 --run-dir parts --env-steps 64 {settings}") == 0
    assert polyak_command("resume parts --env-steps 128 --eval-episodes 0") == 0
    assert last_checkpoint("parts") == last_checkpoint("whole")
    for name in ("parts/config.json", "parts/summary.json"):
        assert json.loads(Path(name).read_text())["algorithm"] == "rainbow"
    assert "rainbow jax/CartPole-v1: compiled in" in capsys.readouterr().out
    obs = np.linspace(-0.1, 0.1, 12, dtype=np.float32).reshape(3, 4)
    actions = np.asarray(polyak.load_policy("whole").predict(obs)[0])
    assert polyak_command("export whole --format stablehlo") == 0
    np.testing.assert_array_equal(np.asarray(polyak.load_policy("whole/policy.stablehlo").predict(obs)[0]), actions)
    capsys.readouterr()


def test_settings_are_checked_before_anything_is_created(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert polyak_command("train dqn Pendulum-v1 --run-dir run --env-steps 64") == 2
    assert "DQN: actions must be Discrete or MultiDiscrete, got Box" in (err := capsys.readouterr().err)
    assert "PPO, SAC and TD3 take Boxes" in err
    assert polyak_command("train dqn CartPole-v1 --run-dir run --num-envs 3 --updates-per-step 0.1 --env-steps 64") == 2
    assert "must be a whole number of gradient steps" in capsys.readouterr().err
    assert polyak_command("train dqn CartPole-v1 --run-dir run --log-std 0.5 --env-steps 64") == 2
    capsys.readouterr()
    assert not Path("run").exists()


@pytest.mark.slow
def test_recurrent_networks_train_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--network gru --sequence-length 4 --burn-in 2 --num-steps 2"
    train = f"train dqn jax/CartPole-v1 {SETTINGS} --batch-size 4 --epsilon 0.1 --learning-rate 1e-3 --eval-episodes 0 {words}"
    assert polyak_command(f"{train} --run-dir whole --env-steps 128") == 0
    agent = config_of("whole").agent
    assert (type(agent.network), agent.network.hidden, agent.replay.sequence_length) == (polyak.GRU, (16,), 4)
    assert polyak_command(f"{train} --run-dir parts --env-steps 64") == 0
    assert polyak_command("resume parts --env-steps 128") == 0
    assert last_checkpoint("parts") == last_checkpoint("whole")
    capsys.readouterr()
    agent = make_agent("dqn", polyak.envs.make("jax/CartPole-v1").spec, None, 128, None)
    agent = change_parts("dqn", agent, NetworkFlags(network="lstm", hidden=(16,)), ReplayFlags(), 128)
    assert (type(agent.network), agent.network.hidden, agent.replay.sequence_length) == (polyak.LSTM, (16,), 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sac Pendulum-v1 --network mlp", "--hidden sets; --network lstm or gru puts a cell before them"),
        ("crossq Pendulum-v1 --network lstm", "crossq has actor and critics, whose layers --hidden sets\n"),
        ("qt_opt Pendulum-v1 --network lstm", "qt_opt has critics, whose layers --hidden sets\n"),
        ("c51 CartPole-v1 --network gru", "--network gru: c51 takes {mlp,cnn}"),
        ("iqn CartPole-v1 --network lstm", "--network lstm: iqn takes {mlp,cnn}"),
    ],
)
def test_networks_that_an_agent_does_not_take(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert polyak_command(f"train {words}") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "iqn"])
def test_kinds_of_networks_of_action_values(algorithm):
    env = polyak.envs.make("jax/CartPole-v1")
    agent = make_agent(algorithm, env.spec, None, 100, None)
    changed = change_parts(algorithm, agent, NetworkFlags(network="mlp", hidden=(8,)), ReplayFlags(), 100)
    assert type(changed.network) is type(agent.network) and changed.network.hidden == (8,)
    # C51's distributions have as many numbers as before.
    jax.eval_shape(changed.init, jax.random.key(0))


# The trainings are too short to learn.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no gradient step was taken")
def test_parts_of_rainbow_are_added_and_taken_away_by_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--num-envs 2 --env-steps 8 --learning-starts 16 --hidden 16 --eval-episodes 0 --epsilon 0.1 --run-dir run"
    assert polyak_command(f"train rainbow jax/CartPole-v1 {words} --no-dueling --no-noisy") == 0
    assert config_of("run").agent.network == polyak.MLP((16,), head=polyak.QValues(outputs=51))
    spec, flags = polyak.envs.make("jax/CartPole-v1").spec, NetworkFlags(dueling=True, noisy=True)
    for algorithm in ("dqn", "c51", "qrdqn", "iqn"):
        network = change_parts(algorithm, make_agent(algorithm, spec, None, 100, None), flags, ReplayFlags(), 100).network
        assert network.head.dueling and network.head.noisy
    capsys.readouterr()
    assert polyak_command("train ppo CartPole-v1 --run-dir other --no-checkpoint-replay") == 2
    assert capsys.readouterr().err == "error: --no-checkpoint-replay: ppo has no replay\n"
    assert polyak_command("train ppo CartPole-v1 --run-dir other --dueling --noisy") == 2
    assert "--dueling, --noisy: ppo has no such network setting" in capsys.readouterr().err
    assert polyak_command("train dqn CartPole-v1 --run-dir other --network gru --noisy") == 2
    assert "GRU: a recurrent network has no noise" in capsys.readouterr().err
    for words in ("--no-noisy", "--network mlp"):
        assert polyak_command(f"train rainbow CartPole-v1 --run-dir other {words}") == 2
        assert "nothing explores without --noisy while --epsilon is 0" in capsys.readouterr().err
    assert polyak_command("train rainbow CartPole-v1 --run-dir other --network lstm") == 2
    assert "--network lstm: rainbow takes {mlp,cnn}" in capsys.readouterr().err
    assert not Path("other").exists()

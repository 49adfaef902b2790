"""Real processes, really killed."""

import random
import signal
import time

import pytest

from polyak.runs import read_config
from polyak.storage.run_directory import open_run
from tests.cli.fork_server import ForkServer
from tests.cli.processes import SETTINGS, environment, finish, last_checkpoint, metrics, rows, start, wait_until

pytestmark = pytest.mark.slow

# These take seconds: much of them goes into a report and a checkpoint every hundred env steps.
ENV_STEPS = 5_000
TRAIN = f"--report-every 100 --checkpoint-every 100 {SETTINGS}"
# The replay wraps around, and each array of it has segments of its own.
TRAIN_DQN = (
    "--report-every 100 --checkpoint-every 100 --hidden 4 --num-envs 2 --learning-starts 64 --capacity 4096 --eval-episodes 2"
)


@pytest.fixture(scope="module")
def forks(jax_cache):
    """Where commands are forked, nearly two seconds sooner each."""
    server = ForkServer(environment(jax_cache))
    yield server
    server.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, jax_cache):
    """A run of each environment that nobody disturbed, in a process of another hash seed than the forks'."""
    directory = tmp_path_factory.mktemp("uninterrupted")

    def run(env, algorithm="ppo", settings=TRAIN):
        name = f"{algorithm}-{env.replace('/', '-')}"
        if not (directory / name).exists():
            words = f"--run-dir {name} --env-steps {ENV_STEPS} {settings}"
            code, out = finish(start(f"train {algorithm} {env} {words}", directory, jax_cache))
            assert code == 0, out
        return directory / name

    return run


@pytest.mark.parametrize(
    ("algorithm", "settings", "env", "kills"),
    [
        ("ppo", TRAIN, "jax/CartPole-v1", 6),
        ("ppo", TRAIN, "CartPole-v1", 2),
        ("dqn", TRAIN_DQN, "jax/CartPole-v1", 5),
        ("dqn", TRAIN_DQN, "CartPole-v1", 2),
    ],
)
def test_killed_at_random_moments_and_resumed_is_the_same_as_uninterrupted(
    algorithm, settings, env, kills, tmp_path, forks, uninterrupted
):
    moments = random.Random(kills)
    run = tmp_path / "run"
    process = forks.start(f"train {algorithm} {env} --run-dir run --env-steps {ENV_STEPS} {settings}", tmp_path)
    seen = []
    for kill in range(kills):
        if kill == 1:
            wait_until((run / "config.json").exists, process)  # while it compiles
        else:
            enough = rows(run) + moments.randint(1, 6)
            wait_until(lambda enough=enough: rows(run) >= enough, process)
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        seen.append(rows(run))
        process = forks.start("resume run --eval-episodes 2", tmp_path)
    code, out = finish(process)
    assert code == 0, out
    assert len(set(seen)) >= kills // 2, "the kills fell on the same spot"
    undisturbed = uninterrupted(env, algorithm, settings)
    assert [read_config(open_run(r)).threads for r in (run, undisturbed)] == [1, 1]
    assert last_checkpoint(run) == last_checkpoint(undisturbed)
    assert metrics(run) == metrics(undisturbed)


@pytest.mark.parametrize(
    ("env", "number", "code", "name"),
    [("jax/CartPole-v1", signal.SIGTERM, 143, "SIGTERM"), ("CartPole-v1", signal.SIGINT, 130, "Ctrl-C")],
)
def test_a_signal_saves_a_checkpoint_and_exits_within_five_seconds(env, number, code, name, tmp_path, forks, uninterrupted):
    run = tmp_path / "run"
    process = forks.start(f"train ppo {env} --run-dir run --env-steps {ENV_STEPS} {TRAIN}", tmp_path)
    wait_until(lambda: rows(run) > 5, process)
    began = time.monotonic()
    process.send_signal(number)
    got, out = finish(process)
    assert time.monotonic() - began < 5
    assert got == code, out
    summary = open_run(run).read_summary()
    assert summary["stopped"] == name
    assert 100 < summary["env_steps"] < ENV_STEPS
    assert last_checkpoint(run)[0] == f"{summary['env_steps']:012d}"
    assert out.splitlines()[-1].endswith(f"continue with: polyak resume {run}")

    got, out = finish(forks.start("resume run --eval-episodes 2", tmp_path))
    assert got == 0, out
    assert last_checkpoint(run) == last_checkpoint(uninterrupted(env))


def test_a_signal_while_compiling_leaves_a_run_that_can_be_resumed(tmp_path, forks):
    process = start(f"train ppo jax/CartPole-v1 --run-dir run --env-steps 64 --no-compilation-cache {SETTINGS}", tmp_path)
    assert "compiling" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out = finish(process)
    assert (code, time.monotonic() - began < 2) == (143, True), out
    assert "second signal, exiting now" in out
    code, out = finish(forks.start("resume run --eval-episodes 2", tmp_path))
    assert code == 0, out
    assert "starting from the beginning" in out


def test_a_long_iteration_is_not_waited_for(tmp_path):
    words = "--hidden 4 --num-envs 2 --num-minibatches 1 --env-steps 1000000 --num-steps 100000 --num-epochs 5000"
    process = start(f"train ppo jax/CartPole-v1 --run-dir run {words}", tmp_path, tmp_path / "compiled")
    wait_until(lambda: list((tmp_path / "compiled").glob("jit_run_chunk-*")), process)
    time.sleep(1)
    assert not (tmp_path / "run/metrics.jsonl").exists(), "the first iteration is over already"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert (code, 4 < time.monotonic() - began < 5) == (143, True), out
    assert "polyak: not stopped within 4.5 s, exiting now; progress since the last checkpoint is lost" in out

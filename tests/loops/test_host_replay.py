"""A replay in the host's memory gives the numbers of one on the device that learns."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.dqn import DQN
from polyak.cli import main
from polyak.core.struct import struct
from polyak.core.types import Rollout
from polyak.loops import host_replay
from polyak.loops.host_replay import check_replay_on
from polyak.loops.loop import Reporter
from polyak.loops.replay_memory import check_memory
from polyak.ops.schedules import StepCount
from polyak.replay.drawn import Errors
from polyak.storage import checkpoint
from tests.selection import quick

KEY = jax.random.key(0)
SMALL = {"replay": polyak.UniformReplay(256), "learning_starts": 32, "batch_size": 4, "num_steps": 4}
DENSE = {"network": polyak.MLP((4,)), "updates_per_step": 0.5, **SMALL}
# Four gradient steps an update; one where priorities are set after each of them, which is when the numbers are the same.
AGENTS = {
    "dqn": lambda spec: polyak.DQN(spec, **DENSE, n_step=3),
    "c51": lambda spec: polyak.C51(
        spec, **DENSE | {"updates_per_step": 0.125, "replay": polyak.PrioritizedReplay(256)}, num_atoms=5, normalize_obs=True
    ),
    "recurrent": lambda spec: polyak.DQN(
        spec, **DENSE | {"network": polyak.LSTM(4, hidden=(4,)), "replay": polyak.SequenceReplay(256, 8)}
    ),
}


def make(name):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    return AGENTS[name](env.spec), env


def assert_same(ours, theirs, **tolerance):
    def data(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(data(x), data(y), **{"rtol": 1e-6, "atol": 1e-7} | tolerance)


@pytest.fixture
def other_device(monkeypatch):
    """Plays the host beside a first device that plays the accelerator."""
    device = jax.local_devices()[3]
    monkeypatch.setattr(host_replay, "host_device", lambda: device)
    return device


@pytest.mark.parametrize("name", quick("dqn", of=list(AGENTS)))
def test_the_numbers_are_those_of_a_replay_on_the_device(name, other_device):
    agent, env = make(name)
    places = []

    def look(progress, metrics, state):
        parts = (state.agent.replay, dataclasses.replace(state.agent, replay=()))
        places.append([{device for x in jax.tree.leaves(part) for device in x.devices()} for part in parts])

    train = lambda **options: polyak.loops.host(agent, env, env_steps=160, key=KEY, report_every=60, **options)  # noqa: E731
    here, there = train(), train(replay_on="host", callbacks=[look])
    assert places == [[{other_device}, {jax.local_devices()[0]}]] * 3
    assert int(here.state.updates) > 8
    # Of the metrics, the priorities are those before the last update.
    assert_same(here.loop_state, there.loop_state)
    differing = {name for name, value in here.metrics.items() if not np.isclose(value, there.metrics[name], rtol=1e-5)}
    assert differing <= {"replay/mean_priority", "replay/max_priority"}


@pytest.mark.slow
def test_a_stopped_training_goes_on_with_the_same_numbers(other_device):
    agent, _ = make("dqn")
    hosted = polyak.envs.make("CartPole-v1", num_envs=2)
    train = lambda steps, **options: polyak.loops.host(agent, hosted, env_steps=steps, key=KEY, **options)  # noqa: E731
    whole = train(160)
    half, snapshot = train(80, replay_on="host"), hosted.snapshot()
    # On the device at first, since the state is donated then.
    for options in ({}, {"replay_on": "host", "donate": True}):
        hosted.restore(snapshot)
        rest = train(160, resume_from=half.loop_state, env_steps_done=half.progress.env_steps, **options)
        assert_same(whole.loop_state, rest.loop_state)


@pytest.mark.slow
def test_nothing_compiles_while_training_or_for_another_seed(other_device, monkeypatch):
    """Seconds and steps per second are without compilation. It learns on JAX's default device."""
    compiled, while_training = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    original = Reporter.training

    @contextlib.contextmanager
    def training(self):
        before = len(compiled)
        with original(self):
            yield
        while_training.extend(compiled[before:])

    monkeypatch.setattr(Reporter, "training", training)
    agent, _ = make("dqn")
    agent = dataclasses.replace(agent, batch_size=5)  # not that of the other tests, whose programs are there already
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    train = lambda agent, key: polyak.loops.host(agent, env, env_steps=40, key=key, replay_on="host")  # noqa: E731
    other_key = jax.random.key(1)
    with jax.default_device(jax.local_devices()[1]):
        result = train(agent, KEY)
        assert int(result.state.updates) > 0 and compiled and not while_training
        assert result.state.updates.devices() == {jax.local_devices()[1]}
        before = len(compiled)
        train(dataclasses.replace(agent, gamma=0.9), other_key)
    assert len(compiled) == before


def rollout_of(spec, length=8, num_envs=2):
    rng = np.random.default_rng(0)
    steps = polyak.TimeStep(
        obs=rng.normal(size=(length + 1, num_envs, 4)).astype(np.float32),
        reward=rng.normal(size=(length + 1, num_envs)).astype(np.float32),
        first=np.zeros((length + 1, num_envs), bool),
        terminated=np.zeros((length + 1, num_envs), bool),
        truncated=np.zeros((length + 1, num_envs), bool),
    )
    return Rollout(steps, rng.integers(2, size=(length, num_envs)).astype(np.int32))


def prioritized_agent():
    spec = polyak.envs.make("jax/CartPole-v1", num_envs=1).spec
    return polyak.DQN(spec, **DENSE | {"num_steps": 8, "replay": polyak.PrioritizedReplay(256, alpha=1.0, eps=0.0)})


@pytest.mark.slow
def test_no_batches_are_drawn_before_learning_starts():
    agent = prioritized_agent()
    replay, drawn = jax.jit(agent.draw_batches)(agent.init(KEY).replay, rollout_of(agent.spec), KEY, StepCount.of(0))
    assert int(replay.size) == 8 and int(drawn.env_steps) == 16 and not drawn.priorities.is_learning
    assert drawn.batches.reward.shape == (8, 4) and not any(np.any(x) for x in jax.tree.leaves(drawn.batches))


@pytest.mark.slow
@pytest.mark.parametrize("is_learning", [True, False])
def test_errors_become_the_priorities_of_the_rows_that_were_drawn(is_learning):
    agent = prioritized_agent()
    replay, drawn = jax.jit(agent.draw_batches)(agent.init(KEY).replay, rollout_of(agent.spec), KEY, StepCount.of(100))
    assert drawn.batches.reward.shape == (8, 4) and int(drawn.env_steps) == 116
    sizes = jnp.arange(1.0, 33.0).reshape(8, 4)
    after = jax.jit(agent.return_errors)(replay, Errors(drawn.priorities.index, sizes, jnp.int32(8), jnp.asarray(is_learning)))
    wanted = dict.fromkeys(np.flatnonzero(np.asarray(replay.rows.valid)).tolist(), 1.0)
    for index, size in zip(np.asarray(drawn.batches.index), np.asarray(sizes), strict=True):
        # Of a row that was drawn twice, the larger of one batch, and the last batch's.
        wanted |= {row: max(size[index == row]) for row in index.tolist()} if is_learning else {}
    got = agent.replay.sample(after, KEY, 4096, num_envs=2, gamma=0.99)
    counts = np.bincount(np.asarray(got.index), minlength=256) / 4096
    expected = np.zeros(256)
    expected[list(wanted)] = np.array(list(wanted.values())) / sum(wanted.values())
    np.testing.assert_allclose(counts, expected, atol=0.025)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_rejected_before_anything_runs(monkeypatch):
    agent, env = make("dqn")
    hosted = polyak.envs.make("CartPole-v1", num_envs=2)
    monkeypatch.setattr(DQN, "init", lambda self, key: pytest.fail("too late"))
    run = lambda agent, env, **options: polyak.train.run(agent, env, env_steps=64, progress=False, **options)  # noqa: E731
    lacks_both = struct(type("Own", (DQN,), {"draw_batches": None, "return_errors": None}))(agent.spec)
    lacks_one = struct(type("Own", (DQN,), {"return_errors": None}))(agent.spec)
    host = lambda **options: polyak.loops.host(agent, hosted, env_steps=64, key=KEY, **options)  # noqa: E731
    for start, message in (
        (lambda: host(replay_on="disk"), "replay_on must be one of 'device', 'host', got 'disk'"),
        (lambda: host(replay_on="host", devices=2), "replay_on='host' needs devices=1, got 2"),
        (lambda: run(agent, env, replay_on="host"), "replay_on='host' needs the host loop or workers, got loop='compiled'"),
        (lambda: run(polyak.PPO(env.spec), hosted, replay_on="host"), "replay_on='host': PPO has no replay"),
        (lambda: run(lacks_both, hosted, replay_on="host"), "Own lacks draw_batches and return_errors of .*SupportsHostReplay"),
        (lambda: run(lacks_one, hosted, replay_on="host"), "Own lacks return_errors of .*SupportsHostReplay"),
    ):
        with pytest.raises(ValueError, match=message):
            start()

    def without_cpu(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", without_cpu)
    with pytest.raises(ValueError, match=r"replay_on='host' needs JAX's CPU .* add cpu to JAX_PLATFORMS"):
        check_replay_on(agent, "host", 1, "host")


def test_the_host_has_the_memory_for_a_replay_that_does_not_fit_on_the_device(monkeypatch):
    agent, _ = make("dqn")
    full = type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 1000, "bytes_in_use": 900}})()
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [full])
    with pytest.raises(ValueError, match=r"1 device\(s\) has 100 available"):
        check_memory(agent)
    check_memory(agent, on_host=True)


@pytest.mark.slow
def test_a_run_stores_where_its_replay_stands_and_resumes_with_it(tmp_path, other_device, monkeypatch):
    places = []

    def restore(*arguments, **options):
        restored = checkpoint.restore(*arguments, **options)
        places.append({device for x in jax.tree.leaves(restored.tree.agent.replay) for device in x.devices()})
        return restored

    monkeypatch.setattr("polyak.train.resumption.restore", restore)
    arguments = ["dqn", "CartPole-v1", "--hidden", "4", "--capacity", "256", "--learning-starts", "32", "--eval-episodes", "0"]
    for place in ("device", "host"):
        code = main(["train", *arguments, "--env-steps", "64", "--run-dir", str(tmp_path / place), "--replay-on", place])
        assert code == 0 and json.loads((tmp_path / place / "config.json").read_text())["replay_on"] == place
        assert main(["resume", str(tmp_path / place), "--env-steps", "128", "--eval-episodes", "0"]) == 0
    assert places == [{jax.local_devices()[0]}, {other_device}], "a replay on the host may be too large for the device"
    rows = [json.loads((tmp_path / place / "metrics.jsonl").read_text().splitlines()[-1]) for place in ("device", "host")]
    losses = [row["train/loss"] for row in rows]
    assert losses[0] > 0 and losses == pytest.approx(losses[:1] * 2, rel=1e-5)

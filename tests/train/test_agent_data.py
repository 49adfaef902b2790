"""Training in an environment with a data set beside the replay: in all loops, resumed, and what is rejected."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.replay import MixedReplay
from polyak.storage.checkpoint import CheckpointError
from polyak.workers.learner_group import Learners

KEY = jax.random.key(0)
ENV = "jax/CartPole-v1"
SMALL = {"batch_size": 16, "learning_starts": 20, "network": polyak.MLP((8,)), "replay": polyak.UniformReplay(1_000)}


@pytest.fixture(scope="module")
def data():
    env = polyak.envs.make(ENV, num_envs=4)
    return polyak.data.collect(polyak.policies.Uniform(env.spec), env, 300, key=KEY)


def train(data, settings=SMALL, agent="dqn", env=ENV, **options):
    num_envs = None if isinstance(env, polyak.Env | polyak.HostEnv) else 4
    return polyak.train.run(agent, env, data=data, settings=settings, progress=False, num_envs=num_envs, **options)


def arrays(result):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(result.state)]


def assert_same(one, other):
    for x, y in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", [polyak.UniformReplay, polyak.PrioritizedReplay])
def test_an_interrupted_run_with_data_equals_an_uninterrupted_one(kind, data, tmp_path):
    settings = SMALL | {"replay": kind(1_000)}
    whole = train(data, settings, env_steps=200)
    assert whole.metrics["train/n_updates"] > 100
    replay = whole.agent.replay
    assert isinstance(replay, MixedReplay) and replay.share == 0.5
    rows = whole.state.replay.data.rows
    assert rows.valid.sum() == data.num_transitions and rows.reward[rows.valid].sum() == data.reward.sum()
    run = tmp_path / "run"
    first = train(data, settings, env_steps=200, run_dir=run, report_every=100, callbacks=[lambda *_: False])
    assert first.stopped == "callback" and first.config.data == data.name
    assert_same(polyak.resume(run, progress=False), whole)
    assert polyak.load_policy(run).predict(np.zeros(4, np.float32))[0] in (0, 1)


@pytest.mark.slow
def test_loops_and_memories_give_the_same_numbers(data):
    """Almost: the compiler of the tests optimizes little, and the last bits depend on its order of sums."""
    compiled, host, apart = (
        train(data, env_steps=100, **options)
        for options in ({"loop": "compiled"}, {"loop": "host"}, {"loop": "host", "replay_on": "host"})
    )
    for result in (host, apart):
        assert result.metrics["train/n_updates"] == compiled.metrics["train/n_updates"] > 40
        for x, y in zip(*(jax.tree.leaves(one.state.copies.online.params) for one in (compiled, result)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_goals_of_data_are_relabelled_too():
    env = polyak.envs.make("jax/BitFlipping-v0", num_envs=4, env_kwargs={"bits": 4})
    recorded = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 200, key=KEY)
    agent = polyak.DQN(env.spec, polyak.MLP((8,)), batch_size=16, learning_starts=4)
    agent = dataclasses.replace(agent, replay=polyak.HindsightReplay(1_000, ratio=1.0))
    trained = train(recorded, None, agent, env, env_steps=8)
    agent = trained.agent
    state = agent.add(trained.state, polyak.train.collect(polyak.policies.Uniform(env.spec), env, num_steps=40, key=KEY))
    batch = agent.replay.sample(state.replay, KEY, 200, num_envs=4, gamma=0.9)
    assert (batch.weight > 0).mean() > 0.97
    # Random flips reach the goal of all four bits in some steps of a hundred; goals of the own episode are reached more often.
    assert (batch.reward[100:] == 0).mean() > 0.2 and (recorded.reward == 0).mean() < 0.15


def test_every_device_draws_from_all_data(data):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    result = train(data, env_steps=100, devices=2)
    assert result.metrics["train/n_updates"] > 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": "ppo", "settings": None}, "train.run: PPO has no replay to learn from data"),
        ({"agent": "bc", "settings": {"batch_size": 16}}, "BC: learns from recorded actions alone"),
        ({"env": "jax/Pendulum-v1", "agent": "sac", "settings": None}, "is of another environment"),
        ({"data_share": 0.0}, r"MixedReplay: share must be a number in \(0, 1\], got 0.0"),
        ({"data_share": 1.0}, r"share=1.0 of batch_size=16 must leave transitions in both parts"),
        ({"data": None, "data_share": 0.7}, "data_share=0.7 needs data"),
        ({"checkpoint_replay": False}, "checkpoint_replay must be True with data, which a resumed run would lack"),
        ({"devices": 2, "data_share": 0.06}, "share=0.06 of batch_size=8 must leave transitions in both parts"),
        ({"learners": Learners(2)}, "data must be left out with learners=2"),
    ],
)
def test_what_does_not_fit_is_an_error_before_training(options, message, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(**{"data": data, "env_steps": 100, "run_dir": tmp_path / "run"} | options)
    assert not (tmp_path / "run").exists()


def test_an_agent_with_a_mixed_replay_needs_its_data(data, tmp_path):
    result = train(data, env_steps=40)
    with pytest.raises(ValueError, match="data must be passed, as the agent has a MixedReplay"):
        train(None, None, result.agent, env_steps=100, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    again = train(data, None, result.agent, env_steps=40)
    assert_same(again, result)
    longer = train(None, None, result.agent, env_steps=80, resume_from=again.loop_state, env_steps_done=40)
    assert longer.state.replay.data.rows.valid.sum() == data.num_transitions


def test_a_run_that_was_stopped_before_its_first_checkpoint_does_not_go_on_without_data(data, tmp_path):
    def fail(*_):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(data, env_steps=100, run_dir=tmp_path / "run", callbacks=[fail])
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    with pytest.raises(CheckpointError, match="was stopped before its first checkpoint, which has the data"):
        polyak.resume(tmp_path / "run", progress=False)

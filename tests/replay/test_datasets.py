"""Replays filled from elsewhere: rollouts of other policies, and data sets of episodes."""

import dataclasses
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import train
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.replay import from_minari

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(3))
SMALL = {"network": polyak.q_mlp((8,)), "capacity": 512, "batch_size": 16, "learning_starts": 0}


def episodes_of(lengths, terminates=True):
    """Episodes whose observations count their time steps, and in the second number, the episode."""
    for number, length in enumerate(lengths):
        ends = np.arange(length) == length - 1
        obs = np.stack([np.arange(length + 1), np.full(length + 1, number)], axis=1).astype(np.float64)
        yield SimpleNamespace(
            observations=obs,
            actions=np.arange(length, dtype=np.int64) % 3,
            rewards=np.arange(length) * 1.0,
            terminations=ends & terminates,
            truncations=ends & False,
        )


def data_set(*args, **kwargs):
    return SimpleNamespace(iterate_episodes=lambda: episodes_of(*args, **kwargs))


def test_episodes_follow_each_other_in_streams_of_about_equal_length():
    rollout = from_minari(data_set([3, 2, 1, 4]), SPEC, num_envs=2)
    obs = rollout.time_steps.obs
    # The first stream has episodes 0 and 3, the second 1, 2 and nothing more: it ends the other.
    np.testing.assert_array_equal(obs[:, 1], [[0, 1], [1, 1], [2, 1], [0, 2], [1, 2]])
    np.testing.assert_array_equal(obs[:, 0], [[0, 0], [1, 0], [2, 0], [3, 0], [0, 3]])
    steps = rollout.time_steps
    np.testing.assert_array_equal(steps.first, [[1, 1], [0, 0], [0, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(steps.terminated, [[0, 0], [0, 0], [0, 1], [1, 0], [0, 1]])
    np.testing.assert_array_equal(steps.reward, [[0, 0], [0, 0], [1, 1], [2, 0], [0, 0]])
    np.testing.assert_array_equal(rollout.actions[:3, 0], [0, 1, 2])
    assert rollout.actions.dtype == np.int32 and obs.dtype == np.float32 and rollout.reward.shape == (4, 2)


def test_an_episode_that_was_cut_off_counts_as_truncated():
    steps = from_minari(data_set([2, 2], terminates=False), SPEC).time_steps
    assert steps.truncated[2, 0] and not steps.terminated.any()


def test_too_few_episodes_are_an_error():
    with pytest.raises(ValueError, match=r"each of num_envs=3 needs num_steps=2 transitions, the shortest has 0"):
        from_minari(data_set([9, 9]), SPEC, num_envs=3, num_steps=2)


def test_integers_that_do_not_count_from_0_and_rescaled_actions_become_the_agents():
    spec = EnvSpec(Dict({"a": Discrete(4, start=2)}), Box([0.0], [4.0]), action_scaling="rescale")
    episode = SimpleNamespace(
        observations={"a": np.array([2, 5, 3])},
        actions=np.array([[1.0], [4.0]]),
        rewards=np.ones(2),
        terminations=np.zeros(2, bool),
        truncations=np.zeros(2, bool),
    )
    rollout = from_minari(SimpleNamespace(iterate_episodes=lambda: [episode]), spec)
    np.testing.assert_array_equal(rollout.time_steps.obs["a"][:, 0], [0, 3, 1])
    np.testing.assert_array_equal(rollout.actions[:, 0], [[-0.5], [1.0]])


def test_an_agent_learns_from_a_data_set_alone():
    agent = polyak.DQN(SPEC, **SMALL, num_steps=2)
    rollout = from_minari(data_set([7] * 20), SPEC, num_envs=2, num_steps=2)
    state = agent.add(agent.init(KEY), rollout)
    # The rows after a stream are as many as those of a rollout.
    assert int(state.replay.size) == len(rollout.reward) + 2 and int(state.env_steps) == int(state.updates) == 0
    batch = polyak.replay.Replay(512, 2).sample(state.replay, KEY, 256, num_envs=2, gamma=0.9)
    assert (np.asarray(batch.weight) > 0).all()
    np.testing.assert_array_equal(batch.next_obs[:, 0] - batch.obs[:, 0], 1)
    np.testing.assert_array_equal(batch.next_obs[:, 1], batch.obs[:, 1])
    np.testing.assert_array_equal(batch.action, batch.obs[:, 0].astype(jnp.int32) % 3)
    first = jax.tree.map(lambda x: x[:3], rollout.time_steps)
    updated, _ = agent.update(state, polyak.Rollout(first, rollout.actions[:2]), KEY)
    assert int(updated.updates) == 1 and int(updated.replay.size) == len(rollout.reward) + 4


def test_demonstrations_of_a_python_policy_fill_the_replay_of_a_run():
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    policy = polyak.PythonPolicy(lambda obs: (obs[:, 2] > 0).astype(np.int32), env.spec)
    rollout = train.collect(policy, env, 40, key=KEY)
    agent = polyak.DQN(env.spec, **SMALL, num_steps=4, prioritized=True)
    result = train.host(agent, env, env_steps=8, key=KEY)
    state = result.loop_state
    state = dataclasses.replace(state, agent=agent.add(state.agent, rollout))
    assert int(state.agent.replay.size) == 52 and int(state.agent.env_steps) == 8
    priority = np.asarray(state.agent.replay.priorities.tree.priority)
    np.testing.assert_array_equal(priority > 0, np.asarray(state.agent.replay.rows.valid))
    result = train.host(agent, env, env_steps=40, key=KEY, resume_from=state, env_steps_done=8)
    assert int(result.state.replay.size) >= 60


def test_rollouts_that_do_not_fit_are_rejected():
    agent = polyak.DQN(SPEC, **SMALL, num_steps=2)
    with pytest.raises(ValueError, match=r"DQN.add: a rollout must have a multiple of num_steps=2 steps, got 3"):
        agent.add(agent.init(KEY), from_minari(data_set([3]), SPEC))
    with pytest.raises(ValueError, match="obs"):
        rollout = from_minari(data_set([3]), SPEC, num_steps=2)
        agent.add(agent.init(KEY), jax.tree.map(lambda x: x[..., :1], rollout))


@pytest.mark.filterwarnings("ignore::UserWarning")  # about metadata of the data set
def test_a_data_set_of_minari(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1"))
    for seed in range(4):
        env.reset(seed=seed)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
    env.create_dataset(
        "cartpole/random-v0", algorithm_name="random", author="a", author_email="a@b.c", code_permalink="https://a.b"
    )
    env.close()
    spec = polyak.envs.make("CartPole-v1").spec
    rollout = from_minari("cartpole/random-v0", spec, num_envs=2, num_steps=4)
    episodes = list(minari.load_dataset("cartpole/random-v0").iterate_episodes())
    np.testing.assert_array_equal(rollout.time_steps.obs[: len(episodes[0].observations), 0], episodes[0].observations)
    assert len(rollout.reward) % 4 == 0 and rollout.time_steps.terminated.sum() >= 2
    agent = polyak.DQN(spec, **SMALL, num_steps=4)
    assert int(agent.add(agent.init(KEY), rollout).replay.size) == len(rollout.reward) + 4

"""Replays filled from elsewhere: rollouts of other policies, and data sets of episodes."""

import dataclasses
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops, train
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.replay import from_minari

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(3))
SMALL = {"network": polyak.MLP((8,)), "replay": polyak.UniformReplay(512), "batch_size": 16, "learning_starts": 0}


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


@pytest.mark.slow
def test_an_agent_learns_from_a_data_set_alone():
    agent = polyak.DQN(SPEC, **SMALL, num_steps=2)
    rollout = from_minari(data_set([7] * 20), SPEC, num_envs=2, num_steps=2)
    state = agent.add(agent.init(KEY), rollout)
    # The rows after a stream are as many as those of a rollout.
    assert int(state.replay.size) == len(rollout.reward) + 2 and int(state.env_steps) == int(state.updates) == 0
    batch = polyak.UniformReplay(512).sample(state.replay, KEY, 256, num_envs=2, gamma=0.9)
    assert (np.asarray(batch.weight) > 0).all()
    np.testing.assert_array_equal(batch.next_obs[:, 0] - batch.obs[:, 0], 1)
    np.testing.assert_array_equal(batch.next_obs[:, 1], batch.obs[:, 1])
    np.testing.assert_array_equal(batch.action, batch.obs[:, 0].astype(jnp.int32) % 3)
    first = jax.tree.map(lambda x: x[:3], rollout.time_steps)
    updated, _ = agent.update(state, polyak.Rollout(first, rollout.actions[:2]), KEY)
    assert int(updated.updates) == 1 and int(updated.replay.size) == len(rollout.reward) + 4


@pytest.mark.slow
def test_demonstrations_of_a_python_policy_fill_the_replay_of_a_run():
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    policy = polyak.PythonPolicy(lambda obs: (obs[:, 2] > 0).astype(np.int32), env.spec)
    rollout = train.collect(policy, env, 40, key=KEY)
    agent = polyak.DQN(env.spec, **SMALL | {"replay": polyak.PrioritizedReplay(512)}, num_steps=4)
    result = loops.host(agent, env, env_steps=8, key=KEY)
    state = result.loop_state
    state = dataclasses.replace(state, agent=agent.add(state.agent, rollout))
    assert int(state.agent.replay.size) == 52 and int(state.agent.env_steps) == 8
    priority = np.asarray(state.agent.replay.priorities.tree.priority)
    np.testing.assert_array_equal(priority > 0, np.asarray(state.agent.replay.rows.valid))
    result = loops.host(agent, env, env_steps=40, key=KEY, resume_from=state, env_steps_done=8)
    assert int(result.state.replay.size) >= 60


def test_rollouts_that_do_not_fit_are_rejected():
    agent = polyak.DQN(SPEC, **SMALL, num_steps=2)
    with pytest.raises(ValueError, match=r"DQN.add: a rollout must have a multiple of num_steps=2 steps, got 3"):
        agent.add(agent.init(KEY), from_minari(data_set([3]), SPEC))
    with pytest.raises(ValueError, match="obs"):
        rollout = from_minari(data_set([3]), SPEC, num_steps=2)
        agent.add(agent.init(KEY), jax.tree.map(lambda x: x[..., :1], rollout))


@pytest.mark.parametrize(("shift", "bad"), [(1, 3), (-1, -1)])
def test_actions_that_do_not_count_from_0_are_rejected(shift, bad):
    agent = polyak.DQN(SPEC, **SMALL, num_steps=1, updates_per_step=1.0)
    rollout = from_minari(data_set([5]), SPEC)
    shifted = polyak.Rollout(rollout.time_steps, rollout.actions + np.int32(shift))
    with pytest.raises(ValueError, match=rf"DQN.add: rollout.actions must be in \[0, 2\], got {bad} .*; they count from 0"):
        agent.add(agent.init(KEY), shifted)


def test_box_actions_outside_of_the_bounds_are_rejected_but_not_for_rounding_or_where_nothing_acted():
    spec = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Box([-2.0], [2.0]), action_scaling="rescale")
    agent = polyak.SAC(spec, polyak.Actor((8,)), polyak.Critics((8,)), replay=polyak.UniformReplay(512))
    episode = next(iter(episodes_of([4])))
    episode.actions = np.float64([[-2.0], [0.0], [2.0], [1.0]])
    rollout = from_minari(SimpleNamespace(iterate_episodes=lambda: [episode, episode]), spec)
    np.testing.assert_allclose(rollout.actions[:4, 0, 0], [-1.0, 0.0, 1.0, 0.5])

    def add(actions):
        return agent.add(agent.init(KEY), polyak.Rollout(rollout.time_steps, actions))

    assert not rollout.valid[4, 0]
    harmless = rollout.actions.copy()
    harmless[[0, 2, 4], 0, 0] = -1 - 2e-7, 1 + 2e-7, 50.0
    assert int(add(harmless).replay.dropped) == 0
    broken = rollout.actions.copy()
    broken[1] = np.nan
    assert int(add(broken).replay.dropped) == 1
    with pytest.raises(ValueError, match=r"SAC.add: rollout.actions must be in \[-1, 1\], got 1.5 at \[3, 0, 0\]; clip them"):
        add(rollout.actions + np.float32(1.0) * (np.arange(len(rollout.actions)) == 3)[:, None, None])


def test_what_is_in_a_replay_is_not_lost_to_a_rollout_of_other_environments():
    agent = polyak.DQN(SPEC, **SMALL, num_steps=1, updates_per_step=1.0)
    state = agent.add(agent.init(KEY), from_minari(data_set([5, 5]), SPEC, num_envs=2))
    with pytest.raises(ValueError, match=r"must have B=2 environments, as the 14 time steps in the replay, .* got 1"):
        agent.add(state, from_minari(data_set([5]), SPEC))
    other = dataclasses.replace(agent, num_steps=2)
    with pytest.raises(ValueError, match=r"DQN.add: state must have a replay of num_steps=2, got 1"):
        other.add(state, from_minari(data_set([5, 5]), SPEC, num_envs=2, num_steps=2))


@pytest.mark.slow
def test_nothing_is_added_to_the_state_of_a_run_on_several_devices():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = polyak.DQN(env.spec, **SMALL, num_steps=4)
    state = loops.compiled(agent, env, env_steps=64, key=KEY, devices=2).state
    for num_envs in (2, 4):
        rollout = train.collect(agent.collect_policy(state), polyak.envs.make("jax/CartPole-v1", num_envs=num_envs), 4, key=KEY)
        with pytest.raises(
            ValueError, match=r"DQN.add: the state is that of a run on several devices, to which nothing can be"
        ):
            agent.add(state, rollout)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"observations": {"a": np.zeros((6, 2))}}, TypeError, "observations of an episode of 5 steps must have dtype float32"),
        ({"observations": np.zeros((6, 3))}, ValueError, r"observations of an episode of 5 steps must have shape \(6, 2\)"),
        ({"observations": np.zeros((5, 2))}, ValueError, r"must have shape \(6, 2\), got \(5, 2\)"),
        ({"rewards": np.zeros(4)}, ValueError, r"rewards of an episode of 5 steps must be \[5\], got \(4,\)"),
        ({"truncations": np.zeros((5, 1), bool)}, ValueError, r"truncations .* must be \[5\], got \(5, 1\)"),
        ({"terminations": np.zeros(0, bool)}, ValueError, r"terminations of an episode of 0 steps must be \[1\], got \(0,\)"),
        ({"actions": np.full(5, 0.7)}, TypeError, "actions of an episode of 5 steps must have dtype int32 .* got float64"),
        ({"actions": np.zeros((5, 1), int)}, ValueError, r"actions of an episode of 5 steps must have shape \(5,\)"),
    ],
)
def test_a_data_set_that_does_not_fit_is_rejected_by_name(change, error, message):
    episode = next(iter(episodes_of([5])))
    vars(episode).update(change)
    with pytest.raises(error, match=f"from_minari: .*({message})"):
        from_minari(SimpleNamespace(iterate_episodes=lambda: [episode]), SPEC)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about metadata of the data set
def test_a_data_set_of_minari(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1"))
    env.action_space.seed(0)
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

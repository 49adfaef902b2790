"""Data sets that policies collect, and those of the replays of runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.types import Rollout

KEY = jax.random.key(3)


@pytest.mark.parametrize("name", ["CartPole-v1", "jax/CartPole-v1"])
def test_collected_episodes_are_those_of_the_environment(name):
    env = polyak.envs.make(name, num_envs=3)
    policy = polyak.policies.Uniform(env.spec)
    data = polyak.data.collect(policy, env, 200, key=KEY)
    assert 200 <= data.num_transitions <= 202 and data.truncated.sum() == 3
    rollout = polyak.train.collect(policy, env, 67, key=KEY)  # the first rollout
    wanted = [np.asarray(rollout.time_steps.obs[0, i]) for i in range(3)]
    begins = [episode.obs[0].tolist() for episode in data.episodes]
    assert all(obs.tolist() in begins for obs in wanted)
    for episode in data.episodes:
        assert (episode.reward == 1).all() and (np.abs(episode.obs[:-1, 2]) < 0.21).all()
        assert episode.terminated == (abs(episode.obs[-1, 2]) > 0.2095)


@pytest.mark.parametrize("name", ["CartPole-v1", "jax/CartPole-v1"])
def test_a_policy_in_python_is_recorded(name):
    env = polyak.envs.make(name, num_envs=2)
    rule = polyak.PythonPolicy(lambda obs: 3 * obs[:, 2] + obs[:, 3] > 0, env.spec)
    data = polyak.data.collect(rule, env, 300, key=KEY)
    for episode in data.episodes:
        np.testing.assert_array_equal(episode.action, 3 * episode.obs[:-1, 2] + episode.obs[:-1, 3] > 0)
    assert data.num_episodes < 300 / 40  # random episodes have 22 steps


def test_rollouts_continue_each_other(monkeypatch):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    policy = polyak.policies.Uniform(env.spec)
    monkeypatch.setattr("polyak.data.collection.MAX_ROLLOUT", 16)
    data = polyak.data.collect(policy, env, 100, key=KEY)
    # Only the last episode of each environment is cut short, not one for each rollout.
    assert data.truncated.sum() == 2 and data.num_episodes > 4 and data.lengths.max() > 16


def test_box_actions_are_in_the_units_of_the_environment():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=2, action_scaling="rescale")
    data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 100, key=KEY)
    assert 1.5 < np.abs(data.action).max() <= 2 and data.spec.action_scaling == "clip"
    assert np.abs(data.rollout(env.spec).actions).max() <= 1


@pytest.fixture(scope="module")
def sac_run(tmp_path_factory):
    """A run whose ring of 64 rows has wrapped around."""
    path = tmp_path_factory.mktemp("run") / "sac"
    settings = {
        "replay": polyak.UniformReplay(64),
        "batch_size": 8,
        "learning_starts": 8,
        "num_steps": 4,
        "updates_per_step": 0.125,
    }
    settings |= {"actor": polyak.Actor((8,)), "critics": polyak.Critics((8,))}
    result = polyak.train.run(
        "sac", "jax/Pendulum-v1", env_steps=500, num_envs=2, settings=settings, run_dir=path, progress=False
    )
    return path, result


def test_the_replay_of_a_run_is_a_data_set(sac_run):
    path, result = sac_run
    data = polyak.data.load(path)
    state = result.state.replay
    assert data.spec.action.high == 2 and data.num_transitions == int(np.asarray(state.rows.valid).sum())
    stored = {tuple(np.float32(x).tolist()) for x in np.asarray(state.rows.obs)}
    assert {tuple(x.tolist()) for x in data.obs} <= stored
    np.testing.assert_allclose(np.sort(data.reward), np.sort(np.asarray(state.rows.reward)[np.asarray(state.rows.valid)]))
    # The dynamics of the pendulum: the angle follows from the velocity after the step.
    for episode in data.episodes:
        angle = np.arctan2(episode.obs[:, 1], episode.obs[:, 0])
        moved = np.mod(np.diff(angle) - 0.05 * episode.obs[1:, 2] + np.pi, 2 * np.pi) - np.pi
        np.testing.assert_allclose(moved, 0, atol=1e-4)
    assert not data.terminated.any()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: polyak.PrioritizedReplay(rows.capacity),
        lambda rows: polyak.replay.MixedReplay(rows, 32),
        lambda rows: polyak.replay.MixedReplay(polyak.PrioritizedReplay(rows.capacity), 32),
    ],
)
def test_every_replay_has_the_same_rows(wrap):
    from polyak.data.run_replay import read_replay

    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    rollout = polyak.train.collect(polyak.policies.Uniform(env.spec), env, num_steps=40, key=jax.random.key(0))
    sets = []
    for replay in (polyak.UniformReplay(200), wrap(polyak.UniformReplay(200))):
        agent = polyak.DQN(env.spec, polyak.MLP((4,)), replay=replay)
        state = agent.add(agent.init(jax.random.key(0)), rollout).replay
        sets.append(read_replay("test", agent.replay, state, env.spec, "replay"))
    assert sets[0].num_transitions > 50
    np.testing.assert_array_equal(sets[1].obs, sets[0].obs)
    np.testing.assert_array_equal(sets[1].lengths, sets[0].lengths)


def test_the_oldest_episodes_of_a_full_replay_lack_their_beginnings(tmp_path):
    from polyak.data.run_replay import read_replay

    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    rollout = polyak.train.collect(polyak.policies.Uniform(env.spec), env, num_steps=120, key=jax.random.key(0))
    sets = []
    for capacity in (128, 500):
        agent = polyak.DQN(env.spec, polyak.MLP((4,)), replay=polyak.UniformReplay(capacity))
        state = agent.add(agent.init(jax.random.key(0)), rollout).replay
        sets.append(read_replay("test", agent.replay, state, env.spec, "replay"))
    full, complete = sets
    first = full.obs[full.starts[:-1] + np.arange(full.num_episodes)]
    np.testing.assert_array_equal(full.has_beginning, np.abs(first).max(axis=1) <= 0.05)
    assert full.has_beginning.sum() == full.num_episodes - 2 > 0 and complete.has_beginning.all()
    with pytest.warns(UserWarning, match=r"data.save: 2 episodes lack their beginnings, which .*npz does not tell"):
        polyak.data.save(full, tmp_path / "full.npz")
    polyak.data.save(full.select(full.has_beginning), tmp_path / "part.npz")
    assert polyak.data.load(tmp_path / "part.npz").num_episodes == full.num_episodes - 2


def test_a_run_without_a_replay_is_an_error(tmp_path):
    settings = {"num_steps": 8, "num_minibatches": 1}
    polyak.train.run(
        "ppo", "jax/CartPole-v1", env_steps=16, num_envs=2, settings=settings, run_dir=tmp_path / "r", progress=False
    )
    with pytest.raises(ValueError, match=r"PPO has no replay; use polyak.data.collect with its policy"):
        polyak.data.load(tmp_path / "r")


@pytest.mark.parametrize("capacity", [32, 8])
def test_frame_stacks_are_stacked_again(capacity):
    from polyak.data.run_replay import read_replay

    replay = polyak.UniformReplay(capacity, frame_stack=2)
    spec = polyak.EnvSpec(polyak.core.spaces.Box(-99, 99, (2, 1)), polyak.core.spaces.Discrete(2))
    state = replay.init(np.zeros((2, 1), np.float32), np.int32(0), num_steps=4)
    data = polyak.data.load(
        {
            "observations": np.array([[0, 1], [1, 2], [2, 3], [0, 5], [5, 6]], np.float32)[..., None],
            "actions": np.zeros(5, int),
            "rewards": np.arange(5.0),
            "terminations": [0, 0, 1, 0, 0],
            "truncations": [0, 0, 0, 0, 1],
            "final_observations": np.array([[3, 4], [6, 7]], np.float32)[..., None],
        },
        spec=spec,
    )
    rollout = data.rollout(num_steps=4, pad=True)
    for start in (0, 4):
        steps = jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + 5]), rollout.time_steps)
        state = replay.add(state, Rollout(steps, jnp.asarray(rollout.actions[start : start + 4])))
    again = read_replay("test", replay, state, spec, "replay")
    # A full replay has overwritten the first row, and with it a frame of the second.
    assert again.has_beginning.tolist() == [capacity == 32, True]
    np.testing.assert_array_equal(again.obs, data.obs if capacity == 32 else data.obs[2:])
    np.testing.assert_array_equal(again.terminated, data.terminated)

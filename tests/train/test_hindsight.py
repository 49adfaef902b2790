"""Training with a hindsight replay: what it learns, in all loops, on several devices, resumed, and by the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import DQN, MLP, SAC, Actor, Critics, HindsightReplay, PrioritizedReplay, UniformReplay
from polyak.core.spaces import Box, Dict, EnvSpec
from polyak.core.struct import struct
from polyak.envs.autoreset import AutoReset

BITS = {"bits": 6}


def bits(num_envs=8):
    return polyak.envs.make("jax/BitFlipping-v0", num_envs=num_envs, env_kwargs=BITS)


def agent_for(env, replay, **settings):
    settings = {"learning_starts": 100, "batch_size": 32, "gamma": 0.95, "epsilon": 0.2, "target_period": 50} | settings
    return DQN(env.spec, MLP(hidden=(64,)), replay=replay, learning_rate=3e-3, **settings)


def leaves(result):
    return list(map(np.asarray, jax.tree.leaves((result.state.copies.online.params, result.state.replay.episodes))))


def is_same(one, other):
    return all(map(np.array_equal, leaves(one), leaves(other)))


@pytest.mark.slow
def test_dqn_flips_ten_bits_with_hindsight_and_not_without():
    env = polyak.envs.make("jax/BitFlipping-v0", num_envs=16, env_kwargs={"bits": 10})
    rates = []
    for replay in (HindsightReplay(100_000), UniformReplay(100_000)):
        agent = agent_for(env, replay, tau=0.05, target_period=1, batch_size=128)
        agent = dataclasses.replace(agent, network=MLP(hidden=(128,)), learning_rate=1e-3)
        result = polyak.train.run(agent, env, env_steps=15_000, eval_episodes=100, progress=False, seed=0)
        rates.append(result.evaluation.success_rate)
    # By chance 1 % of the goals are reached.
    assert rates[0] > 0.9 and rates[1] < 0.2, rates


@pytest.mark.slow
def test_both_loops_give_the_same_numbers():
    env = bits()
    agent = agent_for(env, HindsightReplay(PrioritizedReplay(2_000)), n_step=2)
    compiled, host = (
        polyak.train.run(agent, env, env_steps=400, loop=loop, progress=False, devices=1) for loop in ("compiled", "host")
    )
    assert compiled.metrics["train/n_updates"] > 50 and is_same(compiled, host)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["bits", "python"])
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(env, tmp_path):
    from tests.envs.test_host_goals import Plane

    class Saved(Plane):
        def get_state(self):
            state = {"t": self.t, "place": self.place, "goal": self.goal, "rng": self.np_random.bit_generator.state}
            return jax.tree.map(np.copy, {**state, "rng": None}) | {"rng": state["rng"]}

        def set_state(self, state):
            self.t, self.place, self.goal = int(state["t"]), np.array(state["place"]), np.array(state["goal"])
            self.np_random.bit_generator.state = state["rng"]

    made = bits() if env == "bits" else polyak.envs.make(Saved, num_envs=8)
    agent = agent_for(made, HindsightReplay(2_000))
    whole = polyak.train.run(agent, made, env_steps=400, progress=False, seed=3)
    polyak.train.run(agent, made, env_steps=200, progress=False, seed=3, run_dir=tmp_path / "run")
    # The agent of the file has no functions of goals: they come from the environment.
    again = None if env == "bits" else polyak.envs.make(Saved, num_envs=8)
    resumed = polyak.resume(tmp_path / "run", env=again, env_steps=400, progress=False)
    assert resumed.progress.env_steps == whole.progress.env_steps and is_same(resumed, whole)
    assert polyak.load_policy(tmp_path / "run").predict(jax.tree.map(lambda x: np.asarray(x[0]), whole.state.replay.rows.obs))


@pytest.mark.slow
def test_devices_draw_goals_of_their_own_rows():
    env = bits(num_envs=4)
    agent = agent_for(env, HindsightReplay(400), learning_starts=50)
    result = polyak.train.run(agent, env, env_steps=1_200, devices=2, progress=False)
    assert result.metrics["train/n_updates"] > 200
    replay = result.state.replay
    assert replay.episodes.number.sharding.num_devices == 2
    # Each device has the rows of two environments, all with goals of its episodes.
    for device in range(2):

        def own(x, device=device):
            return jnp.asarray(np.asarray(x)[200 * device :][:200] if x.shape[:1] == (400,) else np.asarray(x))

        part = jax.tree.map(own, replay)
        batch = agent.replay.sample(part, jax.random.key(device), 2_000, num_envs=2, gamma=0.9)
        goals = np.asarray(batch.obs["desired_goal"])[np.asarray(batch.weight) > 0]
        stored = {tuple(goal) for name in ("achieved_goal", "desired_goal") for goal in part.rows.obs[name].tolist()}
        assert {tuple(goal) for goal in goals.tolist()} <= stored


@struct
class PointState:
    place: jax.Array
    goal: jax.Array
    steps: jax.Array


@struct
class Point:
    """Move a point to a goal by steps within ±0.2."""

    @property
    def spec(self):
        box = Box(-np.ones(2), np.ones(2))
        return EnvSpec(Dict({"observation": box, "achieved_goal": box, "desired_goal": box}), Box(-np.ones(2), np.ones(2)))

    def reset(self, key, num_envs):
        place, goal = jax.random.uniform(key, (2, num_envs, 2), minval=-1.0)
        return PointState(place, goal, jnp.zeros(num_envs, jnp.int32))

    def step(self, state, action, key):
        place = jnp.clip(state.place + 0.2 * action, -1.0, 1.0)
        steps = state.steps + 1
        after = PointState(place, state.goal, steps)
        return after, self.compute_reward(place, state.goal), jnp.zeros(len(steps), bool), steps >= 20

    def observe(self, state):
        return {"observation": state.place, "achieved_goal": state.place, "desired_goal": state.goal}

    def info(self, state):
        return {"is_success": self.compute_reward(state.place, state.goal) == 0}

    def compute_reward(self, achieved_goal, desired_goal):
        distance = jnp.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return jnp.where(distance < 0.15, 0.0, -1.0)


@pytest.mark.slow
def test_sac_reaches_goals():
    env = AutoReset(Point(), 8, "rescale")
    agent = SAC(
        env.spec, Actor(hidden=(64, 64)), Critics(hidden=(64, 64)), replay=HindsightReplay(20_000), gamma=0.9,
        learning_rate=3e-3, learning_starts=200, batch_size=128, updates_per_step=0.25, normalize_obs=True,
    )  # fmt: skip
    result = polyak.train.run(agent, env, env_steps=5_000, eval_episodes=50, progress=False, seed=0)
    assert result.evaluation.success_rate > 0.8


@pytest.mark.slow
def test_seeds_train_together():
    env = bits()
    agent = agent_for(env, HindsightReplay(2_000))
    together = polyak.train.run_seeds(agent, env, seeds=range(2), env_steps=400, progress=False)
    alone = polyak.train.run(agent, env, env_steps=400, seed=1, progress=False, devices=1)
    np.testing.assert_allclose(leaves(together[1])[0], leaves(alone)[0], rtol=1e-3, atol=1e-5)


def test_state_of_another_replay_is_rejected():
    env = bits()
    plain, agent = agent_for(env, UniformReplay(2_000)), agent_for(env, HindsightReplay(2_000))
    with pytest.raises(ValueError, match=r"replay\.episodes"):
        agent._check_created(plain.init(jax.random.key(0)), 1)

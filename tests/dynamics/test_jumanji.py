"""Jumanji's environments, where Jumanji is installed: its dynamics and masks, our resets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.core.spaces import Discrete, MultiBinary, MultiDiscrete
from polyak.dynamics.foreign import own_promotion
from polyak.networks.feedforward import MLP
from polyak.policies.scripted import Uniform

jumanji = pytest.importorskip("jumanji")
wrappers = pytest.importorskip("jumanji.wrappers")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def rollout(env, num_steps, seed=0):
    """The time steps `[T+1, B]` of allowed actions drawn at random, and the states."""
    policy = Uniform(env.spec)

    def body(loop, key):
        state, time_step = loop
        state, time_step = env.step(state, policy.action(time_step, (), key).action, key)
        return (state, time_step), (state, time_step)

    loop = env.init(jax.random.key(seed))
    _, rest = jax.jit(lambda loop, keys: jax.lax.scan(body, loop, keys))(loop, jax.random.split(jax.random.key(1), num_steps))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), loop, rest)


def test_snake_follows_jumanjis_own_steps():
    env = envs.make("jumanji/Snake-v1", num_envs=3, env_kwargs={"time_limit": 7})
    assert env.spec.action == Discrete(4) and sorted(env.spec.obs.spaces) == ["grid", "step_count"]
    states, steps = rollout(env, 40)
    reference = jax.jit(jumanji.make("Snake-v1", time_limit=7).step)
    own = jax.tree.map(lambda x: x[:, 0], states.dynamics.state)
    num_ended = 0
    for t in range(40):
        if steps.last[t, 0]:
            assert steps.first[t + 1, 0] and steps.reward[t + 1, 0] == 0
            num_ended += 1
            continue
        before = jax.tree.map(lambda x, t=t: x[t], own)
        with own_promotion("jumanji/Snake-v1"):
            allowed = [reference(before, jnp.int32(action))[1] for action in range(4)]
        match = [o for o in allowed if np.array_equal(o.observation.grid, steps.obs["grid"][t + 1, 0])]
        assert match and bool(steps.last[t + 1, 0]) in [bool(o.last()) for o in match]
    assert num_ended >= 4 and steps.truncated.sum() + steps.terminated.sum() >= 4
    assert not (steps.truncated & steps.terminated).any()


def test_masks_are_jumanjis_and_random_actions_obey_them():
    states, steps = rollout(envs.make("jumanji/Game2048-v1", num_envs=2), 30)
    mask = np.asarray(states.dynamics.state.action_mask)
    live = ~np.asarray(steps.last)
    np.testing.assert_array_equal(np.asarray(steps.action_mask)[live], mask[live])
    assert steps.action_mask.any(-1).all() and not steps.action_mask.all()


def test_a_joint_mask_makes_one_choice_of_all():
    env = envs.make("jumanji/Minesweeper-v0", num_envs=2)
    assert env.spec.action == Discrete(100)
    _, steps = rollout(env, 20)
    for t in range(19):
        for i in range(2):
            if steps.last[t, i] or steps.last[t + 1, i]:
                continue
            # A field is opened where the mask allowed it, in the same place of the board.
            opened = steps.obs["board"][t + 1, i] != steps.obs["board"][t, i]
            assert opened.sum() == 1 and steps.action_mask[t, i].reshape(10, 10)[opened].all()


def test_a_mask_for_each_agent_is_one_for_each_entry():
    env = envs.make("jumanji/Cleaner-v0", num_envs=2)
    assert env.spec.action == MultiDiscrete((4, 4, 4))
    _, steps = rollout(env, 5)
    assert steps.action_mask.shape == (6, 2, 12)


def test_nested_observations_are_dicts():
    env = envs.make("jumanji/Maze-v0", num_envs=2)
    assert sorted(env.spec.obs.spaces["agent_position"].spaces) == ["col", "row"]
    assert env.spec.obs.spaces["walls"] == MultiBinary((10, 10))


def test_rewards_of_several_agents_are_rejected_with_the_way_out():
    with pytest.raises(ValueError, match=r"jumanji/Connector-v3 must have one reward, .*wrap it with .*MultiToSingleWrapper"):
        envs.make("jumanji/Connector-v3")
    single = wrappers.MultiToSingleWrapper(jumanji.make("Connector-v3"))
    assert envs.make(single, num_envs=2).spec.id == "jumanji/Connector"


def test_a_name_is_suggested_and_all_names_are_listed():
    assert "jumanji/Snake-v1" in envs.names()["jumanji"]
    with pytest.raises(ValueError, match=r"unknown environment 'jumanji/Snek-v1'; did you mean 'jumanji/Snake-v1'\?"):
        envs.make("jumanji/Snek-v1")


@pytest.mark.parametrize("loop", [loops.compiled, loops.host])
def test_ppo_trains_on_an_environment_object_in_both_loops(loop):
    env = envs.make(jumanji.make("Game2048-v1"), num_envs=4)
    agent = PPO(env.spec, network=MLP((8,)), num_steps=16, num_minibatches=1, num_epochs=1)
    result = loop(agent, env, env_steps=128, key=jax.random.key(0))
    assert np.isfinite(result.metrics["train/loss"])

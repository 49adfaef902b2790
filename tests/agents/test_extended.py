"""The replay and the agent around an agent of the page on extending agents, against what they are made of."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from tests.replay.streams import filled_with, stream

PAGE = (Path(__file__).parents[2] / "docs/tutorials/extend-agent.md").read_text()
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, without its trainings."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    for block in (blocks[0], blocks[2].partition("\n\n\ncartpole =")[0], blocks[3].partition("\n\n\nppo =")[0]):
        exec(compile(block, "extend-agent.md", "exec"), names)
    return names


def test_mixed_steps_sum_as_many_rewards_and_each_number_is_as_frequent(page):
    replay = page["MixedStepReplay"](64, most_steps=3)
    state = filled_with(replay, stream(np.ones(41), terminated=[20]))
    batch = jax.jit(lambda state: replay.sample(state, KEY, 3_000, num_envs=1, n_step=1, gamma=1.0))(state)
    rows = np.asarray(batch.weight) > 0
    start, after, summed = (np.asarray(x)[rows] for x in (batch.obs[:, 0], batch.next_obs[:, 0], batch.num_summed))
    np.testing.assert_array_equal(after - start, summed)
    np.testing.assert_array_equal(np.asarray(batch.reward)[rows], summed)
    # Far from the end of the episode and of the stream.
    counts = np.bincount(summed[(start < 17) | ((start > 20) & (start < 37))], minlength=4)[1:]
    np.testing.assert_allclose(counts / counts.sum(), 1 / 3, atol=0.04)
    with pytest.raises(ValueError, match="draws of 9 consecutive steps"):
        dataclasses.replace(replay, capacity=8, most_steps=9).check(1, 1)


def test_without_a_coefficient_an_agent_with_an_intrinsic_reward_is_the_agent_itself(page):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    ppo = polyak.PPO(env.spec, polyak.MLP((8,)), num_steps=16, num_epochs=2, num_minibatches=2)
    rnd = page["Novelty"](ppo, coefficient=0.0)
    state = rnd.init(KEY)
    rollout = polyak.train.collect(rnd.collect_policy(state), env, 16, key=KEY)
    update = jax.jit(lambda agent, state: agent.update(state, rollout, KEY))
    (found, metrics), (wanted, _) = update(rnd, state), update(ppo, state.agent)
    jax.tree.map(np.testing.assert_array_equal, found.agent, wanted)
    assert float(metrics["train/intrinsic_reward"]) == 0
    rewarded, metrics = update(dataclasses.replace(rnd, coefficient=1.0), state)
    assert float(metrics["train/intrinsic_reward"]) > 0
    differs = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), rewarded.agent.copies.online.params, wanted.copies.online.params)
    assert any(jax.tree.leaves(differs))
    # The predictor learns what the random network says of these observations.
    bonuses = []
    for _ in range(30):
        state, metrics = update(rnd, state)
        bonuses.append(float(state.scale))
    assert bonuses[-1] < bonuses[5]


def test_the_agent_around_an_agent_has_at_most_120_lines(page):
    text = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[3].partition("\n\n\nppo =")[0]
    assert len(text.splitlines()) <= 120

"""The replay and the agent around an agent of the page on extending agents, against what they are made of."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.delayed_actor import DelayedActorAgent
from polyak.agents.on_policy import OnPolicyAgent
from polyak.agents.q_learning import QAgent
from polyak.agents.quantile_critics import QuantileCriticsAgent
from polyak.core.spaces import Box, Discrete
from polyak.core.struct import struct
from polyak.learning.rollout_batch import Batch
from polyak.ops.distributions import Categorical
from polyak.ops.schedules import StepCount
from tests.replay.streams import filled_with, stream

PAGE = (Path(__file__).parents[2] / "docs/tutorials/extend-agent.md").read_text()
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, without its trainings."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    for text in ("ConservativeSAC", "SPO", "ExpectedSARSA", "MixedStepReplay", "Novelty"):
        block = next(block for block in blocks if f"class {text}(" in block)
        exec(compile(re.split(r"\n\n\n(?:agent|balance|cartpole|ppo) =", block)[0], "extend-agent.md", "exec"), names)
    return names


def test_another_surrogate_takes_the_place_of_the_clipped_one(page):
    spec = polyak.EnvSpec(Box([-1.0], [1.0]), Discrete(2))
    ratio, advantage, zero = jnp.array([0.5, 1.5, 1.0]), jnp.array([2.0, -1.0, 3.0]), jnp.zeros(3)
    agent = page["SPO"](spec, polyak.MLP((8,)), clip_range=0.25, vf_coef=0.0)
    action, weight, old = jnp.zeros(3, jnp.int32), jnp.array([0.5, 0.25, 0.25]), -jnp.log(2.0) - jnp.log(ratio)
    batch = Batch(zero[:, None], action, None, jnp.zeros((3, 2)), old, zero, advantage, zero, weight, None, ())
    distribution = Categorical(jnp.zeros((3, 2)))
    loss, terms = jax.jit(agent.clipped_loss)(distribution, zero, batch, StepCount.of(0))
    # |A| (ρ - 1)² / 2ε - ρ A
    wanted = 0.5 * (1.0 - 1.0) + 0.25 * (0.5 + 1.5) + 0.25 * (0.0 - 3.0)
    np.testing.assert_allclose([loss, terms["policy_gradient_loss"]], wanted, rtol=1e-6)


def test_settings_of_an_agent_are_checked_without_a_method_of_its_own(page):
    spec = polyak.EnvSpec(Box([-1.0], [1.0]), Discrete(2))
    with pytest.raises(ValueError, match=r"^ExpectedSARSA: gamma must be a number in \[0, 1\], got 2"):
        page["ExpectedSARSA"](spec, gamma=2)
    with pytest.raises(ValueError, match=r"^ExpectedSARSA: network must not be recurrent"):
        page["ExpectedSARSA"](spec, polyak.LSTM(8))
    with pytest.raises(ValueError, match=r"^ConservativeDQN: replay must be a SequenceReplay"):
        type("ConservativeDQN", (polyak.DQN,), {})(spec, polyak.LSTM(8))


@pytest.mark.parametrize(
    ("base", "networks"),
    [
        (QAgent, {"network": polyak.MLP(head=polyak.QValues())}),
        (OnPolicyAgent, {"network": polyak.MLP(head=polyak.PolicyAndValue(std="free"))}),
        (DelayedActorAgent, {"actor": polyak.Actor(std="fixed"), "critics": polyak.Critics()}),
        (QuantileCriticsAgent, {"actor": polyak.Actor(), "critics": polyak.Critics(num_quantiles=25)}),
    ],
)
def test_an_agent_on_a_base_has_the_networks_of_its_kind(base, networks):
    mine = struct(kw_only=True)(type("Mine", (base,), {name: None for name in base.__abstractmethods__}))
    boxes = polyak.EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0]), action_scaling="rescale")
    discrete = polyak.EnvSpec(Box([-1.0], [1.0]), Discrete(2))
    right, wrong = (boxes, discrete) if "actor" in networks else (discrete, boxes)
    agent = mine(right)
    assert {name: repr(getattr(agent, name)) for name in networks} == {name: repr(x) for name, x in networks.items()}
    if base is not OnPolicyAgent:
        with pytest.raises(ValueError, match=r"^Mine: (actions|action) must be"):
            mine(wrong)


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
    text = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1].partition("\n\n\nppo =")[0]
    assert len(text.splitlines()) <= 120

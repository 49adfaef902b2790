"""PPO with trees of spaces, masks on the actions, and users' networks."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.types import TimeStep
from polyak.learning.rollout_batch import sample_weights
from polyak.networks.adapters import FlaxNNX
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import fresh, on_device, rollout, same_bits

ZOO = EnvSpec(
    obs=Dict({
        "vector": Box([-1.0, -1.0], [1.0, 1.0]),
        "level": Box(np.float32(-1.0), np.float32(1.0)),
        "gear": Discrete(3),
        "pair": Tuple((MultiDiscrete((2, 3)), MultiBinary((2, 2)))),
        "pixels": Box(0, 255, (2, 2), np.uint8),
    }),
    action=Dict({
        "gear": Discrete(3),
        "knobs": MultiDiscrete((2, 3)),
        "keys": MultiBinary((2,)),
        "steer": Box([-1.0, -1.0], [1.0, 1.0]),
    }),
    has_action_mask=True,
)  # fmt: skip
KEY = jax.random.key(7)

update = jax.jit(lambda agent, state, data, key: agent.update(state, data, key))
batch_of = jax.jit(lambda agent, state, data: agent._make_batch(state, data, sample_weights(data.valid, None), None))


def zoo_agent():
    return PPO(ZOO, network=MLP((6,)), num_steps=6, num_epochs=1, num_minibatches=1, normalize_obs=True)


def zoo_rollout(seed=0):
    """Noise, with masks in which the actions taken are allowed and others may not be."""
    data = rollout(ZOO, seed, num_steps=6, num_envs=4, ends=0.2)
    rng = np.random.default_rng(seed + 1)
    gear, knobs = data.actions["gear"], data.actions["knobs"]
    taken = {
        "gear": np.eye(3, dtype=bool)[gear],
        "knobs": np.concatenate([np.eye(2, dtype=bool)[knobs[..., 0]], np.eye(3, dtype=bool)[knobs[..., 1]]], -1),
    }
    last = {name: np.ones((1, *x.shape[1:]), bool) for name, x in taken.items()}
    mask = {name: np.concatenate([x | (rng.random(x.shape) < 0.5), last[name]]) for name, x in taken.items()}
    mask = mask | {"keys": None, "steer": None}
    return dataclasses.replace(data, time_steps=dataclasses.replace(data.time_steps, action_mask=mask))


def categorical(logits, mask, action):
    """Log-probability and entropy, from the definition."""
    p = np.where(mask, np.exp(np.asarray(logits, np.float64)), 0.0)
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    return np.log(np.take_along_axis(p, action[..., None], -1)[..., 0]), entropy


def zoo_log_prob_and_entropy(params, mask, action):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    parts = [
        categorical(params["gear"], mask["gear"], action["gear"]),
        categorical(params["knobs"][..., :2], mask["knobs"][..., :2], action["knobs"][..., 0]),
        categorical(params["knobs"][..., 2:], mask["knobs"][..., 2:], action["knobs"][..., 1]),
    ]
    on = 1 / (1 + np.exp(-params["keys"]))
    chance = np.where(action["keys"] == 1, on, 1 - on)
    parts.append((np.log(chance).sum(-1), -(on * np.log(on) + (1 - on) * np.log(1 - on)).sum(-1)))
    loc, log_std = params["steer"]["loc"], params["steer"]["log_scale"]
    density = -0.5 * ((action["steer"] - loc) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    parts.append((density.sum(-1), (0.5 * np.log(2 * np.pi * np.e) + log_std).sum(-1)))
    return sum(p for p, _ in parts), sum(e for _, e in parts)


@pytest.mark.slow
def test_a_tree_of_masked_spaces_has_the_log_probs_and_the_entropy_of_its_parts():
    agent, data = zoo_agent(), zoo_rollout()
    state = fresh(agent)
    flat = on_device(jax.tree.map(lambda x: x[:-1].reshape(-1, *x.shape[2:]), data.time_steps.obs))
    seen = lambda state, obs: agent.network.apply(state.copies.online, state.obs_normalizer.normalize(obs))[0][0]  # noqa: E731
    params = jax.jit(seen)(state, flat)
    mask, action = (
        jax.tree.map(lambda x: x[:6].reshape(-1, *x.shape[2:]), x) for x in (data.time_steps.action_mask, data.actions)
    )
    log_prob, entropy = zoo_log_prob_and_entropy(params, mask, action)
    valid = ~data.time_steps.last[:-1].reshape(-1)

    batch, bad = batch_of(agent, state, on_device(data))
    assert not any(bad.values())
    np.testing.assert_allclose(np.asarray(batch.log_prob)[valid], log_prob[valid], atol=1e-5)
    after, metrics = update(agent, state, on_device(data), KEY)
    assert float(metrics["train/entropy_loss"]) == pytest.approx(-entropy[valid].mean(), rel=1e-5)
    assert float(metrics["train/approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    changed = jax.tree.map(
        lambda a, b: np.any(np.asarray(a) != np.asarray(b)), after.copies.online.params, state.copies.online.params
    )
    assert all(jax.tree.leaves(changed))


def test_action_mask_of_a_masked_sample_changes_no_bit():
    agent, data = zoo_agent(), zoo_rollout(3)
    state = fresh(agent)
    clean = update(agent, state, on_device(data), KEY)
    last = data.time_steps.last
    assert last[:-1].any()
    for mask in (data.time_steps.action_mask["gear"], data.time_steps.action_mask["knobs"]):
        mask[last] = False
    assert same_bits(clean, update(agent, state, on_device(data), KEY))


def test_a_forbidden_action_is_never_sampled():
    agent = zoo_agent()
    state = fresh(agent)
    steps = on_device(jax.tree.map(lambda x: np.repeat(x[:1, :1], 500, 1)[0], zoo_rollout().time_steps))
    mask = {
        "gear": np.tile([True, False, True], (500, 1)),
        "knobs": np.tile([False, True, True, False, True], (500, 1)),
        "keys": None,
        "steer": None,
    }
    steps = TimeStep(steps.obs, steps.reward, steps.terminated, steps.truncated, steps.first, mask)
    action = jax.jit(lambda policy: policy.action(steps, (), KEY).action)(agent.collect_policy(state))
    assert set(np.unique(action["gear"])) == {0, 2}
    assert set(np.unique(action["knobs"][:, 0])) == {1} and set(np.unique(action["knobs"][:, 1])) == {0, 2}
    assert set(np.unique(action["keys"])) == {0, 1} and action["steer"].shape == (500, 2)


class Moody(nnx.Module):
    """A network with statistics and dropout, which an update has to leave alone."""

    def __init__(self, spec, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.policy = nnx.Linear(3, 2, rngs=rngs)
        self.value = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, obs):
        x = self.dropout(self.norm(obs))
        return self.policy(x), self.value(x)[..., 0]


def test_ratios_start_at_one_for_a_network_with_statistics_and_dropout():
    spec = EnvSpec(Box(-np.ones(3), np.ones(3)), Discrete(2))
    agent = PPO(spec, network=FlaxNNX(Moody), num_steps=6, num_epochs=1, num_minibatches=1)
    with pytest.warns(UserWarning, match="the network is always in evaluation mode"):
        state = agent.init(KEY)
    after, metrics = update(agent, state, on_device(rollout(spec, num_steps=6)), KEY)
    assert float(metrics["train/approx_kl"]) == pytest.approx(0.0, abs=1e-6) and metrics["train/skipped_steps"] == 0
    assert same_bits(after.copies.online.stats, state.copies.online.stats)
    assert not same_bits(after.copies.online.params, state.copies.online.params)

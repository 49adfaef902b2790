"""What nothing may come of: data without weight, rewards and observations that never vary, networks that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.learning.rollout_batch import sample_weights
from polyak.networks.adapters import FlaxNNX
from polyak.networks.feedforward import MLP
from polyak.networks.recurrent import GRU
from tests.agents.rollouts import fresh, on_device, ppo, rollout, same_bits

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
SIZES = {"num_steps": 6, "num_envs": 4}
KEY = jax.random.key(3)

update = jax.jit(lambda agent, state, data, key, weights: agent.update(state, data, key, weights=weights))
init = jax.jit(lambda agent, key: agent.init(key))


def small(spec=SPEC, **settings):
    return ppo(spec, **{"network": MLP((4,)), "num_steps": 6, "num_epochs": 2, "num_minibatches": 2, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("junk", [1e9, np.nan])
def test_environment_with_zero_weight_changes_no_bit_of_a_recurrent_update(junk):
    agent = small(network=GRU(4, hidden=(4,)))
    state = fresh(agent)
    data = rollout(SPEC, 0, **SIZES, carry=agent.collect_policy(state).initial_state(4))
    data.time_steps.obs[:, 1] = 0.5
    expected, _ = update(agent, state, on_device(data), KEY, jnp.array([1.0, 0.0, 1.0, 1.0]))
    data.time_steps.obs[:, 1] = junk
    got, metrics = update(agent, state, on_device(data), KEY, jnp.array([1.0, 0.0, 1.0, 1.0]))
    assert same_bits(got, expected) and metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize("preset", [PPO.tf_agents, PPOKL.tf_agents])
def test_constant_reward_is_not_rescaled(preset):
    agent = preset(SPEC, network=MLP((4,)), num_steps=6, num_epochs=1)
    state, losses = init(agent, KEY), []
    data = rollout(SPEC, 0, **SIZES, carry=())
    data.time_steps.reward[:] = 1
    for _ in range(3):
        state, metrics = update(agent, state, on_device(data), KEY, None)
        losses.append(float(metrics["train/value_loss"]))
    assert 0 < max(losses) < 2 * losses[0]


def test_integer_observations_are_normalised_and_uint8_are_not():
    whole = Box([0] * 3, [9] * 3, dtype=np.int32)
    agent = small(EnvSpec(whole, Discrete(3)), normalize_obs=True)
    state = fresh(agent)
    data = rollout(agent.spec, 0, **SIZES, carry=())
    after, _ = update(agent, state, on_device(data), KEY, None)
    seen = data.time_steps.obs[:-1][np.asarray(data.valid)]
    got = after.obs_normalizer.normalize(jnp.asarray(seen))
    np.testing.assert_allclose(got, (seen - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="PPO: normalize_obs must be False for observations without a Box other than uint8"):
        small(EnvSpec(Box([0] * 3, [9] * 3, dtype=np.uint8), Discrete(3)), normalize_obs=True)
    assert not PPO.tf_agents(EnvSpec(Discrete(4), Discrete(3))).normalize_obs


def test_action_mask_after_the_end_of_an_episode_may_be_all_false():
    agent = small(EnvSpec(OBS, Discrete(3), has_action_mask=True))
    data = on_device(rollout(agent.spec, 0, **SIZES, carry=()))
    assert not data.valid.all()
    masks = jnp.asarray(np.repeat(~np.asarray(data.time_steps.last)[..., None], 3, axis=-1))
    data = dataclasses.replace(data, time_steps=dataclasses.replace(data.time_steps, action_mask=masks))
    batch_of = jax.jit(lambda state, data: agent._make_batch(state, data, sample_weights(data.valid, None), None)[0])
    batch = batch_of(fresh(agent), data)
    assert np.isfinite(batch.log_prob).all()


def test_zero_l2_coefficient_needs_no_kernels():
    small(l2_shared=0.0, l2_value=0)
    with pytest.raises(ValueError, match="l2_shared must be None for a network without shared kernels"):
        small(l2_shared=1e-3)


class Halves(nnx.Module):
    def __init__(self, outputs, dtype, rngs):
        self.action, self.value = (nnx.Linear(3, n, dtype=dtype, rngs=rngs) for n in (outputs or 3, 1))
        self.has_rows = outputs is not None

    def __call__(self, obs):
        action = self.action(obs)
        return action if self.has_rows else action[0], self.value(obs)[:, 0]


@pytest.mark.parametrize(
    ("outputs", "dtype", "said"),
    [
        (3, jnp.bfloat16, "network: action_params must be float32 .*, got bfloat16"),
        (4, jnp.float32, r"network: its action_params do not fit Discrete\(n=3.*must end in shape \(3,\)"),
        (None, jnp.float32, r"network: actions for 97 observations must have the shapes \(97,\), action_params give \(\)"),
    ],
)
def test_network_with_wrong_outputs_is_rejected_at_init(outputs, dtype, said):
    agent = small(network=FlaxNNX(lambda spec, rngs: Halves(outputs, dtype, rngs)))
    with pytest.raises((TypeError, ValueError), match=said):
        agent.init(KEY)

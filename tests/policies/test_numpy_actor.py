"""Small actors in NumPy: the greedy actions and the samples of the compiled network."""

import jax
import jax.numpy as jnp
import numpy as np

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.export.write_policy import write_policy
from polyak.policies.numpy_actor import max_batch_size
from tests.policies.test_network_policy import KEY, SPEC, VECTOR, act, modes, policy_for, time_step


def test_clip_mean_leaves_the_logits_of_discrete_actions_unchanged(tmp_path):
    policy = policy_for(SPEC, network=polyak.Actor((5,), "tanh", clip_mean=0.1))
    obs = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    now = time_step(jnp.asarray(obs))
    greedy, drawn = np.asarray(modes(policy, now, ())), np.asarray(act(policy, now, ()).action)
    assert policy.suits_numpy(200) and len(set(greedy)) > 1
    in_numpy = jax.tree.map(np.asarray, policy)
    np.testing.assert_array_equal(in_numpy.mode_in_numpy()(obs), greedy)
    np.testing.assert_array_equal(policy.predict(obs)[0], greedy + 2)
    noise = np.asarray(policy.noise(KEY, 200))
    np.testing.assert_array_equal(in_numpy.in_numpy()(jax.tree.map(np.asarray, now), (), noise).action, drawn)
    write_policy(policy, SPEC, "numpy", tmp_path / "policy.npz", {})
    np.testing.assert_array_equal(polyak.load_policy(tmp_path / "policy.npz").predict(obs)[0], greedy + 2)


def test_batch_size_is_limited_by_means_and_standard_deviations_together():
    box, choices = EnvSpec(VECTOR, Box([-1.0] * 50, [1.0] * 50)), EnvSpec(VECTOR, Discrete(50))
    assert max_batch_size(polyak.Actor((4,), std="fixed"), box, 4000) == 4000 // (4 * 50)
    assert max_batch_size(polyak.Actor((4,), std="state"), box, 4000) == 4000 // (4 * 100)
    assert max_batch_size(polyak.Actor((4,), std="state"), choices, 4000) == 4000 // (4 * 50)

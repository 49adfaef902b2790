"""Small actors in NumPy: the greedy actions and the samples of the compiled network."""

import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.export.write_policy import write_policy
from polyak.ops.normalize import RunningStats
from polyak.policies.numpy_network import _stddev, max_batch_size
from polyak.policies.numpy_policies import numpy_actor
from tests.policies.test_network_policy import KEY, SPEC, VECTOR, act, modes, policy_for, time_step


def test_clip_mean_leaves_the_logits_of_discrete_actions_unchanged(tmp_path):
    policy = policy_for(SPEC, network=polyak.Actor((5,), activation="tanh", clip_mean=0.1))
    obs = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    now = time_step(jnp.asarray(obs))
    greedy, drawn = np.asarray(modes(policy, now, ())), np.asarray(act(policy, now, ()).action)
    actor = numpy_actor(policy, 200)
    assert actor is not None and len(set(greedy)) > 1
    np.testing.assert_array_equal(policy.mode_in_numpy()[1](obs), greedy)
    np.testing.assert_array_equal(policy.predict(obs)[0], greedy + 2)
    noise = np.asarray(actor.noise(policy, KEY, 200))
    in_numpy = actor.start(jax.tree.map(np.asarray, policy))
    np.testing.assert_array_equal(in_numpy(jax.tree.map(np.asarray, now), (), noise).action, drawn)
    write_policy(policy, SPEC, "numpy", tmp_path / "policy.npz", {})
    np.testing.assert_array_equal(polyak.load_policy(tmp_path / "policy.npz").predict(obs)[0], greedy + 2)


def test_batch_size_is_limited_by_means_and_standard_deviations_together():
    box, choices = EnvSpec(VECTOR, Box([-1.0] * 50, [1.0] * 50)), EnvSpec(VECTOR, Discrete(50))
    assert max_batch_size(polyak.Actor((4,), std="fixed"), box, 4000) == 4000 // (4 * 50)
    assert max_batch_size(polyak.Actor((4,), std="state"), box, 4000) == 4000 // (4 * 100)
    assert max_batch_size(polyak.Actor((4,), std="state"), choices, 4000) == 4000 // (4 * 50)


def test_actions_of_a_batch_have_the_bits_of_those_of_its_parts():
    spec = EnvSpec(VECTOR, Box([-1.0] * 2, [1.0] * 2))
    policy = policy_for(spec, network=polyak.MLP((64, 64), head=polyak.PolicyAndValue()))
    obs = np.random.default_rng(2).normal(size=(32, 3)).astype(np.float32)
    _, mode = policy.mode_in_numpy()
    whole = mode(obs)
    assert whole.shape == (32, 2)
    np.testing.assert_allclose(whole, np.asarray(modes(policy, time_step(jnp.asarray(obs)), ())), rtol=1e-4)
    # OpenBLAS has a way of its own for small products, which rounds in another order than that for larger ones.
    for size in (4, 8, 12):
        parts = [mode(obs[start : start + size]) for start in range(0, 32, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("seen", [None, 0.0, 1e-3, 1e6], ids=["nothing", "a constant", "small values", "large values"])
def test_the_standard_deviation_in_numpy_is_that_of_jax(seen):
    stats = RunningStats.init((3,))
    if seen is not None:
        stats = stats.update(7.0 + seen * jax.random.normal(KEY, (50, 3)), jnp.ones(50))
    np.testing.assert_allclose(_stddev(jax.tree.map(np.asarray, stats)), stats.stddev(), rtol=1e-6)


@pytest.mark.parametrize("kind", [polyak.PPO, polyak.DQN])
def test_acting_on_normalized_observations_starts_no_back_end_of_jax(kind, tmp_path):
    """As a worker does, which would then have the memory and the threads of one."""
    agent = kind(SPEC, normalize_obs=True)
    policy = agent.collect_policy(agent.init(KEY))
    now = time_step(jnp.zeros((4, 3)))
    given = jax.tree.map(np.asarray, (policy, now, numpy_actor(policy, 4).noise(policy, KEY, 4)))
    (tmp_path / "given").write_bytes(cloudpickle.dumps(given))
    program = (
        "import pickle, sys, jax._src.xla_bridge as bridge\n"
        "from polyak.policies.numpy_policies import numpy_actor\n"
        "policy, now, noise = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert numpy_actor(policy, 4).start(policy)(now, (), noise).action.shape == (4,)\n"
        "assert not bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "given")], check=True)

"""Policies of noise: their samples, their mode, and what is exported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, EnvSpec
from polyak.core.types import TimeStep, Variables
from polyak.networks.flow import noise_spec
from polyak.policies.flow_policy import FlowPolicy
from polyak.policies.network_policy import Greedy

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-1.0], [1.0]), Box([-2.0], [6.0]))  # middle 2, half range 4


@dataclasses.dataclass(frozen=True)
class OneStep:
    """μ(s, z) as a given function of z."""

    function: object

    def init(self, key, spec):
        raise NotImplementedError

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        loc = self.function(obs[1])
        return ({"loc": loc, "log_scale": jnp.zeros_like(loc)}, None), carry, ()


def policy_of(function, spec=SPEC):
    return FlowPolicy(Variables({}, {}), None, OneStep(function), spec)


def two_modes(z):
    """Three quarters of the noise go to near 0.5, the rest to near -0.5, and some to far beyond the bounds."""
    return jnp.where(jnp.abs(z) > 2.5, 9.0, jnp.where(z > -0.67, 0.5, -0.5) + 0.01 * z)


def time_step(size):
    flags = np.zeros(size, bool)
    return TimeStep(np.zeros((size, 1), np.float32), np.zeros(size, np.float32), flags, flags, flags)


def test_samples_are_the_actions_of_normal_noise_in_the_units_of_the_space():
    actions = np.asarray(policy_of(lambda z: z / 2).action(time_step(4_000), (), KEY).action)  # N(2, 2²), clipped
    assert actions.min() == -2.0 and actions.max() == 6.0
    np.testing.assert_allclose(np.quantile(actions, [0.1587, 0.5, 0.8413]), [0.0, 2.0, 4.0], atol=0.15)
    assert abs(np.mean(actions == 6.0) - 0.0228) < 0.008
    again = policy_of(lambda z: z / 2).predict(np.zeros((4_000, 1), np.float32), deterministic=False, key=jax.random.key(1))[0]
    assert not np.array_equal(actions, again)


@pytest.mark.parametrize(("function", "mode"), [(two_modes, 4.0), (lambda z: 0.25 + 0.3 * z, 3.0), (lambda z: 0 * z - 7, -2.0)])
def test_the_greedy_action_is_the_middle_of_the_highest_mode(function, mode):
    policy = Greedy(policy_of(function))
    got, _ = policy.predict(np.zeros((3, 1), np.float32))
    np.testing.assert_allclose(got, mode, atol=0.05)


def test_the_greedy_action_is_of_one_mode_where_two_are_equal():
    got, _ = policy_of(lambda z: 0.7 * jnp.tanh(20 * z)).predict(np.zeros(1, np.float32))
    assert abs(abs(got[0] - 2.0) - 2.8) < 0.05


def test_there_are_no_log_probabilities():
    """And a distribution draws no sample before the error."""

    def unused(z):
        raise AssertionError("a sample was drawn")

    at = time_step(2)
    distribution, _ = policy_of(unused).distribution(at)
    for call in (
        lambda: distribution.log_prob(jnp.zeros((2, 1))),
        lambda: distribution.sample_and_log_prob(seed=KEY),
        lambda: distribution.kl_divergence(distribution),
        lambda: polyak.policies.with_info(policy_of(two_modes)).action(at, (), KEY),
    ):
        with pytest.raises(NotImplementedError, match="a flow policy has no"):
            call()
    with pytest.raises(NotImplementedError, match="a flow policy has no entropy"):
        distribution.entropy()


@pytest.fixture(scope="module")
def trained():
    """The greedy flow policy of an agent with normalized observations, in an environment's units."""
    rng = np.random.default_rng(0)
    arrays = {"observations": rng.uniform(-5, 9, (200, 2)), "actions": rng.uniform(-2, 6, (200, 1)), "rewards": np.zeros(200)}
    spec = EnvSpec(Box([-5.0] * 2, [9.0] * 2), Box([-2.0], [6.0]))
    data = polyak.data.load(arrays | {"terminations": np.ones(200)}, spec=spec)
    settings = {"normalize_obs": True, "flow_steps": 4, "network": polyak.MLP((8,)), "batch_size": 32}
    return polyak.train.offline("bc", data, gradient_steps=20, settings=settings, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".stablehlo", ".onnx"])
def test_exported_policies_act_as_the_policy(suffix, trained, tmp_path):
    path = tmp_path / f"policy{suffix}"
    trained.export(str(path))
    obs = np.random.default_rng(1).uniform(-5, 9, (5, 2)).astype(np.float32)
    wanted, _ = trained.policy.predict(obs)
    assert np.ptp(wanted) > 0.01
    if suffix == ".stablehlo":
        got, _ = polyak.load_policy(path).predict(obs)
    else:
        runtime = pytest.importorskip("onnxruntime")
        (got,) = runtime.InferenceSession(str(path)).run(None, {"obs": obs})
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_numpy_files_hold_no_flow(trained, tmp_path):
    with pytest.raises(ValueError, match=r"format numpy takes an MLP or Actor .*; the policy is a FlowPolicy"):
        trained.export(str(tmp_path / "policy.npz"))


def test_a_policy_is_a_pytree_that_moves_softly():
    network, spec = polyak.Actor((4,), std="fixed"), noise_spec(SPEC, has_time=True)
    one, other = (FlowPolicy(network.init(key, spec), None, network, SPEC, 2) for key in jax.random.split(KEY))
    between = polyak.soft_update(one, other, 0.5)
    x, y, z = (jax.tree.leaves(policy)[0] for policy in (one, other, between))
    np.testing.assert_allclose(z, (x + y) / 2, rtol=1e-5)

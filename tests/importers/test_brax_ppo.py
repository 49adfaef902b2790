"""Policies of Brax' PPO, against the formula in NumPy and, where it is installed, Brax itself."""

import io
import itertools
import zipfile

import jax
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec

SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-2.0] * 2, [2.0] * 2), action_scaling="rescale")
WIDTHS = (3, 8, 6, 4)
OBS = np.array([0.3, -2.0, 5.0], np.float32)


def arrays(nested=False):
    """Parameters as the documented line writes them; `nested`: of observations that are dicts."""
    draw, key = np.random.default_rng(0), "/state" if nested else ""
    made = {f"0/mean{key}": draw.normal(size=3), f"0/std{key}": draw.uniform(0.5, 2.0, 3)}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS)):
        made[f"1/params/hidden_{i}/kernel"] = draw.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        made[f"1/params/hidden_{i}/bias"] = draw.normal(size=outputs)
    made["2/params/hidden_0/kernel"] = draw.normal(size=(3, 5))
    return {name: x.astype(np.float32) for name, x in made.items()} | {"0/count/hi": np.uint32(0)}


def saved(path, numbers):
    np.savez(path, **numbers)
    return path


def action(numbers, *, normalize=True):
    """The action of Brax' greedy policy, in [-1, 1]."""
    x = (OBS - numbers["0/mean"]) / numbers["0/std"] if normalize else OBS
    for i in range(3):
        x = x @ numbers[f"1/params/hidden_{i}/kernel"] + numbers[f"1/params/hidden_{i}/bias"]
        x = x / (1 + np.exp(-x)) if i < 2 else x
    return np.tanh(x[:2])


@pytest.mark.parametrize("normalize", [True, False])
def test_the_policy_acts_as_brax_does(tmp_path, normalize):
    numbers = arrays()
    policy = polyak.importers.from_brax(saved(tmp_path / "policy.npz", numbers), SPEC, normalize_obs=normalize)
    np.testing.assert_allclose(policy.predict(OBS)[0], 2 * action(numbers, normalize=normalize), rtol=1e-5, atol=1e-6)


def test_statistics_of_an_entry_of_the_observation_are_found(tmp_path):
    path = saved(tmp_path / "policy.npz", arrays(nested=True))
    np.testing.assert_allclose(polyak.importers.from_brax(path, SPEC).predict(OBS)[0], 2 * action(arrays()), rtol=1e-5)
    with pytest.raises(ValueError, match=r"0/mean/other of .* has shape None, the spec needs"):
        polyak.importers.from_brax(path, SPEC, obs_key="other")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-2.0] * 2, [2.0] * 2)), "action_scaling must be 'rescale'"),
        (EnvSpec(SPEC.obs, Discrete(2), action_scaling="rescale"), "action must be a Box"),
        (EnvSpec(SPEC.obs, Box([-2.0], [2.0]), action_scaling="rescale"), "policy/linear/bias of .* has shape"),
        (EnvSpec(Box([-9.0], [9.0]), SPEC.action, action_scaling="rescale"), "0/mean of .* has shape"),
    ],
)
def test_a_policy_that_does_not_fit_the_spec_is_rejected(tmp_path, spec, message):
    with pytest.raises(ValueError, match=message):
        polyak.importers.from_brax(saved(tmp_path / "policy.npz", arrays()), spec)


def test_another_network_is_rejected(tmp_path):
    numbers = arrays() | {"1/params/std": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match=r"no tanh-normal policy of dense layers, got .*std"):
        polyak.importers.from_brax(saved(tmp_path / "policy.npz", numbers), SPEC)


def test_objects_in_the_file_are_not_loaded(tmp_path):
    file = io.BytesIO()
    np.save(file, np.array([print], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "policy.npz", "w") as archive:
        archive.writestr("1/params/hidden_0/kernel.npy", file.getvalue())
    with pytest.raises(ValueError, match="is not an archive of arrays"):
        polyak.importers.from_brax(tmp_path / "policy.npz", SPEC)


@pytest.mark.slow
def test_the_policy_acts_as_that_of_installed_brax(tmp_path):
    networks = pytest.importorskip("brax.training.agents.ppo.networks")
    from brax.training.acme import running_statistics, specs

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = networks.make_ppo_networks(3, 2, running_statistics.normalize, policy_hidden_layer_sizes=(8, 6))
        statistics = running_statistics.init_state(specs.Array((3,), np.dtype("float32")))
        batch = jax.random.normal(jax.random.key(0), (50, 3)) * 3 + 1
        params = (
            running_statistics.update(statistics, batch),
            made.policy_network.init(jax.random.PRNGKey(1)),
            made.value_network.init(jax.random.PRNGKey(2)),
        )
        wanted, _ = networks.make_inference_fn(made)(params, deterministic=True)(batch, jax.random.PRNGKey(3))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    file = tmp_path / "policy.npz"
    np.savez(file, **{jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves})
    policy = polyak.importers.from_brax(file, SPEC)
    got = np.stack([policy.predict(np.asarray(obs))[0] for obs in batch[:10]])
    np.testing.assert_allclose(got, 2 * np.asarray(wanted[:10]), rtol=1e-5, atol=1e-6)

"""Policies of TF-Agents: the same actions, deviations and values, and errors by name."""

import io
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from polyak.core.types import TimeStep
from polyak.importers import from_tf_agents
from tests.importers.tf_agents_policies import FOLDER, NUM_OBS, observations

THREE = EnvSpec(Box([-np.inf] * 4, [np.inf] * 4), Discrete(3))
BOX = EnvSpec(Box([-np.inf] * 3, [np.inf] * 3), Box([-2.0, 0.0], [2.0, 5.0]))
POLICIES = {"discrete": (THREE, "tanh"), "box": (BOX, "relu"), "plain": (BOX, "relu")}


def load(name):
    spec, activation = POLICIES[name]
    return from_tf_agents(FOLDER / f"{name}.npz", spec, activation=activation)


def load_on_device(name):
    """With JAX's arrays, as inside of `jit`."""
    return jax.tree.map(jnp.asarray, load(name))


def time_step(obs):
    flags = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs), jnp.zeros(len(obs)), flags, flags, flags)


def test_greedy_actions_of_a_discrete_policy_are_equal_on_1000_observations():
    actions, _ = load("discrete").predict(observations(4))
    np.testing.assert_array_equal(actions, np.load(FOLDER / "discrete.npy"))
    assert set(actions.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("name", ["box", "plain"])
def test_greedy_actions_of_a_box_policy_are_equal_on_1000_observations(name):
    expected = np.load(FOLDER / f"{name}.npy")
    actions, _ = load(name).predict(observations(3))
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert expected.shape == (NUM_OBS, 2) and np.all(np.std(expected, axis=0) > 0.2)
    assert (load(name).normalizer is None) == (name == "plain")


@pytest.mark.parametrize("name", ["box", "plain"])
def test_standard_deviations_are_equal(name):
    distribution, _ = load_on_device(name).distribution(time_step(observations(3)))
    std = np.broadcast_to(np.load(FOLDER / f"{name}_std.npy"), (NUM_OBS, 2))
    np.testing.assert_allclose(np.broadcast_to(distribution.scale, (NUM_OBS, 2)), std, rtol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_values_are_equal(name):
    values = load_on_device(name).value(time_step(observations(POLICIES[name][0].obs.shape[0])[:10]))
    np.testing.assert_allclose(values, np.load(FOLDER / f"{name}_value.npy"), rtol=1e-5, atol=1e-5)


def test_a_loaded_policy_acts_inside_jit():
    step = jax.jit(lambda policy, *inputs: policy.action(*inputs))(
        load("box"), time_step(observations(3)), (), jax.random.key(0)
    )
    assert step.action.shape == (NUM_OBS, 2)
    assert np.all(np.std(step.action, axis=0) > 0.2)


def changed(tmp_path, name="discrete", drop=(), **arrays):
    """A fixture without some variables, and with others."""
    with zipfile.ZipFile(FOLDER / f"{name}.npz") as archive:
        members = {member.removesuffix(".npy"): archive.read(member) for member in archive.namelist()}
    for variable, array in arrays.items():
        data = io.BytesIO()
        np.save(data, array)
        members[variable] = data.getvalue()
    with zipfile.ZipFile(tmp_path / "changed.npz", "w") as archive:
        for variable in members.keys() - set(drop):
            archive.writestr(f"{variable}.npy", members[variable])
    return tmp_path / "changed.npz"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvSpec(Box([0.0] * 3, [1.0] * 3), Discrete(3)), r"avg_0 of .* shape \(4,\), the spec needs \(3,\)"),
        (EnvSpec(THREE.obs, Discrete(2)), r"policy/linear/bias of .* shape \(3,\), the spec needs \(2,\)"),
        (EnvSpec(THREE.obs, Box([-1.0], [1.0])), "has no variable 'ActorDistributionNetwork/NormalProjectionNetwork"),
        (EnvSpec(THREE.obs, MultiDiscrete((3,))), "action must be Discrete or a Box"),
        (EnvSpec(Box([0] * 4, [255] * 4, dtype=np.uint8), Discrete(3)), "from_tf_agents: obs must not be uint8"),
        (EnvSpec(THREE.obs, Box([-1.0], [1.0]), action_scaling="rescale"), "action_scaling must be 'clip'"),
    ],
)
def test_a_policy_of_other_spaces_is_rejected_by_name(spec, message):
    with pytest.raises(ValueError, match=message):
        from_tf_agents(FOLDER / "discrete.npz", spec)


def test_variables_that_are_missing_or_unknown_are_named(tmp_path):
    head = "ActorDistributionNetwork/CategoricalProjectionNetwork/logits/bias:0"
    with pytest.raises(ValueError, match=r"no variable 'Actor.*/logits/bias'"):
        from_tf_agents(changed(tmp_path, drop=[head]), THREE)
    with pytest.raises(ValueError, match="no variable 'm2_0'"):
        from_tf_agents(changed(tmp_path, drop=["m2_0:0"]), THREE)
    convolution = {"ActorDistributionNetwork/EncodingNetwork/conv2d/kernel:0": np.zeros((3, 3), np.float32)}
    with pytest.raises(ValueError, match=r"has '.*/conv2d/kernel', which polyak's dense networks do not have"):
        from_tf_agents(changed(tmp_path, **convolution), THREE)
    with pytest.raises(ValueError, match=r"has no variable of an ActorDistributionNetwork; got weights"):
        np.savez(tmp_path / "other.npz", weights=np.zeros(3))
        from_tf_agents(tmp_path / "other.npz", THREE)
    drop = [f"ValueNetwork/dense_3/{part}:0" for part in ("kernel", "bias")]
    with pytest.raises(ValueError, match="no variable 'ValueNetwork/kernel'"):
        from_tf_agents(changed(tmp_path, drop=drop), THREE)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_file_that_is_none_or_hostile_is_rejected_and_runs_nothing(tmp_path, unchecked):
    pickled = np.array([Runs(tmp_path / "evil")], object)
    with pytest.raises(ValueError, match=r"is not an archive of arrays that np\.savez wrote"):
        from_tf_agents(changed(tmp_path, extra=pickled), THREE)
    assert not (tmp_path / "evil").exists()
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text.npz is not an archive of arrays"):
        from_tf_agents(tmp_path / "text.npz", THREE)
    np.savez_compressed(tmp_path / "large.npz", zeros=np.zeros(10**6))
    with pytest.raises(ValueError, match=r"larger than the file; write it with np\.savez"):
        from_tf_agents(tmp_path / "large.npz", THREE)
    with pytest.raises(FileNotFoundError):
        from_tf_agents(tmp_path / "none.npz", THREE)
    with pytest.raises(TypeError, match="from_tf_agents: spec must be an EnvSpec"):
        from_tf_agents(tmp_path / "text.npz", "CartPole-v1")

"""A policy loaded from an exported file: what it imports, and what it predicts."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from polyak import PythonPolicy, load_policy, train
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete, zeros
from polyak.core.types import TimeStep
from polyak.export.write_policy import write_policy
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import LSTM
from polyak.policies import numpy_reader
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.network_policy import Greedy, NetworkPolicy
from tests.loops.setting import ENV
from tests.policies.test_network_policy import policy_for
from tests.policies.test_predict import NATIVE, spec_with_action

VECTOR = Box([-9.0] * 3, [9.0] * 3)
OBS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("unchecked")


def exported(tmp_path, spec, *, network=MLP((8,), head=PolicyAndValue()), kind="stablehlo"):  # noqa: B008
    policy = Greedy(NetworkPolicy(network.init(jax.random.key(1), spec), None, network, spec))
    path = tmp_path / {"stablehlo": "policy.stablehlo", "numpy": "policy.npz"}[kind]
    write_policy(policy, spec, kind, path, {})
    return policy, path


@pytest.mark.parametrize("kind", ["stablehlo", "numpy"])
def test_an_exported_file_is_loaded_without_the_training_stack(tmp_path, kind):
    policy, path = exported(tmp_path, EnvSpec(VECTOR, Discrete(4)), kind=kind)
    code = f"""
import sys, numpy, polyak
action, _ = polyak.load_policy({str(path)!r}).predict(numpy.array({OBS.tolist()}, numpy.float32))
assert action.tolist() == {policy.predict(OBS)[0].tolist()}
training = ("flax", "optax", "gymnasium", "polyak.agents", "polyak.train", "polyak.networks")
print([name for name in sys.modules if name in training or name.startswith(tuple(part + "." for part in training))])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0 and ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def test_a_policy_without_a_run_is_written_under_a_plain_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = EnvSpec(VECTOR, Discrete(4))
    policy = policy_for(spec)
    assert write_policy(EpsilonGreedy(policy, 0.5), spec, "stablehlo", "p.stablehlo") == [Path("p.stablehlo")]
    np.testing.assert_array_equal(load_policy("p.stablehlo").predict(OBS)[0], Greedy(policy).predict(OBS)[0])
    with pytest.raises(ValueError, match="export: kind must be one of 'stablehlo', 'onnx', 'numpy', got 'h5'"):
        write_policy(policy, spec, "h5", "p.h5")
    assert not Path("p.h5").exists()


@pytest.mark.parametrize("high", [1, 4, 255])
@pytest.mark.parametrize("kind", ["stablehlo", "numpy"])
def test_exported_policies_scale_bytes_as_the_network_does(tmp_path, kind, high):
    policy, path = exported(tmp_path, EnvSpec(Box(0, high, (3,), np.uint8), Box([-1.0] * 9, [1.0] * 9)), kind=kind)
    obs = np.random.default_rng(0).integers(0, high + 1, (20, 3), np.uint8)
    np.testing.assert_allclose(load_policy(path).predict(obs)[0], policy.predict(obs)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["stablehlo", "numpy", "onnx"])
@pytest.mark.parametrize("name", ["float64", "float16", "int64"])
def test_the_environments_action_space_contains_every_exported_action(tmp_path, name, kind):
    space, path = NATIVE[name], tmp_path / f"policy.{'npz' if kind == 'numpy' else kind}"
    spec = spec_with_action(space, "rescale")
    write_policy(Greedy(policy_for(spec, scale=50.0)), spec, kind, path, {})
    if kind == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (actions,) = session.run(None, {"obs": OBS})
    else:
        loaded = load_policy(path)
        actions, _ = loaded.predict(OBS)
        assert space.contains(loaded.predict(OBS[0])[0])
    assert all(space.contains(action) for action in actions)
    if kind == "numpy":
        assert all(space.contains(action) for action in numpy_reader.load(path)(OBS))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "action_mask must be given, as .* has action masks"),
        (np.zeros((5, 4), bool), "action_mask allows no action in some row"),
        (np.arange(5)[:, None] + np.zeros((1, 4)) != 3, "action_mask allows no action in some row"),
        (np.ones(4, bool), r"action_mask must have shape \(5, 4\), got \(4,\)"),
        (np.ones((1, 4), bool), r"action_mask must have shape \(5, 4\), got \(1, 4\)"),
    ],
)
def test_the_numpy_reader_rejects_the_masks_that_predict_rejects(tmp_path, mask, message):
    policy, path = exported(tmp_path, EnvSpec(VECTOR, Discrete(4), "masked", has_action_mask=True), kind="numpy")
    for act in (policy.predict, load_policy(path).predict, lambda obs, action_mask: numpy_reader.load(path)(obs, action_mask)):
        with pytest.raises(ValueError, match=message):
            act(OBS, action_mask=mask)


def test_the_numpy_reader_rejects_a_mask_of_a_box(tmp_path):
    policy, path = exported(tmp_path, EnvSpec(VECTOR, Box([-2.0], [2.0])), kind="numpy")
    for act in (policy.predict, lambda obs, action_mask: numpy_reader.load(path)(obs, action_mask)):
        with pytest.raises(ValueError, match=r"action_mask must be None, for .* has no mask"):
            act(OBS, action_mask=np.ones((5, 1), bool))


def test_first_resets_the_carry_of_single_observations(tmp_path):
    policy, path = exported(tmp_path, EnvSpec(VECTOR, Discrete(4)), network=LSTM(4, hidden=(4,), head=PolicyAndValue()))
    loaded = load_policy(path)
    _, carry = loaded.predict(OBS)
    _, its_carry = policy.predict(OBS)
    first = np.array([False, True, False, False, True])
    action, after = loaded.predict(OBS, carry, first=first)
    expected, its_after = policy.predict(OBS, its_carry, first=first)
    assert action.tolist() == expected.tolist()
    for leaf, its_leaf in zip(after, jax.tree.leaves(its_after), strict=True):
        np.testing.assert_allclose(leaf, its_leaf, atol=1e-6)
    with pytest.raises(ValueError, match=r"first must be one bool per observation, shape \(5,\)"):
        loaded.predict(OBS, carry, first=[True])


@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec(VECTOR, Discrete(4, start=3)),
        EnvSpec(VECTOR, Box([-2.0, 0.0], [2.0, 1.0])),
        EnvSpec(VECTOR, Box([-2.0, 0.0], [2.0, 1.0]), action_scaling="rescale"),
        EnvSpec(MultiDiscrete((3, 4), (1, 5)), MultiDiscrete((2, 3), (0, 7))),
    ],
    ids=str,
)
def test_an_exported_policy_is_plain_python_with_agents_observations_and_actions(tmp_path, spec):
    policy, path = exported(tmp_path, spec)
    plain = load_policy(path).as_python()
    obs = OBS if spec.obs == VECTOR else np.array([[0, 3], [2, 1]], np.int32)
    no = np.zeros(len(obs), bool)
    now = TimeStep(obs, np.zeros(len(obs), np.float32), no, no, ~no)
    action, expected = plain.action(now, ()).action, policy.as_python().action(now, ()).action
    np.testing.assert_allclose(action, expected, atol=1e-6)
    assert action.dtype == np.asarray(expected).dtype
    native = spec.native_obs(zeros(spec.obs))
    again = PythonPolicy(plain, spec).predict(native)[0]
    np.testing.assert_allclose(again, policy.predict(native)[0], atol=1e-6)


def test_an_exported_policy_is_evaluated_as_a_python_policy(tmp_path):
    policy, path = exported(tmp_path, ENV.spec)
    plain = load_policy(path).as_python()
    results = [train.evaluate(each, ENV, episodes=2, key=jax.random.key(0)) for each in (policy, PythonPolicy(plain, ENV.spec))]
    assert results[0].returns.tolist() == results[1].returns.tolist()

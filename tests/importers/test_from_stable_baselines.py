"""Policies of Stable-Baselines3: the same actions, and nothing in a file can run."""

import dataclasses
import io
import json
import pickle
import struct
import tracemalloc
import zipfile

import jax
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.export.write_policy import write_policy
from polyak.importers import from_stable_baselines, from_stable_baselines3
from polyak.importers.from_stable_baselines import _TensorReader
from tests.importers.stable_baselines_models import FOLDER, observations

CARTPOLE = EnvSpec(Box([-np.inf] * 4, [np.inf] * 4), Discrete(2))
BYTES = Box([0] * 4, [255] * 4, dtype=np.uint8)
PENDULUM = EnvSpec(Box([-np.inf] * 3, [np.inf] * 3), Box([-2.0], [2.0]))
RESCALED = dataclasses.replace(PENDULUM, action_scaling="rescale")
TWO_ACTIONS = dataclasses.replace(RESCALED, action=Box([-1.0, 0.0], [3.0, 0.5]))


def test_greedy_actions_of_a_discrete_model_are_equal_on_1000_observations():
    policy = from_stable_baselines3(FOLDER / "discrete.zip", CARTPOLE)
    actions, _ = policy.predict(observations(4))
    np.testing.assert_array_equal(actions, np.load(FOLDER / "discrete.npy"))
    assert {0, 1} == set(actions.tolist())
    network = policy.network
    assert network.hidden == (16,) and network.head.value_hidden == (12, 8) and network.activation == "tanh"


def test_greedy_actions_of_a_box_model_are_equal_on_1000_observations():
    policy = from_stable_baselines3(FOLDER / "box.zip", PENDULUM)
    actions, _ = policy.predict(observations(3))
    expected = np.load(FOLDER / "box.npy")
    np.testing.assert_allclose(actions, expected, atol=2e-6)
    assert np.std(expected) > 0.1 and policy.network.activation == "relu"
    assert np.asarray(policy.variables.params["policy"]["log_std"]["all"]) == pytest.approx(-0.5, abs=0.05)


@pytest.mark.parametrize(
    ("name", "spec", "network"),
    [
        ("sde", PENDULUM, polyak.MLP((6,), activation="tanh", head=polyak.PolicyAndValue(std="sde"))),
        ("sde_squashed", TWO_ACTIONS, polyak.MLP((6,), activation="tanh", head=polyak.PolicyAndValue(std="sde"))),
        ("sac", RESCALED, polyak.Actor((8, 6))),
        ("sac_sde", RESCALED, polyak.Actor((8, 6), std="sde", clip_mean=2.0)),
        ("td3", RESCALED, polyak.Actor((8, 6), activation="tanh", std="fixed", log_std=-20.0)),
    ],
)
def test_actions_and_deviations_of_other_models_are_equal_on_1000_observations(name, spec, network):
    """Greedy actions after tanh and in the environment's units; standard deviations before, over all noise with gSDE."""
    policy, obs = from_stable_baselines3(FOLDER / f"{name}.zip", spec), observations(3)
    assert policy.network == network and policy.squash == (spec.action_scaling == "rescale")
    expected = np.load(FOLDER / f"{name}.npy")
    np.testing.assert_allclose(policy.predict(obs)[0], expected, atol=1e-5)
    assert np.std(expected) > 0.5
    if name == "td3":
        np.testing.assert_allclose(policy.predict(obs, deterministic=False, key=jax.random.key(0))[0], expected, atol=1e-5)
    else:
        params = policy.network.apply(policy.variables, jax.numpy.asarray(obs))[0][0]
        std = np.load(FOLDER / f"{name}_std.npy")
        np.testing.assert_allclose(np.exp(params["log_scale"]), std, rtol=1e-4)
        assert np.ptp(std) > 0.1


def test_the_mean_of_gsde_is_clipped_also_in_numpy(tmp_path):
    policy, obs = from_stable_baselines3(FOLDER / "sac_sde.zip", RESCALED), observations(3)
    actions = np.load(FOLDER / "sac_sde.npy")
    at_limit = np.isclose(np.abs(actions), 2 * np.tanh(2.0), atol=1e-5)
    assert 50 < at_limit.sum() < 950
    write_policy(policy, RESCALED, "numpy", tmp_path / "policy.npz", {})
    np.testing.assert_allclose(polyak.load_policy(tmp_path / "policy.npz").predict(obs)[0], actions, atol=1e-5)


def changed(tmp_path, **members):
    """The discrete model with other members."""
    path = tmp_path / "changed.zip"
    with zipfile.ZipFile(FOLDER / "discrete.zip") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, members.get(name.partition(".")[0], source.read(name)))
    return path


def weights(index):
    """A `policy.pth` with this pickle as the index of its tensors."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("policy/data.pkl", index)
        archive.writestr("policy/data/0", np.zeros(4, np.float32).tobytes())
    return data.getvalue()


def text(x):
    return b"X" + struct.pack("<I", len(x)) + x.encode()


def integers(*numbers):
    return b"(" + b"".join(b"J" + struct.pack("<i", n) for n in numbers) + b"t"


def tensor(x, storage):
    """The pickle of an array whose numbers are in the archive's storage of this name."""
    strides = integers(*(stride // 4 for stride in x.strides))
    reference = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(storage) + text("cpu") + integers(x.size)[1:-1] + b"tQ"
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + integers(0)[1:-1] + integers(*x.shape) + strides + b"tR"


def altered(tmp_path, name, *, settings=None, **tensors):
    """A model with another JSON of settings, if there is one, and other tensors; None removes a tensor."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as model:
        data = model.read("data") if settings is None else json.dumps(settings).encode()
        with zipfile.ZipFile(io.BytesIO(model.read("policy.pth"))) as archive:
            known = _TensorReader(archive, "archive").load()
    arrays = {key: np.ascontiguousarray(x, np.float32) for key, x in {**known, **tensors}.items() if x is not None}
    weights, path = io.BytesIO(), tmp_path / "altered.zip"
    with zipfile.ZipFile(weights, "w") as archive:
        items = b"".join(text(key) + tensor(x, str(i)) for i, (key, x) in enumerate(arrays.items()))
        archive.writestr("policy/data.pkl", b"\x80\x02}(" + items + b"u.")
        for i, x in enumerate(arrays.values()):
            archive.writestr(f"policy/data/{i}", x.tobytes())
    with zipfile.ZipFile(path, "w") as model:
        model.writestr("data", data)
        model.writestr("policy.pth", weights.getvalue())
    return path


def test_a_model_with_the_same_tensors_acts_the_same(tmp_path):
    policy = from_stable_baselines3(altered(tmp_path, "sac_sde"), RESCALED)
    np.testing.assert_allclose(policy.predict(observations(3))[0], np.load(FOLDER / "sac_sde.npy"), atol=1e-5)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_names_anything_but_tensors_is_rejected_and_runs_nothing(tmp_path):
    evil = tmp_path / "evil"
    for index in (pickle.dumps(Runs(evil)), pickle.dumps({"weight": Runs(evil)}, 2)):
        with pytest.raises(ValueError, match=r"is not a model of Stable-Baselines3 that can be read: policy.pth names .*open"):
            from_stable_baselines3(changed(tmp_path, policy=weights(index)), CARTPOLE)
        assert not evil.exists()


# Offset, shape and strides of 100 numbers, of negative strides, and far beyond a storage of four.
HOSTILE_LAYOUTS = (
    b"K\x00Kd\x85K\x01\x85",
    b"K\x00K\x02\x85J\xff\xff\xff\xff\x85",
    b"J\xff\xff\xff\x7fK\x01\x85K\x01\x85",
)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\x80\x02.",
        pickle.dumps([1, 2]),
        pickle.dumps({"a": 1}),
        b"\x80\x02}(K\x01" + tensor(np.zeros(4, np.float32), "0") + b"u.",
        b"\x80\x02K\x01\x85Q.",
        # The state of a function, of a class and of a string.
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__K\x01sb.",
        b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02ctorch\nFloatStorage\n}X\x01\x00\x00\x00aK\x01sb.",
        *(
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
            b"X\x03\x00\x00\x00cpuK\x04tQ" + layout + b"tR."
            for layout in HOSTILE_LAYOUTS
        ),
    ],
)
def test_damaged_and_hostile_weights_are_rejected(tmp_path, index, unchecked):
    with pytest.raises(ValueError, match="from_stable_baselines3: "):
        from_stable_baselines3(changed(tmp_path, policy=weights(index)), CARTPOLE)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        # In one column for 2,000 features, and 2,000 biases: 16 MB if it was repeated for each.
        ({"actor.log_std": np.ones((2000, 1)), "actor.mu.0.bias": np.ones(2000)}, "actor.mu.0 must have a weight"),
        ({"actor.log_std": np.ones((2000, 1))}, r"actor.log_std must have shape \(6, 1\), got \(2000, 1\)"),
        ({"actor.log_std": np.ones(6)}, r"actor.log_std must have shape \(6, 1\), got \(6,\)"),
        ({"actor.log_std": np.ones((6, 2))}, r"actor.log_std must have shape \(6, 1\), got \(6, 2\)"),
        ({"actor.mu.0.weight": np.ones(6)}, r"actor.mu.0 must have a weight .* got shapes \(6,\) and \(1,\)"),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_rejected_before_memory_is_taken(tmp_path, tensors, message):
    path = altered(tmp_path, "sac_sde", **tensors)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"from_stable_baselines3: .*{message}"):
            from_stable_baselines3(path, RESCALED)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "index",
    [
        # An index in the memo, for which the reader would make a list of that length.
        b"\x80\x02}r\xff\xff\xff\x00.",
        b"\x80\x02}p16777215\n.",
        # One storage of 4 numbers, in so many tensors.
        b"\x80\x02}(" + b"".join(text(str(i)) + tensor(np.zeros(4, np.float32), "0") for i in range(99)) + b"u.",
    ],
    ids=["binary memo", "memo", "tensors"],
)
def test_an_index_that_asks_for_more_memory_than_a_model_may_have_is_rejected(tmp_path, monkeypatch, index):
    monkeypatch.setattr(from_stable_baselines, "MAX_BYTES", 1000)
    with zipfile.ZipFile(io.BytesIO(weights(index))) as archive:
        tracemalloc.start()
        try:
            with pytest.raises(pickle.UnpicklingError, match=r"policy.pth has (a memo of|more than 1,000 bytes)"):
                _TensorReader(archive, "policy").load()
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_a_tensor_counts_under_each_of_its_names(tmp_path, monkeypatch):
    """The policy copies it for each, so that the names could ask for more memory than a model may have."""
    monkeypatch.setattr(from_stable_baselines, "MAX_BYTES", 30_000)
    one = text("0") + tensor(np.zeros(4, np.float32), "0") + b"q\x01"
    index = b"\x80\x02}(" + one + b"".join(text(str(i)) + b"h\x01" for i in range(1, 2000)) + b"u."
    with pytest.raises(ValueError, match=r"can be read: policy.pth has more than 30,000 bytes of tensors"):
        from_stable_baselines3(changed(tmp_path, policy=weights(index)), CARTPOLE)


def test_tensors_are_read_by_their_strides():
    index = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x06tQK\x00K\x02K\x03\x86K\x01K\x02\x86tR."
    )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("policy/data.pkl", index)
        archive.writestr("policy/data/0", np.arange(6, dtype=np.float32).tobytes())
    with zipfile.ZipFile(data) as archive:
        np.testing.assert_array_equal(_TensorReader(archive, "policy").load(), [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            EnvSpec(Box([0.0] * 3, [1.0] * 3), Discrete(2)),
            r"layers/0/kernel .* shape \(4, 16\), the spec needs \(3, 16\)",
        ),
        (EnvSpec(CARTPOLE.obs, Discrete(3)), r"policy/linear/bias .* shape \(2,\), the spec needs \(3,\)"),
        (EnvSpec(Dict({"a": CARTPOLE.obs}), Discrete(2)), "obs must be a Box"),
        (EnvSpec(BYTES, Discrete(2)), r"from_stable_baselines3: obs must not be uint8, .* got Box\(0, 255"),
        (
            EnvSpec(CARTPOLE.obs, Box(-1.0, 1.0, (1,)), action_scaling="rescale"),
            "action_scaling must be 'clip'",
        ),
    ],
)
def test_a_model_of_other_spaces_is_rejected_by_name(spec, message):
    with pytest.raises(ValueError, match=message):
        from_stable_baselines3(FOLDER / "discrete.zip", spec)


@pytest.mark.parametrize("name", ["sac", "td3", "sde_squashed"])
def test_a_model_that_squashes_needs_rescaled_actions(name):
    with pytest.raises(
        ValueError, match="action_scaling must be 'rescale', as in the library that saved the policy, got 'clip'"
    ):
        from_stable_baselines3(FOLDER / f"{name}.zip", PENDULUM)


def test_what_polyak_does_not_have_is_rejected_by_name(tmp_path):
    with zipfile.ZipFile(FOLDER / "discrete.zip") as model:
        settings = json.loads(model.read("data"))
    settings["policy_kwargs"]["activation_fn"] = "<class 'torch.nn.modules.activation.GELU'>"
    with pytest.raises(ValueError, match=r"activation_fn must be one of Tanh, ReLU, ELU, SiLU, got 'GELU'"):
        from_stable_baselines3(changed(tmp_path, data=json.dumps(settings).encode()), CARTPOLE)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("discrete", [], r"can be read: data must be a JSON object, got \[\]"),
        ("discrete", {"policy_kwargs": 5}, "can be read: policy_kwargs must be a JSON object, got 5"),
        ("discrete", {"policy_kwargs": "abc"}, "can be read: policy_kwargs must be a JSON object, got 'abc'"),
        ("sac_sde", {"policy_kwargs": {"clip_mean": "x"}}, "clip_mean must be a number in .* got 'x'"),
        ("sac_sde", {"policy_kwargs": {"clip_mean": -1}}, "clip_mean must be a number in .* got -1"),
    ],
)
def test_malformed_settings_are_rejected_by_name(tmp_path, name, settings, message, unchecked):
    with pytest.raises(ValueError, match=f"^from_stable_baselines3: .*altered.zip.* {message}"):
        from_stable_baselines3(altered(tmp_path, name, settings=settings), RESCALED if name == "sac_sde" else CARTPOLE)


def test_settings_that_are_no_text_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"^from_stable_baselines3: .* can be read: 'utf-8' codec"):
        from_stable_baselines3(changed(tmp_path, data=b'{"a": "\xff"}'), CARTPOLE)


def test_compressed_members_of_other_methods_are_rejected(tmp_path):
    """Damaged data of these methods ends in errors of their own."""
    path = tmp_path / "changed.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as model:
        model.writestr("data", "{}")
    with pytest.raises(ValueError, match=r"^from_stable_baselines3: .* can be read: data must be stored or deflated"):
        from_stable_baselines3(path, CARTPOLE)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        # DQN's, PPO's with a CnnPolicy, and CrossQ's.
        ("discrete", {"action_net.weight": None, "q_net.q_net.0.weight": np.ones((2, 4))}, "'action_net.weight' is missing"),
        ("discrete", {"features_extractor.cnn.0.weight": np.ones(3)}, "'features_extractor.cnn.0.weight' is unexpected"),
        ("sac", {"actor.latent_pi.1.running_mean": np.ones(8)}, "'actor.latent_pi.1.running_mean' is unexpected"),
        ("td3", {"actor.mu.0.bias": None}, "'actor.mu.0.bias' is missing"),
    ],
)
def test_models_of_other_algorithms_and_policies_are_rejected_by_a_tensor(tmp_path, name, tensors, message):
    supported = "; models of PPO, A2C, SAC, TQC, TD3 and DDPG with an MlpPolicy can be imported"
    with pytest.raises(ValueError, match=rf"^from_stable_baselines3: .*altered.zip: {message}{supported}$"):
        from_stable_baselines3(altered(tmp_path, name, **tensors), CARTPOLE if name == "discrete" else RESCALED)


def test_a_file_that_is_no_model_is_rejected(tmp_path, unchecked):
    path = tmp_path / "text.zip"
    path.write_text("no archive")
    with pytest.raises(ValueError, match=r"text.zip is not a model of Stable-Baselines3"):
        from_stable_baselines3(path, CARTPOLE)
    with pytest.raises(FileNotFoundError):
        from_stable_baselines3(tmp_path / "none.zip", CARTPOLE)
    with pytest.raises(TypeError, match="spec must be an EnvSpec"):
        from_stable_baselines3(path, "CartPole-v1")


def test_a_read_policy_acts_inside_jit():
    policy = from_stable_baselines3(FOLDER / "box.zip", PENDULUM)
    obs, flags = observations(3), np.zeros(1000, bool)
    time_step = TimeStep(obs, np.zeros(1000, np.float32), flags, flags, flags)
    step = jax.jit(lambda policy, *inputs: policy.action(*inputs))(policy, time_step, (), jax.random.key(0))
    assert step.action.shape == (1000, 1) and np.std(step.action) > 0.1

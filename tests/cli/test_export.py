"""polyak export: what the files answer is what the policy answers, in other processes and without JAX too."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple, leaf_spaces, map_space
from polyak.export.archive import ExportError, read_export
from polyak.export.policy_function import export_function
from polyak.export.write_policy import write_policy
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU, LSTM
from polyak.ops.normalize import ObsNormalizer
from polyak.policies import numpy_reader
from polyak.policies.network_policy import Greedy
from polyak.runs import read_config
from polyak.storage.run_directory import open_run
from tests.policies.test_network_policy import VECTOR, policy_for

ROWS = 1000
IMAGE = Box(0, 255, (36, 36, 1), np.uint8)
MIXED = Dict({"x": Box(-np.ones((2, 2)), np.ones((2, 2))), "n": Tuple((Discrete(3, 1), MultiDiscrete((2, 3), (1, 0))))})
ACTIONS = Dict(
    {"b": Box([-1.0, 0.0], [1.0, 3.0]), "d": Discrete(3, 2), "m": MultiDiscrete((2, 3), (0, 4)), "z": MultiBinary((2,))}
)
INTEGER = Box([-5, 0], [5, 3], dtype=np.int32)
POLICIES = {
    "mlp to Discrete": (EnvSpec(VECTOR, Discrete(4, start=2)), MLP((6, 5), head=PolicyAndValue())),
    "mlp to Box": (
        EnvSpec(VECTOR, Box([-1.0, 0.0], [1.0, 6.0]), action_scaling="rescale"),
        MLP((6,), activation="silu", head=PolicyAndValue()),
    ),
    "mlp to Box, squashed": (
        EnvSpec(VECTOR, Box([-1.0, 0.0], [1.0, 6.0])),
        MLP((6,), activation="elu", head=PolicyAndValue(squash_mean=True)),
    ),
    "mlp to integers": (EnvSpec(VECTOR, INTEGER), MLP((6,), activation="gelu", head=PolicyAndValue())),
    "cnn": (EnvSpec(IMAGE, Discrete(4)), NatureCNN((4,), head=PolicyAndValue())),
    "lstm of trees": (
        EnvSpec(MIXED, ACTIONS, action_scaling="rescale"),
        LSTM(4, hidden=(3,), activation="elu", head=PolicyAndValue(shared_torso=True)),
    ),
    "gru": (EnvSpec(VECTOR, Box([-9.0], [9.0])), GRU(4, hidden=(), head=PolicyAndValue(std="state"))),
    "gru of an actor": (EnvSpec(VECTOR, Box([-9.0], [9.0])), GRU(4, hidden=(3,), head=polyak.Actor((5,)))),
}
each_policy = pytest.mark.parametrize("name", POLICIES)


def random_obs(spec, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)

    def leaf(space):
        if isinstance(space, Discrete):
            return rng.integers(space.start, space.start + space.n, rows).astype(np.int32)
        if isinstance(space, MultiDiscrete):
            return (rng.integers(0, space.nvec, (rows, 2)) + np.array(space.start)).astype(np.int32)
        if space.dtype == np.uint8:
            return rng.integers(0, 256, (rows, *space.shape), np.uint8)
        return rng.normal(1.0, 2.0, (rows, *space.shape)).astype(np.float32)

    return map_space(leaf, spec.obs)


def random_policy(name):
    """With random weights (small behind an image, whose features are large) and a normaliser that has seen something."""
    spec, network = POLICIES[name]
    policy = policy_for(spec, scale=0.1 if name == "cnn" else 0.6, network=network)
    seen = ObsNormalizer.init(spec.obs).update(jax.tree.map(jnp.asarray, random_obs(spec, 50, 1)), jnp.ones(50))
    return spec, Greedy(dataclasses.replace(policy, normalizer=seen))


@pytest.fixture(scope="module")
def answers():
    """A policy, observations, and its own actions and carry at an episode's first step and at the next one, by name."""
    known = {}

    def of(name):
        if name not in known:
            spec, policy = random_policy(name)
            obs = random_obs(spec)
            first, carry = policy.predict(obs)
            known[name] = (spec, policy, obs, first, policy.predict(obs, carry)[0])
        return known[name]

    return of


def assert_same(got, wanted):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, atol=1e-4 if y.dtype.kind == "f" else 0)


@pytest.mark.slow
@each_policy
def test_stablehlo_computes_the_same_as_the_policy_for_any_number_of_rows(name, answers, tmp_path):
    spec, policy, obs, first, second = answers(name)
    write_policy(policy, spec, "stablehlo", tmp_path / "p", {})
    loaded = polyak.load_policy(tmp_path / "p")
    assert loaded.spec == spec
    got, carry = loaded.predict(obs)
    assert_same(got, first)
    assert_same(loaded.predict(obs, carry)[0], second)
    if name not in ("mlp to Discrete", "gru"):
        return  # each number of rows is compiled anew
    one, _ = loaded.predict(jax.tree.map(lambda x: x[7], obs))
    assert_same(jax.tree.map(lambda x: np.asarray(x)[None], one), jax.tree.map(lambda x: x[7:8], first))


@each_policy
def test_onnxruntime_computes_the_same_as_the_policy_within_1e_4_over_1000_observations(name, answers, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    spec, policy, obs, first, second = answers(name)
    write_policy(policy, spec, "onnx", tmp_path / "p.onnx", {"env": "mine"})
    session = runtime.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    header = json.loads(session.get_modelmeta().custom_metadata_map["polyak"])
    assert (header["kind"], header["about"]) == ("onnx", {"env": "mine"})
    step = export_function(policy, spec)
    assert [x.name for x in session.get_inputs()] == list(step.inputs)
    remembered = [n for n in step.inputs if n.startswith("carry")]
    feed = dict(zip(step.inputs, jax.tree.leaves(obs), strict=False))
    if remembered:
        feed |= {n: np.full((ROWS, *step.inputs[n].shape), np.nan, np.float32) for n in remembered}
        feed["first"] = np.ones(ROWS, bool)
    names = [x.name for x in session.get_outputs()]
    said = dict(zip(names, session.run(None, feed), strict=True))
    actions = [n for n in names if n.startswith("action")]
    assert len(actions) == len(list(leaf_spaces(spec.action)))
    assert_same([said[n] for n in actions], jax.tree.leaves(first))
    if remembered:
        feed |= {n: said[f"next_{n}"] for n in remembered} | {"first": np.zeros(ROWS, bool)}
        again = session.run(actions, feed)
        assert_same(again, jax.tree.leaves(second))


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("mlp")])
def test_numpy_computes_the_same_as_the_policy_where_importing_jax_is_an_error(name, answers, tmp_path):
    spec, policy, obs, first, _ = answers(name)
    made = write_policy(policy, spec, "numpy", tmp_path / "p.npz", {})
    assert [path.name for path in made] == ["p.npz", "numpy_reader.py"]
    assert_same(polyak.load_policy(tmp_path / "p.npz").predict(obs)[0], first)
    np.save(tmp_path / "obs.npy", obs)
    program = (
        "import sys; sys.modules['jax'] = sys.modules['polyak'] = None\n"
        "import numpy_reader, numpy\n"
        "numpy.save('out.npy', numpy_reader.load('p.npz')(numpy.load('obs.npy')))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=tmp_path, check=True)
    assert_same(np.load(tmp_path / "out.npy"), first)


@pytest.mark.parametrize("name", ["cnn", "lstm of trees", "gru"])
def test_numpy_rejects_networks_other_than_an_mlp_by_name(name, tmp_path):
    spec, policy = random_policy(name)
    with pytest.raises(ValueError, match=r"format numpy takes an MLP.* (the network is (LSTM|GRU)|the observation is Box)"):
        write_policy(policy, spec, "numpy", tmp_path / "p", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["stablehlo", "onnx", "numpy"])
def test_action_masks_are_an_input_of_exported_policies(kind, tmp_path):
    spec = EnvSpec(VECTOR, Discrete(3, start=2), "masked", has_action_mask=True)
    policy, rng = policy_for(spec), np.random.default_rng(0)
    obs = rng.normal(size=(20, *VECTOR.shape)).astype(np.float32)
    mask = np.eye(3, dtype=bool)[rng.integers(3, size=20)] | np.eye(3, dtype=bool)[rng.integers(3, size=20)]
    wanted, _ = policy.predict(obs, action_mask=mask)
    assert (wanted != policy.predict(obs, action_mask=np.ones_like(mask))[0]).any()
    if kind == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
        write_policy(policy, spec, kind, tmp_path / "p", {})
        session = runtime.InferenceSession(str(tmp_path / "p"), providers=["CPUExecutionProvider"])
        assert np.array_equal(session.run(None, {"obs": obs, "action_mask": mask})[0], wanted)
        return
    write_policy(policy, spec, kind, tmp_path / "p", {})
    loaded = polyak.load_policy(tmp_path / "p")
    assert np.array_equal(loaded.predict(obs, action_mask=mask)[0], wanted)
    with pytest.raises(ValueError, match="predict: action_mask must be given, as masked has action masks"):
        loaded.predict(obs)
    if kind == "numpy":
        assert np.array_equal(numpy_reader.load(tmp_path / "p")(obs, mask), wanted)


@pytest.mark.slow
def test_masks_of_a_tree_of_actions_are_inputs_by_path(tmp_path):
    spec = EnvSpec(VECTOR, ACTIONS, "masked", has_action_mask=True)
    policy = policy_for(spec)
    write_policy(policy, spec, "stablehlo", tmp_path / "p", {})
    loaded, obs = polyak.load_policy(tmp_path / "p"), np.zeros(VECTOR.shape, np.float32)
    assert list(export_function(policy, spec).inputs) == ["obs", "action_mask/d", "action_mask/m"]
    mask = {"b": None, "d": np.array([False, False, True]), "m": None, "z": None}
    got, wanted = (each.predict(obs, action_mask=mask)[0] for each in (loaded, policy))
    assert got["d"] == wanted["d"] == 4 and np.array_equal(got["m"], wanted["m"])


def test_an_exported_policy_checks_what_it_is_given(answers, tmp_path):
    spec, policy, obs, _, _ = answers("gru")
    write_policy(policy, spec, "stablehlo", tmp_path / "p", {})
    loaded = polyak.load_policy(tmp_path / "p")
    with pytest.raises(ValueError, match=r"obs must have shape \(3,\), got \(4,\)"):
        loaded.predict(np.zeros(4))
    with pytest.raises(ValueError, match="an exported policy is greedy; got deterministic=False"):
        loaded.predict(obs, deterministic=False)
    _, carry = loaded.predict(obs)
    with pytest.raises(ValueError, match=r"carry must have arrays of the shapes \[\(1, 4\)"):
        loaded.predict(obs[0], carry)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The run of the command line's tests as files."""
    from polyak.cli import main

    directory = tmp_path_factory.mktemp("exported")
    for kind in ("stablehlo", "numpy"):
        assert main(["export", str(trained), "--format", kind, "--output", str(directory / kind)]) == 0
    return directory


def test_a_run_is_exported_and_loads_without_training_stack_or_environment(exported, trained):
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    expected = polyak.load_policy(trained).predict(obs)[0].tolist()
    program = (
        "import sys, polyak, json\n"
        f"print([[int(a) for a in polyak.load_policy(f).predict({obs.tolist()})[0]]"
        f" for f in {[str(exported / kind) for kind in ('stablehlo', 'numpy')]}])\n"
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answer, modules = map(json.loads, done.stdout.splitlines())
    assert answer == [expected] * 2
    stack = {
        "gymnasium",
        "polyak.agents",
        "polyak.train",
        "polyak.envs",
        "polyak.cli",
        "polyak.runs",
        "tyro",
        "onnx",
        "tensorboard",
    }
    assert stack & set(modules) == set()
    about = read_export(exported / "stablehlo").about
    assert (about["algorithm"], about["env"]) == ("ppo", "CartPole-v1") and about["env_steps"] >= 400


def test_the_same_policy_is_the_same_bytes_and_stands_in_the_run_by_default(run, command, exported):
    code, out, err = command("export run --format numpy")
    assert (code, err) == (0, "")
    assert out.startswith("wrote run/policy.npz (") and "wrote run/numpy_reader.py (" in out
    assert (run / "policy.npz").read_bytes() == (exported / "numpy").read_bytes()
    with np.load(run / "policy.npz") as arrays:  # as NumPy reads it
        assert arrays["head_bias"].shape == (2,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export nothing --format onnx", "nothing: there is no such directory; a run was expected"),
        ("export run", "--format"),
        ("export run --format pickle", "pickle"),
        ("export run --format numpy -o a --output b", "--output is set more than once"),
        ("export run --format numpy --output run", "run: cannot be written: is a directory"),
        ("export run --format numpy -o a.onnx", "a.onnx: has the suffix of another format; a file of numpy ends with .npz"),
        ("export run --format numpy --output no/where", "no/where: cannot be written: No such file or directory\n"),
        ("export run --format stablehlo --output -", "--output -: must be a separate file, not the standard output"),
        ("export run --format stablehlo -o run/config.json", "--output run/config.json: must be a separate file"),
        ("export run --format stablehlo --output other/config.json", "other/config.json: must be a separate file"),
        ("export run --format stablehlo --output run/.summary.json.aside", "must be a separate file"),
        ("export run --format stablehlo --output run/../run/tb/new", "--output run/../run/tb/new: must be a separate file"),
    ],
)
def test_usage_errors_name_the_flag(run, command, words, message):
    shutil.copytree(run, "other")
    code, out, err = command(words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_directory_with_the_config_of_another_program_is_no_run(run, command):
    Path("project/checkpoints").mkdir(parents=True)
    Path("project/config.json").write_text("{}")
    assert command("export run --format stablehlo --output project/checkpoints/new")[0] == 0
    assert Path("project/checkpoints/new").is_file()


def test_only_plain_files_are_replaced(run, command):
    os.mkfifo("pipe")
    code, _, err = command("export run --format stablehlo --output pipe")
    assert code == 2 and "pipe: cannot be written: exists and is not a plain file" in err
    assert stat.S_ISFIFO(os.lstat("pipe").st_mode)


def test_a_foreign_file_next_to_the_weights_is_not_replaced(run, command):
    code, _, err = command("export run --format numpy --output numpy_reader.py")
    assert code == 2 and "numpy_reader.py: the reader of the weights is written there; choose another --output" in err
    assert not (run.parent / "numpy_reader.py").exists()
    for mine in ("import numpy\n", ""):
        (run / "numpy_reader.py").write_text(mine)
        code, _, err = command("export run --format numpy")
        assert code == 2 and "run/numpy_reader.py: is not polyak's; the reader of the weights would replace it" in err
        assert (run / "numpy_reader.py").read_text() == mine and not (run / "policy.npz").exists()
    older = Path(numpy_reader.__file__).read_text().splitlines(keepends=True)[0]
    (run / "numpy_reader.py").write_text(older)
    assert command("export run --format numpy")[0] == 0
    assert (run / "numpy_reader.py").read_bytes() == Path(numpy_reader.__file__).read_bytes()


def test_missing_onnx_names_its_pip_command(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "polyak.export.onnx", raising=False)
    code, _, err = command("export run --format onnx")
    assert code == 2 and "format onnx needs onnx: pip install 'polyak[onnx]'" in err


def test_a_symbolic_link_to_an_exported_file_is_followed(exported, tmp_path):
    (tmp_path / "latest").symlink_to(exported / "numpy")
    assert polyak.load_policy(tmp_path / "latest").predict(np.zeros(4))[0] in (0, 1)


def test_a_damaged_onnx_file_is_noticed(run, command):
    assert command("export run --format onnx")[0] == 0
    path = run / "policy.onnx"
    with pytest.raises(ExportError, match="is an ONNX file; open it with an ONNX runtime"):
        polyak.load_policy(path)
    whole = path.read_bytes()
    for position in np.random.default_rng(0).integers(4, len(whole), 50):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ExportError, match="damaged"):
            polyak.load_policy(path)


def test_an_agent_for_a_file_is_an_error(exported, trained):
    with pytest.raises(TypeError, match="agent is for a run directory"):
        polyak.load_policy(exported / "numpy", agent=read_config(open_run(trained)).agent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stablehlo", "numpy"])
def test_damage_anywhere_is_an_error_that_names_the_file(kind, exported, tmp_path):
    whole = (exported / kind).read_bytes()
    path = tmp_path / "damaged"
    rng = np.random.default_rng(0)
    for place in [*rng.integers(0, len(whole), 60), *range(40), *range(len(whole) - 40, len(whole))]:
        broken = bytearray(whole)
        broken[place] ^= 0x55
        path.write_bytes(broken)
        try:
            policy = polyak.load_policy(path)
        except ExportError as error:
            assert str(path) in str(error)
        else:  # a byte that says nothing, such as a date in the archive's directory
            assert policy.predict(np.zeros(4))[0] == polyak.load_policy(exported / kind).predict(np.zeros(4))[0]
    for length in rng.integers(0, len(whole), 20):
        path.write_bytes(whole[:length])
        with pytest.raises(ExportError, match="damaged"):
            polyak.load_policy(path)

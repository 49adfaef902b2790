"""Bad files of data: one error that names the file, before anything is trained, allocated or written; no file runs code."""

import pickle
import re
import zipfile

import h5py
import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.data import load, save

N = 12
SPEC = polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec


def arrays(**changes):
    """Two episodes of a pendulum."""
    rng = np.random.default_rng(0)
    fields = {
        "observations": rng.uniform(-1, 1, (N, 3)).astype(np.float32),
        "actions": rng.uniform(-2, 2, (N, 1)).astype(np.float32),
        "rewards": rng.normal(size=N).astype(np.float32),
        "terminals": np.zeros(N, bool),
        "timeouts": np.arange(N) % 6 == 5,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def nan_at(name):
    value = arrays()[name].copy()
    value[3] = np.nan
    return {name: value}


def write(path, fields):
    if path.suffix == ".npz":
        np.savez(path, **fields)
        return
    with h5py.File(path, "w") as file:
        for name, value in fields.items():
            file[name] = value.astype("S") if value.dtype.kind == "U" else value


class Payload:
    """Writes a file if it is loaded."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def write_of_another_environment(path):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=1)
    save(polyak.data.collect(polyak.policies.Uniform(env.spec), env, 20), path)


def cut(path):
    write(path, arrays())
    path.write_bytes(path.read_bytes()[:-100])


def pickled(path):
    np.savez(path, **arrays(rewards=np.array([Payload()] * N, object)))


def pickled_member(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rewards.npy", pickle.dumps(Payload()))


def renamed_npy(path):
    with open(path, "wb") as file:
        np.save(file, np.ones(N))


CHANGES = {
    "rewards that are one too few": ({"rewards": np.ones(N - 1)}, "observations must have one row for each of the 11"),
    "observations that are one too many": ({"observations": np.ones((N + 1, 3))}, "observations must have one row for each of"),
    "flags that are one too few": ({"timeouts": np.zeros(N - 1, bool)}, "timeouts must have one row for each of the 12"),
    "NaN in rewards": (nan_at("rewards"), r"rewards must be finite, got nan at \[3\]"),
    "NaN in observations": (nan_at("observations"), r"observations must be finite, got nan at \[3, 0\]"),
    "NaN in actions": (nan_at("actions"), r"actions must be in \[-2, 2\], got nan at \[3, 0\]"),
    "rewards as text": ({"rewards": np.array(["1.0"] * N)}, "rewards must be numbers, got"),
    "actions outside": ({"actions": np.full((N, 1), 2.5)}, r"actions must be in \[-2, 2\], got 2.5 at \[0, 0\]; clip"),
    "another environment's shapes": ({"observations": np.ones((N, 4))}, r"observations must have shape \(12, 3\)"),
    "flags in a group": ({"terminals": None, "terminals/x": np.zeros(N)}, "terminals must be one array, got"),
}  # fmt: skip
FILES = {
    "another environment": (write_of_another_environment, ".npz", "is of another environment: obs is Box"),
    "a cut archive": (cut, ".npz", "the file is cut, damaged or not an .npz file of arrays: "),
    "a cut HDF5 file": (cut, ".hdf5", "the file is cut, damaged or not HDF5: "),
    "pickled rewards": (pickled, ".npz", "Object arrays cannot be loaded when allow_pickle=False"),
    "a pickle as a member": (pickled_member, ".npz", "not an .npz file of arrays: "),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Payload())), ".npz", "File is not a zip file"),
    "an array without an archive": (renamed_npy, ".npz", "File is not a zip file"),
    "text": (lambda path: path.write_text("observations\n1\n"), ".hdf5", "the file is cut, damaged or not HDF5: "),
    "an array beside a group": (
        *(lambda path: np.savez(path, **arrays(), **{"observations/x": np.ones(N)}), ".npz"),
        "observations/x must not be beside an array",
    ),
}
CASES = [
    *[
        (name + suffix, lambda path, changes=changes: write(path, arrays(**changes)), suffix, message)
        for name, (changes, message) in CHANGES.items()
        for suffix in (".npz", ".hdf5")
    ],
    *[(name, *case) for name, case in FILES.items()],
]


@pytest.mark.parametrize(("make", "suffix", "message"), [pytest.param(*case, id=name) for name, *case in CASES])
def test_bad_data_are_one_error_before_training(make, suffix, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"data{suffix}"
    make(path)
    expected = re.compile(f"data.load: .*data{re.escape(suffix)}.*{message}")
    for read in (
        lambda: load(path, spec=SPEC),
        lambda: polyak.train.offline("iql", path, gradient_steps=1, env="jax/Pendulum-v1", run_dir="run", progress=False),
        lambda: polyak.train.offline(polyak.SAC(SPEC), path, gradient_steps=1, run_dir="run", progress=False),
    ):
        with pytest.raises((TypeError, ValueError), match=expected) as raised:
            read()
        assert "\n" not in str(raised.value)
    assert main(["train", "iql", "jax/Pendulum-v1", "--data", str(path), "--gradient-steps", "1", "--run-dir", "run"]) == 2
    assert expected.search(capsys.readouterr().err)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_good_file_of_these_is_loaded(tmp_path):
    for suffix in (".npz", ".hdf5"):
        write(tmp_path / f"data{suffix}", arrays())
        (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"data{suffix}")
        assert load(tmp_path / f"link{suffix}", spec=SPEC).num_transitions == N - 2


def chunked(file, name, shape):
    """An array of zeros that takes no space in the file."""
    file.create_dataset(name, shape, np.float32, chunks=(1_024, *shape[1:]))


@pytest.mark.parametrize("shape", [(2**50,), (2**33, 4)])
def test_an_hdf5_file_that_states_more_than_memory_holds_is_not_read(shape, tmp_path):
    write(tmp_path / "data.hdf5", arrays(rewards=None))
    with h5py.File(tmp_path / "data.hdf5", "a") as file:
        chunked(file, "rewards", shape)
    with pytest.raises(ValueError, match=r"data.hdf5: its arrays have [\d,]+ bytes, of which [\d,]+ fit into memory; divide"):
        load(tmp_path / "data.hdf5")


def test_an_archive_that_unpacks_to_more_than_memory_holds_is_not_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "data.npz", **arrays(observations=np.zeros((N, 100_000))))
    assert (tmp_path / "data.npz").stat().st_size < 50_000
    monkeypatch.setattr("polyak.data.files.available_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"data.npz: its arrays have 9,60\d,\d+ bytes, of which 1,000,000 fit into memory"):
        load(tmp_path / "data.npz")


@pytest.mark.parametrize("shape", [(2**60,), (2**40,), (2**62, 2**62)])
def test_an_archive_whose_array_states_more_than_it_has_is_an_error(shape, tmp_path):
    write(tmp_path / "data.npz", arrays(rewards=None))
    with zipfile.ZipFile(tmp_path / "data.npz", "a") as archive, archive.open("rewards.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
        member.write(bytes(1_000))
    with pytest.raises(ValueError, match=r"data.npz: the file is cut, damaged or not an .npz file of arrays: "):
        load(tmp_path / "data.npz")


def test_an_archive_with_two_arrays_of_one_name_is_an_error(tmp_path):
    write(tmp_path / "data.npz", arrays())
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(tmp_path / "data.npz", "a") as archive:
        archive.writestr("rewards.npy", b"")
    with pytest.raises(ValueError, match="two arrays have the same name"):
        load(tmp_path / "data.npz")


def test_groups_that_contain_each_other_end(tmp_path):
    for name in ("self", "root", "twice"):
        path = tmp_path / f"{name}.hdf5"
        write(path, arrays(observations=None))
        with h5py.File(path, "a") as file:
            group = file.create_group("observations")
            inner = group.create_group("a/b")
            group["again"] = {"self": group, "root": file["/"], "twice": inner}[name]
        with pytest.raises(ValueError, match=rf"{name}.hdf5: observations/[a-z/]* is a group that is in the file twice"):
            load(path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about metadata of the data set
def test_a_data_set_of_minari_cannot_exceed_memory_or_open_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data = load(arrays(), spec=SPEC)
    for name, message in (("large-v0", r"its arrays have 4,\d+,\d+,\d+,\d+,\d+ bytes"), ("link-v0", "rewards is a link")):
        save(data, f"minari:{name}")
        with h5py.File(tmp_path / name / "data/main_data.hdf5", "a") as file:
            del file["episode_0/rewards"]
            if name == "large-v0":
                chunked(file, "episode_0/rewards", (2**50,))
            else:
                file["episode_0/rewards"] = h5py.ExternalLink("../../secret.hdf5", "rewards")
        with pytest.raises(ValueError, match=f"data.load: {name}: .*{message}"):
            load(f"minari:{name}")
    with pytest.raises(ValueError, match=r"large-v0 is no run directory; Minari's data sets are 'minari:NAME'"):
        load(tmp_path / "large-v0")

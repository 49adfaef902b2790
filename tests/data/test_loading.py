"""Files and arrays of data sets: what is read is what was written, and bad data are one clear error."""

from types import SimpleNamespace

import gymnasium
import h5py
import jax
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, Tuple
from polyak.data import load, save
from polyak.data.minari_files import from_episodes

N = 6


def arrays(**changes):
    """Two episodes of three steps, the first of which terminates."""
    fields = {
        "observations": np.arange(N * 2.0).reshape(N, 2),
        "actions": np.linspace(-1, 1, N)[:, None],
        "rewards": np.ones(N),
        "terminals": np.arange(N) == 2,
        "timeouts": np.arange(N) == 5,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def assert_equal(one, other):
    assert one.spec == other.spec
    names = ("obs", "action", "reward", "lengths", "terminated", "truncated")
    jax.tree.map(np.testing.assert_array_equal, [getattr(one, x) for x in names], [getattr(other, x) for x in names])


def test_without_next_observations_the_last_step_before_a_time_limit_is_the_final_observation():
    data = load(arrays())
    assert data.lengths.tolist() == [3, 2] and data.terminated.tolist() == [True, False]
    np.testing.assert_array_equal(data.episodes[1].obs, arrays()["observations"][3:])
    # A step alone gives nothing.
    data = load(arrays(timeouts=np.isin(np.arange(N), (3, 5))))
    assert data.lengths.tolist() == [3, 1] and data.terminated.tolist() == [True, False]
    np.testing.assert_array_equal(data.episodes[0].obs[:3], arrays()["observations"][:3])
    np.testing.assert_array_equal(data.episodes[1].obs, arrays()["observations"][4:])
    np.testing.assert_allclose(data.action, arrays()["actions"][[0, 1, 2, 4]])


@pytest.mark.parametrize("dtype", [bool, np.int8])
def test_observations_of_multi_binary_are_bools_or_integers(dtype):
    obs = np.arange(3 * N).reshape(N, 3) % 2
    spec = EnvSpec(MultiBinary(3), Box(-1.0, 1.0, (1,)))
    found = load(arrays(observations=obs.astype(dtype), actions=np.zeros((N, 1))), spec=spec).episodes[0].obs
    np.testing.assert_array_equal(found[:3], obs[:3])


def walking(start, size):
    rng = np.random.default_rng(0)
    return np.array([0.0, start]) + size * rng.choice([-1, 1], (N, 2)).cumsum(0)


@pytest.mark.parametrize("part", [None, "gps"])
def test_changes_that_float32_does_not_resolve_are_warned_of(part):
    obs = walking(4_649_776.0, 0.1)
    name = r"observations \'gps\'" if part else "observations"
    with pytest.warns(UserWarning, match=rf"{name} at \[1\] reach 46497.*float32 does not resolve") as shown:
        load(arrays(observations={part: obs, "other": obs[:, :1]} if part else obs))
    assert len(shown) == 1
    ends = np.zeros(N - 1, bool)
    episode = SimpleNamespace(
        observations=obs, actions=np.zeros((N - 1, 1)), rewards=np.zeros(N - 1), terminations=ends, truncations=ends
    )
    recorded = SimpleNamespace(iterate_episodes=lambda: iter([episode, episode]))
    spec = EnvSpec(Box(-np.inf, np.inf, (2,)), Box(-1.0, 1.0, (1,)))
    with pytest.warns(UserWarning, match=r"observations at \[1\] reach 46497.*float32 does not resolve") as shown:
        from_episodes("load", recorded, spec, "walk")
    assert len(shown) == 1


@pytest.mark.parametrize("obs", [walking(4_649_776.0, 10.0), walking(1.0, 1e-9), walking(4_649_776.0, 0.0)])
def test_changes_that_float32_resolves_or_that_are_small_near_zero_are_not_warned_of(obs):
    load(arrays(observations=obs))
    load(arrays(observations=walking(4_649_776.0, 0.1).astype(np.float32)))


def test_next_observations_are_the_final_ones_and_show_where_episodes_were_cut():
    obs = arrays()["observations"]
    following = np.concatenate([obs[1:], [[9.0, 9.0]]])
    following[3] = [7.0, 7.0]
    data = load(arrays(next_observations=following, timeouts=None))
    assert data.lengths.tolist() == [3, 1, 2] and data.truncated.tolist() == [False, True, True]
    assert [e.obs[-1].tolist() for e in data.episodes] == [obs[3].tolist(), [7.0, 7.0], [9.0, 9.0]]


def test_goals_that_terminal_steps_achieved_must_be_in_the_data():
    """Without final observations, hindsight would reward a terminal step for the goal of the step before."""
    entries = {name: arrays()["observations"] for name in ("observation", "achieved_goal", "desired_goal")}
    with pytest.warns(UserWarning, match="the goals that terminal steps achieved are unknown, which a HindsightReplay needs"):
        load(arrays(observations=entries))
    load(arrays(observations=entries, next_observations=entries))
    load(arrays(observations=entries, terminals=np.zeros(N)))


TERMINALS, TIMEOUTS = np.arange(N) == 1, np.arange(N) == 3


@pytest.mark.parametrize(
    "flags", [{"terminals": TERMINALS}, {"timeouts": TIMEOUTS}, {"terminals": TERMINALS, "timeouts": TIMEOUTS}]
)
@pytest.mark.parametrize("following", [None, arrays()["observations"] + 2.0])
def test_dones_beside_one_of_both_flags_are_the_ends_of_episodes(flags, following):
    unknown = {"terminals": None, "timeouts": None} | flags
    data = load(arrays(**unknown, next_observations=following, dones=TERMINALS | TIMEOUTS))
    assert_equal(data, load(arrays(terminals=TERMINALS, timeouts=TIMEOUTS, next_observations=following)))
    assert data.lengths.tolist() == ([2, 1, 1] if following is None else [2, 2, 2])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"terminals": None, "timeouts": None}, "dones do not tell terminal states from time limits: add timeouts"),
        ({"terminals": np.arange(N) == 2}, "dones must be True at the end of each episode, got False at 2"),
        (
            {"terminals": TERMINALS, "timeouts": np.arange(N) == 4},
            "dones must be True at the end of each episode, got False at 4",
        ),
    ],
)
@pytest.mark.parametrize("following", [None, arrays()["observations"] + 2.0])
def test_dones_that_say_too_little_or_something_else_are_an_error(flags, message, following):
    with pytest.raises(ValueError, match=message):
        load(arrays(**flags, next_observations=following, dones=TERMINALS | TIMEOUTS))


@pytest.mark.parametrize("dtypes", [(np.float64, np.float32), (np.float32, np.float64), (np.float32, np.float16)])
def test_next_observations_of_another_precision_cut_no_episode(dtypes):
    obs = np.random.default_rng(0).normal(size=(N + 1, 2))
    data = load(arrays(observations=obs[:-1].astype(dtypes[0]), next_observations=obs[1:].astype(dtypes[1])))
    assert data.lengths.tolist() == [3, 3]


def test_shuffled_transitions_are_episodes_of_one_step():
    order = np.random.default_rng(0).permutation(N)
    obs = arrays()["observations"]
    full = arrays(next_observations=obs + 2.0)
    data = load({name: value[order] for name, value in full.items()})
    assert (data.lengths == 1).sum() >= 4 and data.num_transitions == N
    for episode in data.episodes:
        np.testing.assert_array_equal(episode.obs[1:] - episode.obs[:-1], 2.0)


def test_spaces_are_inferred_or_asked_for():
    assert load(arrays()).spec.action == Box(-1, 1, (1,), np.float32)
    assert load(arrays(actions=np.arange(N))).spec.action == Discrete(N)
    images = np.zeros((N, 4, 4, 1), np.uint8)
    assert load(arrays(observations={"image": images, "speed": np.ones(N)})).spec.obs == Dict(
        {"image": Box(0, 255, (4, 4, 1), np.uint8), "speed": Box(-np.inf, np.inf, ())}
    )
    with pytest.raises(ValueError, match=r"data.load: actions reach 3, and their bounds are unknown; pass spec=env.spec"):
        load(arrays(actions=np.full((N, 1), 3.0)))


SPEC = EnvSpec(Box([-99.0] * 2, [99.0] * 2), Box([-1.0], [1.0]), id="Toy-v0")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"actions": np.zeros((N - 1, 1))}, ValueError, "actions must have one row for each of the 6 rewards, got 5"),
        ({"observations": np.zeros((N + 1, 2))}, ValueError, "observations must have one row for each of the 6 rewards, got 7"),
        ({"timeouts": np.zeros(N - 1, bool)}, ValueError, "timeouts must have one row for each of the 6 rewards, got 5"),
        ({"rewards": ["a"] * N}, TypeError, "rewards must be numbers, got an array of <U1"),
        ({"rewards": np.array([1.0] * 5 + [np.nan])}, ValueError, r"rewards must be finite, got nan"),
        ({"rewards": np.array([1.0] * 5 + [1e300])}, ValueError, r"rewards must be finite, got 1e\+300 at \[5\]$"),
        ({"rewards": np.ma.masked_equal([1.0] * 5 + [-9.0], -9.0)}, ValueError, "rewards must be complete, got 1 masked"),
        ({"observations": np.full((N, 2), np.inf)}, ValueError, r"observations must be finite, got inf at \[0, 0\]"),
        ({"actions": np.full((N, 1), 1.5)}, ValueError, r"actions must be in \[-1, 1\], got 1.5 at \[0, 0\]; clip them"),
        ({"actions": np.zeros((N, 2))}, ValueError, r"actions must have shape \(6, 1\), got \(6, 2\)"),
        ({"terminals": np.full(N, 0.5)}, ValueError, r"terminals must be True and False, or 1 and 0, got 0.5"),
        ({"terminals": None}, ValueError, r"terminations \(or terminals\) must be given, got"),
        ({"rewards": None}, ValueError, "rewards must be given, got"),
        ({"rewards": np.ones((N, 2))}, ValueError, "rewards must have one number for each step"),
        ({"terminals": {"x": np.zeros(N)}}, TypeError, "terminals must be one array, got dict"),
        ({"terminations": np.zeros(N)}, ValueError, "terminations and terminals are both given; leave one out"),
        ({"actions": [object()] * N}, TypeError, "actions must be numbers, got an array of object"),
        ({"next_observations": np.zeros((N, 3))}, ValueError, r"next_observations must have shape \(6, 2\), got \(6, 3\)"),
        (
            {"final_observations": np.zeros((3, 2))},
            ValueError,
            "final_observations must have one row for each of the 2 episodes, got 3",
        ),
    ],
)
def test_bad_data_are_one_error_that_names_the_array(changes, error, message):
    with pytest.raises(error, match=f"data.load: .*{message}"):
        load(arrays(**changes), spec=SPEC)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("truncated", "truncations"),
        ("timeout", "timeouts"),
        ("done", "dones"),
        ("next_obs", "next_observations"),
        ("final_observation", "final_observations"),
        ("log_prob", "log_probs"),
    ],
)
def test_an_array_with_nearly_the_name_of_a_missing_one_is_a_warning(name, wanted):
    """Unread, it would join episodes into one."""
    with pytest.warns(UserWarning, match=f"data.load: the array '{name}' is not read; is it {wanted}\\?"):
        load(arrays(timeouts=None) | {name: np.zeros(N)}, spec=SPEC)
    load(arrays(timeouts=None) | {"timesteps": np.zeros(N), "next_actions": np.zeros(N), 3: np.zeros(N)}, spec=SPEC)


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
def test_nor_is_one_of_a_file_left_unread_without_a_warning(suffix, tmp_path):
    path, columns = tmp_path / f"d4rl.{suffix}", arrays(timeouts=None) | {"truncated": np.zeros(N), "metadata": np.zeros(1)}
    if suffix == "npz":
        np.savez(path, **columns)
    else:
        with h5py.File(path, "w") as file:
            file.update(columns)
    with pytest.warns(UserWarning, match=f"data.load: .*d4rl.{suffix}: the array 'truncated' is not read; is it truncations"):
        load(path, spec=SPEC)


def test_data_of_another_environment_are_rejected(tmp_path):
    save(load(arrays(), spec=SPEC), tmp_path / "toy.npz")
    discrete = EnvSpec(SPEC.obs, Discrete(2), id="Other-v0")
    with pytest.raises(
        ValueError, match=r"data set 'toy.npz' is of another environment: action is Box.*, of Other-v0 Discrete"
    ):
        load(tmp_path / "toy.npz", spec=discrete)
    wide = EnvSpec(SPEC.obs, Box([-2.0], [2.0]), id="Wide-v0")
    with pytest.raises(ValueError, match=r"of another environment: action.low\[0\] is -1.0, of Wide-v0 -2.0"):
        load(tmp_path / "toy.npz", spec=wide)
    # Bounds of observations are stated differently by libraries.
    unbounded = EnvSpec(Box([-np.inf] * 2, [np.inf] * 2), SPEC.action)
    assert load(tmp_path / "toy.npz", spec=unbounded).spec.obs == unbounded.obs


@pytest.mark.parametrize("keys", ["01", "10", ["a/b", "a"], ["", "."], ["..", "é %2F", "\0", "\0a", "\\"]])
def test_a_file_holds_every_key_of_a_dict(tmp_path, monkeypatch, keys):
    space = Dict({key: Box([-9.0], [9.0]) for key in keys})
    rows = {key: np.full((N, 1), float(i)) for i, key in enumerate(keys)}
    data = load(arrays(observations=rows, actions=rows), spec=EnvSpec(space, space, id="Keys-v0"))
    save(data, tmp_path / "data.npz")
    assert_equal(load(tmp_path / "data.npz"), data)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    if {"a/b", "", "."} & set(keys):
        with pytest.raises(
            ValueError, match=r"data.save: Minari's files cannot have the key '(a/b|)'; rename it, or save to a"
        ):
            save(data, "minari:keys-v0")
        assert not (tmp_path / "keys-v0").exists()


@pytest.mark.parametrize("obs", ["array", "tree"])
def test_npz_round_trip(tmp_path, obs):
    tree = {"image": np.zeros((N, 2, 2, 1), np.uint8), "pair": (np.ones((N, 1)), np.arange(N))}
    space = Dict({"image": Box(0, 255, (2, 2, 1), np.uint8), "pair": Tuple((Box([0.0], [2.0]), Discrete(9)))})
    spec = EnvSpec(space, SPEC.action) if obs == "tree" else SPEC
    data = load(arrays(observations=tree) if obs == "tree" else arrays(), spec=spec)
    save(data, tmp_path / "data.npz")
    assert_equal(load(tmp_path / "data.npz"), data)


def test_hdf5_in_the_layout_of_d4rl(tmp_path):
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, value in arrays().items():
            file[name] = value
        file["infos/qpos"] = np.zeros((N, 7))
        file["metadata/algorithm"] = "SAC"
    data = load(tmp_path / "d4rl.hdf5", spec=SPEC)
    assert_equal(data, load(arrays(), spec=SPEC))
    with h5py.File(tmp_path / "text.hdf5", "w") as file:
        for name, value in arrays(rewards=None).items():
            file[name] = value
        file["rewards"] = np.array([b"1"] * N)
    with pytest.raises(TypeError, match="rewards must be numbers"):
        load(tmp_path / "text.hdf5")


def test_an_hdf5_file_cannot_open_another_file(tmp_path):
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["rewards"] = np.ones(N)
    with h5py.File(tmp_path / "link.hdf5", "w") as file:
        for name, value in arrays(rewards=None).items():
            file[name] = value
        file["rewards"] = h5py.ExternalLink("secret.hdf5", "rewards")
    with pytest.raises(ValueError, match=r"link.hdf5: rewards is a link; copy its array into the file"):
        load(tmp_path / "link.hdf5")


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_a_file_that_is_cut_is_one_error(tmp_path, suffix, share):
    path = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        save(load(arrays(), spec=SPEC), path)
    else:
        with h5py.File(path, "w") as file:
            for name, value in arrays().items():
                file[name] = value
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match=rf"data.load: .*data{suffix}: the file is cut, damaged or not .*: .*"):
        load(path)


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"data.load: source must be .*, got an empty path"):
        load("")
    with pytest.raises(FileNotFoundError, match="there is no such file or run directory; Minari's are 'minari:NAME'"):
        load(tmp_path / "none.npz")
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"must be a run directory or end with .npz, .hdf5 or .h5"):
        load(tmp_path / "data.csv")
    with pytest.raises(TypeError, match="source must be 'minari:NAME', a path or arrays by name, got int"):
        load(3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about metadata of the data set
def test_minari_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 60)
    save(data, "minari:cartpole/uniform-v0")
    loaded = load("minari:cartpole/uniform-v0")
    assert loaded.spec.id == "CartPole-v1" and loaded.spec.action == Discrete(2)
    assert_equal(loaded, data)
    import minari

    assert isinstance(minari.load_dataset("cartpole/uniform-v0").recover_environment(), gymnasium.Env)
    with pytest.raises(ValueError, match="there is no data set 'cartpole/none-v0'; download it with: minari download"):
        load("minari:cartpole/none-v0")
    with pytest.raises(ValueError, match="exists already"):
        save(data, "minari:cartpole/uniform-v0")
    (file,) = tmp_path.rglob("*.hdf5")
    file.write_bytes(file.read_bytes()[:2_000])
    with pytest.raises(ValueError, match=r"data.load: cartpole/uniform-v0: the file is cut, damaged or not a"):
        load("minari:cartpole/uniform-v0")

"""Weights from a file: those that the spaces next to them ask for, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiBinary
from polyak.core.types import TimeStep
from polyak.export.archive import Export, ExportError, from_members, read_export, to_members, write_export
from polyak.export.numpy_format import check_weights
from polyak.export.write_policy import write_policy
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.policies.numpy_reader import Policy, load
from tests.policies.test_network_policy import VECTOR, policy_for

SPECS = {
    "Discrete": EnvSpec(VECTOR, Discrete(2, start=7)),
    "Box": EnvSpec(VECTOR, Box([-1.0, 0.0], [1.0, 6.0]), action_scaling="rescale"),
    "squashed": EnvSpec(VECTOR, Box([-1.0, 0.0], [1.0, 6.0])),
    "endless": EnvSpec(VECTOR, Box([-1.0, 0.0], [1.0, np.inf])),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Spaces, about and arrays, by the kind of action; and the file that they are from."""
    known = {}
    for kind, spec in SPECS.items():
        path = tmp_path_factory.mktemp("plain") / kind
        network = MLP((5, 4), head=PolicyAndValue(squash_mean=kind == "squashed"))
        write_policy(policy_for(spec, network=network), spec, "numpy", path, {"env": "mine"})
        export = read_export(path)
        known[kind] = (export, dict(export.about), from_members(export.members, kind))
    return known


@pytest.mark.parametrize("kind", SPECS)
def test_what_was_written_holds(kind, plain):
    export, about, arrays = plain[kind]
    check_weights(export.spec, about, arrays)
    assert about["env"] == "mine"


def test_one_observation_without_a_batch_axis_is_rejected(tmp_path):
    spec = SPECS["Discrete"]
    agent = PPO(spec, network=MLP((4,)), normalize_obs=True)
    write_policy(agent.policy(agent.init(jax.random.key(0))), spec, "numpy", tmp_path / "policy.npz", {})
    policy, one = load(tmp_path / "policy.npz"), np.zeros(spec.obs.shape, np.float32)
    assert policy(one[None]).shape == (1,)
    with pytest.raises(ValueError, match=rf"obs must be observations \[N, ...\] of {one.size} numbers each, got shape"):
        policy(one)


ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("kind", "about", "arrays", "said"),
    [
        ("Discrete", {"start": 0}, {}, "start do not fit the spaces"),
        ("Discrete", {"divide": 255.0}, {}, "divide do not fit the spaces"),
        ("Discrete", {"action": "box"}, {}, "action do not fit the spaces"),
        ("Box", {"dtype": "S1000000000"}, {}, "dtype do not fit the spaces"),
        ("Box", {"dtype": "O", "shape": [1, 1, 2]}, {}, "shape, dtype do not fit the spaces"),
        ("Box", {"rescale": False}, {}, "rescale do not fit the spaces"),
        ("squashed", {"rescale": False}, {}, "rescale do not fit the spaces"),
        ("squashed", {"squash_mean": False}, {}, "rescale do not fit the spaces"),
        ("squashed", {"squash_mean": 1}, {}, "rescale do not fit the spaces"),
        ("endless", {"squash_mean": True, "rescale": True}, {}, "squash_mean needs finite bounds"),
        ("Box", {}, {"low": np.zeros((1, 2), np.float32)}, "low do not fit the spaces"),
        ("Box", {"layers": -1}, {}, "layers is -1"),
        ("Box", {"layers": 10**9}, {}, "layers is 1000000000"),
        ("Box", {"layers": 1}, {}, "its arrays are"),
        ("Discrete", {}, {"kernel0": ONES}, "its arrays are"),
        ("Discrete", {}, {"more": ONES}, "its arrays are"),
        ("Discrete", {}, {"deviation": ONES}, "its arrays are"),
        ("Discrete", {}, {"clip_mean": ONES[0, :1]}, "its arrays are"),
        ("Discrete", {}, {"head_kernel": ONES, "head_bias": ONES[0]}, "expected .*, 2 columns at the end"),
        ("Discrete", {}, {"head_bias": np.ones(2)}, "all float32"),
    ],
)
def test_what_does_not_fit_the_spaces_is_rejected(kind, about, arrays, said, plain, tmp_path):
    export, known, weights = plain[kind]
    changed = Export("numpy", export.spec, export.inputs, export.outputs, known | about, to_members(weights | arrays))
    write_export(tmp_path / "changed", changed)
    with pytest.raises(ExportError, match=f"changed: its weights do not make a policy: .*{said}"):
        polyak.load_policy(tmp_path / "changed")


@pytest.mark.parametrize("scaling", ["clip", "rescale"])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (np.int32, -(2**31), 2**31 - 1),
        (np.int32, 2**31 - 9, 2**31 - 1),
        (np.int32, -(2**25) - 3, -(2**25) - 1),
        (np.uint32, 2**32 - 4, 2**32 - 1),
        (np.uint8, 0, 255),
    ],
)
def test_integer_actions_lie_within_their_bounds_and_reach_them(scaling, dtype, low, high, tmp_path):
    spec = EnvSpec(VECTOR, Box(low, high, (3,), dtype), action_scaling=scaling)
    write_policy(policy_for(spec, network=MLP((4,), head=PolicyAndValue())), spec, "numpy", tmp_path / "p", {})
    polyak.load_policy(tmp_path / "p")
    about, arrays = read_export(tmp_path / "p").about, from_members(read_export(tmp_path / "p").members, "p")
    arrays = {name: arrays[name] for name in ("low", "high")}
    identity = {"head_kernel": np.eye(3, dtype=np.float32), "head_bias": np.zeros(3, np.float32)}
    act = Policy({**about, "layers": 0}, arrays | identity)
    ends = (-1.0, 1.0) if scaling == "rescale" else (low - 512, high + 512)  # Both bounds may be one float32.
    actions = act(np.linspace(*ends, 3000, dtype=np.float32).reshape(-1, 3))
    assert actions.dtype == dtype and actions.min() == low and actions.max() == high
    if scaling == "rescale" and high - low < 256:
        assert np.unique(actions).tolist() == list(range(low, high + 1))


def test_spaces_that_only_declare_their_size_are_rejected_before_anything_of_that_size_is_made(plain):
    _, about, arrays = plain["Discrete"]
    with pytest.raises(ValueError, match="the observation is MultiBinary"):
        check_weights(EnvSpec(MultiBinary((10**9,)), Discrete(2, start=7)), about, arrays)


@pytest.mark.parametrize(
    "network",
    [polyak.MLP((5, 4), head=polyak.QValues()), polyak.MLP((5,), activation="gelu", head=polyak.QValues(dueling=True))],
    ids=["plain", "dueling"],
)
def test_the_actions_of_a_network_of_action_values_are_those_of_largest_value(network, tmp_path):
    spec = EnvSpec(Box([-1.0] * 3, [1.0] * 3), Discrete(4, start=2))
    agent = polyak.DQN(spec, network=network, normalize_obs=True)
    policy = agent.policy(agent.init(jax.random.key(1)))
    write_policy(policy, spec, "numpy", tmp_path / "p", {})
    obs = (9 * np.random.default_rng(0).normal(size=(200, 3))).astype(np.float32)
    wanted = (
        jax.jit(lambda obs: policy.distribution(TimeStep(obs, jnp.zeros(200), *[jnp.zeros(200, bool)] * 3))[0].mode())(obs) + 2
    )
    assert len(np.unique(wanted)) > 1
    for predict in (polyak.load_policy(tmp_path / "p").predict, policy.predict):
        np.testing.assert_array_equal(predict(obs)[0], wanted)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (polyak.MLP((5,), norm="layer", head=polyak.QValues()), "whose layers are not plain"),
        (polyak.MLP((5,), head=polyak.QValues(noisy=True)), "whose layers are not plain"),
        (polyak.MLP((), head=polyak.QValues()), "no hidden layer"),
    ],
    ids=["layer norm", "noisy", "linear"],
)
def test_networks_that_the_format_does_not_cover_are_not_written(network, said, tmp_path):
    spec = EnvSpec(Box([-1.0] * 3, [1.0] * 3), Discrete(4))
    agent = polyak.DQN(spec, network=network)
    with pytest.raises(ValueError, match=rf"takes an MLP or Actor .* {said}"):
        write_policy(agent.policy(agent.init(jax.random.key(1))), spec, "numpy", tmp_path / "p", {})

"""Built-in networks: found from the spec, of the right shapes, and started as they should be."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.stats
from flax import nnx

import polyak
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.types import Network
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue
from polyak.networks.layers import DenseSettings, Encoder, channels_first, is_image
from polyak.ops.distributions import for_space, parameter_shapes
from tests.agents.rollouts import same_bits, sample

KEY = jax.random.key(0)
VECTOR = Box(-np.ones(3), np.ones(3))
HWC = Box(0, 255, (40, 36, 3), np.uint8)
CHW = Box(0, 255, (3, 40, 36), np.uint8)

ACTIONS = {
    "Discrete": Discrete(4, start=1),
    "MultiDiscrete": MultiDiscrete((2, 3)),
    "MultiBinary": MultiBinary((2, 2)),
    "Box": Box(-np.ones((2, 3)), np.ones((2, 3))),
    "Dict": Dict({"b": Discrete(2), "a": Tuple((Box([-1.0], [1.0]), MultiBinary((3,))))}),
}
OBS = {
    "vector": VECTOR,
    "matrix": Box(-np.ones((2, 3)), np.ones((2, 3))),
    "scalar": Box(np.float32(-1), np.float32(1)),
    "Discrete": Discrete(5),
    "MultiDiscrete": MultiDiscrete((2, 3)),
    "MultiBinary": MultiBinary((2, 2)),
    "bytes": Box(0, 255, (4, 4, 3), np.uint8),
    "Dict": Dict({"z": Discrete(2), "a": VECTOR, "pair": Tuple((MultiBinary((2,)), VECTOR))}),
}


def outputs(network, spec, batch=5, seed=0):
    obs = jax.tree.map(jnp.asarray, sample(spec.obs, np.random.default_rng(seed), (batch,)))

    @jax.jit
    def both(key):
        variables = network.init(key, spec)
        return variables, network.apply(variables, obs)

    variables, (out, carry, stats) = both(KEY)
    assert carry == () and same_bits(stats, variables.stats)
    return variables, obs, out


def shapes(tree):
    return jax.tree.map(lambda x: x.shape, tree)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_the_output_fits_every_action_space(action):
    _, _, (params, value) = outputs(MLP((4,), head=PolicyAndValue()), EnvSpec(VECTOR, action))
    wanted = jax.tree.map(
        lambda shape: (5, *shape),
        parameter_shapes(action),
        is_leaf=lambda x: isinstance(x, tuple) and (not x or isinstance(x[0], int)),
    )
    assert shapes(params) == wanted and value.shape == (5,) and value.dtype == jnp.float32
    drawn = for_space(action, params).sample(seed=KEY)
    assert shapes(drawn) == shapes(sample(action, np.random.default_rng(0), (5,)))


@pytest.mark.parametrize("obs", OBS.values(), ids=OBS.keys())
def test_every_observation_space_is_taken_and_every_part_of_it_is_seen(obs):
    spec = EnvSpec(obs, Discrete(2))
    network = MLP((8,), orthogonal=False, head=PolicyAndValue())
    variables, values, (_, value) = outputs(network, spec)
    leaves, tree = jax.tree.flatten(values)
    others = jax.tree.leaves(sample(obs, np.random.default_rng(9), (5,)))
    for i in range(len(leaves)):
        changed = jax.tree.unflatten(tree, [jnp.asarray(others[i]) if i == j else x for j, x in enumerate(leaves)])
        assert not np.array_equal(network.apply(variables, changed)[0][1], value)


def test_the_order_of_a_dicts_keys_does_not_matter():
    a = EnvSpec(Dict({"x": VECTOR, "n": Discrete(2)}), Discrete(2))
    b = EnvSpec(Dict({"n": Discrete(2), "x": VECTOR}), Discrete(2))
    network = MLP((4,), head=PolicyAndValue())
    assert same_bits(network.init(KEY, a), network.init(KEY, b))
    obs = {"x": jnp.ones((2, 3)), "n": jnp.ones(2, jnp.int32)}
    variables = network.init(KEY, a)
    assert same_bits(network.apply(variables, obs)[0], network.apply(variables, dict(reversed(obs.items())))[0])


def test_images_are_found_and_told_apart_by_their_channels():
    assert is_image(HWC) and is_image(CHW) and not is_image(OBS["bytes"]) and not is_image(VECTOR)
    assert not is_image(Box(0, 1, (40, 40, 3), np.float32))
    assert channels_first((4, 84, 84)) and not channels_first((84, 84, 4)) and not channels_first((40, 40, 40))
    found = [PPO(EnvSpec(obs, Discrete(2))).network for obs in (HWC, VECTOR, Dict({"cam": CHW, "x": VECTOR}))]
    assert found == [kind(head=PolicyAndValue()) for kind in (NatureCNN, MLP, NatureCNN)]


@pytest.mark.parametrize(("high", "scale"), [(255, 255), (1, 1), ([[1, 10], [2, 4]], 10), (0, 1)])
def test_bytes_are_divided_by_the_largest_bound_of_their_box(high, scale):
    space = Box(0, high, (2, 2), np.uint8)
    encoded = Encoder(space, nnx.Rngs(0))(jnp.asarray(space.high)[None])
    np.testing.assert_array_equal(encoded, (space.high.reshape(1, -1) / np.float32(scale)).astype(np.float32))


def test_images_of_few_levels_are_divided_by_the_largest_one():
    image = jnp.asarray(sample(HWC, np.random.default_rng(0), (2,)) // 128)
    few, many = (Encoder(Box(0, high, HWC.shape, np.uint8), nnx.Rngs(0)) for high in (1, 255))
    np.testing.assert_array_equal(few(image), many(255 * image))


def test_channels_may_come_first_or_last():
    network = NatureCNN((8,), head=PolicyAndValue())
    specs = [EnvSpec(Dict({"cam": space, "x": VECTOR}), Discrete(2)) for space in (HWC, CHW)]
    last, first = (jax.jit(lambda key, spec=spec: network.init(key, spec))(KEY) for spec in specs)
    assert same_bits(last.params, first.params)
    image = jnp.asarray(sample(HWC, np.random.default_rng(0), (2,)))
    x = jnp.ones((2, 3))
    moved = jnp.moveaxis(image, -1, 1)
    a, b = network.apply(last, {"cam": image, "x": x})[0], network.apply(first, {"cam": moved, "x": x})[0]
    np.testing.assert_allclose(a[0], b[0], atol=1e-6)
    np.testing.assert_allclose(a[1], b[1], atol=1e-5)
    assert not np.allclose(network.apply(last, {"cam": 255 - image, "x": x})[0][1], a[1])
    kernels = [layer["kernel"].shape for layer in last.params["actor"]["encoder"]["images"]["cam"]["layers"].values()]
    assert kernels == [(8, 8, 3, 32), (4, 4, 32, 64), (3, 3, 64, 64)]


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_torso_learns_from_the_value_and_a_separate_one_does_not(shared):
    network = MLP((4,), head=PolicyAndValue(shared_torso=shared))
    variables, obs, _ = outputs(network, EnvSpec(VECTOR, Discrete(2)))

    def value(params):
        return network.apply(dataclasses.replace(variables, params=params), obs)[0][1].sum()

    gradient = jax.jit(jax.grad(value))(variables.params)
    moved = any(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient["actor"]))
    assert moved == shared and ("critic" in variables.params) == (not shared)
    assert float(jnp.abs(gradient["value"]["kernel"]).max()) > 0
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(gradient["policy"]))


def gains(kernel):
    """Singular values of a kernel."""
    return np.linalg.svd(np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1]), compute_uv=False)


def test_weights_are_orthogonal_with_the_gains_of_ppo():
    variables, _, _ = outputs(MLP((8, 6), head=PolicyAndValue()), EnvSpec(VECTOR, Discrete(3)))
    params = variables.params
    for torso in ("actor", "critic"):
        for layer in params[torso]["dense"]["layers"].values():
            np.testing.assert_allclose(gains(layer["kernel"]), np.sqrt(2), rtol=1e-5)
            assert not layer["bias"].any()
    np.testing.assert_allclose(gains(params["policy"]["linear"]["kernel"]), 0.01, rtol=1e-5)
    np.testing.assert_allclose(gains(params["value"]["kernel"]), 1.0, rtol=1e-5)


def test_weights_that_are_not_orthogonal_are_those_of_pytorch():
    variables, _, _ = outputs(MLP((400, 100), orthogonal=False, head=PolicyAndValue()), EnvSpec(VECTOR, Discrete(30)))
    params = variables.params
    dense = [layer for torso in ("actor", "critic") for layer in params[torso]["dense"]["layers"].values()]
    for layer in (*dense, params["policy"]["linear"], params["value"]):
        inputs = len(layer["kernel"])
        for weights in (np.asarray(layer["kernel"]).ravel(), np.asarray(layer["bias"])):
            assert np.abs(weights).max() <= inputs**-0.5
            if len(weights) >= 100:
                assert scipy.stats.kstest(weights, "uniform", (-(inputs**-0.5), 2 * inputs**-0.5)).pvalue > 1e-3


def test_a_fresh_policy_is_nearly_uniform_and_box_actions_have_the_deviation_asked_for():
    _, _, (logits, _) = outputs(MLP(head=PolicyAndValue()), EnvSpec(VECTOR, Discrete(4)), batch=200)
    assert float(jnp.abs(jax.nn.softmax(logits) - 0.25).max()) < 0.01
    _, _, (params, _) = outputs(MLP(head=PolicyAndValue(log_std=-0.5)), EnvSpec(VECTOR, ACTIONS["Box"]))
    assert np.all(params["log_scale"] == -0.5) and float(jnp.abs(params["loc"]).max()) < 0.05


@pytest.mark.parametrize("shared", [True, False])
def test_a_deviation_may_depend_on_the_state_and_starts_alike_in_all(shared):
    network = MLP((4,), head=PolicyAndValue(std="state", log_std=-0.5, shared_torso=shared))
    variables, obs, (params, _) = outputs(network, EnvSpec(VECTOR, ACTIONS["Dict"]))
    scales = params["a"][0]["log_scale"]
    assert scales.shape == (5, 1) and np.all(scales == -0.5) and "log_std" not in variables.params["policy"]

    def total(params):
        (action, _), _, _ = network.apply(dataclasses.replace(variables, params=params), obs)
        return action["a"][0]["log_scale"].sum()

    slope = jax.jit(jax.grad(total))(variables.params)
    (name,) = variables.params["policy"]["scales"]
    assert float(jnp.abs(slope["policy"]["scales"][name]["kernel"]).min()) > 0
    moved = jax.tree.map(lambda x, g: x + 0.1 * g, variables.params, slope)
    after = network.apply(dataclasses.replace(variables, params=moved), obs)[0][0]["a"][0]["log_scale"]
    assert len(np.unique(after)) > 1


def test_a_deviation_of_the_state_has_the_shape_of_the_action():
    _, _, (params, _) = outputs(MLP((4,), head=PolicyAndValue(std="state")), EnvSpec(VECTOR, ACTIONS["Box"]))
    assert params["log_scale"].shape == params["loc"].shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("scaling", "low", "high"), [("clip", [-3.0, 0.0], [1.0, 10.0]), ("rescale", [-1.0, -1.0], [1.0, 1.0])]
)
def test_a_squashed_mean_lies_inside_the_bounds_of_the_agents_actions(scaling, low, high):
    spec = EnvSpec(VECTOR, Box([-3.0, 0.0], [1.0, 10.0]), action_scaling=scaling)
    plain, squashed = (MLP((4,), orthogonal=False, head=PolicyAndValue(squash_mean=squash)) for squash in (False, True))
    variables, obs, _ = outputs(squashed, spec, batch=50)
    unbounded, _, _ = outputs(plain, spec, batch=50)
    params, value = squashed.apply(jax.tree.map(lambda x: 8 * x, variables), obs)[0]
    raw, same_value = plain.apply(jax.tree.map(lambda x: 8 * x, unbounded), obs)[0]
    assert same_bits(unbounded.params, variables.params) and same_bits(value, same_value)
    low, high = np.array(low), np.array(high)
    expected = (low + high) / 2 + (high - low) / 2 * np.tanh(np.asarray(raw["loc"], np.float64))
    np.testing.assert_allclose(params["loc"], expected, atol=1e-5)
    assert np.all(np.asarray(params["loc"]) >= low - 1e-5) and np.all(np.asarray(params["loc"]) <= high + 1e-5)
    assert np.ptp(params["loc"], axis=0).min() > 0.5 * (high - low).min()


def test_the_widest_bounds_do_not_overflow_and_infinite_ones_are_refused_by_name():
    most = np.finfo(np.float32).max
    _, _, (params, _) = outputs(MLP((4,), head=PolicyAndValue(squash_mean=True)), EnvSpec(VECTOR, Box([-most], [most])))
    assert np.isfinite(params["loc"]).all()
    spec = EnvSpec(VECTOR, Dict({"go": Box([-1.0], [np.inf]), "on": Discrete(2)}))
    with pytest.raises(ValueError, match=r"squash_mean needs finite bounds, got Box\(.*inf.*\) at action 'go'; .*, or set"):
        MLP((4,), head=PolicyAndValue(squash_mean=True)).init(KEY, spec)
    with pytest.raises(ValueError, match=r"squash_mean must be False without a Box action, got Discrete\(n=2"):
        MLP((4,), head=PolicyAndValue(squash_mean=True)).init(KEY, EnvSpec(VECTOR, Discrete(2)))


def test_without_hidden_layers_it_is_linear():
    network = MLP((), head=PolicyAndValue())
    variables, obs, (logits, value) = outputs(network, EnvSpec(VECTOR, Discrete(2)))
    twice = network.apply(variables, 2 * obs)[0]
    np.testing.assert_allclose(twice[0], 2 * logits, rtol=1e-5)
    np.testing.assert_allclose(twice[1], 2 * value, rtol=1e-5)


@pytest.mark.parametrize(("activation", "at_minus_one"), [("tanh", np.tanh(-1)), ("relu", 0.0), ("elu", np.expm1(-1.0))])
def test_the_activation_is_the_one_asked_for(activation, at_minus_one):
    network = MLP((1,), activation=activation, head=PolicyAndValue())
    variables = network.init(KEY, EnvSpec(Box([-1.0], [1.0]), Discrete(2)))
    params = jax.tree.map(jnp.ones_like, variables.params)
    params["critic"]["dense"]["layers"][0]["bias"] = jnp.zeros(1)
    params["value"]["bias"] = jnp.zeros(1)
    value = network.apply(dataclasses.replace(variables, params=params), jnp.array([[-1.0]]))[0][1]
    np.testing.assert_allclose(value, [at_minus_one], rtol=1e-6)


def test_the_critic_may_have_layers_of_its_own():
    network = MLP((2,), activation="tanh", head=PolicyAndValue(value_hidden=(3, 1), value_activation="relu"))
    spec = EnvSpec(VECTOR, Discrete(2))
    variables = network.init(jax.random.key(0), spec)
    shapes = {
        role: [layer["kernel"].shape[1] for layer in variables.params[role]["dense"]["layers"].values()]
        for role in ("actor", "critic")
    }
    assert shapes == {"actor": [2], "critic": [3, 1]}
    ones = jax.tree.map(jnp.ones_like, variables.params)
    inputs = VECTOR.shape[0]
    obs = jnp.full((1, inputs), -1.0)
    # relu(1 - inputs) is 0, then 3 · 0 + 1 and 1 + 1; the actor's tanh(1 - inputs) is not cut off.
    (logits, value), _, _ = network.apply(dataclasses.replace(variables, params=ones), obs)
    np.testing.assert_allclose(value, [2.0], rtol=1e-6)
    np.testing.assert_allclose(logits, np.full((1, 2), 2 * np.tanh(1 - inputs) + 1), rtol=1e-5)


def test_settings_are_values():
    network = MLP((4,), head=PolicyAndValue())
    assert network == MLP((4,), head=PolicyAndValue()) != MLP((5,), head=PolicyAndValue())
    assert hash(network) == hash(MLP((4,), head=PolicyAndValue())) and isinstance(network, Network)
    spec = EnvSpec(VECTOR, Discrete(2))
    a, b, c = (MLP((4,), head=PolicyAndValue()).init(jax.random.key(seed), spec) for seed in (0, 0, 1))
    assert same_bits(a, b) and not same_bits(a, c)
    # One structure, so that two networks made alike compile once.
    assert jax.tree.structure(a) == jax.tree.structure(c) and hash(jax.tree.structure(a)) == hash(jax.tree.structure(c))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden": (0,)}, "MLP: hidden must be an integer >= 1, got 0"),
        ({"hidden": (64, 1.5)}, "MLP: hidden must be an integer >= 1, got 1.5"),
        ({"hidden": 64}, r"MLP: hidden must be widths such as \(64, 64\), got 64"),
        ({"hidden": "64"}, r"MLP: hidden must be widths such as \(64, 64\), got '64'"),
        ({"activation": "tahn"}, "MLP: activation must be one of None, 'tanh', 'relu', .*got 'tahn'"),
        ({"orthogonal": 1}, "MLP: orthogonal must be one of None, True, False, got 1"),
        ({"norm": "batch"}, "MLP: norm must be one of None, 'layer', got 'batch'"),
        (
            {"head": PolicyAndValue},
            r"MLP: head must be a head such as PolicyAndValue\(\), QValues\(\) or Quantiles\(\), got <class",
        ),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch, settings, said):
    # The tests' own type checker would be faster to object.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises((TypeError, ValueError), match=said):
        MLP(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"log_std": float("nan")}, "PolicyAndValue: log_std must be a number"),
        ({"shared_torso": "no"}, "PolicyAndValue: shared_torso must be one of None, True, False, got 'no'"),
        ({"std": "learned"}, "PolicyAndValue: std must be one of 'free', 'state', 'fixed', 'sde', got 'learned'"),
        ({"squash_mean": None}, "PolicyAndValue: squash_mean must be one of True, False, got None"),
        ({"value_hidden": (4, 0)}, "PolicyAndValue: value_hidden must be an integer >= 1, got 0"),
        ({"value_activation": "rule"}, "PolicyAndValue: value_activation must be one of None, 'tanh', .*got 'rule'"),
        ({"value_hidden": (4,), "shared_torso": True}, r"MLP: value_hidden must be None with a shared torso, got \(4,\)"),
    ],
)
def test_a_wrong_setting_of_the_head_is_named(monkeypatch, settings, said):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises((TypeError, ValueError), match=said):
        MLP(head=PolicyAndValue(**settings))


def test_layers_of_a_critic_are_rejected_where_the_torso_is_usually_shared():
    with pytest.raises(ValueError, match="NatureCNN: value_activation must be None with a shared torso, got 'relu'"):
        NatureCNN(head=PolicyAndValue(value_activation="relu"))
    own = NatureCNN(head=PolicyAndValue(value_activation="elu", shared_torso=False))
    assert own.critic == dataclasses.replace(own.dense, activation="elu")


def test_the_activation_and_the_weights_are_those_of_the_head_where_they_are_not_set():
    by_head = [MLP((4,), head=head).dense for head in (PolicyAndValue(), polyak.QValues(), polyak.Quantiles())]
    relu = DenseSettings((4,), "relu", False)
    assert by_head == [DenseSettings((4,), "tanh", True), relu, relu]
    network = MLP((4,), activation="elu", orthogonal=True, head=polyak.QValues(noisy=True))
    assert network.dense == DenseSettings((4,), "elu", True, noisy=True)
    assert NatureCNN(head=PolicyAndValue()).dense == DenseSettings((512,), "relu", True)


@pytest.mark.parametrize("network", [MLP((4,)), polyak.GRU(4)])
def test_a_network_without_a_head_is_rejected_outside_of_an_agent(network):
    said = rf"{type(network).__name__}: head must be set outside of an agent, such as \w+\(head=PolicyAndValue\(\)\), got None"
    with pytest.raises(ValueError, match=said):
        network.init(KEY, EnvSpec(VECTOR, Discrete(4)))


def test_an_agent_completes_its_network():
    spec = EnvSpec(VECTOR, Discrete(4))
    made = [agent(spec, network=MLP((4,))).network for agent in (polyak.PPO, polyak.DQN, polyak.IQN)]
    assert made == [MLP((4,), head=head) for head in (PolicyAndValue(), polyak.QValues(), polyak.Quantiles())]
    distributional = polyak.C51(spec, network=MLP((4,), head=polyak.QValues(dueling=True)))
    assert distributional.network.head == polyak.QValues(dueling=True, outputs=51)
    exploring = polyak.PPO(EnvSpec(VECTOR, Box([-1.0], [1.0])), network=MLP((4,)), sde_sample_freq=4)
    assert exploring.network.head == PolicyAndValue(std="sde")


@pytest.mark.parametrize(
    "network", [MLP(head=polyak.QValues()), polyak.GRU(head=polyak.QValues()), MLP(head=polyak.Quantiles())]
)
def test_agents_of_actor_critics_reject_networks_of_action_values(network):
    for agent in (polyak.PPO, polyak.A2C, polyak.IMPALA):
        said = rf"{agent.__name__}: network must have the head PolicyAndValue, got {type(network.head).__name__}\(\)"
        with pytest.raises(ValueError, match=said):
            agent(EnvSpec(VECTOR, Discrete(4)), network=network)


@pytest.mark.parametrize("std", ["free", "state"])
def test_parts_may_be_called_as_the_methods_of_containers(std):
    names = ("items", "items_", "keys", "pop", "update", "train", "eval", "sow", "set_attributes", "__class__")
    # Each of its own size, so that no two can share their parameters.
    action = Dict({name: Box(-np.ones(size), np.ones(size)) for size, name in enumerate(names, 1)})
    _, _, (params, _) = outputs(MLP((4,), head=PolicyAndValue(std=std, log_std=-1.0)), EnvSpec(VECTOR, action))
    for size, name in enumerate(names, 1):
        assert params[name]["loc"].shape == (5, size) and params[name]["log_scale"].shape[-1] == size
        assert jnp.all(params[name]["log_scale"] == -1.0)


def test_answers_are_float32_where_jax_holds_doubles():
    with jax.enable_x64(True):
        _, _, answers = outputs(
            MLP((4,), head=PolicyAndValue()), EnvSpec(VECTOR, Dict({"go": Box([-1.0], [1.0]), "on": Discrete(2)}))
        )
    assert {x.dtype for x in jax.tree.leaves(answers)} == {jnp.dtype(jnp.float32)}

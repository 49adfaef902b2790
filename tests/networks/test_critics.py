"""Critics computed together equal critics computed one by one; what settings do to the output, and which are rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0] * 2, [1.0] * 2))
RNG = np.random.default_rng(0)
OBS, ACTION = (jnp.asarray(RNG.normal(size=(4, n)), jnp.float32) for n in (3, 2))


def in_numpy(params, number, x=None):
    """The forward pass of one critic, with relu and layer normalisation where it has one."""
    x = np.concatenate([OBS, ACTION], axis=1) if x is None else np.asarray(x)
    layers = [params["layers"][i] for i in range(len(params["layers"]))]
    for layer in layers:
        x = x @ np.asarray(layer["linear"]["kernel"])[number] + np.asarray(layer["linear"]["bias"])[number]
        if "norm" in layer:
            x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
            x = x * np.asarray(layer["norm"]["scale"])[number] + np.asarray(layer["norm"]["bias"])[number]
        x = np.maximum(x, 0.0)
    return x @ np.asarray(params["head"]["kernel"])[number] + np.asarray(params["head"]["bias"])[number]


@pytest.mark.parametrize(("norm", "num_quantiles"), [(None, None), ("layer", None), ("layer", 7)])
def test_critics_are_computed_together_as_one_by_one(norm, num_quantiles):
    network = polyak.Critics((8, 6), num_critics=3, norm=norm, num_quantiles=num_quantiles)
    variables = network.init(KEY, SPEC)
    (q, value), _, _ = network.apply(variables, (OBS, ACTION))
    wanted = np.stack([in_numpy(variables.params, i) for i in range(3)], axis=1)
    np.testing.assert_allclose(q, wanted if num_quantiles else wanted[..., 0], atol=1e-5)
    assert value is None and q.shape == ((4, 3, 7) if num_quantiles else (4, 3))


def test_critics_start_different():
    (q, _), _, _ = polyak.Critics((8,)).apply(polyak.Critics((8,)).init(KEY, SPEC), (OBS, ACTION))
    assert float(jnp.abs(q[:, 0] - q[:, 1]).min()) > 1e-3


def test_dropout_needs_the_training_phase():
    network = polyak.Critics((64,), dropout=0.5)
    variables = network.init(KEY, SPEC)
    (plain, _), _, _ = network.apply(variables, (OBS, ACTION))
    (again, _), _, _ = network.apply(variables, (OBS, ACTION))
    (dropped, _), _, _ = network.apply(variables, (OBS, ACTION), train=True, key=KEY)
    np.testing.assert_array_equal(plain, again)
    assert float(jnp.abs(plain - dropped).max()) > 1e-3


def test_an_image_passes_through_convolutions_that_critics_share():
    spec = EnvSpec(Box(0, 255, (36, 36, 3), np.uint8), SPEC.action)
    network = polyak.Critics((8,), num_critics=3)
    variables = network.init(KEY, spec)
    (q, _), _, _ = network.apply(variables, (jnp.zeros((2, 36, 36, 3), jnp.uint8), ACTION[:2]))
    assert q.shape == (2, 3) and len(variables.params["encoder"]["images"]) == 1


def test_actions_in_a_tree_are_concatenated():
    spec = EnvSpec(SPEC.obs, Dict({"a": Box([-1.0], [1.0]), "b": Box([-1.0], [1.0])}))
    network = polyak.Critics((8,))
    variables = network.init(KEY, spec)
    tree = {"a": ACTION[:, :1], "b": ACTION[:, 1:]}
    (q, _), _, _ = network.apply(variables, (OBS, tree))
    (flat, _), _, _ = network.apply(variables, (OBS, ACTION))
    np.testing.assert_array_equal(q, flat)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_critics": 0}, "num_critics"),
        ({"num_quantiles": 0}, "num_quantiles"),
        ({"dropout": 1.0}, "dropout"),
        ({"hidden": (0,)}, "hidden"),
        ({"norm": 1.5}, "norm"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        polyak.Critics(**settings)


def test_critics_need_actions_of_boxes_or_one_discrete():
    tree = Dict({"a": Box([-1.0], [1.0]), "b": Discrete(2)})
    with pytest.raises(ValueError, match=r"critics need actions of Boxes or one Discrete, got .*Discrete.* at action 'b'"):
        polyak.Critics().init(KEY, EnvSpec(SPEC.obs, tree))
    with pytest.raises(ValueError, match="num_quantiles must be None for Discrete actions, got 7"):
        polyak.Critics(num_quantiles=7).init(KEY, EnvSpec(SPEC.obs, Discrete(2)))


def test_critics_of_discrete_actions_return_the_value_of_each():
    network, spec = polyak.Critics((8,), num_critics=3), EnvSpec(SPEC.obs, Discrete(4))
    variables = network.init(KEY, spec)
    (q, _), _, _ = network.apply(variables, (OBS, jnp.zeros(4, jnp.int32)))
    wanted = np.stack([in_numpy(variables.params, i, OBS) for i in range(3)], axis=1)
    assert q.shape == (4, 3, 4)
    np.testing.assert_allclose(q, wanted, atol=1e-5)


def test_the_deviation_of_an_actor_depends_on_the_state_is_a_parameter_or_fixed():
    spec, deviations = SPEC, {}
    for std in ("state", "free", "fixed"):
        network = polyak.Actor((8,), std=std, log_std=-0.5)
        variables = network.init(KEY, spec)
        (params, value), _, _ = network.apply(variables, OBS)
        assert value is None and params["loc"].shape == params["log_scale"].shape == (4, 2)
        np.testing.assert_allclose(params["log_scale"], -0.5)
        deviations[std] = sum(x.size for x in jax.tree.leaves(variables.params))
    layers = 3 * 8 + 8 + 8 * 2 + 2
    assert deviations == {"fixed": layers, "free": layers + 2, "state": layers + 8 * 2 + 2}


def test_the_deviation_of_an_actor_stays_in_a_range_whose_density_is_finite():
    network = polyak.Actor((8,), std="free", log_std=9.0)
    (params, _), _, _ = network.apply(network.init(KEY, SPEC), OBS)
    np.testing.assert_allclose(params["log_scale"], 2.0)


def test_the_mean_of_an_actor_is_clipped():
    def mean_of(network):
        return network.apply(network.init(KEY, SPEC), OBS)[0][0]["loc"]

    wanted = mean_of(polyak.Actor((8,)))
    limit = float(np.median(np.abs(wanted)))
    found = mean_of(polyak.Actor((8,), clip_mean=limit))
    np.testing.assert_allclose(found, np.clip(wanted, -limit, limit), rtol=1e-6)
    assert not np.array_equal(found, wanted)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="clip_mean must be"):
            polyak.Actor(clip_mean=wrong)
    with pytest.raises(ValueError, match=r"Actor: clip_mean must be None with squash_mean=True, got 0\.5"):
        polyak.Actor(squash_mean=True, clip_mean=0.5)

"""Networks of action values: their shapes, dueling heads, noise, normalisation, and quantiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import Quantiles, QValues
from polyak.networks.layers import NoisyLayer
from polyak.networks.q_network import ExpectedValues, is_noisy, q_network_or_default

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
IMAGE = EnvSpec(Box(0, 255, (36, 36, 4), np.uint8), Discrete(4))
OBS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def applied(network, key=None, obs=OBS, spec=SPEC):
    return network.apply(network.init(KEY, spec), obs, key=key)[0]


@pytest.mark.parametrize(
    "network",
    [
        MLP(head=QValues()),
        MLP(head=QValues(dueling=True)),
        MLP(head=QValues(noisy=True)),
        MLP(norm="layer", head=QValues()),
        MLP((), head=QValues()),
    ],
)
def test_values_and_distributions_of_all_actions(network):
    q, value = applied(network)
    assert q.shape == (5, 4) and value.shape == (5,)
    np.testing.assert_array_equal(value, q.max(axis=1))
    head = dataclasses.replace(network.head, outputs=7)
    assert applied(dataclasses.replace(network, head=head)).shape == (5, 4, 7)


def test_images_go_through_convolutions():
    obs = jnp.zeros((2, 36, 36, 4), jnp.uint8)
    assert q_network_or_default("DQN", None, IMAGE, QValues()).hidden == (512,)
    assert applied(NatureCNN((16,), head=QValues()), obs=obs, spec=IMAGE)[0].shape == (2, 4)
    assert q_network_or_default("IQN", None, IMAGE, Quantiles()).hidden == (512,)
    assert applied(NatureCNN((16,), head=Quantiles()), obs=obs, spec=IMAGE)[0].shape == (2, 4)


@pytest.mark.parametrize("outputs", [None, 3])
def test_the_mean_advantage_of_a_dueling_network_is_zero(outputs):
    network = MLP((8,), head=QValues(dueling=True, outputs=outputs))
    variables = network.init(KEY, SPEC)
    # Without its value head, what is left are the advantages.
    head = variables.params["head"]["value"]
    head |= {name: jnp.zeros_like(x) for name, x in head.items()}
    out, _, _ = network.apply(variables, OBS)
    np.testing.assert_allclose((out if outputs else out[0]).mean(axis=1), 0.0, atol=1e-6)


def test_layer_norm_makes_features_independent_of_the_scale_of_weights():
    network = MLP((8,), norm="layer", head=QValues())
    variables = network.init(KEY, SPEC)
    before = network.apply(variables, OBS)[0][0]
    layer = variables.params["dense"]["layers"][0]
    layer |= {name: 100.0 * x for name, x in layer.items()}
    np.testing.assert_allclose(network.apply(variables, OBS)[0][0], before, rtol=1e-3, atol=1e-4)


def test_noise_is_drawn_with_the_key_for_each_row():
    network = MLP((8,), head=QValues(noisy=True))
    same_rows = jnp.broadcast_to(OBS[:1], OBS.shape)
    one, again, other = (applied(network, jax.random.key(seed), same_rows)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (np.asarray(one) != other).any() and (np.asarray(one)[0] != np.asarray(one)[1]).any()
    mean = applied(network, None, same_rows)[0]
    np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
    assert is_noisy(network) and is_noisy(ExpectedValues(network)) and not is_noisy(MLP(head=QValues()))


def test_noise_of_a_layer_has_the_mean_and_variance_of_factorised_noise():
    """y = (μ + σ f(ε_in) f(ε_out)) x + μ_b + σ_b f(ε_out) with E f² = E|ε| = √(2/π)."""
    from flax import nnx

    layer = NoisyLayer(2, 1, nnx.Rngs(0))
    x = jnp.broadcast_to(jnp.array([[2.0, -1.0]]), (200_000, 2))
    y = np.asarray(layer(x, KEY))
    std, spread = 0.5 / np.sqrt(2), np.sqrt(2 / np.pi)
    np.testing.assert_allclose(y.mean(), layer(x[:1], None)[0, 0], atol=0.01)
    np.testing.assert_allclose(y.var(), std**2 * spread * (spread * (4 + 1) + 1), rtol=0.03)


def test_expected_values_are_means_of_atoms_and_of_quantiles():
    logits = jnp.log(jnp.array([[[0.2, 0.3, 0.5], [1.0, 1e-9, 1e-9]]]))
    np.testing.assert_allclose(ExpectedValues(MLP(head=QValues()), (-1.0, 1.0)).q(logits), [[0.3, -1.0]], atol=1e-6)
    np.testing.assert_allclose(ExpectedValues(MLP(head=QValues())).q(jnp.array([[[1.0, 2.0, 6.0]]])), [[3.0]])


def test_quantiles_depend_on_their_fraction_and_row_only():
    network = MLP((8, 8), head=Quantiles(dueling=True))
    variables = network.init(KEY, SPEC)
    tau = jnp.asarray(np.random.default_rng(1).uniform(size=(5, 6)), jnp.float32)
    quantiles = network.quantiles(variables, OBS, tau)
    assert quantiles.shape == (5, 4, 6)
    alone = network.quantiles(variables, OBS[2:3], tau[2:3, 4:5])
    np.testing.assert_allclose(alone[0, :, 0], quantiles[2, :, 4], rtol=1e-5)
    (q, value), _, _ = network.apply(variables, OBS)
    assert q.shape == (5, 4) and value.shape == (5,)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: MLP((0,), head=QValues()), "hidden must be an integer"),
        (lambda: MLP(head=QValues(outputs=0)), "outputs must be an integer"),
        (lambda: MLP((), head=Quantiles()), "hidden must have at least one layer"),
        (
            lambda: q_network_or_default("IQN", MLP(head=QValues()), SPEC, Quantiles()),
            "IQN: network must have the head Quantiles",
        ),
    ],
)
def test_settings_of_networks_are_checked(network, message):
    with pytest.raises((TypeError, ValueError), match=message):
        network()

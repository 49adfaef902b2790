"""Unit weight vectors: the layers that have them, in built-in networks and in others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyak
from polyak.core.types import Variables
from polyak.ops.gradient_step import Aux, apply_gradient
from polyak.ops.weight_norm import DenseKernels, on_unit_spheres
from tests.agents.test_actor_critics import SPEC

KEY = jax.random.key(0)
NORM = {"norm": "batch", "norm_inputs": True}


class Attention(nnx.Module):
    """An actor with a convolution and attention, whose kernels have three axes, before a dense layer."""

    def __init__(self, spec, rngs):
        self.convolution = nnx.Conv(1, 4, kernel_size=(3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.mean = nnx.Linear(12, 2, rngs=rngs)

    def __call__(self, obs):
        x = self.attention(self.convolution(obs[..., None])).reshape(len(obs), -1)
        return {"loc": self.mean(x), "log_scale": jnp.zeros((len(obs), 2))}, None


class Values(nnx.Module):
    """Two critics whose last layer has this name."""

    def __init__(self, spec, rngs, *, name):
        setattr(self, name, nnx.Linear(8, 2, rngs=rngs))
        self.name, self.first = name, nnx.Linear(5, 8, rngs=rngs)

    def __call__(self, inputs):
        return getattr(self, self.name)(jax.nn.relu(self.first(jnp.concatenate(inputs, axis=-1)))), None


def norms(params):
    """The norms of the weight vectors of all kernels, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kernels = {key: x for path, x in leaves if "kernel" in (key := jax.tree_util.keystr(path))}
    return {path: np.linalg.norm(x, axis=-2) for path, x in kernels.items()}


@pytest.mark.parametrize("name", ["SAC", "TQC", "CrossQ", "CQL", "XQC"])
def test_only_critics_of_logits_have_unit_weights_in_the_last_layer(name):
    networks = {"actor": polyak.Actor((8,), **NORM), "critics": polyak.Critics((8,), **NORM)}
    plain, agent = (
        getattr(polyak, name)(SPEC, **networks, replay=polyak.UniformReplay(64), weight_norm=on) for on in (False, True)
    )
    old, new = (norms(one.init(KEY).copies.critics.online.params) for one in (plain, agent))
    (head,) = (path for path in new if path.startswith("['head']"))
    np.testing.assert_allclose(new[head], 1.0 if name == "XQC" else old[head], rtol=1e-5)
    assert len(new) == 2 and not np.allclose(old[head], 1.0)
    for path in new.keys() - {head}:
        np.testing.assert_allclose(new[path], 1.0, rtol=1e-5)
    for norm in norms(agent.init(KEY).copies.actor.online.params).values():
        assert np.allclose(norm, 1.0) or not norm.any(), "the layer of the standard deviation starts at 0"


def test_convolutions_and_attention_are_left_out():
    critics = polyak.FlaxNNX(lambda spec, rngs: Values(spec, rngs, name="head"))
    networks = {"actor": polyak.FlaxNNX(Attention), "critics": critics}
    plain, agent = (polyak.SAC(SPEC, **networks, replay=polyak.UniformReplay(64), weight_norm=on) for on in (False, True))
    old, new = (
        (one.init(KEY).copies.actor.online.params, one.init(KEY).copies.critics.online.params) for one in (plain, agent)
    )
    changed = [path for path, norm in norms(new).items() if not np.array_equal(norm, norms(old)[path])]
    assert changed == ["[0]['mean']['kernel']", "[1]['first']['kernel']"] and len(norms(new)) == 8
    for path in changed:
        np.testing.assert_allclose(norms(new)[path], 1.0, rtol=1e-5)


def test_other_critics_of_values_name_their_last_layer():
    critics = polyak.FlaxNNX(lambda spec, rngs: Values(spec, rngs, name="last"))
    agent = polyak.SAC(SPEC, polyak.Actor(**NORM), critics, replay=polyak.UniformReplay(64), weight_norm=True)
    with pytest.raises(ValueError, match=r"weight_norm=True needs .* and a last layer named head in critics, got FlaxNNX"):
        agent.init(KEY)


def test_networks_without_normalization_are_warned_of():
    agent = polyak.SAC(SPEC, polyak.Actor(**NORM), replay=polyak.UniformReplay(64), weight_norm=True)
    with pytest.warns(
        UserWarning, match=r"SAC: critics has no normalization.* use polyak\.Critics\(\.\.\., norm='batch'\)"
    ) as found:
        agent.init(KEY)
    assert len(found) == 1


def test_an_optimizer_s_step_ends_on_the_spheres_and_leaves_other_layers_to_it():
    params = {name: {"kernel": jax.random.normal(KEY, (3, 2))} for name in ("first", "head")}
    gradient = jax.tree.map(jnp.ones_like, params)
    sgd, kernels = optax.sgd(0.1), DenseKernels(without=("head",))
    optimizer = on_unit_spheres(sgd, kernels)
    state = optimizer.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(sgd.init(params))
    after, _, _ = apply_gradient(optimizer, Variables(params), state, gradient, Aux({}), {}, jnp.array(True))
    stepped = jax.tree.map(lambda x: np.asarray(x) - 0.1, params)
    first = stepped["first"]["kernel"]
    np.testing.assert_allclose(after.params["first"]["kernel"], first / np.linalg.norm(first, axis=0), rtol=1e-5)
    np.testing.assert_allclose(after.params["head"]["kernel"], stepped["head"]["kernel"], rtol=1e-6)

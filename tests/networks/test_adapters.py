"""Users' networks: the same answers as calling the module, and statistics that move in training only."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Network, Variables
from polyak.networks.adapters import Equinox, FlaxLinen, FlaxNNX
from tests.agents.rollouts import same_bits

KEY = jax.random.key(0)
SPEC = EnvSpec(Box(-np.ones(3), np.ones(3)), Discrete(2))
OBS = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, (16, 3)), jnp.float32)


class NNXNet(nnx.Module):
    def __init__(self, spec, rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.policy = nnx.Linear(3, spec.action.n, rngs=rngs)
        self.value = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, obs):
        x = self.dropout(self.norm(obs))
        return self.policy(x), self.value(x)[..., 0]


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, obs, train=False):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(obs)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(2)(x), linen.Dense(1)(x)[..., 0]


class LinenPlain(linen.Module):
    @linen.compact
    def __call__(self, obs):
        return linen.Dense(2)(obs), linen.Dense(1)(obs)[..., 0]


class EquinoxNet(eqx.Module):
    torso: eqx.nn.MLP
    policy: eqx.nn.Linear
    value: eqx.nn.Linear
    table: jax.Array

    def __init__(self, spec, key):
        keys = jax.random.split(key, 3)
        self.torso = eqx.nn.MLP(3, 4, 8, 1, key=keys[0])
        self.policy = eqx.nn.Linear(4, spec.action.n, key=keys[1])
        self.value = eqx.nn.Linear(4, 1, key=keys[2])
        self.table = jnp.arange(2)

    def __call__(self, obs):
        x = self.torso(obs)
        return self.policy(x) + self.table.astype(jnp.float32), self.value(x)[0]


class EquinoxWithDropout(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, spec, key):
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, obs, key=None):
        x = self.dropout(self.linear(obs), key=key)
        return x, x.sum()


class WithWidth(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, 2, rngs=rngs)


NETWORKS = {
    "NNX": FlaxNNX(NNXNet),
    "Linen": FlaxLinen(LinenNet(), train_argument="train"),
    "Linen without phases": FlaxLinen(LinenPlain()),
    "Equinox": Equinox(EquinoxNet),
}
WITH_STATISTICS = {name: NETWORKS[name] for name in ("NNX", "Linen")}


def called(name, variables):
    """The module's own answer in evaluation mode."""
    match name:
        case "NNX":
            module = NNXNet(SPEC, nnx.Rngs(KEY))
            module.eval()
            return module(OBS)
        case "Equinox":
            return jax.vmap(EquinoxNet(SPEC, KEY))(OBS)
        case _:
            return NETWORKS[name].module.apply({"params": variables.params, **variables.stats}, OBS)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_answer_is_the_modules(name):
    network = NETWORKS[name]
    assert isinstance(network, Network)
    variables = network.init(KEY, SPEC)
    out, carry, stats = network.apply(variables, OBS)
    for mine, theirs in zip(out, called(name, variables), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert carry == () and same_bits(stats, variables.stats)
    assert network.apply(variables, OBS, ("memory",))[1] == ("memory",)


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_floats_and_everything_else_is_statistics(name):
    variables = NETWORKS[name].init(KEY, SPEC)
    assert variables.params and all(x.dtype == jnp.float32 for x in jax.tree.leaves(variables.params))
    kinds = {str(x.dtype) for x in jax.tree.leaves(variables.stats)}
    wanted = {
        "NNX": {"float32", "uint32", "key<fry>"},
        "Linen": {"float32"},
        "Linen without phases": set(),
        "Equinox": {"int32"},
    }
    assert kinds == wanted[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_one_compilation_serves_all_variables(name):
    network = NETWORKS[name]
    forward = jax.jit(lambda variables, obs: network.apply(variables, obs)[0])
    for seed in range(3):
        forward(network.init(jax.random.key(seed), SPEC), OBS)
    assert forward._cache_size() == 1


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_statistics_move_in_training_only(name):
    network = NETWORKS[name]
    variables = network.init(KEY, SPEC)
    _, _, stats = network.apply(variables, OBS, train=True, key=KEY)
    assert jax.tree.structure(stats) == jax.tree.structure(variables.stats)
    norm = stats["norm"] if name == "NNX" else stats["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(norm["mean"], 0.5 * OBS.mean(0), rtol=1e-4)
    np.testing.assert_allclose(norm["var"], 0.5 + 0.5 * OBS.var(0), rtol=1e-4)
    again = network.apply(Variables(variables.params, stats, variables.graph), OBS)[2]
    assert same_bits(again, stats)


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_dropout_follows_the_key_in_training_and_is_off_otherwise(name):
    network = NETWORKS[name]
    variables = network.init(KEY, SPEC)
    a, b, c = (network.apply(variables, OBS, train=True, key=jax.random.key(seed))[0][1] for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    d, e = (network.apply(variables, OBS, key=jax.random.key(seed))[0][1] for seed in (1, 2))
    assert np.array_equal(d, e)


def test_networks_made_alike_are_equal():
    assert FlaxNNX(NNXNet) == FlaxNNX(NNXNet) and hash(FlaxLinen(LinenPlain())) == hash(FlaxLinen(LinenPlain()))
    assert FlaxLinen(LinenPlain()) != FlaxLinen(LinenNet())


@pytest.mark.parametrize(
    ("adapter", "given", "said"),
    [
        (FlaxNNX, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "make must be a function or class of .*, got a Linear"),
        (FlaxNNX, 3, "make must be a function or class of .*, got a int"),
        (FlaxLinen, linen.Dense, "module must be a Linen module, such as Net\\(\\), got the class Dense"),
        (Equinox, eqx.nn.Linear(2, 2, key=jax.random.key(0)), "make must be a function or class of .*, got a Linear"),
    ],
)
def test_modules_where_their_makers_belong_are_refused_by_name(adapter, given, said, unchecked):
    with pytest.raises(TypeError, match=f"^{adapter.__name__}: {said}"):
        adapter(given)


def test_functions_with_two_arguments_by_position_build_modules():
    FlaxNNX(functools.partial(lambda width, spec, rngs: WithWidth(width, rngs=rngs), 3)).init(KEY, SPEC)
    FlaxNNX(lambda *args: WithWidth(3, rngs=args[1])).init(KEY, SPEC)
    with pytest.raises(TypeError, match=r"^FlaxNNX: make\(spec, rngs\) must return an NNX module, got a int"):
        FlaxNNX(lambda spec, rngs: 3).init(KEY, SPEC)


def test_dropout_of_an_equinox_module_is_on_in_training_with_a_key_for_each_row():
    network = Equinox(EquinoxWithDropout)
    variables, rows = network.init(KEY, SPEC), jnp.ones((64, 3))
    plain = network.apply(variables, rows)[0][0]
    np.testing.assert_array_equal(network.apply(variables, rows, key=KEY)[0][0], plain)
    dropped = network.apply(variables, rows, train=True, key=KEY)[0][0]
    assert set(np.unique(np.isclose(dropped, 2 * plain))) == {False, True} == set(np.unique(dropped == 0))
    assert len(np.unique(dropped == 0, axis=0)) == 4


class OwnStream(nnx.Module):
    def __init__(self, spec, rngs):
        self.dropout = nnx.Dropout(0.5, rng_collection="noise", rngs=rngs)

    def __call__(self, obs):
        return self.dropout(obs)


def test_streams_of_any_name_follow_the_key_and_stay_as_they_are():
    network = FlaxNNX(OwnStream)
    variables = network.init(KEY, SPEC)
    (a, _, stats), (b, _, _), (c, _, _) = (network.apply(variables, OBS, train=True, key=jax.random.key(n)) for n in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert same_bits(stats, variables.stats)


@pytest.mark.parametrize(
    ("network", "layers"),
    [
        (FlaxNNX(NNXNet), ["BatchNorm norm", "Dropout dropout"]),
        (FlaxLinen(LinenNet(), "train"), ["BatchNorm BatchNorm_0"]),
        (FlaxLinen(LinenPlain()), []),
        (Equinox(EquinoxNet), []),
        (Equinox(EquinoxWithDropout), ["Dropout"]),
    ],
)
def test_layers_of_the_training_mode_are_named(network, layers):
    assert network.training_layers(network.init(KEY, SPEC)) == layers

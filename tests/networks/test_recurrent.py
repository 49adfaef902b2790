"""Networks with a memory: their cells are those of the textbook, and time goes through them step by step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.types import Network, RecurrentNetwork
from polyak.networks.actor_critic import check_actor_critic
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue, Quantiles, QValues
from polyak.networks.recurrent import GRU, LSTM, Recurrent
from polyak.networks.unroll import reset_carry, unroll
from tests.agents.rollouts import same_bits, sample

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-1.0] * 3, [1.0] * 3), Box([-1.0] * 2, [1.0] * 2))
NETWORKS = {
    "lstm": LSTM(4, hidden=(3,), head=PolicyAndValue()),
    "gru": GRU(4, hidden=(3,), head=PolicyAndValue()),
    "shared": LSTM(4, hidden=(3,), head=PolicyAndValue(shared_torso=True)),
    "without layers": GRU(3, hidden=(), head=PolicyAndValue(std="state")),
}
NUM_STEPS, NUM_ENVS = 6, 3
each_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())

unrolled = jax.jit(unroll, static_argnums=0)
fresh = jax.jit(lambda network, key: network.init(key, SPEC), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def one_step(network, variables, obs, carry, first):
    return network.apply(variables, obs, reset_carry(network, carry, first))


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's network, whose memory is the sum of what it saw, and begins at 10."""

    def init(self, key, spec):
        return MLP((2,), head=PolicyAndValue()).init(key, spec)

    def initial_carry(self, batch_size):
        return {"sum": jnp.full((batch_size, 3), 10.0)}

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        total = carry["sum"] + obs
        out, _, stats = MLP((2,), head=PolicyAndValue()).apply(variables, total)
        return out, {"sum": total}, stats


def data(seed=0, spec=SPEC):
    """Observations, and episodes that begin in the middle, at the start and at the end."""
    rng = np.random.default_rng(seed)
    obs = jax.tree.map(jnp.asarray, sample(spec.obs, rng, (NUM_STEPS, NUM_ENVS)))
    first = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    first[2, 0] = first[0, 1] = first[5, 1] = True
    return obs, jnp.asarray(first)


def grown(network, seed=0, spec=SPEC):
    """Variables that are all random, so that every one of them matters."""
    variables = jax.eval_shape(lambda key: network.init(key, spec), KEY)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape), jnp.float32), variables.params)
    return dataclasses.replace(variables, params=params)


def random_carry(network, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), network.initial_carry(NUM_ENVS))


def close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **{"rtol": 1e-5, "atol": 1e-6, **tolerance}), a, b)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_lstm(cell, x, c, h):
    gates = [x @ w + h @ u + b for w, u, b in zip(*(np.split(part, 4, axis=-1) for part in cell), strict=True)]
    i, f, o = (sigmoid(gates[k]) for k in (0, 1, 3))
    c = f * c + i * np.tanh(gates[2])
    return (c, o * np.tanh(c)), o * np.tanh(c)


def slow_gru(cell, x, h):
    (wr, wz, wn), (ur, uz, un), (br, bz, bn) = (np.split(part, 3, axis=-1) for part in cell)
    r, z = sigmoid(x @ wr + br + h @ ur), sigmoid(x @ wz + bz + h @ uz)
    n = np.tanh(x @ wn + bn + r * (h @ un))
    h = (1 - z) * n + z * h
    return h, h


def slow(network, params, obs, first, carry):
    """`(loc, value)` of one network after the other, all in NumPy with 64 bits."""
    params, obs, carry = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, obs, carry))
    outs = {}
    for name, head in (("actor", params["policy"]["linear"]), ("critic", params["value"])):
        layers, cell = params[name]["torso"]["dense"]["layers"], params[name]["cell"]
        bias = cell["dense_h" if isinstance(network, LSTM) else "dense_i"]["bias"]
        weights = (cell["dense_i"]["kernel"], cell["dense_h"]["kernel"], bias)
        memory, outs[name] = carry[name], []
        for t in range(NUM_STEPS):
            memory = jax.tree.map(lambda x, now=first[t]: np.where(np.asarray(now)[:, None], 0.0, x), memory)
            x = np.tanh(obs[t] @ layers[0]["kernel"] + layers[0]["bias"])
            if isinstance(network, LSTM):
                memory, out = slow_lstm(weights, x, *memory)
            else:
                memory, out = slow_gru(weights, x, memory)
            outs[name].append(out @ head["kernel"] + head["bias"])
    return np.array(outs["actor"]), np.array(outs["critic"])[..., 0]


@pytest.mark.parametrize(
    "network", [LSTM(4, hidden=(3,), head=PolicyAndValue()), GRU(4, hidden=(3,), head=PolicyAndValue())], ids=["lstm", "gru"]
)
def test_the_cells_are_those_of_the_textbook(network):
    variables, carry = grown(network), random_carry(network)
    obs, first = data()
    (params, value), _ = unrolled(network, variables, obs, first, carry)
    loc, slow_value = slow(network, variables.params, obs, first, carry)
    np.testing.assert_allclose(params["loc"], loc, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, slow_value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", [*NETWORKS.values(), Own()], ids=[*NETWORKS.keys(), "own"])
def test_all_steps_at_once_are_one_step_after_the_other(network):
    variables, carry = grown(network), random_carry(network)
    obs, first = data()
    out, after = unrolled(network, variables, obs, first, carry)
    outs = []
    for t in range(NUM_STEPS):
        now, carry, _ = one_step(network, variables, obs[t], carry, first[t])
        outs.append(now)
    close(out, jax.tree.map(lambda *x: np.stack(x), *outs))
    close(after, carry)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((out, after)))


@pytest.mark.parametrize("network", [NETWORKS["lstm"], NETWORKS["gru"], Own()], ids=["lstm", "gru", "own"])
def test_an_episode_knows_nothing_of_the_one_before(network):
    variables, (obs, first) = grown(network), data()
    one, two = random_carry(network, 1), random_carry(network, 2)
    two = jax.tree.map(lambda x: x.at[1].set(jnp.nan), two)
    (_, a), _ = unrolled(network, variables, obs, first, one)
    (_, b), _ = unrolled(network, variables, obs.at[1, 0].add(1.0), first, two)
    same = np.asarray(a) == np.asarray(b)
    # Environment 0 begins anew in row 2, 1 in rows 0 and 5, 2 never.
    assert same[2:, 0].all() and not same[:2, 0].any()
    assert same[:, 1].all() and not same[:, 2].any()


@pytest.mark.parametrize("network", [NETWORKS["lstm"], Own()], ids=["lstm", "own"])
def test_no_carry_is_the_initial_one(network):
    variables, (obs, first) = grown(network), data()
    initial = network.initial_carry(NUM_ENVS)
    close(unrolled(network, variables, obs, first, ()), unrolled(network, variables, obs, first, initial), atol=0, rtol=0)
    assert same_bits(reset_carry(network, (), first[0]), initial)
    if isinstance(network, Recurrent):
        assert same_bits(network.apply(variables, obs[0]), network.apply(variables, obs[0], initial))


def test_a_network_without_memory_has_nothing_to_reset():
    assert reset_carry(MLP(head=PolicyAndValue()), (), jnp.ones(3, bool)) == ()
    assert isinstance(LSTM(), RecurrentNetwork) and isinstance(LSTM(), Network) and not isinstance(MLP(), RecurrentNetwork)


def test_the_carry_has_a_part_for_each_cell():
    pair = {"actor": ((5, 4), (5, 4)), "critic": ((5, 4), (5, 4))}
    shapes = [jax.tree.map(jnp.shape, network.initial_carry(5)) for network in NETWORKS.values()]
    assert shapes == [pair, {"actor": (5, 4), "critic": (5, 4)}, {"actor": pair["actor"]}, {"actor": (5, 3), "critic": (5, 3)}]
    assert all(x.dtype == jnp.float32 and not x.any() for x in jax.tree.leaves(LSTM(head=PolicyAndValue()).initial_carry(5)))


@pytest.mark.parametrize(
    "network",
    [LSTM(3, hidden=(2,), head=PolicyAndValue()), GRU(3, hidden=(2,), head=PolicyAndValue(shared_torso=True))],
    ids=["lstm", "gru shared"],
)
def test_gradients_through_time_are_finite_differences(network):
    variables, carry = grown(network), random_carry(network)
    obs, first = data()
    rng = np.random.default_rng(5)
    weight = jnp.asarray(rng.normal(size=(NUM_STEPS, NUM_ENVS)), jnp.float32)

    @jax.jit
    def loss(params, carry):
        (action, value), _ = unroll(network, dataclasses.replace(variables, params=params), obs, first, carry)
        return jnp.sum(weight * (jnp.square(value) + action["loc"].sum(-1)))

    at = (variables.params, carry)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(*at)
    # Direction after direction, one for each leaf, so that a leaf that is wrong cannot hide behind the others.
    leaves, tree = jax.tree.flatten(at)
    for i, (x, slope) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
        direction = rng.normal(size=x.shape).astype(np.float32)
        there, back = (
            loss(*jax.tree.unflatten(tree, [*leaves[:i], x + e * direction, *leaves[i + 1 :]])) for e in (0.01, -0.01)
        )
        np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), (there - back) / 0.02, rtol=5e-3, atol=5e-3)


def test_no_gradient_flows_into_the_episode_before():
    network = NETWORKS["lstm"]
    variables, carry, (obs, first) = grown(network), random_carry(network), data()
    gradient = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(unroll(network, variables, x, first, carry)[0][1][3:])))(obs))
    assert not gradient[:2, 0].any() and gradient[2:, 0].any(axis=-1).all()
    assert gradient[:, 2].any(axis=-1).all() and gradient[0, 1].any()


def test_many_sets_of_weights_at_once():
    network = NETWORKS["gru"]
    obs, first = data()
    several = [grown(network, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *several)
    together = jax.jit(jax.vmap(lambda variables: unroll(network, variables, obs, first, ())))(stacked)
    for i, variables in enumerate(several):
        close(jax.tree.map(lambda x, i=i: x[i], together), unrolled(network, variables, obs, first, ()))


def test_observations_of_every_kind_go_in():
    image = Box(0, 255, (36, 36, 1), np.uint8)
    spec = EnvSpec(Dict({"cam": image, "n": Discrete(3), "x": SPEC.obs}), Dict({"a": Discrete(2), "b": SPEC.action}))
    network = LSTM(3, hidden=(2,), head=PolicyAndValue(shared_torso=True))
    variables, (obs, first) = jax.jit(lambda key: network.init(key, spec))(KEY), data(spec=spec)
    (params, value), _ = unrolled(network, variables, obs, first, ())
    wanted = {"a": (2,), "b": {"loc": (2,), "log_scale": (2,)}}
    assert jax.tree.map(lambda x: x.shape[2:], params) == wanted and value.shape == (NUM_STEPS, NUM_ENVS)
    check_actor_critic(network, variables, spec)


def test_a_fresh_cell_has_orthogonal_recurrent_weights_and_an_open_forget_gate():
    of_lstm, of_gru = (
        fresh(n, KEY).params for n in (LSTM(3, hidden=(2,), head=PolicyAndValue()), GRU(3, hidden=(2,), head=PolicyAndValue()))
    )
    assert np.array_equal(of_lstm["actor"]["cell"]["dense_h"]["bias"], np.repeat([0, 1, 0, 0], 3))
    assert not of_gru["actor"]["cell"]["dense_i"]["bias"].any()
    for params in (of_lstm, of_gru):
        for name in ("actor", "critic"):
            kernel = np.asarray(params[name]["cell"]["dense_h"]["kernel"])
            np.testing.assert_allclose(kernel @ kernel.T, np.eye(3), atol=1e-6)
        assert not np.array_equal(*(params[name]["cell"]["dense_h"]["kernel"] for name in ("actor", "critic")))


def test_recurrent_networks_are_compared_and_hashed_by_value():
    assert LSTM(4) == LSTM(4) != GRU(4) and hash(LSTM(4)) == hash(LSTM(4)) and LSTM(4) != LSTM(4, head=PolicyAndValue())
    a, b = (fresh(LSTM(3, hidden=(2,), head=PolicyAndValue()), jax.random.key(seed)) for seed in (0, 1))
    assert jax.tree.structure(a) == jax.tree.structure(b) and hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    assert not same_bits(a, b)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 0}, r"LSTM: width must be an integer in \[1, 65536\], got 0"),
        ({"hidden": 64}, r"LSTM: hidden must be widths such as \(64, 64\), got 64"),
        ({"head": PolicyAndValue(std="sde")}, "LSTM: std must be 'free', 'state' or 'fixed' in a recurrent network, got 'sde'"),
        ({"head": PolicyAndValue(value_hidden=(4,))}, "LSTM: value_hidden and value_activation must be None in a recurrent"),
        ({"head": QValues(noisy=True)}, "LSTM: a recurrent network has no noise, outputs or quantiles, got QValues"),
        ({"head": QValues(outputs=3)}, "LSTM: a recurrent network has no noise, outputs or quantiles, got QValues"),
        ({"head": Quantiles()}, "LSTM: a recurrent network has no noise, outputs or quantiles, got Quantiles"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch, settings, said):
    # The tests' own type checker would be faster to object.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises((TypeError, ValueError), match=said):
        LSTM(**settings)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_arrays_of_an_initial_carry_have_buffers_of_their_own(network):
    memory = network.initial_carry(2)
    parts = len(jax.tree.leaves(memory))
    assert len({part.unsafe_buffer_pointer() for part in jax.tree.leaves(memory)}) == parts

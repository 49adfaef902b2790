"""The rows of a rollout: what counts, what is hidden, and by what advantages are normalised."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.learning.batch import QUANTITIES, Rows, advantage_scaling, hidden, not_finite, row_weights
from polyak.ops.distributions import broadcast_params
from tests.agents.rollouts import on_device, rollout, same_bits

SPEC = EnvSpec(Box(-np.ones(2), np.ones(2)), Discrete(2), has_action_mask=True)
NUM_STEPS, NUM_ENVS = 5, 4

scaling = jax.jit(advantage_scaling, static_argnums=(2, 3))
bad_quantities = jax.jit(lambda table, value, data: not_finite(table, value, data, None))


def rows(advantage, weight, *, sequences=False):
    """Rows of which only these matter."""
    advantage, weight = (jnp.asarray(x, jnp.float32) for x in (advantage, weight))
    zeros = jnp.zeros_like(weight)
    first = jnp.zeros(weight.shape, bool) if sequences else None
    action = zeros.astype(jnp.int32)
    return Rows(zeros[..., None], action, None, zeros[..., None], zeros, zeros, advantage, zeros, weight, first, (), sequences)


def numbered(sequences=False):
    """`[T, B]` rows in which everything is the row's number, with a mask that forbids action 0."""
    data = on_device(rollout(SPEC, num_steps=NUM_STEPS, num_envs=NUM_ENVS, ends=0.3))
    number = jnp.arange(1.0, 1 + NUM_STEPS * NUM_ENVS).reshape(NUM_STEPS, NUM_ENVS)
    mask = jnp.broadcast_to(jnp.array([False, True]), (*number.shape, 2))
    wide = jnp.stack([number, number], -1)
    first, carry = (data.first, {"h": jnp.ones((NUM_ENVS, 3))}) if sequences else (None, ())
    weight = row_weights(data.valid, None)
    action = number.astype(jnp.int32)
    return Rows(wide, action, mask, wide, number, number, number, number, weight, first, carry, sequences), data


@partial(jax.jit, static_argnums=2)
def shown_rows(table, data, at_once):
    return hidden(table, data, at_once=at_once).at(jnp.arange(NUM_STEPS * NUM_ENVS))


def no_ends(time_steps):
    never = jnp.zeros_like(time_steps.terminated)
    return dataclasses.replace(time_steps, terminated=never, truncated=never)


VALID = np.array([[True, True, False], [True, False, True]])


def test_without_weights_every_transition_counts_one():
    np.testing.assert_array_equal(row_weights(jnp.asarray(VALID), None), VALID.astype(np.float32))


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ([2.0, 0.0, 1.0], [[2, 0, 0], [2, 0, 1]]),
        ([[0.5, np.nan, 9.0], [-1.0, 1.0, 3.0]], [[0.5, 0, 0], [0, 0, 3]]),
        ([-np.inf, np.nan, -0.0], [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_A13_weights_are_of_environments_or_transitions_and_negative_or_nan_ones_are_none(weights, wanted):
    np.testing.assert_array_equal(row_weights(jnp.asarray(VALID), jnp.array(weights)), np.float32(wanted))


def test_as_many_steps_as_environments_leave_no_doubt():
    valid = jnp.ones((3, 3), bool)
    np.testing.assert_array_equal(row_weights(valid, jnp.array([1.0, 2.0, 3.0]))[0], [1, 2, 3])


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_hidden_is_zero_and_flat_and_its_mask_allows_all(at_once):
    table, data = numbered()
    out = shown_rows(table, data, at_once)
    shown = np.asarray(data.valid).reshape(-1)
    assert 0 < shown.sum() < shown.size
    number = np.where(shown, np.arange(1, 1 + shown.size), 0)
    np.testing.assert_array_equal(out.log_prob, number)
    np.testing.assert_array_equal(out.obs, np.stack([number, number], -1))
    np.testing.assert_array_equal(out.action, number)
    np.testing.assert_array_equal(out.action_mask, np.stack([~shown, np.ones_like(shown)], -1))
    assert out.action.dtype == jnp.int32 and out.carry == () and out.first is None


@pytest.mark.parametrize("at_once", [True, False])
def test_a_row_of_weight_zero_is_hidden_unless_it_is_remembered(at_once):
    table, data = numbered()
    table = dataclasses.replace(table, weight=jnp.zeros_like(table.weight))
    assert not shown_rows(table, data, at_once).log_prob.any()
    table, data = numbered(sequences=True)
    # Nothing of the last environment counts, and of the others only the last step.
    table = dataclasses.replace(table, weight=jnp.zeros_like(table.weight).at[-1, :-1].set(1.0))
    out = hidden(table, data, at_once=at_once)
    valid, first = np.asarray(data.valid), np.asarray(data.first)
    remembered = np.zeros_like(valid)
    for i in range(NUM_ENVS - 1):
        begin = np.flatnonzero(first[:, i]).max(initial=0)
        remembered[begin:, i] = valid[begin:, i]
    assert first.any() and valid[:-1].sum() > remembered[:-1].sum() > 0
    np.testing.assert_array_equal(out.log_prob > 0, remembered)
    assert out.first is table.first and out.carry is table.carry and out.obs.shape == (NUM_STEPS, NUM_ENVS, 2)


def test_rows_are_taken_by_number_and_sequences_by_environment():
    table, data = numbered()
    every = dataclasses.replace(table, weight=jnp.ones_like(table.weight))
    np.testing.assert_array_equal(hidden(every, data, at_once=True).at(jnp.array([3, 0])).log_prob, [4, 1])
    table, data = numbered(sequences=True)
    table = dataclasses.replace(table, weight=jnp.ones_like(table.weight), carry={"h": jnp.arange(4.0)})
    two = hidden(table, dataclasses.replace(data, time_steps=no_ends(data.time_steps)), at_once=True).at(jnp.array([3, 0]))
    np.testing.assert_array_equal(two.log_prob[0], [4, 1])
    assert two.obs.shape == (NUM_STEPS, 2, 2) and two.first.shape == (NUM_STEPS, 2)
    np.testing.assert_array_equal(two.carry["h"], [3, 0])


@pytest.mark.parametrize("sequences", [False, True])
def test_other_advantages_keep_what_is_hidden_hidden(sequences):
    table, data = numbered(sequences)
    out = hidden(table, data, at_once=True)
    nan = jnp.full((NUM_STEPS, NUM_ENVS), jnp.nan)
    new = out.with_advantages(jnp.where(data.valid, 2.0, nan), jnp.where(data.valid, 3.0, nan))
    valid = data.valid if sequences else data.valid.reshape(-1)
    np.testing.assert_array_equal(new.advantage, np.where(valid, 2.0, 0.0))
    np.testing.assert_array_equal(new.value_target, np.where(valid, 3.0, 0.0))
    assert same_bits(new.obs, out.obs)


# Which quantities are not finite


def with_value(sequences=False):
    table, data = numbered(sequences)
    return table, jnp.zeros((NUM_STEPS + 1, NUM_ENVS)), data


def places(data):
    """A transition, the row that only reset after an end, and a terminal observation."""
    t, env = np.argwhere(np.asarray(data.valid & ~data.time_steps.last[1:]))[0]
    reset = np.argwhere(~np.asarray(data.valid))[0]
    end = np.argwhere(np.asarray(data.terminated))[0] + [1, 0]
    return (t, env), tuple(reset), tuple(end)


@pytest.mark.parametrize("what", QUANTITIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_A8_what_is_not_finite_is_found_where_it_counts_and_only_there(what, bad):
    table, value, data = with_value()
    here, reset, end = places(data)
    assert not bad_quantities(table, value, data).any()

    def found(place):
        t, env = place
        steps, rows, values = data.time_steps, table, value
        if what == "obs":
            steps = dataclasses.replace(steps, obs=steps.obs.at[t, env, 0].set(bad))
        elif what == "reward":
            steps = dataclasses.replace(steps, reward=steps.reward.at[t + 1, env].set(bad))
        elif what == "value":
            values = value.at[t, env].set(bad)
        else:
            rows = dataclasses.replace(table, log_prob=table.log_prob.at[t, env].set(bad))
        return bad_quantities(rows, values, dataclasses.replace(data, time_steps=steps))

    np.testing.assert_array_equal(found(here), [name == what for name in QUANTITIES])
    if what in ("reward", "log_prob"):
        assert not found(reset).any()
    else:
        assert not found(end).any()


# Normalising advantages

ADVANTAGE = np.array([1.0, 2.0, 4.0, 8.0, 99.0, -3.0, 5.0, 7.0], np.float32)
WEIGHT = np.array([1.0, 1.0, 2.0, 1.0, 0.0, 0.5, 1.0, 1.0], np.float32)
INDEX = jnp.array([[0, 2, 4, 6], [1, 3, 5, 7]])


def moments(advantage, weight):
    mean = np.average(advantage, weights=weight)
    return mean, 1 / np.sqrt(np.average((advantage - mean) ** 2, weights=weight))


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("over", ["minibatch", "batch", None])
def test_advantages_are_normalised_over_minibatch_batch_or_not(over, sequences):
    advantage, weight, index = ADVANTAGE, WEIGHT, INDEX
    if sequences:
        # Two steps; environment i holds rows i and i + 4.
        advantage, weight, index = advantage.reshape(2, 4), weight.reshape(2, 4), jnp.array([[0, 2], [1, 3]])
    centre, scale, total = scaling(rows(advantage, weight, sequences=sequences), index, over, None)
    for k in range(2):
        chosen = np.asarray(INDEX[k])
        wanted = {
            "minibatch": moments(ADVANTAGE[chosen], WEIGHT[chosen]),
            "batch": moments(ADVANTAGE, WEIGHT),
            None: (0.0, 1.0),
        }[over]
        np.testing.assert_allclose((centre[k], scale[k]), wanted, rtol=1e-5)
        assert total[k] == WEIGHT[chosen].sum()


def test_numbers_of_a_normalised_minibatch_by_hand():
    part = rows([1.0, 3.0], [1.0, 1.0])
    centre, scale, _ = scaling(part, jnp.array([[0, 1]]), "minibatch", None)
    np.testing.assert_allclose(part.scaled(centre[0], scale[0]).advantage, [-1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("weight", [[1.0, 0.0], [0.0, 0.0]])
def test_A3_one_entry_or_none_keeps_its_advantage(weight):
    centre, scale, _ = scaling(rows([5.0, 7.0], weight), jnp.array([[0, 1]]), "minibatch", None)
    assert (centre[0], scale[0]) == (0.0, 1.0)


def test_A4_equal_advantages_become_zero_and_stay_finite():
    part = rows([2.5] * 4, [1.0] * 4)
    centre, scale, _ = scaling(part, jnp.array([[0, 1, 2, 3]]), "batch", None)
    np.testing.assert_array_equal(part.scaled(centre[0], scale[0]).advantage, np.zeros(4))


@pytest.mark.parametrize("over", ["minibatch", "batch"])
def test_over_devices_they_are_normalised_by_all_of_them(over):
    mesh = Mesh(np.array(jax.devices()[:2]), ("envs",))

    def split(advantage, weight):
        return advantage_scaling(rows(advantage, weight), jnp.array([[0, 2], [1, 3]]), over, "envs")

    got = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=P("envs"), out_specs=P(), check_vma=False))(ADVANTAGE, WEIGHT)
    whole = scaling(rows(ADVANTAGE, WEIGHT), INDEX, over, None)
    for x, y in zip(got, whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


# A network that gives the deviation once for all rows


@dataclasses.dataclass(frozen=True)
class Free:
    """A linear network whose log-deviation has no batch."""

    def init(self, key, spec):
        return Variables({"w": jnp.ones((2, 2)), "log_std": jnp.full(2, -0.5)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        loc = obs @ variables.params["w"]
        return ({"loc": loc, "log_scale": variables.params["log_std"]}, loc[:, 0]), carry, ()


def test_a_deviation_given_once_is_that_of_every_row():
    params = {"a": jnp.ones((3, 2)), "b": {"loc": jnp.ones((3, 1)), "log_scale": jnp.array([-1.0])}}
    out = broadcast_params(Dict({"a": Discrete(2), "b": Box([-1.0], [1.0])}), params)
    np.testing.assert_array_equal(out["b"]["log_scale"], -np.ones((3, 1)))
    assert out["a"] is params["a"] and out["b"]["loc"] is params["b"]["loc"]


@pytest.mark.parametrize("when", ["update", "collect"])
def test_a_network_may_give_its_deviation_once(when):
    spec = EnvSpec(Box(-np.ones(2), np.ones(2)), Box(-np.ones(2), np.ones(2)))
    agent = PPO(spec, network=Free(), num_steps=NUM_STEPS, num_epochs=1, num_minibatches=1, values_when=when)
    state, data = agent.init(jax.random.key(0)), on_device(rollout(spec, num_steps=NUM_STEPS, num_envs=NUM_ENVS))
    if when == "collect":
        steps = jax.tree.map(lambda x: x[:-1], data.time_steps)
        act = jax.vmap(lambda step: agent.collect_policy(state).action(step, (), jax.random.key(0)).info)
        data = dataclasses.replace(data, info=act(steps))
    _, metrics = jax.jit(agent.update)(state, data, jax.random.key(1))
    assert float(metrics["train/ratio"]) == pytest.approx(1.0, abs=1e-6) and metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize(("weights", "kind"), [(np.ones(3, np.complex64), "complex64"), ("heavy", "<U5")])
def test_weights_that_are_no_real_numbers_are_refused(weights, kind, unchecked):
    with pytest.raises(TypeError, match=f"update: weights must be real numbers, got {kind}"):
        row_weights(jnp.asarray(VALID), weights)


def test_weights_may_be_whole_numbers_or_a_list(unchecked):
    for weights in (np.array([2, 0, 1]), [2, 0, 1]):
        np.testing.assert_array_equal(row_weights(jnp.asarray(VALID), weights), [[2, 0, 0], [2, 0, 1]])

"""The batch of a rollout: what counts, what is masked, and how advantages are normalised."""

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
from polyak.learning.rollout_batch import (
    ActorCriticModel,
    Batch,
    any_over_devices,
    finite_rows,
    make_batch,
    map_steps,
    normalize_minibatches,
    sample_weights,
)
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU
from polyak.ops.distributions import broadcast_params
from tests.agents.rollouts import on_device, rollout, same_bits

SPEC = EnvSpec(Box(-np.ones(2), np.ones(2)), Discrete(2), has_action_mask=True)
NUM_STEPS, NUM_ENVS = 5, 4
SAMPLES, SEQUENCES = (
    ActorCriticModel(MLP((2,), head=PolicyAndValue()), SPEC.action),
    ActorCriticModel(GRU(2, hidden=(2,), head=PolicyAndValue()), SPEC.action),
)
QUANTITIES = ("obs", "reward", "value", "log_prob")

normalize = jax.jit(normalize_minibatches, static_argnums=(2, 3))


def batch(advantage, weight):
    """A batch of which only these matter."""
    advantage, weight = (jnp.asarray(x, jnp.float32) for x in (advantage, weight))
    zeros = jnp.zeros_like(weight)
    action = zeros.astype(jnp.int32)
    return Batch(zeros[..., None], action, None, zeros[..., None], zeros, zeros, advantage, zeros, weight, None, ())


def collected(ends=0.3):
    """A rollout whose mask forbids action 0, with the number of each row as its observation and value, and log-odds of 0."""
    data = on_device(rollout(SPEC, num_steps=NUM_STEPS, num_envs=NUM_ENVS, ends=ends))
    number = jnp.arange(1.0, 1 + (NUM_STEPS + 1) * NUM_ENVS).reshape(NUM_STEPS + 1, NUM_ENVS)
    steps = dataclasses.replace(
        data.time_steps,
        obs=jnp.stack([number, number], -1),
        action_mask=jnp.broadcast_to(jnp.array([False, True]), (*number.shape, 2)),
    )
    ones = jnp.ones((NUM_STEPS, NUM_ENVS), jnp.int32)
    return dataclasses.replace(data, time_steps=steps, actions=ones), number


@partial(jax.jit, static_argnums=0)
def make(model, data, value, weight):
    params = jnp.zeros((NUM_STEPS, NUM_ENVS, 2))
    carry = model.network.initial_carry(NUM_ENVS) if model.is_recurrent else ()
    made, bad = make_batch(model, data, data.time_steps.obs, weight, carry, params, value)
    return made, bad


VALID = np.array([[True, True, False], [True, False, True]])


def test_without_weights_every_transition_counts_one():
    np.testing.assert_array_equal(sample_weights(jnp.asarray(VALID), None), VALID.astype(np.float32))


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ([2.0, 0.0, 1.0], [[2, 0, 0], [2, 0, 1]]),
        ([[0.5, np.nan, 9.0], [-1.0, 1.0, 3.0]], [[0.5, 0, 0], [0, 0, 3]]),
        ([-np.inf, np.nan, -0.0], [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_weights_are_of_environments_or_transitions_and_only_finite_positive_ones_count(weights, wanted):
    np.testing.assert_array_equal(sample_weights(jnp.asarray(VALID), jnp.array(weights)), np.float32(wanted))


def test_with_as_many_steps_as_environments_one_axis_is_environments():
    valid = jnp.ones((3, 3), bool)
    np.testing.assert_array_equal(sample_weights(valid, jnp.array([1.0, 2.0, 3.0]))[0], [1, 2, 3])


def test_samples_are_flat_zero_where_masked_and_their_masks_allow_all_there():
    data, value = collected()
    out, bad = make(SAMPLES, data, value, sample_weights(data.valid, None))
    valid = np.asarray(data.valid).reshape(-1)
    assert 0 < valid.sum() < valid.size and not any(bad.values())
    number = np.where(valid, np.arange(1, 1 + valid.size), 0)
    np.testing.assert_array_equal(out.value, number)
    np.testing.assert_array_equal(out.obs, np.stack([number, number], -1))
    np.testing.assert_array_equal(out.action, valid)
    np.testing.assert_array_equal(out.action_mask, np.stack([~valid, np.ones_like(valid)], -1))
    assert out.action.dtype == jnp.int32 and out.carry == () and out.first is None


def test_what_has_no_weight_is_masked_unless_a_later_row_remembers_it():
    data, value = collected()
    out, _ = make(SAMPLES, data, value, jnp.zeros((NUM_STEPS, NUM_ENVS)))
    assert not out.value.any()
    # Nothing of the last environment counts, and of the others only the last step.
    weight = jnp.zeros((NUM_STEPS, NUM_ENVS)).at[-1, :-1].set(1.0)
    weight = jnp.where(data.valid, weight, 0.0)
    out, _ = make(SEQUENCES, data, value, weight)
    valid, first = np.asarray(data.valid), np.asarray(data.first)
    remembered = np.zeros_like(valid)
    for i in range(NUM_ENVS - 1):
        begin = np.flatnonzero(first[:, i]).max(initial=0)
        remembered[begin:, i] = valid[begin:, i] & bool(weight[-1, i])
    assert first.any() and valid[:-1].sum() > remembered[:-1].sum() > 0
    np.testing.assert_array_equal(out.value > 0, remembered.T)
    np.testing.assert_array_equal(out.first, first.T)
    assert out.obs.shape == (NUM_ENVS, NUM_STEPS, 2)


@pytest.mark.parametrize("model", [SAMPLES, SEQUENCES], ids=["samples", "sequences"])
def test_minibatches_are_samples_by_number_or_sequences_by_environment(model):
    data, value = collected(ends=0.0)
    out, _ = make(model, data, value, jnp.ones((NUM_STEPS, NUM_ENVS)))
    two = out.at(jnp.array([3, 0]))
    if model.is_recurrent:
        np.testing.assert_array_equal(two.value[:, 0], [4, 1])
        assert two.obs.shape == (2, NUM_STEPS, 2) and two.first.shape == (2, NUM_STEPS)
        assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(two.carry))
    else:
        np.testing.assert_array_equal(two.value, [4, 1])


@pytest.mark.parametrize("model", [SAMPLES, SEQUENCES], ids=["samples", "sequences"])
def test_new_advantages_are_zero_where_masked(model):
    data, value = collected()
    out, _ = make(model, data, value, sample_weights(data.valid, None))
    nan = jnp.full((NUM_STEPS, NUM_ENVS), jnp.nan)
    new = out.with_advantages(jnp.where(data.valid, 2.0, nan), jnp.where(data.valid, 3.0, nan))
    valid = data.valid.T if model.is_recurrent else data.valid.reshape(-1)
    np.testing.assert_array_equal(new.advantage, np.where(valid, 2.0, 0.0))
    np.testing.assert_array_equal(new.value_target, np.where(valid, 3.0, 0.0))
    assert same_bits(new.obs, out.obs)


def test_a_carry_that_no_row_with_weight_depends_on_is_masked():
    data, value = collected(ends=0.0)
    weight = jnp.ones((NUM_STEPS, NUM_ENVS)).at[:, 1].set(0.0)
    carry = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), SEQUENCES.network.initial_carry(NUM_ENVS))
    params = jnp.zeros((NUM_STEPS, NUM_ENVS, 2))
    out, _ = make_batch(SEQUENCES, data, data.time_steps.obs, weight, carry, params, value)
    for leaf in jax.tree.leaves(out.carry):
        assert not leaf[1].any() and np.isnan(leaf[jnp.array([0, 2, 3])]).all()


# Which quantities are not finite


def places(data):
    """A transition, the row that only reset after an end, and a terminal observation."""
    t, env = np.argwhere(np.asarray(data.valid & ~data.time_steps.last[1:]))[0]
    reset = np.argwhere(~np.asarray(data.valid))[0]
    end = np.argwhere(np.asarray(data.terminated))[0] + [1, 0]
    return (t, env), tuple(reset), tuple(end)


@pytest.mark.parametrize("what", QUANTITIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_quantity_that_is_not_finite_is_found_where_it_counts_and_only_there(what, bad):
    data, value = collected()
    here, reset, end = places(data)

    def found(place):
        t, env = place
        steps, values, params = data.time_steps, value, jnp.zeros((NUM_STEPS, NUM_ENVS, 2))
        if what == "obs":
            steps = dataclasses.replace(steps, obs=steps.obs.at[t, env, 0].set(bad))
        elif what == "reward":
            steps = dataclasses.replace(steps, reward=steps.reward.at[t + 1, env].set(bad))
        elif what == "value":
            values = value.at[t, env].set(bad)
        else:
            params = params.at[t, env].set(jnp.nan)
        changed = dataclasses.replace(data, time_steps=steps)
        weight = sample_weights(data.valid, None)
        _, flags = flags_of(changed, weight, params, values)
        return [bool(flags[name]) for name in QUANTITIES]

    assert found(here) == [name == what for name in QUANTITIES]
    if what in ("reward", "log_prob"):
        assert not any(found(reset))
    else:
        assert not any(found(end))


@jax.jit
def flags_of(data, weight, params, value):
    return make_batch(SAMPLES, data, data.time_steps.obs, weight, (), params, value)


# Normalising advantages

ADVANTAGE = np.array([1.0, 2.0, 4.0, 8.0, 99.0, -3.0, 5.0, 7.0], np.float32)
WEIGHT = np.array([1.0, 1.0, 2.0, 1.0, 0.0, 0.5, 1.0, 1.0], np.float32)
INDEX = jnp.array([[0, 2, 4, 6], [1, 3, 5, 7]])


def normalized(advantage, weight):
    mean = np.average(advantage, weights=weight)
    return (advantage - mean) / np.sqrt(np.average((advantage - mean) ** 2, weights=weight))


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("over", ["minibatch", "batch", None])
def test_advantages_are_normalised_over_minibatch_batch_or_not(over, sequences):
    advantage, weight, index = ADVANTAGE, WEIGHT, INDEX
    if sequences:
        # Two steps; environment i holds samples i and i + 4.
        advantage, weight, index = advantage.reshape(2, 4).T, weight.reshape(2, 4).T, jnp.array([[0, 2], [1, 3]])
    out, total = normalize(batch(advantage, weight), index, over, None)
    got = (np.asarray(x).T.reshape(-1) if sequences else np.asarray(x) for x in (out.advantage, out.weight))
    advantages, weights = got
    for k in range(2):
        chosen = np.asarray(INDEX[k])
        wanted = {
            "minibatch": normalized(ADVANTAGE[chosen], WEIGHT[chosen]),
            "batch": normalized(ADVANTAGE, WEIGHT)[chosen],
            None: ADVANTAGE[chosen],
        }[over]
        np.testing.assert_allclose(advantages[chosen], wanted, rtol=1e-5)
        np.testing.assert_allclose(weights[chosen], WEIGHT[chosen] / WEIGHT[chosen].sum(), rtol=1e-6)
        assert total[k] == WEIGHT[chosen].sum()


def test_numbers_of_a_normalised_minibatch_by_hand():
    out, _ = normalize(batch([1.0, 3.0], [1.0, 1.0]), jnp.array([[0, 1]]), "minibatch", None)
    np.testing.assert_allclose(out.advantage, [-1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("weight", [[1.0, 0.0], [0.0, 0.0]])
def test_a_single_sample_or_none_keeps_its_advantage(weight):
    out, total = normalize(batch([5.0, 7.0], weight), jnp.array([[0, 1]]), "minibatch", None)
    np.testing.assert_array_equal(out.advantage, [5.0, 7.0])
    np.testing.assert_array_equal(out.weight, weight)
    assert total[0] == sum(weight)


def test_equal_advantages_become_zero_and_stay_finite():
    out, _ = normalize(batch([2.5] * 4, [1.0] * 4), jnp.array([[0, 1, 2, 3]]), "batch", None)
    np.testing.assert_array_equal(out.advantage, np.zeros(4))


@pytest.mark.parametrize("over", ["minibatch", "batch"])
def test_over_devices_they_are_normalised_by_all_of_them(over):
    mesh = Mesh(np.array(jax.devices()[:2]), ("envs",))

    def split(advantage, weight):
        out, total = normalize_minibatches(batch(advantage, weight), jnp.array([[0, 2], [1, 3]]), over, "envs")
        return out.advantage, out.weight, total

    out_specs = (P("envs"), P("envs"), P())
    got = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=P("envs"), out_specs=out_specs, check_vma=False))(ADVANTAGE, WEIGHT)
    whole, total = normalize(batch(ADVANTAGE, WEIGHT), INDEX, over, None)
    for x, y in zip(got, (whole.advantage, whole.weight, total), strict=True):
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
def test_weights_that_are_not_real_numbers_raise(weights, kind, unchecked):
    with pytest.raises(TypeError, match=f"update: weights must be real numbers, got {kind}"):
        sample_weights(jnp.asarray(VALID), weights)


def test_weights_may_be_whole_numbers_or_a_list(unchecked):
    for weights in (np.array([2, 0, 1]), [2, 0, 1]):
        np.testing.assert_array_equal(sample_weights(jnp.asarray(VALID), weights), [[2, 0, 0], [2, 0, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_a_non_finite_float_are_found(bad):
    tree = {"x": jnp.array([[1.0, 2.0], [bad, 4.0]]), "n": jnp.arange(2), "none": None}
    np.testing.assert_array_equal(finite_rows(tree, 1), [True, False])
    np.testing.assert_array_equal(finite_rows(tree, 2)[1], [False, True])


def test_any_over_several_devices():
    np.testing.assert_array_equal(any_over_devices(jnp.array([True, False]), None), [True, False])
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))

    def any_above(x):
        return any_over_devices(jnp.stack([x[0] > 2.5, x[0] > 9.0]), "rows")

    split = jax.shard_map(any_above, mesh=mesh, in_specs=P("rows"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(split)(jnp.arange(4.0)), [True, False])


def test_images_are_mapped_in_smaller_chunks_on_a_cpu():
    seen = []
    images = np.zeros((9, 8, 2), np.float32)
    jax.eval_shape(lambda x: map_steps(lambda part: (seen.append(len(part)), part)[1], x, has_images=True), images)
    assert max(seen) == 32


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("rows_in_cache", [1, 6, 9, 12, 1000])
def test_mapped_rows_are_those_of_one_call(monkeypatch, rows_in_cache, asked):
    if not asked:
        monkeypatch.setattr("polyak.ops.gradient_step.SAMPLES_IN_CACHE", rows_in_cache)
    tree = {"a": np.arange(7 * 3 * 2, dtype=np.float32).reshape(7, 3, 2), "b": np.arange(21, dtype=np.int32).reshape(7, 3)}
    seen = []

    def function(part):
        seen.append(part["b"].shape[0])
        assert part["a"].shape == (part["b"].shape[0], 2)
        return part["a"].sum(-1) * 2.0, part["b"] + 1

    microbatch_size = rows_in_cache if asked else None
    doubled, plus_one = jax.jit(lambda tree: map_steps(function, tree, microbatch_size))(tree)
    assert np.array_equal(doubled, tree["a"].sum(-1) * 2) and np.array_equal(plus_one, tree["b"] + 1)
    # Up to twice as many pass in one call.
    assert max(seen) < 2 * max(3, rows_in_cache)

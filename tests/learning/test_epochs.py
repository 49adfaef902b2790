"""Minibatches that have every row once, and gradient steps on a loss so simple that every step can be worked out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from polyak.core.types import Variables
from polyak.learning.epochs import epoch_seeds, mean_terms, shuffled_minibatches, train_epochs
from polyak.learning.rollout_batch import Batch
from polyak.loops.loop import ENVS, mesh_over
from polyak.ops.gradient_step import QUANTITIES, Aux, StepLog
from tests.copies.line import made

KEY = jax.random.key(2)
NUM_STEPS, NUM_ENVS = 4, 2
ADVANTAGE = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], np.float32)
ONES = np.ones(8, np.float32)
# A step of a tenth of the gradient, and a count of the steps.
SGD = optax.chain(optax.trace(0.0), optax.scale_by_schedule(lambda step: -0.1))


def distance(params, batch, *, variables, key):
    """The weighted mean of (p - advantage)² / 2, whose least value is at the mean advantage."""
    error = jnp.where(batch.weight > 0, params[0] - batch.advantage, 0.0)
    return jnp.sum(0.5 * batch.weight * jnp.square(error)), Aux({"total": jnp.sum(batch.weight)})


def copies_of(params):
    copies = dataclasses.replace(made(optimizer=None), online=Variables(params))
    return copies.with_optimizer_state(SGD)


def batch_of(advantage, weight):
    zeros = jnp.zeros(weight.shape)
    return Batch(zeros[:, None], zeros, None, zeros, zeros, zeros, jnp.asarray(advantage), zeros, jnp.asarray(weight), None, ())


def run(
    advantage=ADVANTAGE,
    weight=ONES,
    *,
    make_batch=None,
    start=0.0,
    epochs=2,
    num_minibatches=2,
    finite=True,
    normalize=None,
    early_stop=None,
    num_microbatches=1,
):
    after, log = train_epochs(
        copies_of(jnp.array([start], jnp.float32)),
        distance,
        SGD,
        make_batch or (lambda params: batch_of(advantage, weight)),
        KEY,
        num_epochs=epochs,
        num_minibatches=num_minibatches,
        num_microbatches=num_microbatches,
        rollout_shape=(NUM_STEPS, NUM_ENVS),
        normalize_advantage=normalize,
        early_stop=early_stop,
        data_is_finite=jnp.array(finite),
        axis_name=None,
    )
    count = int(after.optimizer_state[1].count)
    assert count == int(after.steps)
    return float(after.online.params[0]), count, log


def minibatches(num_minibatches, epochs):
    sizes = NUM_STEPS, NUM_ENVS, num_minibatches
    return [np.asarray(shuffled_minibatches(seeds, *sizes)) for seeds in epoch_seeds(KEY, epochs, *sizes)]


def by_hand(advantage=ADVANTAGE, weight=ONES, epochs=2, p=0.0):
    """p ← p - 0.1 (p - mean) for every minibatch; where a minibatch is not finite or weighs nothing, nothing."""
    applied = []
    for epoch in minibatches(2, epochs):
        for index in epoch:
            w, a = weight[index], advantage[index]
            gradient = np.sum(w[w > 0] * (p - a[w > 0])) / w.sum() if w.sum() else np.nan
            applied.append(bool(np.isfinite(gradient)))
            p = p - 0.1 * gradient if applied[-1] else p
    return p, applied


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_every_minibatch_of_every_epoch_is_one_step(num_microbatches):
    after, count, log = run(num_microbatches=num_microbatches)
    wanted, _ = by_hand()
    assert after == pytest.approx(wanted, rel=1e-5) and count == 4
    assert log.applied.shape == (2, 2) and log.applied.all() and not log.skipped.any() and not log.bad.any()
    np.testing.assert_allclose(log.terms["total"], np.ones((2, 2)), rtol=1e-6)


def test_weights_count_within_their_minibatch():
    weight = np.array([1.0, 0.5, 2.0, 1.0, 3.0, 1.0, 0.25, 1.0], np.float32)
    after, _, _ = run(weight=weight)
    assert after == pytest.approx(by_hand(weight=weight)[0], rel=1e-5)


def test_a_minibatch_that_is_not_finite_is_skipped_and_the_others_are_applied():
    advantage = ADVANTAGE.copy()
    advantage[3] = np.nan
    after, count, log = run(advantage)
    wanted, applied = by_hand(advantage)
    assert after == pytest.approx(wanted, rel=1e-5) and count == 2 == sum(applied)
    np.testing.assert_array_equal(log.applied.reshape(-1), applied)
    np.testing.assert_array_equal(log.skipped, ~log.applied)
    assert log.bad[~log.applied][:, QUANTITIES.index("loss")].all()


def test_a_minibatch_without_weight_is_no_step():
    ((first, second),) = minibatches(2, epochs=1)
    weight = ONES.copy()
    weight[first] = 0.0
    after, count, log = run(weight=weight, epochs=1)
    assert after == pytest.approx(0.1 * ADVANTAGE[second].mean(), rel=1e-5) and count == 1
    np.testing.assert_array_equal(log.applied, [[False, True]])
    assert not log.bad.any() and not log.skipped.any(), "nothing was wrong with it"
    _, _, log = run(weight=weight, epochs=1, finite=False)
    np.testing.assert_array_equal(log.skipped, [[False, True]])


def test_data_that_is_not_finite_skips_every_step():
    after, count, log = run(finite=False, start=3.0)
    assert after == 3.0 and count == 0 and log.skipped.all() and not log.applied.any()


def test_after_an_early_stop_no_step_is_applied_and_none_is_skipped():
    loss = float(0.5 * np.mean(ADVANTAGE**2))
    after, count, log = run(num_minibatches=1, early_stop=lambda terms: terms["loss"] > loss - 0.1)
    assert after == 0 and count == 0 and not log.applied.any() and not log.skipped.any()
    after, count, _ = run(num_minibatches=1, early_stop=lambda terms: terms["loss"] > loss + 0.1)
    assert after > 0 and count == 2


def test_advantages_are_normalised_before_they_are_learned_from():
    # Of mean 0: there is nothing to move to.
    after, _, log = run(normalize="minibatch")
    assert abs(after) < 1e-6
    np.testing.assert_allclose(log.terms["loss"], 0.5, rtol=1e-5)
    assert abs(run(normalize="batch", epochs=1)[0]) > 1e-6


def test_an_epoch_learns_from_the_batch_of_its_first_parameters():
    # The goal is always one ahead of where the epoch began.
    def ahead(params):
        return dataclasses.replace(batch_of(ADVANTAGE, ONES), advantage=jnp.full(8, 1.0) + params[0])

    assert run(make_batch=ahead, epochs=3, num_minibatches=1)[0] == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize(
    ("applied", "of_all", "of_last"),
    [
        ([[1, 1], [1, 1], [1, 1]], [2.5, 25.0], [4.5, 45.0]),
        ([[1, 0], [1, 1], [0, 0]], [5 / 3, 50 / 3], [2.5, 25.0]),
        ([[0, 1], [0, 0], [0, 0]], [1.0, 10.0], [1.0, 10.0]),
        ([[0, 0], [0, 0], [0, 0]], [np.nan, np.nan], [np.nan, np.nan]),
    ],
)
def test_terms_are_averaged_over_the_applied_steps(applied, of_all, of_last):
    applied = np.array(applied, bool)
    values = np.where(applied, np.arange(6, dtype=np.float32).reshape(3, 2), np.nan).astype(np.float32)
    terms = {"a": jnp.asarray(values), "b": jnp.asarray(10 * values)}
    log = StepLog(terms, jnp.zeros((3, 2, len(QUANTITIES)), bool), jnp.asarray(applied), jnp.asarray(~applied))
    for means, wanted in zip(mean_terms(log), (of_all, of_last), strict=True):
        assert list(means) == ["a", "b"]
        np.testing.assert_allclose(list(means.values()), wanted, rtol=1e-6)


def one_epoch(key, *sizes, axis_name=None):
    (words,) = epoch_seeds(key, 1, *sizes, axis_name)
    return shuffled_minibatches(words, *sizes)


def batches(key, *sizes):
    return np.asarray(jax.jit(one_epoch, static_argnums=(1, 2, 3))(key, *sizes))


@pytest.mark.parametrize(
    ("num_steps", "num_envs", "num_minibatches"),
    [(16, 4, 4), (5, 2, 10), (3, 7, 3), (1, 1, 1), (128, 8, 4), (6, 12, 9)],
)
def test_every_row_is_in_one_minibatch(num_steps, num_envs, num_minibatches):
    index = batches(KEY, num_steps, num_envs, num_minibatches)
    assert index.shape == (num_minibatches, num_steps * num_envs // num_minibatches)
    assert sorted(index.ravel()) == list(range(num_steps * num_envs))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_any_sizes_either_split_or_raise(num_steps, num_envs, num_minibatches):
    rows = num_steps * num_envs
    sizes = (num_steps, num_envs, num_minibatches)
    if rows % num_minibatches:
        with pytest.raises(ValueError, match=f"num_minibatches={num_minibatches} .*{num_steps} .* {num_envs} = {rows}"):
            jax.eval_shape(lambda key: one_epoch(key, *sizes), KEY)
    else:
        shape = jax.eval_shape(lambda key: one_epoch(key, *sizes), KEY).shape
        assert shape == (num_minibatches, rows // num_minibatches)


def test_a_minibatch_draws_equally_from_eight_groups_of_environments():
    index = batches(KEY, 4, 16, 2)
    env = index % 16
    for one in env:
        assert np.array_equal(np.bincount(one // 2, minlength=8), np.full(8, 4))


def test_the_key_decides_the_order():
    a, b, c = (batches(jax.random.key(seed), 16, 8, 4) for seed in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert not np.array_equal(a.ravel(), np.arange(128))


def test_every_epoch_has_an_order_of_its_own():
    words = epoch_seeds(KEY, 3, 16, 8, 4)
    orders = {tuple(np.asarray(shuffled_minibatches(its, 16, 8, 4)).ravel()) for its in words}
    assert len(orders) == 3


def test_steps_are_mixed_within_every_environment():
    """A shuffle that kept the time order, or gave every group one order, would put the same steps together."""
    step = batches(KEY, 64, 8, 8) // 8
    assert all(np.ptp(one) > 32 for one in step)
    rows = batches(KEY, 64, 8, 2).ravel()
    orders = [rows[rows % 8 == env] // 8 for env in range(8)]
    assert len({tuple(order) for order in orders}) == 8


def test_single_minibatch_is_not_shuffled():
    assert np.array_equal(batches(KEY, 4, 6, 1), [np.arange(24)])


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_minibatches_do_not_depend_on_the_number_of_devices(devices):
    num_steps, num_envs, num_minibatches = 4, 16, 4
    here = num_envs // devices
    split = jax.shard_map(
        lambda key: one_epoch(key, num_steps, here, num_minibatches, axis_name=ENVS)[None],
        mesh=mesh_over(devices, num_envs),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(ENVS),
        check_vma=False,
    )
    local = np.asarray(jax.jit(split)(KEY))
    device = np.arange(devices)[:, None, None]
    rows = local // here * num_envs + device * here + local % here
    whole = batches(KEY, num_steps, num_envs, num_minibatches)
    for i in range(num_minibatches):
        assert sorted(rows[:, i].ravel()) == sorted(whole[i])


def test_devices_without_whole_groups_still_cover_their_samples():
    split = jax.shard_map(
        lambda key: one_epoch(key, 4, 2, 2, axis_name=ENVS)[None],
        mesh=mesh_over(3, 6),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(ENVS),
        check_vma=False,
    )
    for one in np.asarray(jax.jit(split)(KEY)):
        assert sorted(one.ravel()) == list(range(8))

"""The gradient step of the copies: along the gradient of the whole batch, in parts too, and skipped on NaN or infinity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from polyak.copies.follow import Follow
from polyak.core.types import Variables
from polyak.loops.loop import ENVS, mesh_over
from polyak.ops.gradient_step import QUANTITIES, Aux
from tests.copies.line import SGD, made, same


def distance(params, batch):
    """Half the squared distance from the weighted mean of the batch, whose weights sum to 1."""
    x, weight = batch
    loss = jnp.sum(0.5 * weight * jnp.square(params[0] - x))
    return loss, Aux({"distance": loss})


BATCH = (jnp.array([1.0, 2.0, 3.0, 6.0]), jnp.full(4, 0.25))


def one_number(optimizer):
    copies = dataclasses.replace(made(Follow(), optimizer=None), online=Variables(jnp.array([1.0]), {"calls": jnp.uint32(3)}))
    return copies.with_optimizer_state(optimizer)


def whole_step(batch=BATCH, loss_fn=distance, **options):
    copies, log = one_number(SGD).train(loss_fn, SGD, batch, **options)
    assert int(copies.steps) == int(log.applied) and int(copies.skipped) == int(log.skipped)
    return copies.online.params, log


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_step_is_along_the_gradient_of_the_whole_batch(num_microbatches):
    params, log = whole_step(num_microbatches=num_microbatches)
    assert float(params[0]) == pytest.approx(1.0 - 0.1 * (1.0 - 3.0))
    assert float(log.terms["loss"]) == float(log.terms["distance"]) == pytest.approx(3.75)
    assert float(log.terms["grad_norm"]) == pytest.approx(2.0)
    assert bool(log.applied) and not bool(log.skipped) and not log.bad.any()


@pytest.mark.parametrize(
    ("loss_fn", "first"),
    [
        (lambda p, b: (jnp.log(p[0] - 1.0), Aux({})), "loss"),
        (lambda p, b: (jnp.sqrt(p[0] - 1.0), Aux({})), "gradient"),
        (lambda p, b: (jnp.nan * p[0], Aux({})), "loss"),
        (lambda p, b: (-3e38 * p[0], Aux({})), None),
    ],
    ids=["infinite loss", "infinite gradient", "NaN", "large and finite"],
)
def test_the_first_quantity_that_is_not_finite_skips_the_step(loss_fn, first):
    params, log = whole_step(loss_fn=loss_fn)
    assert bool(log.skipped) == (first is not None) and bool(log.applied) == (first is None)
    if first is not None:
        assert same(params, jnp.array([1.0])) and QUANTITIES[int(jnp.argmax(log.bad))] == first


def test_a_result_that_is_not_finite_skips_the_step():
    optimizer = optax.sgd(3e38)
    before = one_number(optimizer)
    after, log = before.train(lambda p, b: (9.0 * p[0], Aux({})), optimizer, BATCH)
    assert same(after.online, before.online) and QUANTITIES[int(jnp.argmax(log.bad))] == "step" and bool(log.skipped)


def test_what_is_not_enabled_is_neither_applied_nor_skipped_and_bad_data_is_skipped():
    for options in ({"enabled": jnp.array(False)}, {"early_stop": lambda terms: terms["distance"] > 1.0}):
        params, log = whole_step(**options)
        assert float(params[0]) == 1.0 and not bool(log.applied) and not bool(log.skipped)
    params, log = whole_step(data_is_finite=jnp.array(False))
    assert float(params[0]) == 1.0 and bool(log.skipped)
    params, log = whole_step(early_stop=lambda terms: terms["distance"] > 10.0)
    assert bool(log.applied)


# Statistics


def with_stats(stats):
    return lambda params, batch: (distance(params, batch)[0], Aux({}, stats(batch)))


def test_the_statistics_of_the_loss_replace_those_of_the_online_copy_alone():
    before = one_number(SGD)
    after, log = before.train(with_stats(lambda batch: {"calls": jnp.uint32(4)}), SGD, BATCH)
    assert int(after.online.stats["calls"]) == 4 and bool(log.applied)
    assert same(after.target, before.target)
    kept, _ = before.train(distance, SGD, BATCH)
    assert int(kept.online.stats["calls"]) == 3


@pytest.mark.parametrize("options", [{"enabled": jnp.array(False)}, {"data_is_finite": jnp.array(False)}])
def test_a_step_that_is_not_applied_leaves_the_statistics(options):
    before = one_number(SGD)
    after, _ = before.train(with_stats(lambda batch: {"calls": jnp.uint32(4)}), SGD, BATCH, **options)
    assert same(after.online, before.online)


def test_statistics_that_are_not_finite_skip_the_step():
    copies = dataclasses.replace(one_number(SGD), online=Variables(jnp.array([1.0]), {"mean": jnp.float32(0.0)}))
    after, log = copies.train(with_stats(lambda batch: {"mean": jnp.float32(jnp.nan)}), SGD, BATCH)
    assert same(after.online, copies.online) and bool(log.skipped) and int(after.steps) == 0
    assert QUANTITIES[int(jnp.argmax(log.bad))] == "statistics"


def mean_and_count(batch):
    return {"mean": jnp.mean(batch[0]), "calls": jnp.uint32(7)}


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_statistics_of_microbatches_are_averaged_and_counts_are_not(num_microbatches):
    copies = dataclasses.replace(one_number(SGD), online=Variables(jnp.array([1.0]), mean_and_count(BATCH)))
    after, _ = copies.train(with_stats(mean_and_count), SGD, BATCH, num_microbatches=num_microbatches)
    assert float(after.online.stats["mean"]) == pytest.approx(3.0) and int(after.online.stats["calls"]) == 7


def test_statistics_of_several_devices_are_averaged():
    copies = dataclasses.replace(one_number(SGD), online=Variables(jnp.array([1.0]), mean_and_count(BATCH)))
    step = jax.shard_map(
        lambda copies, batch: copies.train(with_stats(mean_and_count), SGD, batch, axis_name=ENVS)[0].online,
        mesh=mesh_over(2, 2),
        in_specs=(PartitionSpec(), PartitionSpec(ENVS)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    online = jax.jit(step)(copies, BATCH)
    assert float(online.stats["mean"]) == pytest.approx(3.0)
    np.testing.assert_allclose(online.params, whole_step()[0], rtol=1e-6)


def test_statistics_of_another_tree_are_rejected_by_their_leaf():
    with pytest.raises(ValueError, match=r"network.train: .*only in statistics: 'more'"):
        one_number(SGD).train(with_stats(lambda batch: {"calls": jnp.uint32(4), "more": jnp.float32(0.0)}), SGD, BATCH)


def test_copies_whose_optimizer_is_shared_are_not_trained_alone():
    with pytest.raises(ValueError, match="network: the optimizer is shared; apply to 'shared'"):
        made(shared=True).train(lambda params, batch: (params["b"], Aux({})), SGD, BATCH)

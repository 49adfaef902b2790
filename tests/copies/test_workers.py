"""Workers that share one copy: the published numbers, one worker as a single process, many as one large batch, staleness."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.copies.follow import Follow
from polyak.copies.workers import synchronous_round
from polyak.networks.adapters import FlaxNNX
from tests.copies.line import ADAM, GOALS, INPUTS, SGD, gradient, made, normalized, same, squared, w


def workers_of(count, **options):
    workers = [made(shared=True, **options) for _ in range(count)]
    return workers, workers[0].shared


@pytest.mark.parametrize("shared_optimizer", [True, False])
@pytest.mark.parametrize(("reduce", "wanted"), [("mean", 0.7), ("sum", -0.2)])
def test_a_synchronous_round_steps_once_with_the_average_or_the_sum(reduce, wanted, shared_optimizer):
    workers, shared = workers_of(4, shared_optimizer=shared_optimizer)
    workers, shared = synchronous_round(workers, shared, [gradient(g) for g in (1.0, 2.0, 3.0, 6.0)], reduce=reduce)
    assert w(shared.variables) == pytest.approx(wanted, abs=1e-6) and int(shared.version) == 1
    for worker in workers:
        assert same(worker.online, shared.variables) and int(worker.version) == 1


def test_each_workers_gradient_is_clipped_before_the_average():
    workers, shared = workers_of(2)
    _, shared = synchronous_round(workers, shared, [gradient(10.0), gradient(-2.0)], clip=1.0)
    np.testing.assert_allclose(shared.variables.params["w"], 1.0, atol=1e-7)


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_asynchronous_workers_give_the_published_numbers(shared_optimizer):
    (a, b), shared = workers_of(2, shared_optimizer=shared_optimizer)

    def own_gradient(worker):
        return gradient(w(worker.online))

    of_a, of_b = own_gradient(a), own_gradient(b)
    a, shared = a.push(shared, of_a)
    a = a.pull(shared)
    assert w(a.online) == pytest.approx(0.9)
    assert int(b.staleness(shared)) == 1
    b, shared = b.push(shared, of_b)
    b = b.pull(shared)
    assert w(b.online) == pytest.approx(0.8)
    of_a, of_b = own_gradient(a), own_gradient(b)
    a, shared = a.push(shared, of_a)
    assert w(shared.variables) == pytest.approx(0.71)
    b, shared = b.push(shared, of_b)
    assert w(shared.variables) == pytest.approx(0.63) and int(shared.version) == 4


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_one_synchronous_worker_equals_the_single_process_bit_for_bit(shared_optimizer):
    single = made(Follow(0.3, period=2), optimizer=ADAM)
    (worker,), shared = workers_of(1, target=Follow(0.3, period=2), optimizer=ADAM, shared_optimizer=shared_optimizer)

    @jax.jit
    def slope(copies):
        return jax.grad(lambda p: jnp.mean((jnp.sum(INPUTS * p["w"][None], axis=1) + p["b"] - GOALS) ** 2))(
            copies.online.params
        )

    for _ in range(5):
        single = single.apply_and_sync(slope(single)).follow(updates=1)
        (worker,), shared = synchronous_round([worker], shared, [slope(worker)])
        worker = worker.follow(updates=1)
    assert same(worker.online, single.online) and same(worker.target, single.target)


def test_n_workers_equal_one_batch_n_times_as_large():
    @jax.jit
    def slope(copies, inputs, goals):
        def loss(params):
            out, _, _ = copies.network.apply(dataclasses.replace(copies.online, params=params), inputs, train=True)
            parts, _ = squared(out, goals)
            return jnp.mean(parts["squared"])

        return jax.grad(loss)(copies.online.params)

    single = made(optimizer=ADAM)
    workers, shared = workers_of(4, optimizer=ADAM)
    for _ in range(5):
        single = single.apply_and_sync(slope(single, INPUTS, GOALS))
        gradients = [slope(worker, INPUTS[n : n + 1], GOALS[n : n + 1]) for n, worker in enumerate(workers)]
        workers, shared = synchronous_round(workers, shared, gradients)
    for leaf, other in zip(jax.tree.leaves(shared.variables), jax.tree.leaves(single.online), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


def test_non_finite_gradient_of_a_worker_is_excluded_from_the_round():
    workers, shared = workers_of(2)
    workers, shared = synchronous_round(workers, shared, [gradient(float("nan")), gradient(1.0)])
    assert w(shared.variables) == pytest.approx(0.9) and [int(x.skipped) for x in workers] == [1, 0]
    for _ in range(2):
        workers, shared = synchronous_round(workers, shared, [gradient(float("nan")), gradient(1.0)])
    assert "'gradient'" in workers[0].diagnose(max_skipped_steps=3) and workers[1].diagnose(max_skipped_steps=1) is None
    nobody, after = synchronous_round(workers, shared, [gradient(float("nan"))] * 2)
    assert same(after, shared) and [int(x.guard.consecutive_skipped_updates) for x in nobody] == [4, 1]
    workers, shared = workers_of(2, optimizer=ADAM)
    huge, after = synchronous_round(workers, shared, [gradient(1e30)] * 2)
    assert same(after, shared) and all("'step'" in worker.diagnose(max_skipped_steps=1) for worker in huge)


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_stale_push_is_dropped_and_counted(shared_optimizer):
    (a, b), shared = workers_of(2, optimizer=optax.adam(0.1), shared_optimizer=shared_optimizer)
    for _ in range(3):
        a, shared = a.push(shared, gradient(1.0), max_staleness=10)
    before = shared
    late = jax.jit(lambda b, shared: b.push(shared, gradient(1.0), max_staleness=2))
    after, shared = late(b, shared)
    assert same(shared.variables, before.variables) and same(after.optimizer_state, b.optimizer_state)
    assert same(shared.optimizer_state, before.optimizer_state)
    assert (int(shared.dropped), int(shared.version), int(after.skipped)) == (1, 3, 0)
    _, shared = late(b.pull(shared), shared)
    assert (int(shared.dropped), int(shared.version)) == (1, 4)


def test_push_of_another_tree_raises_and_changes_nothing():
    (a,), shared = workers_of(1)
    with pytest.raises(ValueError, match=r"leaf 'w': gradients is float32\[3\], params is float32\[2\]"):
        a.push(shared, {"w": jnp.ones(3), "b": jnp.zeros(())})
    with pytest.raises(ValueError, match="max_staleness must be an integer >= 0"):
        a.push(shared, gradient(1.0), max_staleness=-1)
    with pytest.raises(ValueError, match="one gradient tree per worker, got 1 workers, 2 gradients"):
        synchronous_round([a], shared, [gradient(1.0)] * 2)


def mean_and_calls(mean, calls):
    return {"mean": jnp.array(mean), "calls": jnp.array(calls, jnp.int32)}


def test_round_averages_the_statistics_of_the_included_workers():
    nan = float("nan")
    workers, shared = workers_of(3)
    stats = [mean_and_calls(5.0, 7), mean_and_calls(1.0, 3), mean_and_calls(2.0, 4)]
    after, taken = synchronous_round(workers, shared, [gradient(nan), gradient(1.0), gradient(2.0)], stats=stats)
    assert float(taken.variables.stats["mean"]) == 1.5 and int(taken.variables.stats["calls"]) == 3
    assert all(same(worker.online, taken.variables) for worker in after)
    spoilt = [stats[0], mean_and_calls(nan, 3), stats[2]]
    after, taken = synchronous_round(workers, shared, [gradient(1.0)] * 3, stats=spoilt)
    assert float(taken.variables.stats["mean"]) == 3.5 and int(taken.variables.stats["calls"]) == 7
    assert "'statistics'" in after[1].diagnose(max_skipped_steps=1)
    _, none = synchronous_round(workers, shared, [gradient(nan)] * 3, stats=stats)
    assert same(none, shared)
    with pytest.raises(ValueError, match="3 workers, 3 gradients and 2 trees of statistics"):
        synchronous_round(workers, shared, [gradient(1.0)] * 3, stats=stats[:2])
    with pytest.raises(ValueError, match="only in shared: 'calls'"):
        synchronous_round(workers, shared, [gradient(1.0)] * 3, stats=[{"mean": jnp.array(1.0)}] * 3)


def test_push_replaces_the_statistics_unless_it_is_skipped():
    (a, b), shared = workers_of(2)
    a, one = a.push(shared, gradient(1.0), stats=mean_and_calls(2.0, 1))
    assert float(one.variables.stats["mean"]) == 2.0
    _, stale = b.push(one, gradient(1.0), stats=mean_and_calls(9.0, 9), max_staleness=0)
    assert same(stale.variables, one.variables) and int(stale.dropped) == 1
    for bad in ({"gradients": gradient(float("nan"))}, {"stats": mean_and_calls(float("nan"), 9)}):
        rejected, after = b.push(one, **({"gradients": gradient(1.0), "stats": mean_and_calls(9.0, 9)} | bad))
        assert same(after, one) and int(rejected.skipped) == 1
    pulled = b.pull(one)
    assert float(pulled.online.stats["mean"]) == 2.0
    with pytest.raises(ValueError, match=r"apply_gradients: leaf 'mean': statistics is float32\[2\], shared is float32\[\]"):
        a.push(one, gradient(1.0), stats=mean_and_calls([1.0, 2.0], 1))


def normalized_workers(count, **options):
    with lenient():
        return [made(shared=True, network=FlaxNNX(normalized), **options) for _ in range(count)]


@contextlib.contextmanager
def lenient():
    """Flax's own arithmetic mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@jax.jit
def trained_part(worker, inputs, goals):
    with lenient():
        gradients, aux = worker.compute_gradients(squared, inputs, goals)
        return gradients, aux.stats


@jax.jit
def trained(single, inputs, goals):
    with lenient():
        return single.train_and_sync(squared, inputs, goals)[0]


@jax.jit
def trained_round(workers, shared, inputs, goals):
    """A round in which each worker has its own part of the rows."""
    parts = jnp.split(inputs, len(workers)), jnp.split(goals, len(workers))
    found = [trained_part(*each) for each in zip(workers, *parts, strict=True)]
    return synchronous_round(workers, shared, [g for g, _ in found], stats=[s for _, s in found])


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_one_synchronous_worker_with_batch_normalisation_equals_the_single_process_bit_for_bit(shared_optimizer):
    single = made(network=FlaxNNX(normalized), optimizer=ADAM)
    workers = normalized_workers(1, optimizer=ADAM, shared_optimizer=shared_optimizer)
    shared = workers[0].shared
    for _ in range(3):
        single = trained(single, INPUTS, GOALS)
        workers, shared = trained_round(workers, shared, INPUTS, GOALS)
    assert same(workers[0].online, single.online) and same(shared.variables, single.online)


def test_workers_with_batch_norm_equal_the_large_batch_in_means_but_lack_variance_between_batches():
    workers = normalized_workers(2)
    shared, before = workers[0].shared, workers[0].online.stats["norm"]
    _, large = trained_part(workers[0], INPUTS, GOALS)
    _, shared = trained_round(workers, shared, INPUTS, GOALS)
    norm, halves = shared.variables.stats["norm"], INPUTS.reshape(2, 2, 2)
    np.testing.assert_allclose(norm["mean"], large["norm"]["mean"], atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.5 * before["var"] + 0.5 * halves.var(1).mean(0), rtol=1e-5)
    between = halves.mean(1).var(0)
    np.testing.assert_allclose(large["norm"]["var"] - norm["var"], 0.5 * between, rtol=1e-4, atol=1e-6)


def test_workers_with_batch_norm_on_equal_batches_equal_the_large_batch():
    rows, goals = jnp.concatenate([INPUTS, INPUTS[::-1]]), jnp.concatenate([GOALS, 2.0 - GOALS])
    single = made(network=FlaxNNX(normalized), optimizer=ADAM)
    workers = normalized_workers(2, optimizer=ADAM)
    shared = workers[0].shared
    for _ in range(5):
        single = trained(single, rows, goals)
        workers, shared = trained_round(workers, shared, rows, goals)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), shared.variables, single.online)


def test_accumulated_gradients_can_be_pushed():
    (a,), shared = workers_of(1, optimizer=SGD)
    _, shared = a.accumulate(gradient(1.0)).accumulate(gradient(2.0)).push(shared)
    assert w(shared.variables) == pytest.approx(0.7)

"""Workers that share one copy: the published numbers, one worker as a single process, many as one large batch, staleness."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.ops.follow import Follow
from polyak.parts.workers import pull, push, staleness, synchronous_round
from tests.parts.test_copies import ADAM, GOALS, INPUTS, SGD, gradient, made, same, squared, w


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
    a, shared = push(a, shared, of_a)
    a = pull(a, shared)
    assert w(a.online) == pytest.approx(0.9)
    assert int(staleness(b, shared)) == 1
    b, shared = push(b, shared, of_b)
    b = pull(b, shared)
    assert w(b.online) == pytest.approx(0.8)
    of_a, of_b = own_gradient(a), own_gradient(b)
    a, shared = push(a, shared, of_a)
    assert w(shared.variables) == pytest.approx(0.71)
    b, shared = push(b, shared, of_b)
    assert w(shared.variables) == pytest.approx(0.63) and int(shared.version) == 4


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_one_synchronous_worker_equals_the_single_process_bit_for_bit(shared_optimizer):
    single = made(Follow(0.3, period=2), optimizer=ADAM)
    (worker,), shared = workers_of(1, target=Follow(0.3, period=2), optimizer=ADAM, shared_optimizer=shared_optimizer)

    def slope(copies):
        return jax.grad(lambda p: jnp.mean((jnp.sum(INPUTS * p["w"][None], axis=1) + p["b"] - GOALS) ** 2))(
            copies.online.params
        )

    for _ in range(5):
        single = single.apply_and_sync(slope(single)).follow(updates=1)
        (worker,), shared = synchronous_round([worker], shared, [slope(worker)])
        worker = worker.follow(updates=1)
    assert same(worker.online, single.online) and same(worker.target, single.target)


def test_W14_many_workers_equal_one_batch_that_many_times_the_size():
    def slope(copies, rows):
        def loss(params):
            out, _, _ = copies.network.apply(dataclasses.replace(copies.online, params=params), INPUTS[rows], train=True)
            parts, _ = squared(out, GOALS[rows])
            return jnp.mean(parts["squared"])

        return jax.grad(loss)(copies.online.params)

    single = made(optimizer=ADAM)
    workers, shared = workers_of(4, optimizer=ADAM)
    for _ in range(5):
        single = single.apply_and_sync(slope(single, slice(None)))
        gradients = [slope(worker, slice(n, n + 1)) for n, worker in enumerate(workers)]
        workers, shared = synchronous_round(workers, shared, gradients)
    for leaf, other in zip(jax.tree.leaves(shared.variables), jax.tree.leaves(single.online), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


def test_W5_a_workers_bad_gradient_is_left_out_of_the_round():
    workers, shared = workers_of(2)
    workers, shared = synchronous_round(workers, shared, [gradient(float("nan")), gradient(1.0)])
    assert w(shared.variables) == pytest.approx(0.9) and int(workers[0].gradients.refused) == 1


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_W8_a_push_that_is_too_stale_is_dropped_and_counted(shared_optimizer):
    (a, b), shared = workers_of(2, optimizer=optax.adam(0.1), shared_optimizer=shared_optimizer)
    for _ in range(3):
        a, shared = push(a, shared, gradient(1.0), max_staleness=10)
    before = shared
    late = jax.jit(lambda b, shared: push(b, shared, gradient(1.0), max_staleness=2))
    after, shared = late(b, shared)
    assert same(shared.variables, before.variables) and same(after.optimizer_state, b.optimizer_state)
    assert same(shared.optimizer_state, before.optimizer_state)
    assert (int(shared.dropped), int(shared.version), int(after.skipped)) == (1, 3, 0)
    _, shared = late(pull(b, shared), shared)
    assert (int(shared.dropped), int(shared.version)) == (1, 4)


def test_W6_a_push_of_another_tree_is_an_error_and_changes_nothing():
    (a,), shared = workers_of(1)
    with pytest.raises(ValueError, match=r"leaf 'w': gradients is float32\[3\], params is float32\[2\]"):
        push(a, shared, {"w": jnp.ones(3), "b": jnp.zeros(())})
    with pytest.raises(ValueError, match="max_staleness must be an integer >= 0"):
        push(a, shared, gradient(1.0), max_staleness=-1)
    with pytest.raises(ValueError, match="1 workers and 2 gradients"):
        synchronous_round([a], shared, [gradient(1.0)] * 2)


def test_accumulated_gradients_can_be_pushed():
    (a,), shared = workers_of(1, optimizer=SGD)
    _, shared = push(a.accumulate(gradient(1.0)).accumulate(gradient(2.0)), shared)
    assert w(shared.variables) == pytest.approx(0.7)

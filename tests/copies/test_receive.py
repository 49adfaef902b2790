"""Gradients that arrive from workers: closed numbers, exactly once, how old they may be, and who is left out."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.copies.receive import Push, Senders, receive, worker_copies
from polyak.copies.shared import Shared
from polyak.ops.rmsprop import rmsprop
from tests.copies.line import ADAM, INF, NAN, SGD, gradient, made, same, w

MOMENTUM = rmsprop(0.1, decay=0.5, eps=1e-5, max_grad_norm=None)


@partial(jax.jit, static_argnames=("optimizer", "max_staleness", "max_bad"))
def jit_receive(shared, senders, push, gradients, optimizer=SGD, is_finite=True, max_staleness=None, max_bad=3):
    return receive(
        shared,
        senders,
        push,
        gradients,
        optimizer=optimizer,
        is_finite=is_finite,
        max_staleness=max_staleness,
        max_bad=max_bad,
    )


def receiver(num_workers=2, optimizer=SGD, shared_optimizer=True):
    """A shared line whose weights are 1, and the counts of its workers."""
    line = made().online
    state = optimizer.init(line.params)
    return Shared.init(line, state if shared_optimizer else ()), Senders.init(num_workers, None if shared_optimizer else state)


def what_became(receipt):
    (name,) = (field.name for field in dataclasses.fields(receipt) if getattr(receipt, field.name))
    return name


@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_two_workers_give_the_published_numbers(shared_optimizer):
    """As `test_workers.py` has them: each gradient is the weight that its worker last pulled."""
    shared, senders = receiver(shared_optimizer=shared_optimizer)
    pulled, sequence, seen = [(1.0, 0), (1.0, 0)], [0, 0], []
    for worker in (0, 1, 0, 1):
        sequence[worker] += 1
        weight, version = pulled[worker]
        shared, senders, _ = jit_receive(shared, senders, Push.create(worker, sequence[worker], version), gradient(weight))
        pulled[worker] = (w(shared.variables), int(shared.version))
        seen.append(w(shared.variables))
    np.testing.assert_allclose(seen, [0.9, 0.8, 0.71, 0.63], rtol=1e-6)
    assert int(shared.version) == 4 and senders.applied.tolist() == [2, 2] == senders.sequence.tolist()


def test_optimizer_states_are_the_shared_copys_or_each_workers_own():
    """RMSProp with α = ½, v = 1 at first, gradients 1, 3 and 1: v is 1, 5, 3 in one state, and 1, 5 and 1 in two."""
    for shared_optimizer, wanted in [(True, (1.0, 5.0, 3.0)), (False, (1.0, 5.0, 1.0))]:
        shared, senders = receiver(2, MOMENTUM, shared_optimizer)
        weight, steps = 1.0, []
        for worker, sequence, g in [(0, 1, 1.0), (0, 2, 3.0), (1, 1, 1.0)]:
            push = Push.create(worker, sequence, shared.version)
            shared, senders, _ = jit_receive(shared, senders, push, gradient(g), optimizer=MOMENTUM)
            steps.append((g, weight - w(shared.variables)))
            weight = w(shared.variables)
        taken = [0.1 * g / np.sqrt(v) for (g, _), v in zip(steps, wanted, strict=True)]
        np.testing.assert_allclose([step for _, step in steps], taken, rtol=1e-4)
        assert (shared.optimizer_state == ()) is not shared_optimizer


def test_a_push_that_is_sent_again_is_applied_once():
    shared, senders = receiver(optimizer=ADAM, shared_optimizer=False)
    push = Push.create(1, 1, 0)
    once = jit_receive(shared, senders, push, gradient(2.0), optimizer=ADAM)
    twice = jit_receive(*once[:2], push, gradient(2.0), optimizer=ADAM)
    assert what_became(once[2]) == "applied" and what_became(twice[2]) == "repeated"
    assert same(twice[0], once[0]) and same(twice[1].optimizer_state, once[1].optimizer_state)
    assert twice[1].repeated.tolist() == [0, 1] and twice[1].applied.tolist() == [0, 1]
    # The other worker counts for itself.
    assert what_became(jit_receive(*twice[:2], Push.create(0, 1, 0), gradient(2.0), optimizer=ADAM)[2]) == "applied"


def test_a_repeated_bad_push_is_refused_once():
    shared, senders = receiver()
    for _ in range(5):
        shared, senders, receipt = jit_receive(shared, senders, Push.create(0, 1, 0), gradient(NAN))
    assert what_became(receipt) == "repeated" and senders.rejected.tolist() == [1, 0] and senders.repeated.tolist() == [4, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=20))
def test_any_order_of_repetitions_is_the_same_as_none(sends):
    """Each worker sends its pushes in order, and each of them 1 + `again` times, whatever the others do in between."""
    results = []
    for repeats in (True, False):
        shared, senders = receiver(3)
        sequence = [0, 0, 0]
        for worker, again in sends:
            sequence[worker] += 1
            push = Push.create(worker, sequence[worker], shared.version)
            for _ in range(1 + again * repeats):
                shared, senders, _ = jit_receive(shared, senders, push, gradient(0.5 + worker))
        results.append((shared, dataclasses.replace(senders, repeated=senders.applied)))
        assert senders.applied.tolist() == sequence
        assert int(senders.repeated.sum()) == repeats * sum(again for _, again in sends)
    assert same(*results)


@pytest.mark.parametrize(("version", "became"), [(0, "stale"), (1, "applied"), (3, "applied"), (4, "stale")])
def test_old_gradients_are_dropped_and_so_are_those_of_versions_to_come(version, became):
    shared, senders = receiver()
    shared = dataclasses.replace(shared, version=jnp.uint32(3))
    after, counts, receipt = jit_receive(shared, senders, Push.create(0, 1, version), gradient(1.0), max_staleness=2)
    assert what_became(receipt) == became
    assert same(after.variables, shared.variables) == (became == "stale")
    assert int(after.dropped) == int(counts.stale[0]) == (became == "stale")
    assert int(counts.sequence[0]) == 1 and int(counts.rejected[0]) == 0


def test_any_age_is_accepted_without_a_limit():
    shared, senders = receiver()
    shared = dataclasses.replace(shared, version=jnp.uint32(1_000_000))
    assert what_became(jit_receive(shared, senders, Push.create(0, 1, 0), gradient(1.0))[2]) == "applied"


@pytest.mark.parametrize("bad", [NAN, INF, 1e38, "said so"])
@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_bad_gradients_change_no_bit_and_quarantine_their_worker(bad, shared_optimizer):
    optimizer = MOMENTUM
    shared, senders = before = receiver(2, optimizer, shared_optimizer)
    send = partial(jit_receive, optimizer=optimizer, max_bad=2)
    junk, is_finite = (gradient(1.0), False) if bad == "said so" else (gradient(bad), True)
    for sequence in (1, 2):
        shared, senders, receipt = send(shared, senders, Push.create(0, sequence, 0), junk, is_finite=is_finite)
        assert what_became(receipt) == "rejected"
    assert same(shared, before[0]) and same(senders.optimizer_state, before[1].optimizer_state)
    assert senders.is_quarantined(2).tolist() == [True, False]
    shared, senders, receipt = send(shared, senders, Push.create(0, 3, 0), gradient(1.0))
    assert what_became(receipt) == "quarantined" and same(shared, before[0])
    # The others go on; and so does the worker, once it was started again and counts on.
    shared, senders, receipt = send(shared, senders, Push.create(1, 1, 0), gradient(1.0))
    assert what_became(receipt) == "applied" and w(shared.variables) < 1
    senders = senders.readmit(0)
    shared, senders, receipt = send(shared, senders, Push.create(0, int(senders.sequence[0]) + 1, 1), gradient(1.0))
    assert what_became(receipt) == "applied" and senders.rejected.tolist() == [2, 0]


@pytest.mark.parametrize("shared_optimizer", [True, False])
@pytest.mark.parametrize("worker", [2, 5, -1, -3])
def test_a_worker_that_is_none_of_the_w_is_rejected_and_counted_for_nobody(worker, shared_optimizer):
    shared, senders = receiver(2, ADAM, shared_optimizer)
    for _ in range(2):
        push = Push.create(worker, 1, shared.version)
        after, counts, receipt = jit_receive(shared, senders, push, gradient(1.0), optimizer=ADAM)
        assert what_became(receipt) == "rejected" and same(after, shared) and same(counts, senders)


def test_a_good_push_ends_the_refusals_in_a_row():
    shared, senders = receiver()
    for sequence, g in enumerate((NAN, NAN, 1.0, NAN, NAN), 1):
        shared, senders, _ = jit_receive(shared, senders, Push.create(0, sequence, 0), gradient(g))
    assert senders.consecutive_rejected.tolist() == [2, 0] and senders.rejected.tolist() == [4, 0]
    assert not senders.is_quarantined(3).any()


def test_arrays_of_other_shapes_raise():
    shared, senders = receiver()
    push = Push.create(1, 1, 0)
    with pytest.raises(ValueError, match=r"receive: .*w"):
        jit_receive(shared, senders, push, {"w": jnp.ones(3), "b": jnp.zeros(())})
    with pytest.raises(ValueError, match="receive: max_staleness must be"):
        jit_receive(shared, senders, push, gradient(1.0), max_staleness=-1)
    with pytest.raises(ValueError, match="Senders: num_workers must be"):
        Senders.init(0)


def test_statistics_are_those_of_the_last_applied_worker():
    shared, senders = receiver()
    stats = {"mean": jnp.float32(0.5), "calls": jnp.int32(7)}
    shared, senders, _ = receive(shared, senders, Push.create(0, 1, 0), gradient(1.0), optimizer=SGD, stats=stats)
    assert shared.variables.stats["calls"] == 7
    bad = {"mean": jnp.float32(NAN), "calls": jnp.int32(8)}
    after, senders, receipt = receive(shared, senders, Push.create(0, 2, 1), gradient(1.0), optimizer=SGD, stats=bad)
    assert what_became(receipt) == "rejected" and same(after, shared)


def test_a_worker_pulls_the_shared_weights_and_neither_optimizer_nor_other_copies():
    copies = made(shared=True, optimizer=ADAM).apply_gradients("shared", gradient(1.0))
    pulled = worker_copies(copies)
    assert same(pulled.online, copies.shared.variables) and int(pulled.version) == 1
    assert pulled.names == ("online",) and pulled.optimizer is None
    assert len(jax.tree.leaves(pulled)) == len(jax.tree.leaves(pulled.online)) + 5
    with pytest.raises(ValueError, match="worker_copies needs a shared copy, got the copies online"):
        worker_copies(pulled)

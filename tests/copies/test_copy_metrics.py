"""Metrics of copies: all that there is to watch, under names that do not hide each other."""

import jax
import pytest

from polyak.copies.follow import Follow
from polyak.copies.workers import metrics_of
from tests.copies.line import gradient, made, moved


def test_metrics_are_prefixed_by_the_name_of_the_copies():
    critic = moved(made(Follow(), name="critic"), 4.0).apply_gradients(gradients=gradient(float("nan")))
    actor = made(shared=True, name="actor").accumulate(gradient(float("inf"))).apply_gradients("shared", gradient(1.0))
    metrics = jax.jit(lambda a, c: metrics_of([a, c]))(actor, critic)
    assert {name: float(value) for name, value in metrics.items()} == {
        "critic/skipped_steps": 1.0,
        "critic/consecutive_skipped_updates": 1.0,
        "critic/skipped_gradients": 0.0,
        "critic/target_distance": pytest.approx(3 * 2**0.5),
        "actor/skipped_steps": 0.0,
        "actor/consecutive_skipped_updates": 0.0,
        "actor/skipped_gradients": 1.0,
        "actor/shared_version": 1.0,
        "actor/staleness": 1.0,
        "actor/dropped_pushes": 0.0,
    }


def test_duplicate_names_raise():
    with pytest.raises(ValueError, match="names must be unique, got 'critic' twice; create each with its own name="):
        metrics_of([made(name="critic"), made(name="actor"), made(name="critic")])

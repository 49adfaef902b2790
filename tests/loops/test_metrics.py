"""Metrics of a report: means over all updates since the last report, last values of what is no mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import loops
from polyak.core.struct import struct
from polyak.core.types import Histogram, Mean
from polyak.loops.metrics import PackedMetrics, add_metrics, as_numbers
from tests.loops.setting import ENV, KEY
from tests.reinforce import Reinforce

FIRST = 6
"""The first update that learns."""


@struct
class Counting(Reinforce):
    """Its metrics are functions of the update's number; until `FIRST` it learns nothing."""

    def update(self, state, rollout, key, *, axis_name=None):
        state = dataclasses.replace(state, updates=state.updates + jnp.uint32(1))
        number = state.updates.astype(jnp.float32)
        steps = jnp.stack([number, number * number])
        metrics = {"train/loss": Mean.of(steps, number >= FIRST), "train/number": number, "train/n_updates": state.updates}
        return state, metrics | {"train/nan": Mean.of(number * jnp.nan)}

    def diagnose(self, metrics):
        assert ("train/loss" in metrics) == (metrics["train/number"] >= FIRST)


AGENT = Counting(ENV.spec, num_steps=2)


def expected(first, last):
    values = [x for number in range(max(first, FIRST), last + 1) for x in (number, number**2)]
    return {"train/loss": np.mean(values)} if values else {}


def check(reports):
    """Each report has the means since the one before it."""
    before = 0
    for iteration, metrics in reports:
        learned = {name: value for name, value in metrics.items() if name in ("train/loss", "train/nan")}
        assert learned == pytest.approx(expected(before + 1, iteration)), iteration
        assert metrics["train/number"] == metrics["train/n_updates"] == iteration
        before = iteration
    assert len(reports) > 5 and any("train/loss" not in metrics for _, metrics in reports)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loops.compiled, loops.host])
@pytest.mark.parametrize("devices", [1, 2])
def test_reports_are_means_over_all_updates_since_the_last(loop, devices):
    reports = []
    loop(
        AGENT,
        ENV,
        env_steps=200,
        key=KEY,
        report_every=24,
        devices=devices,
        callbacks=[lambda progress, metrics, _: reports.append((progress.iteration, dict(metrics)))],
    )
    check(reports)


def test_a_report_that_no_chunk_ends_at_has_the_means_of_all_chunks(monkeypatch):
    # Every chunk is one iteration long.
    monkeypatch.setattr("polyak.loops.compiled_loop.CHUNK_SECONDS", 1e-9)
    reports = []
    callback = lambda progress, metrics, _: reports.append((progress.iteration, dict(metrics)))  # noqa: E731
    loops.compiled(AGENT, ENV, env_steps=200, key=KEY, report_every=24, callbacks=[callback])
    check(reports)


@pytest.mark.parametrize("seconds", [1e-9, 0.5])
def test_each_seed_has_the_means_of_its_own_updates(monkeypatch, seconds):
    monkeypatch.setattr("polyak.loops.seeds_loop.CHUNK_SECONDS", seconds)
    reports = [[], []]
    callbacks = [[lambda progress, metrics, _, rows=rows: rows.append((progress.iteration, dict(metrics)))] for rows in reports]
    keys = jax.random.split(KEY, 2)
    loops.compiled_seeds(AGENT, ENV, env_steps=200, keys=keys, report_every=24, callbacks=callbacks, devices=1)
    for rows in reports:
        check(rows)


@struct
class Drawing(Reinforce):
    """Its only metric is a mean of random numbers."""

    def update(self, state, rollout, key, *, axis_name=None):
        return state, {"train/drawn": Mean.of(jax.random.normal(key, (3,)))}


@pytest.mark.parametrize("loop", [loops.compiled, pytest.param(loops.compiled_seeds, marks=pytest.mark.slow)])
def test_no_bit_of_a_report_depends_on_the_speed_of_the_machine(monkeypatch, loop):
    def rows_with_chunks_of(seconds):
        monkeypatch.setattr("polyak.loops.compiled_loop.CHUNK_SECONDS", seconds)
        monkeypatch.setattr("polyak.loops.seeds_loop.CHUNK_SECONDS", seconds)
        rows = []
        note = lambda progress, metrics, _: rows.append((progress.env_steps, progress.iteration, metrics))  # noqa: E731
        alone = {"key": KEY, "callbacks": [note]}
        seeds = {"keys": jax.random.split(KEY, 2), "callbacks": [[note], [note]], "devices": 1}
        settings = seeds if loop is loops.compiled_seeds else alone
        loop(Drawing(ENV.spec, num_steps=2), ENV, env_steps=2000, report_every=500, **settings)
        return rows

    rows = rows_with_chunks_of(1e-9)
    assert rows == rows_with_chunks_of(1e6)
    assert len(rows) >= 4 and all({"train/drawn", "rollout/ep_rew_mean"} <= metrics.keys() for *_, metrics in rows)


def test_means_of_two_periods_are_weighted_by_their_counts():
    histogram = Histogram(*(np.zeros(()) for _ in range(2)), np.zeros(3), *(np.zeros(()) for _ in range(2)))
    before = {"a": Mean(np.float32(6.0), np.float32(3.0)), "b": 1.0, "empty": Mean(np.float32(0.0), np.float32(0.0))}
    after = {"a": Mean(np.float32(4.0), np.float32(1.0)), "b": 2.0, "empty": before["empty"], "h": histogram}
    assert as_numbers(add_metrics(before, after)) == {"a": 2.5, "b": 2.0}
    assert as_numbers(add_metrics({}, after)) == {"a": 4.0, "b": 2.0}


def test_packed_metrics_unpack_to_the_sums():
    metrics = {"a": Mean(jnp.float32(6.0), jnp.float32(3.0)), "b": jnp.float32(1.0), "c": Mean.of(jnp.zeros(2))}
    packed = PackedMetrics.pack(metrics).after(jnp.stack([jnp.ones((2, 2)), jnp.zeros((2, 2))], axis=-1))
    unpacked = packed.unpack()
    assert {name: float(value) for name, value in unpacked.items()} == {"b": 1.0, "a": 7 / 4, "c": 1 / 3}
    assert PackedMetrics.pack({"b": jnp.float32(1.0)}).means.shape == (0, 2, 2)


def test_means_of_many_updates_lose_nothing_to_float32():
    values = np.float32([1e8, *[1.0] * 50, -1e8])
    packed, *rest = (PackedMetrics.pack({"a": Mean(jnp.float32(x), jnp.float32(1.0))}) for x in values)
    for update in rest:
        packed = update.after(packed.means)
    assert float(packed.unpack()["a"]) == 50 / 52


def test_a_mean_counts_finite_values_only_and_is_a_number():
    mean = Mean.of(jnp.array([1.0, jnp.nan, 3.0, jnp.inf, 5.0]), jnp.array([True, True, True, True, False]))
    assert float(mean) == 2.0 and float(mean.count) == 2.0
    np.testing.assert_allclose(mean, 2.0)
    assert np.isnan(float(Mean.of(jnp.float32(jnp.nan))))


@pytest.mark.parametrize("loop", [loops.compiled, loops.host])
def test_a_callback_may_add_numbers_of_any_library(loop):
    seen = []

    def add(progress, metrics, state):
        metrics |= {"mine/a": np.float32(1.5), "mine/b": jnp.float32(2.0)}
        metrics |= {"mine/c": np.int64(3), "mine/d": np.array(True), "mine/e": None, "mine/f": jnp.bfloat16(4)}

    train_options = {
        "env_steps": 40,
        "key": KEY,
        "callbacks": [add, lambda progress, metrics, state: seen.append(dict(metrics))],
    }
    loop(AGENT, ENV, **train_options)
    added = {name: value for name, value in seen[-1].items() if name.startswith("mine/")}
    assert added == {"mine/a": 1.5, "mine/b": 2.0, "mine/c": 3, "mine/d": True, "mine/e": None, "mine/f": 4.0}
    assert [type(value) for value in added.values()] == [float, float, int, bool, type(None), float]


@pytest.mark.parametrize(("name", "value"), [("mine/x", "high"), ("mine/x", np.zeros(2)), (3, 1.0), ("mine/x", [1.0])])
def test_what_a_callback_adds_that_is_no_number_is_an_error_that_names_it(name, value):
    def add_wrong(progress, metrics, state):
        metrics[name] = value

    with pytest.raises(TypeError, match=rf"callback add_wrong: a metric must be a number .*, got {name!r}: "):
        loops.compiled(AGENT, ENV, env_steps=40, key=KEY, callbacks=[add_wrong])

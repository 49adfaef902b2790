import numpy as np
import pytest

import polyak
from polyak.reports.curves import elapsed_seconds, group_runs, make_curves, read_samples, thin
from polyak.reports.statistics import iqm, iqm_intervals
from tests.reports.written_runs import linear_rows, write_run


def curves_of(root, tag="rollout/ep_rew_mean", by=None, **options):
    records = polyak.load_runs(root).records
    return make_curves(group_runs(records, by), read_samples(records), tag, **options)


def test_only_seeds_are_one_group_by_default(tmp_path):
    for number, (seed, options) in enumerate(
        [
            (0, {}),
            (1, {"threads": 2, "eval_every": 7}),
            (0, {"agent": {"gamma": 0.9}}),
            (0, {"env": "jax/Acrobot-v1", "num_envs": 2}),
        ]
    ):
        write_run(tmp_path / str(number), linear_rows(3), seed=seed, **options)
    groups = group_runs(polyak.load_runs(tmp_path).records)
    # The other environment is a panel of its own, in which no setting differs.
    assert [(group.label, group.env, len(group.records)) for group in groups] == [
        ("gamma=0.9", "jax/CartPole-v1", 1),
        ("gamma=0.99", "jax/CartPole-v1", 2),
        ("ppo", "jax/Acrobot-v1", 1),
    ]
    assert dict(groups[0].settings) == {"gamma": 0.9}


def test_groups_are_in_the_order_of_numbers(tmp_path):
    """Not in that of names, in which 0.0003 is behind 0.01; texts stay in the order of the runs."""
    settings = [(rate, kind) for kind in ("sgd", "adam", None) for rate in (0.001, 0.01, 0.0003, 1)]
    for number, (rate, kind) in enumerate(settings):
        write_run(tmp_path / f"{number:02d}", agent={"rate": rate, "kind": kind})
    groups = group_runs(polyak.load_runs(tmp_path).records)
    wanted = [(rate, kind) for rate in (0.0003, 0.001, 0.01, 1) for kind in ("sgd", "adam", None)]
    assert [(group.settings["rate"], group.settings["kind"]) for group in groups] == wanted
    by_kind = group_runs(polyak.load_runs(tmp_path).records, ["kind", "rate"])
    assert [group.settings["rate"] for group in by_kind] == 3 * [0.0003, 0.001, 0.01, 1]


def test_groups_whose_settings_are_close_have_different_labels(tmp_path):
    for number, steps in enumerate([10_000_000.0, 10_000_024.0, 2.5]):
        write_run(tmp_path / str(number), linear_rows(3), agent={"steps": steps})
    groups = group_runs(polyak.load_runs(tmp_path).records)
    assert [group.label for group in groups] == ["steps=2.5", "steps=10000000.0", "steps=10000024.0"]


def test_an_integer_and_its_float_are_one_value(tmp_path):
    for number, rate in enumerate([1, 1.0, 2]):
        write_run(tmp_path / str(number), linear_rows(3), agent={"rate": rate})
    groups = group_runs(polyak.load_runs(tmp_path).records)
    assert [(group.label, len(group.records)) for group in groups] == [("rate=1", 2), ("rate=2", 1)]


def test_runs_are_grouped_by_chosen_settings(tmp_path):
    for number, (algorithm, gamma, rate) in enumerate([("ppo", 0.9, 1), ("ppo", 0.9, 2), ("dqn", 0.9, 1), ("dqn", 0.8, 1)]):
        write_run(tmp_path / str(number), algorithm=algorithm, agent={"gamma": gamma, "rate": rate})
    records = polyak.load_runs(tmp_path).records

    def grouped(by):
        return {group.label: len(group.records) for group in group_runs(records, by)}

    assert grouped(None) == {"ppo, rate=1": 1, "ppo, rate=2": 1, "dqn, gamma=0.9": 1, "dqn, gamma=0.8": 1}
    assert grouped(["gamma"]) == {"gamma=0.9": 3, "gamma=0.8": 1}
    assert grouped(["algorithm"]) == {"ppo": 2, "dqn": 2}
    write_run(tmp_path / "4", agent={"gamma": 0.9 + 1e-12, "rate": 1})
    close = group_runs(polyak.load_runs(tmp_path).records, ["gamma"])
    assert [len(group.records) for group in close] == [1, 3, 1], "equal texts are not equal values"
    with pytest.raises(ValueError, match=r"group_by: unknown setting 'gama'; did you mean 'gamma'"):
        grouped(["gama"])


def test_a_group_is_the_iqm_over_its_runs_with_its_interval(tmp_path):
    for seed in range(5):
        write_run(tmp_path / str(seed), linear_rows(10, slope=seed, every=2), seed=seed, eval_every=200)
    (curve,) = curves_of(tmp_path).curves
    assert curve.x.tolist() == [100 * n for n in range(1, 11)] and set(curve.runs) == {5}
    values = np.outer(range(5), range(1, 11)).astype(float)
    expected = iqm_intervals(values)
    for got, wanted in zip((curve.y, curve.low, curve.high), expected, strict=True):
        np.testing.assert_allclose(got, wanted)
    (evaluated,) = curves_of(tmp_path, "eval/mean_reward").curves
    assert (evaluated.x.tolist(), evaluated.y.tolist()) == ([200, 400, 600, 800, 1000], [1002, 1004, 1006, 1008, 1010])


def test_runs_with_other_steps_are_interpolated_where_half_of_them_have_values(tmp_path):
    for seed, (count, step) in enumerate([(100, 100), (50, 210), (10, 90)]):
        write_run(tmp_path / str(seed), linear_rows(count, slope=float(step), step=step), seed=seed, stopped="interrupt")
    (curve,) = curves_of(tmp_path, points=30).curves
    # All returns are equal to env_steps, so the curve is, too; the short run ends at 900.
    np.testing.assert_allclose(curve.y, curve.x)
    assert (curve.x[0], curve.x[-1], len(curve.x)) == (210, 10_000, 30)
    assert np.all((curve.runs == 3) == (curve.x <= 900))


def test_a_group_keeps_the_evaluations_of_runs_that_were_evaluated_at_other_steps(tmp_path):
    """Points between the evaluations alone would hide the peak."""
    for seed in range(4):
        rows = [{"env_steps": at + seed, "eval/mean_reward": value} for at, value in ((2000, 0.0), (4000, 100.0), (5000, 0.0))]
        write_run(tmp_path / str(seed), rows, seed=seed)
    (curve,) = curves_of(tmp_path, "eval/mean_reward").curves
    assert set(range(4000, 4004)) <= set(curve.x) and curve.y.max() > 99
    (curve,) = curves_of(tmp_path, "eval/mean_reward", points=5).curves
    assert curve.x.tolist() == np.linspace(2003, 5000, 5).tolist()


def test_a_curve_ends_where_the_first_of_runs_of_about_equal_length_ends(tmp_path):
    for seed, value in enumerate([0.0, 0.0, 100.0, 100.0]):
        rows = [{**row, "rollout/ep_rew_mean": value} for row in linear_rows(100 + seed)]
        write_run(tmp_path / str(seed), rows, seed=seed)
    (curve,) = curves_of(tmp_path, points=30).curves
    # Beyond it, the mean would jump from 50 to 100.
    assert (curve.x[-1], set(curve.runs), set(curve.y)) == (10_000, {4}, {50.0})


def test_a_diverged_run_keeps_its_last_value(tmp_path):
    for seed in range(2):
        write_run(tmp_path / str(seed), linear_rows(10), seed=seed)
    write_run(tmp_path / "2", linear_rows(4, slope=-1.0), seed=2, stopped="TrainingDiverged: the loss was NaN", env_steps=1000)
    (curve,) = curves_of(tmp_path).curves
    assert set(curve.runs) == {3}
    np.testing.assert_allclose(curve.y[-1], iqm([[10.0], [10.0], [-4.0]]))


def test_time_goes_on_where_a_run_was_resumed(tmp_path):
    rows = [
        *linear_rows(4, seconds=1.0),
        *({**row, "env_steps": row["env_steps"] + 400} for row in linear_rows(3, seconds=2.0)),
    ]
    write_run(tmp_path / "0", rows)
    assert elapsed_seconds(polyak.load_run(tmp_path / "0").metrics).tolist() == [1, 2, 3, 4, 6, 8, 10]
    (curve,) = curves_of(tmp_path, x="time").curves
    assert curve.x.tolist() == [1, 2, 3, 4, 6, 8, 10] and curve.low is None


@pytest.mark.parametrize("resumed_seconds", [1.0, 4.0, 9.0])
def test_time_goes_on_where_the_first_report_of_a_resumed_run_came_late(tmp_path, resumed_seconds):
    """As the loops report: `time/fps` over the env_steps and seconds since the run was resumed."""
    sessions = [(0, 100 * n, float(n)) for n in range(1, 5)], [(400, 400 + 100 * n, resumed_seconds * n) for n in range(1, 4)]
    rows = [
        {"env_steps": at, "time/time_elapsed": seconds, "time/fps": (at - start) / seconds, "rollout/ep_rew_mean": 1.0}
        for session in sessions
        for start, at, seconds in session
    ]
    write_run(tmp_path / "0", rows)
    expected = [1, 2, 3, 4, *(4 + resumed_seconds * n for n in range(1, 4))]
    (curve,) = curves_of(tmp_path, x="time").curves
    np.testing.assert_allclose(curve.x, expected)


def test_a_thinned_curve_keeps_its_extremes_and_ends():
    y = np.random.default_rng(0).normal(size=100_000)
    y[[12_345, 54_321]] = 50, -60
    x, thinned = thin(np.arange(100_000.0), y, 500)
    assert len(x) <= 502 and (thinned.max(), thinned.min()) == (50, -60) and (x[0], x[-1]) == (0, 99_999)
    np.testing.assert_array_equal(thinned, y[x.astype(int)])
    assert len(thin(x[:10], y[:10], 10)[0]) == 10


def test_runs_without_the_tag_or_with_damaged_metrics_hide_no_other(tmp_path):
    write_run(tmp_path / "a", linear_rows(5, every=1), seed=0)
    write_run(tmp_path / "b", linear_rows(5), seed=1)
    (write_run(tmp_path / "c", linear_rows(5), seed=2) / "metrics.jsonl").write_text("{\n")
    records = polyak.load_runs(tmp_path).records
    samples = read_samples(records)
    assert list(samples.unreadable) == ["c"] and "line 1: not valid JSON" in samples.unreadable["c"]
    found = make_curves(group_runs(records), samples, "eval/mean_reward")
    assert (found.missing, [curve.runs.tolist() for curve in found.curves]) == (["b"], [[1] * 5])
    with pytest.raises(ValueError, match="unknown tag 'eval/mean_rewrd'; did you mean 'eval/mean_reward'"):
        make_curves(group_runs(records), samples, "eval/mean_rewrd")

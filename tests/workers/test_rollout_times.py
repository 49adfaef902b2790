from polyak.workers.rollout_times import RolloutTimes


def test_times_are_per_rollout_and_per_update():
    now = [100.0]
    times = RolloutTimes(2, lambda: now[0])
    for seconds, staleness in (([3.0, 1.0], [0, 1]), ([2.0, 2.0], [0, 3])):
        times.add(seconds, staleness)
        times.waited += 2.0
        times.updated += 0.5
    now[0] += 5.0
    assert times.metrics() == {
        "staleness/mean": 1.0,
        "staleness/max": 3.0,
        "time/collect": 2.0,
        "time/wait": 2.0,
        "time/update": 0.5,
        "workers/idle_share": 1 - 8 / (2 * 5),
        "workers/slowest_seconds": 3.0,
    }


def test_a_report_without_rollouts_has_zeros_and_idle_workers():
    metrics = RolloutTimes(2, iter([0.0, 1.0]).__next__).metrics()
    assert metrics.pop("workers/idle_share") == 1.0 and set(metrics.values()) == {0.0}

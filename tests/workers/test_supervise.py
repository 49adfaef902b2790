import pytest

from polyak.workers.supervise import MAX_BACK_OFF, MAX_FAILURES, Supervisor, WorkerLost

LATE, DEAD = object(), object()


class Engine:
    """Calls of a worker return what a list says, in order; time passes only while waiting."""

    def __init__(self, results):
        self.results = dict(results) if isinstance(results, dict) else {b"0": list(results), b"1": list(results)}
        self.now, self.started, self.ended, self.calls, self.lacks = 0.0, 0, [], [], ""

    def start(self, payload):
        self.started += 1
        return (payload, self.started)

    def call(self, handle, method, arguments):
        self.calls.append((handle[0], method, arguments))
        return (len(self.calls), "begun" if method == "begin" else self.results[handle[0]].pop(0))

    def share(self, value):
        return value

    def wait(self, calls, seconds):
        done = [call for call in calls if call[1] is not LATE]
        if not done:
            self.now += seconds
        return done

    def result(self, call):
        if call[1] is DEAD:
            raise WorkerLost("died: of a test")
        return call[1]

    def end(self, handle):
        self.ended.append(handle)

    def shortage(self):
        return self.lacks

    def close(self):
        pass


def make(results, workers=1, budget=10, **options):
    engine, events = Engine(results), []
    supervisor = Supervisor(
        engine,
        [b"%d" % i for i in range(workers)],
        lambda index: ("state", index),
        **{"timeout": 5.0, "start_timeout": 50.0} | options,
        budget=budget,
        on_event=events.append,
        clock=lambda: engine.now,
    )
    supervisor.start()
    return supervisor, engine, events


def run(supervisor, wanted, patience=1000):
    """Wait for so many results of `rollout`."""
    results = []
    for _ in range(patience):
        for worker, method, result in supervisor.results(1.0):
            if method == "rollout":
                supervisor.accept(worker)
                results.append((worker, result))
        if len(results) >= wanted:
            return results
    raise AssertionError(f"only {results}")


def test_results_come_from_the_workers_that_were_asked():
    supervisor, engine, _ = make({b"0": ["a"], b"1": ["b"]}, workers=2)
    for worker in range(2):
        supervisor.request(worker, "rollout", worker)
    assert run(supervisor, 2) == [(0, "a"), (1, "b")]
    assert [method for _, method, _ in engine.calls] == ["begin", "begin", "rollout", "rollout"]


@pytest.mark.parametrize("fault", [DEAD, LATE], ids=["dead", "late"])
def test_a_worker_that_fails_is_made_again_and_repeats_its_request(fault):
    supervisor, engine, events = make([fault, "again"])
    supervisor.request(0, "rollout", 7)
    assert run(supervisor, 1) == [(0, "again")]
    assert engine.calls == [
        (b"0", "begin", ("state", 0)),
        (b"0", "rollout", (7,)),
        (b"0", "begin", ("state", 0)),
        (b"0", "rollout", (7,)),
    ]
    assert [event.event for event in events] == ["started", "failed", "restarted"]
    assert engine.ended == [(b"0", 1)], "the one that failed"
    assert supervisor.metrics() == {"workers/alive": 1, "workers/restarts": 1}


def test_a_hang_is_noticed_at_the_timeout_and_named():
    supervisor, engine, events = make([LATE, "again"], timeout=3.0)
    supervisor.request(0, "rollout", 1)
    run(supervisor, 1)
    assert 3.0 <= engine.now <= 3.1
    assert "did not return from rollout() within timeout=3 s" in events[1].detail


def test_a_worker_that_is_too_slow_gets_twice_the_time_and_the_message_tells_how_much():
    supervisor, engine, events = make(["a", LATE, LATE, LATE, LATE, "b", LATE, "c"], timeout=3.0)
    for number in range(3):
        supervisor.request(0, "rollout", number)
        run(supervisor, 1)
    details = [event.detail.partition(" within ")[2].partition(";")[0] for event in events if event.event == "failed"]
    times = ["timeout=3 s", "2 times timeout=3 s", "4 times timeout=3 s", "4 times timeout=3 s", "timeout=3 s"]
    assert details == times and events[1].detail.endswith("; --worker-timeout and Workers(timeout=) allow more")
    assert engine.now == pytest.approx(3 + 6 + 12 + 12 + (1 + 2 + 4) + 3, abs=0.5)


def test_a_slow_worker_keeps_its_time_until_a_rollout_is_fast_enough():
    supervisor, engine, events = make(["a", LATE, "b", LATE, "c"], timeout=3.0)
    supervisor.request(0, "rollout", 0)
    run(supervisor, 1)
    supervisor.request(0, "rollout", 1)
    while engine.started == 1:
        supervisor.results(1.0)
    supervisor.results(1.0)
    engine.now += 5.0
    run(supervisor, 1)
    supervisor.request(0, "rollout", 2)
    run(supervisor, 1)
    assert "within 2 times timeout=3 s" in [event.detail for event in events if event.event == "failed"][1]


def test_a_slow_start_has_a_patience_of_its_own():
    supervisor, engine, _ = make(["a"], timeout=3.0, start_timeout=50.0)
    supervisor.workers[0].call = (0, LATE)
    for _ in range(40):
        supervisor.results(1.0)
    assert engine.started == 1
    for _ in range(12):
        supervisor.results(1.0)
    assert engine.started == 2


def test_a_start_that_takes_too_long_names_the_free_cpu_that_it_may_wait_for():
    supervisor, engine, events = make(["a"], start_timeout=50.0)
    supervisor.workers[0].call = (0, LATE)
    supervisor.request(0, "rollout", 1)
    assert run(supervisor, 1) == [(0, "a")] and engine.started == 2
    assert events[0].detail == "did not return from begin() within start_timeout=50 s: it is slow, or waits for a free CPU"


def test_workers_that_were_never_there_and_cannot_be_end_the_training_at_the_first_timeout():
    supervisor, engine, _ = make(["a"], start_timeout=50.0)
    supervisor.workers[0].call, engine.lacks = (0, LATE), "2 workers need 2 CPUs, the Ray cluster at a:1 has 1"
    with pytest.raises(RuntimeError, match="worker 0 did not start within start_timeout=50 s: 2 workers need 2 CPUs, the Ray"):
        run(supervisor, 1)
    assert engine.started == 1 and 50.0 <= engine.now <= 50.1


def test_a_worker_that_was_there_waits_for_another_machine():
    supervisor, engine, events = make([DEAD, "a"], start_timeout=50.0)
    engine.lacks = "2 workers need 2 CPUs, the Ray cluster at a:1 has 1"
    supervisor.request(0, "rollout", 1)
    while engine.started == 1:
        supervisor.results(1.0)
    supervisor.workers[0].call = (0, LATE)
    assert run(supervisor, 1) == [(0, "a")]
    assert [event.detail for event in events if event.event == "failed"][1].endswith(f"start_timeout=50 s: {engine.lacks}")


def test_events_have_the_machine_and_the_process_of_their_worker():
    supervisor, engine, events = make([DEAD, "a"])
    supervisor.place_of = lambda result: (result, engine.started)
    supervisor.request(0, "rollout", 1)
    run(supervisor, 1)
    assert [(event.event, event.node, event.pid) for event in events] == [
        ("started", "begun", 1),
        ("failed", "begun", 1),
        ("restarted", "begun", 2),
    ]


def test_the_pause_before_a_restart_doubles_and_ends_with_a_success():
    supervisor, engine, _ = make(["first"] + [DEAD] * 9 + ["at last", DEAD, "b"], budget=100)
    for number in range(2):
        supervisor.request(0, "rollout", number)
        run(supervisor, 1)
    # At once, then after 1 + 2 + 4 + ... + 60 + 60 seconds.
    assert engine.now == pytest.approx(1 + 2 + 4 + 8 + 16 + 32 + 2 * MAX_BACK_OFF, abs=0.2)
    before = engine.now
    supervisor.request(0, "rollout", 2)
    run(supervisor, 1)
    assert engine.now == before, "the first failure in a row again"


def test_other_workers_go_on_while_one_waits_to_be_started_again():
    supervisor, engine, _ = make({b"0": [DEAD, DEAD, "a"], b"1": ["b0", "b1"]}, workers=2)
    supervisor.request(0, "rollout", 0)
    supervisor.request(1, "rollout", 0)
    assert run(supervisor, 1) == [(1, "b0")]
    supervisor.request(1, "rollout", 1)
    assert run(supervisor, 1) == [(1, "b1")]
    assert engine.now < 1.1 and run(supervisor, 1) == [(0, "a")]


def test_the_budget_of_restarts_ends_the_training_with_the_reason():
    supervisor, engine, events = make([DEAD] * 5, budget=2)
    supervisor.request(0, "rollout", 1)
    with pytest.raises(RuntimeError, match="worker 0 died: of a test; no restart is left of restarts=2"):
        run(supervisor, 1)
    assert engine.started == 3
    assert [event.event for event in events if event.event != "restarted"] == ["started", "failed", "failed", "lost"]


def test_the_spent_budget_names_the_last_failure_of_every_worker():
    supervisor, _, _ = make({b"0": [DEAD, LATE], b"1": [DEAD, LATE]}, workers=2, budget=2, timeout=2.0)
    for worker in range(2):
        supervisor.request(worker, "rollout", 1)
    with pytest.raises(RuntimeError, match=r"worker 0 did not return from rollout\(\) within timeout=2 s") as caught:
        run(supervisor, 1)
    assert caught.value.__notes__ == ["worker 1 before: died: of a test"]


def test_a_worker_that_fails_again_and_again_is_given_up_where_others_suffice():
    supervisor, engine, events = make({b"0": [DEAD] * MAX_FAILURES, b"1": ["b0", "b1"]}, workers=2, min_workers=1)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    assert not supervisor.is_absent(0), "before it has failed"
    absences = []
    while not supervisor.is_lost(0):
        supervisor.results(1.0)
        absences.append(supervisor.is_absent(0))
    assert absences[0] is False and absences[-1] is True and supervisor.is_absent(1) is False
    assert [event.event for event in events if event.worker == 0] == ["started", *["failed", "restarted"] * 4, "lost"]
    assert engine.now == pytest.approx(1 + 2 + 4, abs=0.2) and len(engine.ended) == MAX_FAILURES
    supervisor.request(0, "rollout", 1)
    supervisor.request(1, "rollout", 1)
    assert run(supervisor, 1) == [(1, "b1")] and not supervisor.is_idle(0) and supervisor.is_settled()
    assert supervisor.metrics() == {"workers/alive": 1, "workers/restarts": MAX_FAILURES - 1}
    engine.results[b"0"] = ["again"]
    supervisor.forget_failures()
    supervisor.request(0, "rollout", 2)
    assert run(supervisor, 1) == [(0, "again")], "another training"


@pytest.mark.parametrize("min_workers", [None, 2])
def test_failures_in_a_row_end_the_training_if_no_worker_has_ever_worked(min_workers):
    supervisor, engine, events = make([DEAD] * 100, workers=2, budget=100, min_workers=min_workers)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    with pytest.raises(RuntimeError, match="worker 0 died: of a test; failures in a row: 5"):
        run(supervisor, 1)
    assert engine.now == pytest.approx(1 + 2 + 4, abs=0.2) and events[-1].event == "lost"


def test_failures_in_a_row_end_no_training_whose_other_workers_have_not_failed():
    results = {b"0": [DEAD] * 6 + ["a"], b"1": [LATE, "b"]}
    supervisor, engine, _ = make(results, workers=2, budget=100, warm_up=300.0)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    assert run(supervisor, 1) == [(0, "a")] and engine.now < 300, "the other still compiles"


def test_a_request_that_returns_at_once_takes_no_time_from_a_slow_rollout():
    supervisor, _, events = make(["a", LATE, "noted", LATE, "b"], timeout=3.0)
    supervisor.request(0, "rollout", 0)
    run(supervisor, 1)
    supervisor.request(0, "rollout", 1)
    while not [event for event in events if event.event == "failed"]:
        supervisor.results(1.0)
    supervisor.withdraw(0)
    supervisor.request(0, "note", 1)
    while not supervisor.is_settled():
        supervisor.results(1.0)
    supervisor.request(0, "rollout", 2)
    run(supervisor, 1)
    assert "within 2 times timeout=3 s" in [event.detail for event in events if event.event == "failed"][1]


def test_the_error_of_a_worker_ends_the_training_if_no_worker_has_ever_worked():
    supervisor, engine, _ = make(["raised"] * MAX_FAILURES)
    with pytest.raises(ArithmeticError, match="of a test") as caught:
        for number in range(MAX_FAILURES):
            supervisor.request(0, "rollout", number)
            while not engine.calls or engine.calls[-1][2] != (number,) or not supervisor.is_idle(0):
                supervisor.results(1.0)
            supervisor.fail(0, "raised", ArithmeticError("of a test"))
    assert caught.value.__notes__ == ["No worker has returned a valid result; worker 0: failures in a row: 5"]


def test_the_error_of_a_worker_is_the_cause_where_others_have_worked():
    supervisor, _, _ = make(["a", "raised"], budget=0)
    supervisor.request(0, "rollout", 0)
    run(supervisor, 1)
    error = ArithmeticError("of a test")
    with pytest.raises(RuntimeError, match=r"no restart is left of restarts=0; --worker-restarts and Workers\(") as caught:
        supervisor.fail(0, "raised", error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("min_workers", [None, 2])
def test_a_worker_that_does_not_start_in_time_twice_ends_the_training(min_workers):
    supervisor, engine, _ = make([], workers=2, start_timeout=50.0, min_workers=min_workers)
    call = engine.call
    engine.call = lambda handle, method, arguments: (call(handle, method, arguments)[0], LATE)
    for index, worker in enumerate(supervisor.workers):
        worker.call = (index, LATE)
    with pytest.raises(RuntimeError, match=r"the constructor or reset\(\) of the environment did not return"):
        run(supervisor, 1)
    assert engine.now == pytest.approx(100, abs=1)


def test_fewer_workers_than_are_needed_end_the_training_with_the_reasons():
    results = {b"0": [DEAD] * MAX_FAILURES, b"1": [DEAD] * MAX_FAILURES}
    supervisor, _, _ = make(results, workers=2, min_workers=1, budget=2 * MAX_FAILURES - 2)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    message = "worker 1 died: of a test; no restart is left of restarts=8, and only 0 others are left of min_workers=1"
    with pytest.raises(RuntimeError, match=message) as caught:
        run(supervisor, 1)
    assert caught.value.__notes__ == ["worker 0 before: died: of a test"]


def test_a_worker_that_does_not_start_at_the_beginning_is_given_up_after_one_start():
    supervisor, engine, events = make({b"0": [], b"1": ["b"]}, workers=2, min_workers=1, start_timeout=50.0)
    supervisor.workers[0].call = (0, LATE)
    supervisor.request(1, "rollout", 0)
    assert run(supervisor, 1) == [(1, "b")]
    while not supervisor.is_lost(0):
        supervisor.results(1.0)
    assert engine.now == pytest.approx(50, abs=1) and engine.started == 2
    assert "start_timeout=50 s" in events[-1].detail and events[-1].event == "lost"


def test_without_a_restart_left_the_others_go_on_if_they_suffice():
    supervisor, _, events = make({b"0": [DEAD], b"1": ["b"]}, workers=2, min_workers=1, budget=0)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    assert run(supervisor, 1) == [(1, "b")] and [event.event for event in events] == ["started", "started", "lost"]


def test_a_worker_that_is_needed_is_restarted_until_the_budget_is_spent():
    supervisor, engine, _ = make({b"0": [DEAD] * (MAX_FAILURES + 2) + ["back"], b"1": ["b"]}, workers=2, min_workers=2)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    assert sorted(run(supervisor, 2)) == [(0, "back"), (1, "b")] and not supervisor.is_lost(0)
    assert engine.now > 60


def test_others_wait_for_a_worker_where_too_few_are_there():
    supervisor, _, _ = make({b"0": [DEAD] * 3, b"1": ["b"]}, workers=2, min_workers=2)
    for worker in range(2):
        supervisor.request(worker, "rollout", 0)
    for _ in range(6):
        supervisor.results(0.1)
    assert supervisor.workers[0].failures > 1 and not supervisor.is_absent(0)


def test_the_result_of_a_worker_that_was_given_up_is_ignored():
    supervisor, _, _ = make([LATE, "new"], timeout=2.0)
    supervisor.request(0, "rollout", 1)
    supervisor.results(1.0)
    late = supervisor.workers[0].call
    assert run(supervisor, 1) == [(0, "new")]
    assert late not in [worker.call for worker in supervisor.workers]


def test_results_that_are_not_accepted_do_not_end_the_pauses():
    """An environment that raises at once in every new worker must not use up the budget in a second."""
    supervisor, engine, _ = make(["raised"] * 5, budget=10)
    supervisor.request(0, "rollout", 1)
    for _ in range(40):
        for worker, method, _ in supervisor.results(1.0):
            if method == "rollout" and len(engine.results[b"0"]):
                supervisor.request(0, "rollout", 1)
                supervisor.fail(worker, "raised")
    assert engine.now >= 1 + 2 + 4


def test_a_worker_that_compiles_gets_more_time_until_its_first_result():
    supervisor, engine, events = make([LATE, "a", LATE, "b"], timeout=3.0)
    supervisor.warm_up = 20.0
    supervisor.request(0, "rollout", 1)
    run(supervisor, 1)
    assert 23 <= engine.now < 23.2
    assert " within timeout=3 s and 20 s to compile;" in events[1].detail
    supervisor.request(0, "rollout", 2)
    run(supervisor, 1)
    assert 26 <= engine.now < 26.4, "a result was accepted before"


def test_the_end_closes_environments_and_waits_for_two_seconds_at_most():
    supervisor, engine, _ = make({b"0": [DEAD, "a"], b"1": ["closed"], b"2": [LATE]}, workers=3)
    supervisor.results(1.0)
    supervisor.close()
    assert [call for call in engine.calls if call[1] == "close"] == [(b"%d" % i, "close", ()) for i in range(3)]
    assert engine.now == pytest.approx(2.0)


def test_a_second_training_has_the_whole_budget_again():
    supervisor, _, _ = make([DEAD, "a", DEAD, "b"], budget=1)
    for number in range(2):
        supervisor.request(0, "rollout", number)
        run(supervisor, 1)
        supervisor.forget_failures()

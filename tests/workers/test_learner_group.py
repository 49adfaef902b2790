"""A group of learners: with learners of the test and its clock, and with real processes that do not train."""

import itertools
import os
import shutil
import signal
import sys
import time
import types
from functools import partial

import pytest

from polyak.workers.learner_group import STOP_SECONDS, LearnerLost, Learners, StoppedBeforeStart, run_group, start_here
from polyak.workers.learner_process import LearnerEnd
from polyak.workers.ray_learners import RayLearners
from polyak.workers.rollout_worker import Failure


class Clock:
    """A clock that sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeLearner:
    """A learner that ends as a test says, at a time of its clock."""

    def __init__(self, clock, end=None, after=0.0, has_joined=True, notes=(), messages_until=1e9):
        self.has_joined, self.noted = has_joined, notes
        self.start, self.messages_until = clock(), clock() + messages_until
        self.clock, self.end, self.at = clock, end, clock() + after
        self.is_killed = self.is_asked = False

    @property
    def messages(self):
        return int(min(self.clock(), self.messages_until) - self.start) + 1 if self.has_joined else 0

    def poll(self):
        assert not self.is_killed
        return self.end if self.clock() >= self.at else None

    def ask_to_stop(self):
        self.is_asked = True
        self.end, self.at = LearnerEnd("stopped"), 0.0

    def kill(self):
        self.is_killed = True

    def notes(self):
        assert self.is_killed, "until then there may be more"
        return self.noted


def failure(error, **fields):
    try:
        raise error
    except type(error) as raised:
        return LearnerEnd(failure=Failure.of(raised), **fields)


class Groups:
    """Groups that are started one after another, each with the ends of its learners, `(end, after)`."""

    def __init__(self, *ends, **fields):
        self.clock, self.ends, self.started, self.events = Clock(), list(ends), [], []
        self.options = Learners(2, **fields)
        self.saved = 0

    def start(self):
        assert all(learner.is_killed for _, group in self.started for learner in group), "one group at a time"
        group = [FakeLearner(self.clock, *end) for end in self.ends.pop(0)]
        self.started.append((self.clock(), group))
        return group

    def run(self, **arguments):
        arguments = {"progress": lambda: self.saved} | arguments
        return run_group(
            self.start, self.options, on_event=self.events.append, clock=self.clock, sleep=self.clock.sleep, **arguments
        )


DIES = [(None, 1e9), ("was killed by SIGKILL", 1.0)]
DONE = [(LearnerEnd("result"), 1.0), (None, 1e9)]


def test_the_result_is_the_first_learners_and_all_are_ended():
    groups = Groups(DONE)
    assert groups.run() == "result"
    assert groups.events == [] and all(learner.is_killed for learner in groups.started[0][1])


def test_all_start_again_at_once_when_one_dies():
    groups = Groups(DIES, DONE)
    assert groups.run() == "result"
    (first, _), (second, _) = groups.started
    assert second - first == pytest.approx(1.0, abs=0.1)
    assert [(event.worker, event.event, event.detail) for event in groups.events] == [(1, "failed", "was killed by SIGKILL")]


def test_deaths_without_progress_are_followed_by_longer_and_longer_pauses():
    groups = Groups(*[DIES] * 5, DONE)
    groups.run()
    times = [start for start, _ in groups.started]
    pauses = [later - earlier - 1.0 for earlier, later in itertools.pairwise(times)]
    assert pauses == pytest.approx([0, 1, 2, 4, 8], abs=0.2)


def test_progress_resets_the_pause():
    groups = Groups(*[DIES] * 4, DONE)

    def progress():
        groups.saved += 1
        return groups.saved

    groups.run(progress=progress)
    assert groups.started[-1][0] == pytest.approx(4.0, abs=0.5)


def test_the_last_restart_is_the_last():
    groups = Groups(DIES, DIES, DIES, restarts=1)
    with pytest.raises(RuntimeError, match=r"learner 1 was killed by SIGKILL; no restart is left of restarts=1"):
        groups.run()
    assert len(groups.started) == 2
    assert [event.event for event in groups.events] == ["failed", "lost"], "the last one is not started again"


def test_a_first_learner_that_hangs_is_started_again_after_the_timeout():
    hangs = [(None, 1e9, True, (), 20.0), (None, 1e9)]
    groups = Groups(hangs, DONE, timeout=60)
    assert groups.run() == "result"
    assert 79 <= groups.started[1][0] <= 81
    ((rank, detail),) = [(event.worker, event.detail) for event in groups.events]
    assert rank == 0 and detail.startswith("trained no further for timeout=60 s")


def test_the_first_chunk_which_compiles_has_no_limit():
    groups = Groups([(LearnerEnd("result"), 500.0, True, (), 0.0), (None, 1e9)], timeout=60)
    assert groups.run() == "result"


def test_a_group_that_has_not_found_each_other_does_not_hang_but_starts():
    """`start_timeout` is for it."""
    groups = Groups([(LearnerEnd("result"), 500.0, False), (None, 1e9)], timeout=60)
    assert groups.run() == "result"


def test_an_exception_of_the_first_learner_ends_the_training():
    groups = Groups([(failure(ArithmeticError("of a test")), 1.0), (None, 1e9)])
    with pytest.raises(ArithmeticError, match="of a test") as raised:
        groups.run()
    assert "learner 0" in raised.value.__notes__[0]
    assert groups.clock() < 2


def test_an_exception_that_follows_from_a_death_does_not_end_the_training():
    broken = failure(RuntimeError("connection closed by peer"), may_be_loss=True)
    groups = Groups([(broken, 1.0), ("was killed by SIGKILL", 5.0)], DONE)
    assert groups.run() == "result"
    assert [event.worker for event in groups.events] == [1]


def test_an_exception_that_no_death_explains_ends_the_training_after_a_while():
    broken = failure(RuntimeError("out of memory"), may_be_loss=True)
    groups = Groups([(None, 1e9), (broken, 1.0)])
    with pytest.raises(RuntimeError, match="out of memory"):
        groups.run()
    assert groups.options.heartbeat < groups.clock() < 30


def test_a_learner_that_does_not_find_the_others_is_lost():
    groups = Groups([(failure(RuntimeError("port in use"), has_joined=False), 1.0), (None, 1e9)], DONE)
    assert groups.run() == "result"
    assert "did not start: RuntimeError: port in use" in groups.events[0].detail


def test_learners_that_never_find_each_other_end_the_training_with_the_reason():
    alone = [(failure(RuntimeError("timed out"), has_joined=False), 1.0), (None, 1e9)]
    groups = Groups(*[alone] * 100)
    with pytest.raises(
        RuntimeError, match=r"learner 0 did not start: RuntimeError: timed out; .* not find each other in 3 starts"
    ):
        groups.run()
    assert len(groups.started) == 3
    assert [event.event for event in groups.events] == ["failed"] * 2 + ["lost"]


def test_learners_that_have_found_each_other_before_may_take_many_starts():
    """A fault of the network after the death of one, in the middle of a long training."""
    alone = [(failure(RuntimeError("timed out"), has_joined=False), 1.0), (None, 1e9)]
    groups = Groups(alone, DIES, *[alone] * 10, DONE)
    assert groups.run() == "result"
    groups = Groups(DIES, *[alone] * 10, restarts=5)
    with pytest.raises(RuntimeError, match="timed out; no restart is left of restarts=5"):
        groups.run()


def test_processes_that_end_before_they_find_each_other_end_the_training_too():
    groups = Groups(*[[("ended with exit code 1: no such module", 1.0, False), (None, 1e9, False)]] * 100)
    with pytest.raises(RuntimeError, match=r"learner 0 ended with exit code 1: no such module; .* in 3 starts"):
        groups.run()
    assert len(groups.started) == 3


class SlowRay:
    """A cluster with another machine, which starts nothing."""

    def __init__(self):
        self.util = types.SimpleNamespace(
            scheduling_strategies=types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
        )
        self.exceptions = types.SimpleNamespace(RayError=LookupError)
        self.util.get_node_ip_address = lambda: "127.0.0.1"
        self.killed = []

    def nodes(self):
        return [{"Alive": True, "NodeID": name, "NodeManagerHostname": name, "Resources": {}} for name in ("this", "other")]

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: "this")

    def remote(self, **_):
        actor = types.SimpleNamespace(versions=types.SimpleNamespace(remote=lambda: "call"))
        return lambda kind: types.SimpleNamespace(remote=lambda: actor)

    def wait(self, calls, timeout):
        time.sleep(timeout)
        return [], calls

    def kill(self, actor, no_restart):
        self.killed.append(actor)


def test_a_machine_that_does_not_start_its_learner_is_named_with_what_to_look_at(monkeypatch):
    ray = SlowRay()
    monkeypatch.setattr("polyak.workers.ray_learners.connect", lambda address: ray)
    with pytest.raises(LearnerLost, match=r"learner 1 did not start on other within start_timeout=1 s; .* firewall") as lost:
        RayLearners("auto").start(act, 2, Learners(2, start_timeout=1))
    assert not lost.value.has_joined and len(ray.killed) == 1


def test_a_request_to_stop_ends_the_wait_for_a_learner_on_another_machine(monkeypatch):
    ray, asked = SlowRay(), []
    monkeypatch.setattr("polyak.workers.ray_learners.connect", lambda address: ray)
    start = time.monotonic()
    with pytest.raises(StoppedBeforeStart, match="stopped while waiting for the machines"):
        RayLearners("auto", lambda: asked.append(1) or len(asked) > 2).start(act, 2, Learners(2, start_timeout=5))
    assert time.monotonic() - start < 2 and len(ray.killed) == 1


class LonelyRay:
    """A cluster of this machine alone."""

    def nodes(self):
        return [{"Alive": True, "NodeID": "this"}]

    def get_runtime_context(self):
        return self

    def get_node_id(self):
        return "this"


def test_a_request_to_stop_ends_the_wait_for_machines(monkeypatch):
    monkeypatch.setattr("polyak.workers.ray_learners.connect", lambda address: LonelyRay())
    asked = []
    learners = RayLearners("auto", lambda: asked.append(1) or len(asked) > 2)
    start = time.monotonic()
    with pytest.raises(StoppedBeforeStart, match="stopped while waiting for the machines"):
        learners.start(act, 2, Learners(2, start_timeout=5))
    assert time.monotonic() - start < 2


def test_a_request_to_stop_reaches_the_first_learner_once():
    groups = Groups([(None, 1e9), (None, 1e9)])
    assert groups.run(should_stop=lambda: groups.clock() > 3) == "stopped"
    assert groups.started[0][1][0].is_asked and not groups.started[0][1][1].is_asked


def test_a_request_to_stop_ends_the_pause_and_starts_no_other_group():
    groups = Groups(*[DIES] * 100)
    with pytest.raises(StoppedBeforeStart, match="after the death of a learner: learner 1 was killed by SIGKILL"):
        groups.run(should_stop=lambda: groups.clock() > 6 + 1 + 2 + 4 + 8 + 3)
    assert groups.clock() == pytest.approx(6 + 1 + 2 + 4 + 8 + 3, abs=0.2) and len(groups.started) == 6


def test_a_request_to_stop_before_a_death_starts_no_other_group():
    groups = Groups([(None, 1e9), ("was killed by SIGKILL", 5.0)], restarts=0)
    groups.start = lambda start=groups.start: [Deaf(learner) for learner in start()]
    with pytest.raises(StoppedBeforeStart):
        groups.run(should_stop=lambda: groups.clock() > 3)
    assert len(groups.started) == 1 and [event.event for event in groups.events] == ["lost"]


class Deaf:
    """A learner that does not stop when it is asked to."""

    def __init__(self, learner):
        self.has_joined, self.messages = learner.has_joined, learner.messages
        self.poll, self.kill, self.notes = learner.poll, learner.kill, learner.notes

    def ask_to_stop(self):
        pass


def test_a_request_to_stop_ends_learners_that_never_find_each_other():
    alone = [(failure(RuntimeError("timed out"), has_joined=False), 300.0, False), (None, 1e9, False)]
    groups = Groups(*[alone] * 3)
    groups.start = lambda start=groups.start: [Deaf(learner) for learner in start()]
    with pytest.raises(StoppedBeforeStart, match="stopped before the learners found each other"):
        groups.run(should_stop=lambda: groups.clock() > 10)
    assert groups.clock() == pytest.approx(10 + STOP_SECONDS, abs=0.2) and groups.events == []
    assert all(learner.is_killed for _, group in groups.started for learner in group)


def test_learners_that_find_each_other_when_they_are_asked_to_stop_do_so_in_order():
    groups = Groups([(LearnerEnd("stopped"), 60.0), (None, 1e9)])
    groups.start = lambda start=groups.start: [Deaf(learner) for learner in start()]
    assert groups.run(should_stop=lambda: groups.clock() > 3) == "stopped"
    assert groups.clock() > 60


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"number": 0}, "train: learners must be an integer in"),
        ({"number": 2, "restarts": -1}, "train: restarts must be an integer >= 0, got -1"),
        ({"number": 2, "timeout": 0}, "train: timeout must be an integer >= 1, got 0"),
        ({"number": 2, "heartbeat": 0}, "train: heartbeat must be an integer >= 1, got 0"),
    ],
)
def test_options_out_of_range_are_rejected(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Learners(**fields)


HUNG_SECONDS = 5


def act(directory, rank, should_stop, note):
    """In a process of its own: in the first group the second learner is killed, in the second one the first learner trains for
    a while and then hangs, in the third one it raises."""
    (directory / f"{rank}-{os.getpid()}").touch()
    note((rank, os.getpid()))
    group = len(list(directory.glob(f"{rank}-*")))
    deadline = time.monotonic() + 60
    while len(list(directory.glob(f"{1 - rank}-*"))) < group:
        assert time.monotonic() < deadline, "the other learner did not start"
        time.sleep(0.01)
    if rank == 1 and group == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and group == 2:
        until = time.monotonic() + 2 * HUNG_SECONDS
        while time.monotonic() < until:
            assert not should_stop()
            time.sleep(0.1)
        note("trained for twice the timeout")
    if rank == 0 and group == 3:
        raise LookupError("of a test")
    time.sleep(60)


@pytest.mark.slow
def test_real_processes_start_again_and_their_exceptions_arrive(tmp_path):
    events, notes, learners = [], [], Learners(2, timeout=HUNG_SECONDS)
    with pytest.raises(LookupError, match="of a test"):
        run_group(
            partial(start_here, partial(act, tmp_path), 2, learners),
            learners,
            progress=lambda: 0,
            on_event=events.append,
            on_note=notes.append,
        )
    assert [event.worker for event in events] == [1, 0]
    assert events[0].detail == "was killed by SIGKILL"
    assert events[1].detail.startswith(f"trained no further for timeout={HUNG_SECONDS} s")
    notes.remove("trained for twice the timeout")
    pids = [int(path.name.split("-")[1]) for path in tmp_path.iterdir()]
    assert sorted(notes) == sorted(tuple(map(int, path.name.split("-"))) for path in tmp_path.iterdir()), "of the dead too"
    assert len(pids) == 6 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_learner_that_ends_before_it_reads_its_function_is_reported_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    # Larger than the buffer of a pipe.
    group = start_here(bytes(2**22).count, 2, Learners(2))
    try:
        assert [learner.poll() for learner in group] == ["ended with exit code 1"] * 2
    finally:
        for learner in group:
            learner.kill()


def test_the_message_of_a_lost_learner_names_it():
    assert str(LearnerLost(3, "was killed by SIGKILL")) == "learner 3 was killed by SIGKILL"

import contextlib
import copy
import dataclasses
import itertools
from typing import ClassVar

import jax
import numpy as np
import pytest

import polyak
from polyak.agents.a2c import A2C
from polyak.agents.impala import IMPALA
from polyak.copies.receive import Push
from polyak.core.space_check import InvalidValue
from polyak.core.struct import struct
from polyak.loops.loop import Reporter
from polyak.networks.recurrent import LSTM
from polyak.workers.asynchronous_loop import train_asynchronously
from polyak.workers.in_process_workers import InProcessWorkers
from tests.cli.conftest import compiled_once
from tests.envs import toys
from tests.selection import quick
from tests.workers.setting import (
    KEY,
    Counting,
    Fault,
    FaultyWorkers,
    arrays_of,
    assert_same_bits,
    make_agent,
    make_env,
    make_workers,
)


@pytest.fixture(autouse=True)
def _compile_once(tmp_path_factory):
    """Each worker jits for itself, as it would in a process of its own: two thirds of the programs are compiled already."""
    with compiled_once(tmp_path_factory.getbasetemp() / "jax-cache"):
        yield


class FaultyPushes(FaultyWorkers):
    """As `FaultyWorkers`, for pushes."""

    def call(self, handle, method, arguments):
        if method != "gradients":
            return super().call(handle, method, arguments)
        fault = self.faults.get(self.calls)
        self.calls += 1
        if fault in ("lost", "late"):
            return Fault(fault)
        call = InProcessWorkers.call(self, handle, method, arguments)
        if fault is not None:
            call.result = fault(call.result)
        return call


def train(
    workers=2, engine=InProcessWorkers, steps=400, env=None, agent=None, snapshot=None, options=None, events=None, **arguments
):
    env = env or make_env(num_envs=4)
    envs = make_workers(env, workers, engine, **options or {})
    if events is not None:
        envs.group.on_event = events.append
    try:
        if snapshot is not None:
            envs.restore(snapshot)
        return train_asynchronously(
            agent or A2C(env.spec, num_steps=8, learning_rate=1e-3), envs, env_steps=steps, key=KEY, **arguments
        )
    finally:
        envs.close()


@pytest.mark.slow
def test_every_push_is_applied_once_and_steps_are_those_of_the_rollouts():
    reports = []
    result = train(callbacks=[lambda progress, metrics, state: reports.append(dict(metrics))])
    assert result.progress.env_steps >= 400
    assert result.metrics["pushes/applied"] == result.progress.iteration
    assert result.metrics["pushes/stale"] == result.metrics["pushes/rejected"] == 0
    assert int(result.state.env_steps) == result.progress.env_steps
    assert max(report["staleness/max"] for report in reports) == 1, "the push of the other worker"
    assert reports[-1]["rollout/ep_len_mean"] >= 8
    for report in reports:
        # Workers in this process work while the learner waits for nobody.
        assert 0 < report["time/collect"] <= report["workers/slowest_seconds"] < 60
        assert 0 <= report["time/wait"] < 60 and 0 < report["time/update"] < 60
        assert 0 <= report["workers/idle_share"] <= 1


def test_the_first_rollout_for_which_a_worker_compiles_is_not_training_time(monkeypatch):
    phase, phases = "", []

    class Recording(InProcessWorkers):
        def call(self, handle, method, arguments):
            phases.append((method, phase))
            return super().call(handle, method, arguments)

    def recorded(name):
        @contextlib.contextmanager
        def context(reporter):
            nonlocal phase
            phase = name
            yield

        return context

    for name in ("compiling", "training"):
        monkeypatch.setattr(Reporter, name, recorded(name))
    train(engine=Recording, steps=64)
    assert [when for method, when in phases if method == "gradients"][:2] == ["compiling"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_the_result_is_a_state_of_the_host_loop_and_either_loop_goes_on(shared_optimizer):
    env, options = make_env(num_envs=4), {"shared_optimizer": shared_optimizer}
    agent = A2C(env.spec, num_steps=8, learning_rate=1e-3)
    kept = []
    result = train(agent=agent, options=options, callbacks=[lambda progress, *_: kept.append(progress.env.snapshot())])
    done = result.progress.env_steps
    assert jax.tree.structure(result.state) == jax.tree.structure(agent.init(KEY))
    assert result.agent.policy(result.state).predict(np.zeros(4, np.float32))[0] in (0, 1)
    assert result.progress.nondeterminism
    moments = jax.tree.leaves(result.state.copies.optimizer_state)
    assert any(np.asarray(x).any() for x in moments), "the optimizer of the workers"
    more = {"steps": done + 200, "resume_from": result.loop_state, "env_steps_done": done}
    again = train(agent=agent, options=options, snapshot=kept[-1], **more)
    assert done + 200 <= again.progress.env_steps < done + 300
    assert int(again.state.env_steps) == again.progress.env_steps, "the statistics go on"
    env.restore(kept[-1])
    hosted = polyak.loops.host(agent, env, key=KEY, env_steps=more.pop("steps"), **more)
    assert int(hosted.state.env_steps) == hosted.progress.env_steps


@pytest.mark.slow
def test_states_that_callbacks_keep_stay_usable():
    kept = []
    result = train(callbacks=[lambda progress, metrics, state: kept.append(state.agent)])
    actions = [result.agent.policy(state).predict(np.zeros(4, np.float32))[0] for state in (*kept, result.state)]
    assert len(actions) > 3 and set(map(int, actions)) <= {0, 1}


def choosy():
    """An environment that fails where a forbidden action is taken."""
    return toys.Choosy(kind="multi")


SMALL = {"num_steps": 8, "learning_rate": 1e-3}
CASES = {
    "A2C": ("CartPole-v1", lambda spec: A2C(spec, **SMALL)),
    "recurrent": ("CartPole-v1", lambda spec: A2C(spec, network=LSTM(hidden=(), width=4), **SMALL)),
    "masks": (choosy, lambda spec: A2C(spec, network=polyak.MLP((8,)), **SMALL)),
    "IMPALA": ("CartPole-v1", lambda spec: IMPALA(spec, network=polyak.MLP((8,)), **SMALL)),
}


@pytest.mark.parametrize("case", quick("A2C", of=list(CASES)))
def test_one_worker_without_waiting_has_the_weights_of_updates_on_its_rollouts(case):
    """Its pushes are never stale."""
    env_id, make = CASES[case]
    env = make_env(env_id, num_envs=4)
    agent, rollouts, structures = make(env.spec), [], []

    @struct
    class Recorded(type(agent)):
        def gradients(self, state, rollout, key, **options):
            structures.append(jax.tree.structure(rollout))
            jax.debug.callback(lambda *leaves: rollouts.append(leaves), *jax.tree.leaves(rollout), ordered=True)
            return super().gradients(state, rollout, key, **options)

    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
    result = train(1, env=env, agent=Recorded(**fields), steps=200)
    jax.effects_barrier()
    state = agent.init(jax.random.split(KEY, 3)[0])
    update = jax.jit(agent.update)
    pushed = result.progress.iteration
    for leaves in rollouts[:pushed]:
        state, _ = update(state, jax.tree.unflatten(structures[-1], leaves), KEY)
    assert len(rollouts) >= pushed >= 6
    assert env.spec.has_action_mask == (case == "masks")
    carry = jax.tree.leaves(result.loop_state.carry)
    assert bool(carry) == (case == "recurrent") and all(np.asarray(x).any() for x in carry)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        result.state.copies.online.params,
        state.copies.online.params,
    )


class KeptPushes(FaultyPushes):
    """As `FaultyPushes`; keeps the pushes that arrive, as they were computed, with their workers. "computed" dies after it."""

    def __init__(self, faults):
        super().__init__(faults)
        self.payloads, self.task, self.received = [], None, []

    def call(self, handle, method, arguments):
        if method != "gradients":
            self.task = arguments[0] if method == "prepare" else self.task
            return super().call(handle, method, arguments)
        fault = self.faults.get(self.calls)
        if fault == "computed":
            self.faults[self.calls] = None
        call = super().call(handle, method, arguments)
        call.push = None if fault else (self.number_of(handle), copy.deepcopy(call.result))
        return Fault("lost") if fault == "computed" else call

    def result(self, call):
        result = super().result(call)
        if getattr(call, "push", None):
            self.received.append(call.push)
        return result

    def number_of(self, handle):
        """Of the worker, which is another object after each start, of the same payload."""
        return self.payloads.index(id(handle._make_env))

    def start(self, payload):
        self.payloads += [] if id(payload) in self.payloads else [id(payload)]
        return super().start(payload)


@pytest.mark.slow
@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_workers_that_die_cost_nothing(shared_optimizer):
    """A push arrives wholly or not at all, whether its worker dies before, within or after it."""
    engine, structures = KeptPushes({3: "computed", 6: "lost", 10: with_wrong_shape}), []

    @struct
    class Recorded(A2C):
        def gradients(self, *arguments, **options):
            halves = super().gradients(*arguments, **options)
            structures.append(jax.tree.structure(halves))
            return halves

    env, options = make_env(num_envs=4), {"shared_optimizer": shared_optimizer}
    agent = Recorded(env.spec, num_steps=8, learning_rate=1e-3)
    result = train(engine=lambda: engine, env=env, agent=agent, options=options, steps=300)
    assert result.metrics["workers/restarts"] == 3 and result.metrics["pushes/invalid"] == 1
    pushed = result.progress.iteration
    assert result.metrics["pushes/applied"] == pushed >= 16 and {worker for worker, _ in engine.received} == {0, 1}
    state, senders = agent.share(agent.init(jax.random.split(KEY, 3)[0]), 2, shared_optimizer=shared_optimizer)
    receive = jax.jit(agent.receive)
    for worker, push in engine.received[:pushed]:
        gradients, summary = jax.tree.unflatten(structures[-1], engine.task.result.unpack(push.halves))
        state, senders, _ = receive(state, senders, Push.create(worker, push.number, push.version), gradients, summary)
    assert_same_bits(result.loop_state.agent, agent.unshare(state, senders))


def with_nan(push):
    halves = {dtype: np.full_like(x, np.nan) if dtype == "float32" else x for dtype, x in push.halves.items()}
    return dataclasses.replace(push, halves=halves)


def test_gradients_with_nan_are_refused_and_their_worker_replaced():
    result = train(engine=lambda: FaultyPushes({4: with_nan, 6: with_nan, 8: with_nan}), options={"max_bad": 3})
    assert result.metrics["pushes/rejected"] == 3
    assert result.metrics["workers/restarts"] == 1
    assert all(np.isfinite(x).all() for x in arrays_of(result.state.copies))


def with_wrong_shape(push):
    return dataclasses.replace(push, halves={dtype: x[:-1] for dtype, x in push.halves.items()})


def with_huge_numbers(push):
    halves = {dtype: np.where(x != 0, np.float32(1e30), x) if dtype == "float32" else x for dtype, x in push.halves.items()}
    return dataclasses.replace(push, halves=halves)


def details_of(events, worker):
    """Why the worker failed each time; no other one did."""
    failed = [event for event in events if event.event == "failed"]
    assert {event.worker for event in failed} == {worker}
    return [event.detail for event in failed]


@pytest.mark.slow
def test_pushes_that_are_garbage_or_arrive_again_change_nothing():
    """The worker is replaced, and computes its push again."""
    undisturbed, events = train(1, steps=200), []
    engine = FaultyPushes({1: lambda push: "garbage", 4: with_wrong_shape, 7: lambda push: engine.earlier})
    engine.faults[0] = lambda push: setattr(engine, "earlier", push) or push
    result = train(1, lambda: engine, steps=200, events=events)
    assert result.metrics["pushes/invalid"] == result.metrics["workers/restarts"] == 3
    problems = "a WorkerGradients was expected, got str", "Packing: vectors must be", "the number is 1, not"
    for problem, detail in zip(problems, details_of(events, worker=0), strict=True):
        assert detail.startswith(f"returned a push in which {problem}")
    assert result.metrics["pushes/rejected"] == 0 and "pushes/repeated" not in result.metrics
    assert_same_bits(result.loop_state.agent, undisturbed.loop_state.agent)


@pytest.mark.slow
def test_every_part_of_a_push_is_checked():
    """By worker and part."""
    state, arrays = "the state of the environments is missing", "arrays of {} are missing"
    wrong = [
        ("halves", None, "gradients are missing"),
        ("version", "x", "the version is 'x', not "),
        ("version", -1, "the version is -1, not "),
        ("finished", None, arrays.format("finished")),
        ("time_step", None, arrays.format("time_step")),
        ("carry", None, arrays.format("carry")),
        ("info_sums", None, state),
        ("snapshot", "there", state),
    ]
    engine, events = InProcessWorkers(), []
    call, first = engine.call, []
    # After a wrong push a right one, so that the worker is started again at once.
    left = [change for name, value, _ in wrong for change in ((name, value), None)]

    def sending_wrong_parts(handle, method, arguments):
        made = call(handle, method, arguments)
        first.extend([] if first else [handle])
        if method == "gradients" and handle is not first[0] and left and (change := left.pop(0)):
            made.result = copy.copy(made.result)
            # The tests' type checker would object in the worker already.
            object.__setattr__(made.result, *change)
        return made

    engine.call = sending_wrong_parts
    result = train(2, lambda: engine, steps=800, events=events)
    assert not left and result.metrics["pushes/invalid"] == result.metrics["workers/restarts"] == len(wrong)
    for (_, _, problem), detail in zip(wrong, details_of(events, worker=1), strict=True):
        assert detail.startswith(f"returned a push in which {problem}")


def test_huge_gradients_are_clipped():
    """One push of 1e30 moves no weight further than a step of the optimizer may."""
    kept = []
    train(1, lambda: FaultyPushes({3: with_huge_numbers}), callbacks=[lambda *report: kept.append(report[2])], report_every=1)
    weights = [arrays_of(state.agent.copies.online.params) for state in kept]
    moves = [max(float(np.abs(a - b).max()) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(weights)]
    assert len(moves) > 5 and np.isfinite(moves).all() and max(moves) <= 0.1


class SlowPushes(InProcessWorkers):
    """The last of four workers takes 40 times as long as the others, of a time that only the wait for it lets pass."""

    def __init__(self):
        super().__init__()
        self.now, self.pushes = 0, [0] * 4

    def call(self, handle, method, arguments):
        call, worker = super().call(handle, method, arguments), self._workers.index(handle)
        is_push = method == "gradients"
        self.pushes[worker] += is_push
        call.returns_at = self.now + is_push * (40 if worker == 3 else 1)
        return call

    def wait(self, calls, seconds):
        if not any(call.returns_at <= self.now for call in calls):
            self.now = min(call.returns_at for call in calls)
        return [call for call in calls if call.returns_at <= self.now]


@pytest.mark.slow
def test_a_slow_worker_holds_nobody_back_and_what_is_too_old_is_dropped():
    engine = SlowPushes()
    reports = []
    result = train(
        4, lambda: engine, steps=1_300, options={"max_staleness": 10}, callbacks=[lambda *report: reports.append(report[1])]
    )
    assert engine.now > 40 and min(engine.pushes[:3]) > 0.9 * 40 * (engine.pushes[3] - 1)
    assert max(report["staleness/max"] for report in reports) >= 100
    assert result.metrics["pushes/stale"] == engine.pushes[3] - 1 > 0
    assert result.metrics["pushes/applied"] >= sum(engine.pushes[:3]) - 3


def test_a_stop_while_it_waits_reports_what_was_learned_since_the_last_report():
    engine, asked, reports = FaultyPushes({5: "late"}), [], []
    result = train(
        1,
        lambda: engine,
        steps=10**6,
        # Not at the end of a round, but in the wait for the sixth push.
        should_stop=lambda: engine.calls > 5 and (asked.append(1) or len(asked) > 1),
        callbacks=[lambda progress, metrics, state: reports.append((progress.env_steps, metrics["pushes/applied"]))],
    )
    assert result.stopped == "request" and result.metrics["pushes/applied"] == 5
    assert reports == [(result.progress.env_steps, 5)]


@pytest.mark.slow
def test_stale_gradients_are_dropped():
    result = train(4, options={"max_staleness": 0})
    assert result.metrics["pushes/stale"] > 0
    assert result.metrics["pushes/applied"] + result.metrics["pushes/stale"] == result.progress.iteration


@pytest.mark.slow
def test_an_exception_of_an_environment_ends_the_training_or_its_episodes():
    env = polyak.envs.make(raising_env, num_envs=4)
    with pytest.raises(ArithmeticError, match="of a test"):
        train(env=env)
    result = train(env=env, options={"on_env_error": "restart"})
    assert result.metrics["workers/restarts"] >= 1 and result.progress.env_steps >= 400


@pytest.mark.slow
def test_nan_of_an_environment_costs_its_worker_and_nothing_else():
    env = polyak.envs.make(lambda: Counting(nan_at=60), num_envs=4, vectorization="sync")
    result = train(env=env)
    assert result.metrics["pushes/invalid"] == result.metrics["workers/restarts"] >= 1
    assert result.metrics["pushes/rejected"] == 0 and result.progress.env_steps >= 400


def test_an_environment_that_is_always_wrong_ends_the_training_with_its_error(monkeypatch):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    env = polyak.envs.make(lambda: Counting(nan_at=1), num_envs=4, vectorization="sync")
    with pytest.raises(InvalidValue, match="the observation must be finite, got nan") as caught:
        train(env=env)
    assert any("Raised in worker" in note and "Traceback" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_a_worker_that_sends_nothing_but_nan_is_put_out(monkeypatch):
    """Pushes that are rejected are no success, so it is given up after five quarantines in a row."""
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    engine = FaultyPushes({})
    call, first = engine.call, []

    def sending_nan(handle, method, arguments):
        made = call(handle, method, arguments)
        first.extend([] if first else [handle])
        # A worker that is made again is the last one; the other one stays.
        if method == "gradients" and handle is not first[0]:
            made.result = with_nan(made.result)
        return made

    engine.call = sending_nan
    result = train(2, lambda: engine, options={"max_bad": 2, "min_workers": 1})
    assert result.metrics["pushes/rejected"] == 10 and result.metrics["workers/restarts"] == 4
    assert result.metrics["workers/alive"] == 1 and result.progress.env_steps >= 400


class CountingSeeds(Counting):
    seeds: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seeds.append(seed)
        return super().reset(seed=seed, options=options)


@pytest.mark.slow
def test_an_environment_that_raised_begins_with_another_seed_each_time():
    env = polyak.envs.make(lambda: CountingSeeds(raises_at=30), num_envs=4)
    CountingSeeds.seeds.clear()
    result = train(1, env=env, options={"on_env_error": "restart"})
    assert result.metrics["workers/restarts"] >= 3
    # An environment is made with seed 0.
    seeds = [seed for seed in CountingSeeds.seeds if seed]
    assert len(set(seeds)) == len(seeds) >= 12


def raising_env():
    return Counting(raises_at=60)


def test_an_agent_without_halves_is_rejected():
    env = make_env(num_envs=4)
    with pytest.raises(TypeError, match="PPO sends no gradients; use A2C or IMPALA"):
        train(env=env, agent=make_agent(env.spec))

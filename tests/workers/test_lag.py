"""With a lag of N nothing is older than N updates and nothing is dropped, however slow a worker is."""

import dataclasses

import jax
import numpy as np
import pytest

from polyak.agents.ppo import PPO
from polyak.loops.episodes import EpisodeTotals
from polyak.loops.host_loop import start_host
from polyak.loops.metrics import PackedMetrics
from polyak.loops.rollouts import Learned
from polyak.workers.in_process_workers import InProcessWorkers
from polyak.workers.rollout_worker import WorkerRollout
from tests.workers.setting import KEY, make_agent, make_env, make_workers

WORKERS, SLOW = 4, 100
UPDATES = 200


class Timed(InProcessWorkers):
    """A rollout takes a second, one of the last worker 100; time passes only while the learner waits.

    Rewards are the rollout's number. Environments are stepped for the first rollout of each worker only.
    """

    def __init__(self):
        super().__init__()
        self.now, self.returned, self.first = 0.0, [0] * WORKERS, {}

    def call(self, handle, method, arguments):
        if method != "rollout":
            call = super().call(handle, method, arguments)
            call.returns_at = 0.0
            return call
        worker, (number, version) = self._workers.index(handle), arguments[:2]
        if worker not in self.first:
            self.first[worker] = super().call(handle, method, arguments).result
        first = self.first[worker]
        time_steps = dataclasses.replace(first.arrays[0], reward=np.full_like(first.arrays[0].reward, number))
        arrays = time_steps, *first.arrays[1:]
        call = super().call(handle, "close", ())
        call.result = dataclasses.replace(first, number=number, version=version, arrays=arrays)
        call.returns_at, call.worker = self.now + (SLOW if worker == WORKERS - 1 else 1), worker
        return call

    def wait(self, calls, seconds):
        if not any(call.returns_at <= self.now for call in calls):
            self.now = min((call.returns_at for call in calls), default=self.now)
        return [call for call in calls if call.returns_at <= self.now]

    def result(self, call):
        if isinstance(call.result, WorkerRollout):
            self.returned[call.worker] += 1
        return super().result(call)


@pytest.mark.parametrize("lag", [1, 2, 8])
def test_a_slow_worker_makes_no_rollout_older_than_the_lag_and_loses_none(lag, monkeypatch):
    monkeypatch.setattr(PPO, "max_lag", None)
    env, engine = make_env(num_envs=WORKERS), Timed()
    agent = make_agent(env.spec, values_when="collect", num_steps=2)
    envs = make_workers(env, WORKERS, lambda: engine, lag=lag)
    state = start_host(agent, envs, KEY)
    rollouts = envs.rollouts(agent, state, jax.tree.leaves(agent), lambda: False)
    leaves, staleness = jax.tree.leaves(state), []
    learned = Learned(leaves, PackedMetrics({}, np.zeros((0, 2), np.float32)), EpisodeTotals.none(), None)
    for update in range(UPDATES):
        collected = rollouts.collect(leaves)
        np.testing.assert_array_equal(collected.arrays[0].reward, update)
        rollouts.learn(lambda: learned)
        metrics = rollouts.metrics()
        staleness.append(metrics["staleness/max"])
        assert metrics["rollouts/invalid"] == metrics["workers/restarts"] == 0
    assert max(staleness) == lag
    # What was collected and is not learned from is what workers are ahead.
    assert all(UPDATES <= returned <= UPDATES + lag for returned in engine.returned)
    # The slow worker never waits, so it is learned from as fast as it collects.
    assert engine.now <= SLOW * (UPDATES + lag)
    envs.close()

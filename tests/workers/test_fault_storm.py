"""Faults at random in runs of four workers: none changes a bit, none is lost, nothing hangs."""

import numpy as np
import pytest

from tests.workers.setting import FaultyWorkers, assert_same_bits, make_agent, make_env, train

pytestmark = pytest.mark.slow


def test_many_deaths_and_hangs_leave_no_trace():
    env = make_env()
    agent = make_agent(env.spec, num_steps=8)
    generator = np.random.default_rng(0)
    faults = {call: kind for call, kind in enumerate(generator.choice(["lost", "late", "none"], 2000, p=[0.25, 0.01, 0.74]))}
    options = {"timeout": 0.05, "restarts": 10_000}
    result = train(env, 4, lambda: Immediate(faults), agent=agent, steps=4_000, options=options)
    assert_same_bits(result.loop_state, train(env, agent=agent, steps=4_000).loop_state)
    assert result.metrics["workers/restarts"] >= 50


class Immediate(FaultyWorkers):
    """Faulty workers in which a fault is never followed by another at once: the pauses of a second would add up."""

    def call(self, handle, method, arguments):
        if method == "rollout" and self.faults.get(self.calls) == "none":
            self.faults.pop(self.calls)
        if method == "rollout" and self.faults.get(self.calls - 1) is not None:
            self.faults.pop(self.calls, None)
        return super().call(handle, method, arguments)

"""What happens to calls of a program that Ctrl-C has left."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from polyak.core import policy_faults as python_calls
from polyak.core.policy_faults import CallRaised, ExceptionRelay, PythonCalls
from polyak.policies.python.policy import PythonPolicy
from tests.policies.python.test_policy import KEY, SPEC, B, rule, time_step

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_program_that_is_left_between_two_calls_calls_no_more(monkeypatch):
    monkeypatch.setattr(python_calls, "GRACE_SECONDS", 0.05)
    policy, between, go_on = PythonPolicy(rule, SPEC), threading.Event(), threading.Event()

    def slow(obs):
        between.set()
        go_on.wait(9)
        return obs

    def step(obs, _):
        action = policy.action(time_step(obs), (), KEY).action
        return jax.pure_callback(slow, obs, obs + action[:, None].astype(jnp.float32)), None

    obs = jnp.zeros((B, 2))
    program = jax.jit(lambda obs: jax.lax.scan(step, obs, None, 3)[0]).lower(obs).compile()
    threading.Thread(target=lambda: between.wait(9) and os.kill(os.getpid(), signal.SIGINT), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        ExceptionRelay(policy).run(program, obs)
    assert policy.num_calls == 1
    with pytest.raises(CallRaised, match="stopped, until the program that was interrupted has ended"):
        policy.direct_call()(time_step(), (), None)
    # A new relay waits for its end.
    threading.Timer(0.2, go_on.set).start()
    with policy.raising():
        assert policy.action(time_step(), (), KEY).action.tolist() == [0, 1, 1]
    time.sleep(0.5)
    assert policy.num_calls == 2


def test_calls_go_on_by_themselves_when_that_program_has_ended():
    calls, thread = PythonCalls("rule"), threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()
    calls.stay_stopped(thread)
    with pytest.raises(CallRaised):
        calls.call(int)
    thread.join()
    assert calls.call(int) == 0


def test_an_interrupted_program_that_stays_busy_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(python_calls, "BUSY_SECONDS", 0.05)
    calls, ends = PythonCalls("PythonPolicy 'rule'"), threading.Event()
    thread = threading.Thread(target=ends.wait, args=(9,), daemon=True)
    thread.start()
    calls.stay_stopped(thread)
    with pytest.raises(TimeoutError, match=r"PythonPolicy 'rule': a program that was interrupted is still busy after 0.05 s"):
        calls.wait()
    ends.set()
    thread.join(9)
    calls.wait()
    assert calls.call(lambda: 3) == 3

"""A time limit for a Python policy: the call is left, and its answer taken by nobody."""

import signal
import threading
import time

import jax
import numpy as np
import pytest

from polyak.policies.python.policy import PythonPolicy
from tests.policies.python.test_policy import SPEC, B, steps, time_step

pytestmark = pytest.mark.usefixtures("unchecked")


def test_timeout_names_the_policy_and_the_next_call_works():
    asked = []

    def slow(obs):
        asked.append(threading.current_thread().name)
        time.sleep(2.0 if len(asked) == 2 else 0.0)
        return [0] * B

    policy = PythonPolicy(slow, SPEC, timeout=0.2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="PythonPolicy 'slow' did not return within timeout"), policy.raising():
        jax.block_until_ready(steps(policy, 5))
    assert time.monotonic() - began < 1.5 and len(asked) == 2
    with policy.raising():
        assert steps(policy, 1).action.tolist() == [[0] * B]
    assert asked == ["polyak-deadline"] * 3


def test_result_after_ctrl_c_is_not_returned_by_the_next_call():
    asked = []

    def slow(obs):
        asked.append(len(asked))
        if asked[-1] == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.3)
        return [asked[-1]] * B

    act, now = PythonPolicy(slow, SPEC, timeout=5).direct_call(), jax.tree.map(np.asarray, time_step())
    assert act(now, (), None).action[0] == 0
    with pytest.raises(KeyboardInterrupt):
        act(now, (), None)
    time.sleep(0.3)
    assert [act(now, (), None).action[0] for _ in range(2)] == [2, 3]

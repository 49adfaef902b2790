"""Environments in worker processes: the same numbers, and every fault told in time with its index, no process left."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np
import pytest

from polyak import envs
from polyak.envs import process_workers
from polyak.envs.env_options import EnvOptions
from tests.envs import oracle, toys


def made(make_env, num_envs=2, **options):
    """Asynchronous, and closed at the end of the test whatever happens."""
    env = envs.make(make_env, num_envs=num_envs, vectorization="async", **options)
    OPEN.append(env)
    return env


OPEN = []
NONE = np.zeros(2, np.int32)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    while OPEN:
        OPEN.pop().close()
    assert multiprocessing.active_children() == []


def test_sync_and_async_give_the_same_trajectories_bit_for_bit():
    actions = np.random.default_rng(0).integers(0, 4, (60, 2)).astype(np.int32)
    expected = oracle.record(envs.make(toys.Masked, num_envs=2), 3, actions)
    ours = oracle.record(made(toys.Masked), 3, actions)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_named_environment_is_the_same_in_workers():
    actions = np.random.default_rng(0).uniform(-2, 2, (30, 2, 1)).astype(np.float32)
    expected = oracle.record(envs.make("Pendulum-v1", num_envs=2), 3, actions)
    np.testing.assert_array_equal(oracle.record(made("Pendulum-v1"), 3, actions)[0], expected[0])


def test_workers_are_never_forked_and_know_nothing_of_jax():
    env = made(functools.partial(toys.Curious, os.getpid()))
    assert env.reset(0).obs.tolist() == [[0, 0], [0, 0]]


def test_an_environment_that_computes_with_jax_runs_in_workers():
    env, here = made(toys.InJax), envs.make(toys.InJax, num_envs=2)
    for time_step, expected in [(env.reset(0), here.reset(0))] + [(env.step(NONE), here.step(NONE)) for _ in range(3)]:
        np.testing.assert_array_equal(time_step.obs, expected.obs)
    assert not np.array_equal(time_step.obs, np.zeros_like(time_step.obs))


def test_a_named_environment_brings_no_jax_into_its_worker_and_may_be_registered_here_only():
    gymnasium.register("tests/Curious-v0", entry_point="tests.envs.toys:Curious", kwargs={"trainer": os.getpid()})
    try:
        assert made("tests/Curious-v0").reset(0).obs.tolist() == [[0, 0], [0, 0]]
    finally:
        del gymnasium.registry["tests/Curious-v0"]


def test_a_broadcastable_observation_is_an_error_in_a_worker_too():
    env = made(functools.partial(toys.Faulty, at=2, answer=short_obs))
    env.reset(0)
    env.step(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"env 0, step 2: the observation must have shape \(3,\), got \(1,\)"):
        env.step(np.zeros(2, np.int32))


def short_obs(obs, *rest):
    return (obs[:1], *rest)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (toys.raise_key_error, KeyError, "the user's own"),
        (toys.raise_user_error, RuntimeError, "env 0 raised UserError: code 7: from deep inside"),
        (toys.raise_unsendable, RuntimeError, "env 0 raised Unsendable: unsendable"),
    ],
)
def test_an_exception_in_a_worker_arrives_with_its_traceback_and_place(fault, error, says):
    env = made(functools.partial(toys.Faulty, at=2, answer=fault))
    env.reset(0)
    env.step(np.array([0, 1]))
    with pytest.raises(error, match=says) as caught:
        env.step(np.array([0, 1]))
    notes = "\n".join(caught.value.__notes__)
    seed = np.random.SeedSequence(0).generate_state(2)[0]
    assert f"env 0, step 2: raised in step(); seed {seed}, last action 0" in notes
    assert f"in {fault.__name__}" in notes
    # The workers live on.
    assert env.reset(0).first.all()


def test_a_class_of_the_users_script_is_the_same_class_here():
    class ScriptError(Exception):
        pass

    def fail(*_):
        raise ScriptError("from a script")

    env = made(lambda: toys.Faulty(at=1, answer=fail))
    env.reset(0)
    with pytest.raises(ScriptError, match="from a script"):
        env.step(np.zeros(2, np.int32))


def test_an_exception_in_the_making_is_reported_and_leaves_no_process():
    with pytest.raises(KeyError, match="the user's own"):
        made(toys.raise_key_error)
    assert multiprocessing.active_children() == []


def test_a_function_that_cannot_be_pickled_is_an_error_and_leaves_no_process_and_no_file_open():
    envs.make(toys.Faulty, vectorization="async").close()
    before = len(os.listdir("/proc/self/fd"))
    functions = [toys.Faulty, functools.partial(toys.Faulty, threading.Lock())]
    with pytest.raises(TypeError, match="cannot pickle"):
        process_workers.WorkerProcesses(functions, "faulty", 60.0, EnvOptions())
    assert multiprocessing.active_children() == []
    assert len(os.listdir("/proc/self/fd")) <= before


def test_different_spaces_in_workers_are_rejected_and_leave_no_process(tmp_path):
    with pytest.raises(ValueError, match="env 1 must have the spaces of env 0"):
        made(functools.partial(different_spaces, tmp_path))
    assert multiprocessing.active_children() == []


def different_spaces(folder):
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return toys.Scripted(n=5)
    return toys.Scripted(n=4)


def test_an_unsupported_space_in_workers_is_rejected_and_leaves_no_process():
    with pytest.raises(TypeError, match="observation space: Text is not supported"):
        made(wordy)
    assert multiprocessing.active_children() == []


def wordy():
    import gymnasium

    return toys.Faulty(obs_space=gymnasium.spaces.Text(5))


def test_the_death_of_a_worker_is_reported_at_once_with_its_exit_code():
    env = made(functools.partial(toys.Faulty, at=2, answer=toys.exit_hard))
    env.reset(0)
    env.step(np.zeros(2, np.int32))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the process of env 0 died in step\(\) with exit code 3"):
        env.step(np.zeros(2, np.int32))
    assert time.monotonic() - start < 2
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="is closed"):
        env.reset(0)


def test_a_killed_worker_is_reported_with_its_index():
    env = made(toys.Faulty)
    env.reset(0)
    victim = env._batch.group.processes[1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with pytest.raises(RuntimeError, match=r"the process of env 1 died in step\(\) with exit code -9"):
        env.step(np.zeros(2, np.int32))


def start_slowly():
    time.sleep(60)


def test_a_slow_start_asks_for_the_guard_of_the_script():
    with pytest.raises(TimeoutError, match=r"env 0 did not return from start\(\) within timeout=0.5 s; .*`if __name__ =="):
        envs.make(start_slowly, vectorization="async", timeout=0.5)


def test_a_worker_that_does_not_return_in_time_is_reported_with_its_index():
    env = made(toys.Faulty, timeout=20.0)
    env.reset(0)
    workers = env._batch.group
    workers.timeout = 0.5
    os.kill(workers.processes[1].pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"env 1 did not return from step\(\) within timeout=0.5 s"):
        env.step(np.zeros(2, np.int32))
    assert time.monotonic() - start < 3
    assert multiprocessing.active_children() == []


class Large(gymnasium.Env):
    """Observations and actions of 4 MB, more than a pipe holds."""

    observation_space = action_space = gymnasium.spaces.Box(-1.0, 1.0, (1_000_000,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1_000_000, np.float32), {}

    def step(self, action):
        return *self.reset()[:1], 0.0, False, False, {}


def stopped_large(group):
    """Stop the second worker, and wait a second for it from now on."""
    group.timeout = 1.0
    for pipe in group.pipes:
        process_workers._limit_waits(pipe, 1.0)
    os.kill(group.processes[1].pid, signal.SIGSTOP)


def test_a_worker_that_stops_in_the_middle_of_its_answer_is_reported():
    env = made(Large, timeout=20.0)
    env.reset(0)
    group = env._batch.group
    # Nobody reads, so the answer ends where the pipe is full.
    group.pipes[1].send((group.call_number, "step", (np.zeros(1_000_000, np.float32), False)))
    time.sleep(0.5)
    stopped_large(group)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"env 1 did not return from step\(\) within timeout=1 s"):
        group.pipes[0].send((group.call_number, "step", (np.zeros(1_000_000, np.float32), False)))
        group._results("step")
    assert time.monotonic() - start < 5


def test_a_worker_that_reads_no_argument_is_reported():
    env = made(Large, timeout=20.0)
    env.reset(0)
    stopped_large(env._batch.group)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"env 1 did not return from step\(\) within timeout=1 s"):
        env.step(np.zeros((2, 1_000_000), np.float32))
    assert time.monotonic() - start < 5


def test_close_ends_even_a_worker_that_hangs_within_two_seconds():
    env = made(functools.partial(toys.Faulty, on_close=toys.sleep_long))
    env.reset(0)
    start = time.monotonic()
    env.close()
    env.close()
    assert time.monotonic() - start < 2
    assert multiprocessing.active_children() == []


def test_an_exception_in_a_workers_close_is_reported_after_all_have_ended():
    env = made(functools.partial(toys.Faulty, on_close=toys.raise_key_error))
    OPEN.clear()
    with pytest.raises(KeyError) as caught:
        env.close()
    assert any("raised in close()" in note for note in caught.value.__notes__)
    assert multiprocessing.active_children() == []


def test_ctrl_c_is_left_to_the_trainer():
    env = made(toys.Faulty)
    env.reset(0)
    for process in env._batch.group.processes:
        os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    assert env.step(np.zeros(2, np.int32)).reward.tolist() == [1, 1]


def test_the_results_of_a_call_that_was_interrupted_are_not_taken_for_the_next():
    env = made(toys.Scripted)
    expected = env.reset(0).obs
    workers = env._batch.group
    for pipe in workers.pipes:
        workers.call_number += 1
        pipe.send((workers.call_number, "step", (0, False)))
    np.testing.assert_array_equal(env.reset(0).obs, expected)


def test_making_and_closing_leaves_no_file_open():
    envs.make(toys.Faulty, num_envs=1, vectorization="async").close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        env = made(toys.Faulty)
        env.reset(0)
        env.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_workers_end_when_their_trainer_is_gone():
    """An environment that was dropped, not closed, leaves no process either."""
    env = envs.make(toys.Faulty, vectorization="async")
    env.reset(0)
    (process,) = env._batch.group.processes
    del env
    process.join(5)
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_worker_in_a_step_that_does_not_end_dies_with_its_trainer(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, sys, time, gymnasium\n"
        "from polyak import envs\n"
        "class Endless(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        print(os.getpid(), flush=True)\n"
        "        time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    envs.make(Endless, vectorization='async').reset(0)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as trainer:
        worker = int(trainer.stdout.readline())
        trainer.kill()
    ends = time.monotonic() + 10
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < ends:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")

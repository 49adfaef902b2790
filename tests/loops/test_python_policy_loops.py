"""Python policies in all loops: equal calls and numbers, their own exceptions, Ctrl-C, and what a checkpoint says."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops, train
from polyak.core.struct import struct
from polyak.core.types import PolicyStep
from polyak.ops.schedules import Linear
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.scripted import Uniform
from polyak.storage import run_directory as runs
from polyak.storage.checkpoint import read_manifest
from polyak.storage.writers import checkpointer
from tests.loops.foreign import Follower, following
from tests.loops.scripted import Scripted
from tests.loops.setting import ENV, KEY, LOOPS, NUM_ENVS, hosted

ENV_STEPS = 60
pytestmark = pytest.mark.usefixtures("unchecked")
each_loop = pytest.mark.parametrize("loop", LOOPS)


class Planner:
    """Acts by the pole, its seed, and how long the episode has been; remembers what it was given."""

    def __init__(self):
        self.seen = []

    def initial_state(self, batch_size):
        return np.zeros(batch_size, np.int32)

    def action(self, time_step, carry, seed):
        self.seen.append((time_step.obs.copy(), time_step.first.copy(), carry.copy(), seed))
        action = (time_step.obs[:, 2] > 0) ^ (carry % 3 == 0) ^ (seed % 2 == 0)
        return PolicyStep(action, carry + 1, {"seed": np.full(len(carry), seed % 100, np.float32)})


def planning():
    return following(Planner(), ENV.spec, carry_spec=np.int32(0), info_spec={"seed": jax.ShapeDtypeStruct((), np.float32)})


def run(loop, agent, env=ENV, **options):
    return LOOPS[loop](agent, env, env_steps=options.pop("env_steps", ENV_STEPS), key=KEY, **options)


def test_both_loops_make_the_same_calls_and_get_the_same_results():
    agents = {loop: planning() for loop in LOOPS}
    # Long enough that episodes end.
    results = {loop: run(loop, agent, env_steps=2 * ENV_STEPS) for loop, agent in agents.items()}
    compiled, host = (agents[loop].chosen.callee.target.seen for loop in ("compiled", "host"))
    assert len(compiled) == len(host) == 8 * int(results["host"].state["updates"]) == agents["host"].chosen.num_calls
    for (obs, *given), (its_obs, *its_given) in zip(compiled, host, strict=True):
        jax.tree.map(np.testing.assert_array_equal, given, its_given)
        # The environment is computed in two programs, which may round differently.
        np.testing.assert_allclose(obs, its_obs, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, results["compiled"].state, results["host"].state)
    jax.tree.map(np.testing.assert_array_equal, results["compiled"].loop_state.carry, results["host"].loop_state.carry)
    # The carry begins anew in every episode, and only there.
    before = np.zeros(NUM_ENVS, np.int32)
    for _, first, carry, _ in compiled:
        np.testing.assert_array_equal(carry, np.where(first, 0, before))
        before = carry + 1
    assert sum(first.any() for _, first, _, _ in compiled) > 1
    assert len({seed for *_, seed in compiled}) == len(compiled)


@pytest.mark.parametrize(("loop", "kind"), [("compiled", KeyError), ("compiled", StopIteration), ("host", StopIteration)])
def test_training_raises_the_exception_of_the_policy(loop, kind):
    count = iter(range(100))

    def failing(obs):
        if next(count) == 11:
            raise kind("mine")
        return [0] * NUM_ENVS

    with pytest.raises(kind, match="mine") as caught:
        run(loop, following(failing, ENV.spec))
    assert "raised by PythonPolicy 'failing' at its step 11, counted from 0" in caught.value.__notes__
    assert caught.traceback[-1].name == "failing"


@pytest.mark.parametrize("env", [ENV, Scripted([[5]] * NUM_ENVS, [1.0] * NUM_ENVS)], ids=["compiled", "host"])
def test_evaluation_raises_the_exception_of_the_policy(env):
    count = iter(range(100))

    def failing(obs):
        if next(count) == 3:
            raise StopIteration("mine")
        return [0] * NUM_ENVS

    policy = following(failing, ENV.spec).chosen
    with pytest.raises(StopIteration, match="mine") as caught:
        train.evaluate(policy, env, episodes=NUM_ENVS, key=KEY)
    assert "raised by PythonPolicy 'failing' at its step 3, counted from 0" in caught.value.__notes__


def test_a_long_evaluation_is_compiled_on_the_way_with_the_same_calls(monkeypatch):
    found = []
    for steps in (0, 7, 10_000):
        monkeypatch.setattr(polyak.loops.evaluate, "STEPS_BEFORE_COMPILING", steps)
        agent = planning()
        evaluation = train.evaluate(agent.chosen, ENV, episodes=2 * NUM_ENVS, key=KEY)
        found.append((evaluation.returns, evaluation.lengths, agent.chosen.callee.target.seen))
    assert found[0][1].max() > 7
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), other, found[0])


def test_a_new_policy_of_a_short_evaluation_compiles_no_program_with_the_environment(monkeypatch):
    monkeypatch.setattr("polyak.core.policy_faults._compile", lambda *_: pytest.fail("compiled"))
    for threshold in (0.0, 0.01):
        policy = following(lambda obs, threshold=threshold: obs[:, 2] > threshold, ENV.spec).chosen
        assert train.evaluate(policy, ENV, episodes=NUM_ENVS, key=KEY).episodes == NUM_ENVS


def test_evaluation_calls_for_the_steps_that_count_and_no_more():
    counts = []
    for env in (ENV, hosted()):
        policy = following(lambda obs: [0] * NUM_ENVS, ENV.spec).chosen
        lengths = train.evaluate(policy, env, episodes=NUM_ENVS, key=KEY).lengths
        assert policy.num_calls == lengths.max()
        with pytest.raises(TimeoutError, match="5 steps"):
            train.evaluate(policy, env, episodes=NUM_ENVS, key=KEY, max_steps=5)
        counts.append(policy.num_calls - lengths.max())
    assert counts == [5, 5]


@pytest.mark.parametrize("env", [ENV, hosted()], ids=["compiled", "host"])
def test_collect_calls_the_policy_as_training_does_and_raises_its_exception(env):
    policy = planning().chosen
    seen = policy.callee.target.seen
    rollout = train.collect(policy, env, 6, key=KEY)
    assert policy.num_calls == 6 and [seed % 100 for *_, seed in seen] == rollout.info["seed"][:, 0].tolist()
    np.testing.assert_array_equal(rollout.first[:6], [first for _, first, _, _ in seen])
    policy.callee.target.seen = None
    for acting in (policy, Wrapped(policy)):
        with pytest.raises(AttributeError, match="append") as caught:
            train.collect(acting, env, 6, key=KEY)
        assert caught.value.__notes__ == ["raised by PythonPolicy 'Planner' at its step 0, counted from 0"]
        assert caught.traceback[-1].name == "action"


def test_ctrl_c_stops_collecting_at_the_next_call():
    def interrupted(obs):
        if policy.num_calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return [0] * NUM_ENVS

    policy = following(interrupted, ENV.spec).chosen
    with pytest.raises(KeyboardInterrupt):
        train.collect(policy, ENV, 6, key=KEY)
    assert policy.num_calls == 2


@struct
class Wrapped:
    """A wrapper that knows nothing of Python."""

    inner: object

    @property
    def spec(self):
        return self.inner.spec

    def initial_state(self, batch_size):
        return self.inner.initial_state(batch_size)

    def distribution(self, time_step, carry):
        return self.inner.distribution(time_step, carry)

    def action(self, time_step, carry, key):
        return self.inner.action(time_step, carry, key)


@each_loop
def test_python_policy_inside_a_wrapper_is_found(loop):
    agent = planning()
    wrapped = type(agent)(Wrapped(agent.chosen))
    seen = agent.chosen.callee.target.seen
    result = run(loop, wrapped)
    assert len(seen) == 8 * int(result.state["updates"])
    agent.chosen.callee.target.seen = None
    with pytest.raises(AttributeError, match="append") as caught:
        run(loop, wrapped)
    assert "at its step 0" in caught.value.__notes__[0]


def test_parallel_seeds_and_several_devices_are_rejected_before_anything_runs():
    agent = planning()
    with pytest.raises(TypeError, match=r"PythonPolicy 'Planner'.* cannot be mapped by vmap"):
        loops.compiled_seeds(agent, ENV, env_steps=ENV_STEPS, keys=jax.random.split(KEY, 2))
    with pytest.raises(TypeError, match=r"PythonPolicy 'Planner'.* cannot be split over devices: use devices=1"):
        run("compiled", agent, devices=2)
    assert agent.chosen.num_calls == 0


@each_loop
def test_ctrl_c_stops_a_slow_policy_promptly(loop):
    began = threading.Event()

    def slow(obs):
        began.set()
        time.sleep(0.2)
        return [0] * NUM_ENVS

    def interrupt():
        began.wait(60)
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    sent = []
    threading.Thread(target=interrupt, daemon=True).start()
    agent = following(slow, ENV.spec)
    with pytest.raises(KeyboardInterrupt):
        run(loop, agent, env_steps=10_000)
    assert time.monotonic() - sent[0] < 2.0
    calls = agent.chosen.num_calls
    time.sleep(0.5)
    assert agent.chosen.num_calls == calls


@pytest.mark.slow
def test_ctrl_c_leaves_a_policy_that_hangs_and_the_process_ends():
    program = """
import os, signal, threading, time
import jax
import polyak
from polyak import train
env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
def hangs(obs):
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    time.sleep(3)
try:
    train.evaluate(polyak.PythonPolicy(hangs, env.spec), env, episodes=2, key=jax.random.key(0))
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


@each_loop
def test_training_ends_by_the_timeout(loop):
    with pytest.raises(TimeoutError, match="PythonPolicy 'hangs' did not return within timeout"):
        run(loop, following(lambda obs: time.sleep(5), ENV.spec, name="hangs", timeout=0.1))


@pytest.mark.parametrize(
    ("deterministic", "says"), [(False, "not bit-exact because PythonPolicy 'rule' takes no seed"), (True, "bit-exact")]
)
def test_checkpoint_records_that_a_policy_without_seed_is_nondeterministic(tmp_path, deterministic, says):
    agent = following(lambda obs: [0] * NUM_ENVS, ENV.spec, name="rule", deterministic=deterministic)
    with runs.create(tmp_path / "run", {}) as its_run:
        run("host", agent, callbacks=[checkpointer(its_run, 1)])
        manifest = read_manifest(its_run.checkpoints)
    assert says in manifest.meta["resume"]
    assert manifest.meta["resume"].startswith("bit") is deterministic


def test_evaluating_again_compiles_nothing():
    policy = planning().chosen
    train.evaluate(policy, ENV, episodes=NUM_ENVS, key=KEY)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
        train.evaluate(policy, ENV, episodes=NUM_ENVS, key=KEY)


@struct
class Explorer(Follower):
    """Explores as documented, with Python numbers in its policy."""

    def collect_policy(self, state):
        return EpsilonGreedy(self.chosen, Linear(1.0, 0.05, env_steps=10_000), state["updates"])

    def update(self, state, rollout, key, *, axis_name=None):
        return {**state, "updates": state["updates"] + 1}, {"train/log_prob": jnp.mean(rollout.info["log_prob"])}


@each_loop
def test_a_collecting_policy_may_hold_python_numbers(loop):
    result = run(loop, Explorer(Uniform(ENV.spec)))
    assert result.progress.env_steps >= ENV_STEPS and np.isclose(result.metrics["train/log_prob"], np.log(0.5), atol=1e-3)

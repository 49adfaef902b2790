"""The compiled and the host loop: the same numbers, stopped and resumed, reported and refused."""

import dataclasses
import importlib
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import loops, train
from polyak.agents.ppo import PPO
from polyak.core.spaces import Discrete
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole, Pendulum
from polyak.loops import loop as loop_module
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import run_env_key
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import same_bits, with_online
from tests.loops.scripted import Scripted
from tests.loops.setting import AGENT, ENV, ENV_STEPS, KEY, LOOPS, NUM_ENVS, NUM_STEPS, everything, goes_on, hosted, run

# Signatures are checked while `whole` is trained; checked again at every trace, they take most of the time.
pytestmark = pytest.mark.usefixtures("unchecked")
BOTH = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def whole():
    """One uninterrupted training in each loop; its result as it was at its end."""
    results = {loop: run(loop) for loop in LOOPS}
    return {loop: (result, everything(result)) for loop, result in results.items()}


@pytest.mark.to_the_bit
def test_both_loops_give_the_same_parameters_to_the_bit_after_20_updates(whole):
    (compiled, numbers), (host, host_numbers) = whole["compiled"], whole["host"]
    assert compiled.progress.iteration >= 20 and compiled.progress.env_steps == host.progress.env_steps
    assert same_bits(numbers, host_numbers)
    measured = {name for name in compiled.metrics if name.startswith(("train/", "rollout/"))}
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean", "train/loss", "train/approx_kl"} <= measured
    assert {name: compiled.metrics[name] for name in measured} == pytest.approx({name: host.metrics[name] for name in measured})


@pytest.mark.slow
def test_training_changes_the_parameters(whole):
    result, _ = whole["compiled"]
    fresh = AGENT.init(jax.random.split(KEY, 3)[0])
    assert not same_bits(result.state.copies.online, fresh.copies.online)
    assert result.stopped is None and result.state is result.loop_state.agent


@BOTH
def test_same_key_gives_the_same_bits_and_another_key_others(whole, loop):
    assert same_bits(everything(run(loop)), whole[loop][1])
    other = run(loop, key=jax.random.key(12))
    assert not same_bits(other.state.copies.online, whole[loop][0].state.copies.online)


@BOTH
def test_run_stopped_at_half_resumes_bit_for_bit(whole, loop):
    half = run(loop, env_steps=ENV_STEPS // 2)
    assert ENV_STEPS // 2 <= half.progress.env_steps < ENV_STEPS // 2 + 50
    finished = run(loop, **goes_on(loop, half))
    assert finished.progress.iteration == whole[loop][0].progress.iteration
    assert finished.progress.env_steps == whole[loop][0].progress.env_steps
    assert same_bits(everything(finished), whole[loop][1])


@BOTH
def test_run_stopped_at_every_iteration_resumes_bit_for_bit(whole, loop):
    options, stops = {}, 0
    for _ in range(3):
        result = run(loop, should_stop=lambda: True, **options)
        assert result.stopped == "request"
        stops += result.progress.iteration
        options = goes_on(loop, result)
    assert result.progress.iteration == 3
    assert same_bits(everything(run(loop, **options)), whole[loop][1])


def test_a_stop_within_a_slow_rollout_reports_the_updates_before_and_resumes_bit_for_bit(whole, monkeypatch):
    monkeypatch.setattr("polyak.loops.rollouts.ROLLOUT_SECONDS", -1.0)
    calls, reports = itertools.count(), []
    # It is asked at each step and after each update: in the middle of the third rollout.
    at = 2 * (NUM_STEPS + 1) + NUM_STEPS // 2
    callbacks = [lambda progress, metrics, _: reports.append((progress.iteration, "train/loss" in metrics))]
    result = run("host", should_stop=lambda: next(calls) >= at, report_every=10_000, callbacks=callbacks)
    assert (result.stopped, result.progress.iteration, reports) == ("request", 2, [(2, True)])
    assert math.isfinite(result.metrics["train/loss"])
    assert same_bits(everything(run("host", **goes_on("host", result))), whole["host"][1])
    # Nothing was learned since the last report.
    calls, reports = itertools.count(), []
    result = run("host", should_stop=lambda: next(calls) >= 2, callbacks=callbacks)
    assert (result.stopped, result.progress.iteration, reports) == ("request", 0, [])


@BOTH
def test_env_steps_can_be_any_positive_integer(loop):
    result = run(loop, env_steps=10**15, should_stop=lambda: True)
    assert result.stopped == "request" and result.progress.target_env_steps == 10**15


@BOTH
@pytest.mark.parametrize("report_every", [1, 60, 10_000])
def test_reports_change_no_bit(whole, loop, report_every):
    seen = []
    result = run(loop, report_every=report_every, callbacks=[lambda progress, *_: seen.append(progress.env_steps)])
    assert same_bits(everything(result), whole[loop][1])
    assert seen[-1] == result.progress.env_steps and seen == sorted(set(seen))
    # No iteration does 60 steps, so none of the ten multiples up to 600 is passed over; then comes the end.
    assert {1: result.progress.iteration, 60: 11, 10_000: 1}[report_every] == len(seen)


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_the_size_of_chunks_changes_no_bit(monkeypatch, whole, seconds):
    module = importlib.import_module("polyak.loops.compiled_loop")
    monkeypatch.setattr(module, "CHUNK_SECONDS", seconds)
    assert same_bits(everything(run("compiled")), whole["compiled"][1])


def test_the_host_loop_starts_where_a_jax_environment_given_as_a_host_one_starts(whole):
    assert same_bits(everything(run("host", env=hosted())), whole["host"][1])


def test_a_jax_environment_cannot_be_resumed_in_the_host_loop_without_its_state(whole):
    half = run("host", env_steps=100)
    with pytest.raises(ValueError, match=r"resume_from .*JaxEnvOnHost.*restore"):
        run("host", resume_from=half.loop_state, env_steps_done=half.progress.env_steps)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The state's own layers fit: with fewer or more of them, the rest would be left out, or be missing.
        ({"network": MLP((8, 8))}, "same networks.*layers/1/bias' is missing, expected float32.8."),
        ({"normalize_obs": False}, "'obs_normalizer' is missing, expected None"),
    ],
)
def test_a_state_of_another_agent_is_rejected(whole, loop, change, message):
    result = whole[loop][0]
    agent = dataclasses.replace(AGENT, **change)
    with pytest.raises(ValueError, match=message):
        run(loop, agent=agent, **{"env": ENV} | goes_on(loop, result))


def test_a_state_of_other_environments_and_no_state_are_rejected(whole):
    result = whole["compiled"][0]
    with pytest.raises(ValueError, match=f"resume_from must be of num_envs=2, as env is, got {NUM_ENVS}"):
        run("compiled", env=dataclasses.replace(ENV, num_envs=2), resume_from=result.loop_state)
    with pytest.raises(TypeError, match="resume_from must be the loop_state of a result, got TrainResult"):
        run("compiled", resume_from=result)


def test_run_picks_the_loop_from_the_environment(whole):
    for env, loop in ((ENV, "compiled"), (hosted(), "host")):
        result = train.run(AGENT, env, env_steps=ENV_STEPS, key=KEY)
        assert same_bits(everything(result), whole[loop][1])
        assert (result.progress.env is None) == (loop == "compiled")


def test_arguments_can_be_reused_after_training():
    key = jax.random.key(11)
    for _ in range(2):
        result = run("compiled", key=key, env_steps=60)
        action, _ = AGENT.policy(result.state).predict(np.zeros(4))
        assert action in (0, 1) and float(AGENT.gamma) == pytest.approx(0.99)
    assert int(jax.random.bits(key)) == int(jax.random.bits(jax.random.key(11)))


@BOTH
def test_env_steps_count_transitions_and_no_resets(loop):
    counted = []

    def count(progress, metrics, state):
        counted.append((progress.env_steps, progress.iteration, int(state.agent.env_steps), int(state.iteration)))

    result = run(loop, env_steps=200, report_every=1, callbacks=[count])
    for env_steps, iteration, agents, iterations in counted:
        assert env_steps == agents and iteration == iterations
        assert iteration * NUM_ENVS * (NUM_STEPS - 2) < env_steps <= iteration * NUM_ENVS * NUM_STEPS
    assert counted[-1][0] < counted[-1][1] * NUM_ENVS * NUM_STEPS
    assert counted[-2][0] < 200 <= counted[-1][0] == result.progress.env_steps


def test_progress_reports_steps_and_time():
    seen = []
    result = run("compiled", report_every=100, callbacks=[lambda progress, *_: seen.append(progress)])
    for before, after in itertools.pairwise(seen):
        assert before.env_steps < after.env_steps and before.seconds < after.seconds
    last = seen[-1]
    assert last == result.progress and last.target_env_steps == ENV_STEPS and last.compile_seconds > 0
    assert last.fps == pytest.approx(last.env_steps / last.seconds)


@BOTH
def test_callback_exception_propagates(loop):
    class Mine(Exception):
        pass

    def fail(progress, metrics, state):
        raise Mine("here")

    with pytest.raises(Mine, match="here"):
        run(loop, callbacks=[fail])


@BOTH
def test_callback_returning_false_ends_training_after_all_callbacks_ran(loop):
    seen = []
    callbacks = [lambda progress, *_: progress.env_steps < 100, lambda progress, *_: seen.append(progress.env_steps)]
    result = run(loop, report_every=1, callbacks=callbacks)
    assert result.stopped == "callback" and 100 <= result.progress.env_steps < 140 and seen[-1] == result.progress.env_steps
    for false in (False, np.False_):
        assert run(loop, env_steps=60, callbacks=[lambda *_, false=false: false]).stopped == "callback"
    assert run(loop, env_steps=60, report_every=60, callbacks=[lambda *_: False]).stopped is None


@BOTH
def test_a_callback_may_remove_all_metrics(loop):
    assert run(loop, env_steps=60, callbacks=[lambda progress, metrics, state: metrics.clear()]).metrics == {}


@pytest.mark.parametrize("returned", [0, "stop", np.zeros(2)])
def test_callback_that_returns_neither_a_bool_nor_none_is_rejected_by_name(returned):
    def report(progress, metrics, state):
        return returned

    with pytest.raises(TypeError, match="train: callback report must return None or a bool"):
        run("host", env_steps=60, callbacks=[report])


@BOTH
def test_callback_time_is_not_training_time(loop):
    slept = []

    def slow(*_):
        began = time.monotonic()
        time.sleep(0.3)
        slept.append(time.monotonic() - began)

    began = time.monotonic()
    progress = run(loop, env_steps=100, report_every=50, callbacks=[slow]).progress
    whole = time.monotonic() - began
    assert len(slept) >= 2 and progress.seconds + progress.compile_seconds + sum(slept) <= whole
    assert progress.fps == pytest.approx(progress.env_steps / progress.seconds)


def test_callback_may_train():
    inner = []
    outer = run(
        "compiled",
        env_steps=60,
        report_every=60,
        callbacks=[lambda *_: inner.append(everything(run("compiled", env_steps=60)))],
    )
    assert same_bits(inner[0], everything(outer))


@BOTH
def test_training_resumes_from_a_state_kept_in_a_callback(whole, loop):
    kept = {}

    def keep(progress, metrics, state):
        if not kept and progress.env_steps > 200:
            snapshot = None if progress.env is None else progress.env.snapshot()
            kept.update(state=state, steps=progress.env_steps, snapshot=snapshot)

    run(loop, report_every=1, callbacks=[keep])
    options = {} if loop == "compiled" else {"env": hosted(kept["snapshot"])}
    result = run(loop, resume_from=kept["state"], env_steps_done=kept["steps"], **options)
    assert same_bits(everything(result), whole[loop][1])


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "devices"), [("compiled", 1), ("compiled", 2), ("host", 1)])
def test_what_a_callback_keeps_stays_as_it_was_and_training_is_unchanged(whole, loop, devices):
    kept, copies = [], []

    def keep(progress, metrics, state):
        policy = AGENT.policy(state.agent)
        kept.append((state.agent, policy, state.time_step.obs))
        copies.append(jax.tree.map(np.array, kept[-1]))

    result = run(loop, report_every=50, callbacks=[keep], devices=devices)
    assert len(kept) > 5
    for one, copy in zip(kept, copies, strict=True):
        assert same_bits(one, copy)
        assert kept[0][1].predict(np.zeros(4, np.float32))[0] in (0, 1)
    if devices == 1:
        assert same_bits(everything(result), whole[loop][1])


@BOTH
def test_a_state_that_no_callback_keeps_is_not_copied(loop, monkeypatch):
    copied = []
    original = loop_module.copy_buffers
    monkeypatch.setattr(loop_module, "copy_buffers", lambda tree: copied.append(tree) or original(tree))

    def look(progress, metrics, state):
        assert int(jax.device_get(state.agent.env_steps)) >= 0
        AGENT.policy(state.agent).predict(np.zeros(4, np.float32))

    run(loop, env_steps=200, report_every=1, callbacks=[look])
    assert not copied


@BOTH
def test_result_stays_usable_after_training_resumed_from_it(loop):
    half = run(loop, env_steps=100)
    before = everything(half)
    run(loop, **goes_on(loop, half) | {"env_steps": 200})
    assert same_bits(everything(half), before)
    AGENT.policy(half.state).predict(np.zeros(4, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "devices"), [("compiled", 2), ("host", 1)])
def test_nothing_compiles_after_the_first_iteration(loop, devices):
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts = []
    # Other settings than those of the other tests, whose programs are there already.
    options = {"agent": dataclasses.replace(AGENT, num_epochs=1), "devices": devices}
    result = run(loop, report_every=1, callbacks=[lambda *_: counts.append(len(compiled))], **options)
    assert counts[0] > 0 and len(counts) > 10 and counts[-1] == counts[0]
    assert same_bits(everything(run(loop, **options)), everything(result))
    assert len(compiled) == counts[-1], "the same training again compiled something"


WRONG_STEPS = [0, -5, 1.5, math.nan, "100", None, True]


class Untouched(Scripted):
    def reset(self, seed):
        raise AssertionError("the environment was reset")


@pytest.mark.parametrize("loop", [loops.host, train.run])
@pytest.mark.parametrize("env_steps", WRONG_STEPS)
def test_invalid_env_steps_are_rejected_before_anything_runs(loop, env_steps):
    with pytest.raises((TypeError, ValueError), match=f"train: env_steps must be an integer >= 1, got {env_steps!r}"):
        loop(AGENT, Untouched([[3]], [1.0]), env_steps=env_steps, key=KEY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"env_steps": wrong}, "env_steps must be an integer >= 1") for wrong in WRONG_STEPS),
        ({"report_every": 0}, "report_every must be an integer >= 1, got 0"),
        ({"report_every": 1.5}, "report_every must be an integer >= 1, got 1.5"),
        ({"devices": 0}, "devices must be an integer >= 1, got 0"),
        ({"devices": 2.0}, "devices must be an integer >= 1, got 2.0"),
        ({"devices": 9}, "devices=9, but JAX sees 8"),
        ({"devices": 3}, "num_envs=4 cannot be split over devices=3"),
        ({"agent": dataclasses.replace(AGENT, num_minibatches=3)}, "num_minibatches=3"),
        ({"agent": PPO(dataclasses.replace(ENV.spec, action=Discrete(3)))}, "action of the agent's spec is Discrete.n=3"),
        ({"env": AutoReset(Pendulum(), NUM_ENVS)}, "obs of the agent's spec is"),
    ],
)
@BOTH
def test_invalid_arguments_are_rejected(monkeypatch, loop, options, said):
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises((TypeError, ValueError), match=said):
        run(loop, **options)


@BOTH
def test_diverged_training_raises_an_error_that_names_the_quantity(loop):
    agent = dataclasses.replace(AGENT, max_skipped_updates=3)
    good = run(loop, env_steps=30)
    variables = jax.tree.map(lambda x: x * jnp.nan, good.state.copies.online)
    poisoned = dataclasses.replace(good.loop_state, agent=with_online(good.state, variables))
    seen = []
    with pytest.raises(train.TrainingDiverged, match=r"3 consecutive updates .*max_skipped_updates=3.*'value'") as caught:
        run(
            loop,
            agent=agent,
            report_every=1,
            callbacks=[lambda progress, metrics, state: seen.append(metrics["train/consecutive_skipped_updates"])],
            **goes_on(loop, good) | {"resume_from": poisoned},
        )
    assert isinstance(caught.value, FloatingPointError) and seen == [1, 2, 3]


@pytest.mark.slow
def test_more_devices_give_the_same_numbers_but_for_rounding():
    one, two = (run("compiled", env_steps=90, devices=devices) for devices in (1, 2))
    assert one.progress.iteration == two.progress.iteration == 3
    for a, b in zip(jax.tree.leaves(everything(one)), jax.tree.leaves(everything(two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def test_states_without_an_element_are_split_over_devices_too():
    class Plugin(CartPole):
        """Physics with a state of plugins, of which there are none."""

        def reset(self, key, num_envs):
            return super().reset(key, num_envs), jnp.zeros((num_envs, 0, 3))

        def step(self, state, action, key):
            after, *rest = super().step(state[0], action, key)
            return (after, state[1]), *rest

        def observe(self, state):
            return super().observe(state[0])

    env = AutoReset(Plugin(), NUM_ENVS, reset_pool=2)
    agent = dataclasses.replace(AGENT, spec=env.spec)
    assert run("compiled", env=env, agent=agent, env_steps=100, devices=2).progress.iteration > 2


@BOTH
def test_without_a_pool_a_run_stopped_at_half_resumes_bit_for_bit_too(loop):
    env = dataclasses.replace(ENV, reset_pool=None)
    make = (lambda: JaxEnvOnHost(env, run_env_key(KEY))) if loop == "host" else (lambda: env)
    whole, half, again = run(loop, env=make(), env_steps=200), run(loop, env=make(), env_steps=100), make()
    if loop == "host":
        again.restore(half.progress.env.snapshot())
    rest = run(loop, env=again, env_steps=200, resume_from=half.loop_state, env_steps_done=half.progress.env_steps)
    assert same_bits(everything(rest), everything(whole))


@pytest.mark.slow
def test_the_host_loop_may_update_on_more_devices():
    one, two = (run("host", env_steps=90, devices=devices) for devices in (1, 2))
    for a, b in zip(jax.tree.leaves(everything(one)), jax.tree.leaves(everything(two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def scripted(lengths=((3,), (5,), (3,), (5,))):
    return Scripted(lengths, [1.0, 2.0, 1.0, 2.0])


def test_a_host_environment_is_reset_by_a_seed_of_the_key():
    envs = [scripted() for _ in range(3)]
    for env, seed in zip(envs, (0, 0, 1), strict=True):
        result = train.run(AGENT, env, env_steps=60, key=jax.random.key(seed))
        assert env.steps == 8 * result.progress.iteration and not env.closed
    assert envs[0].seeds == envs[1].seeds != envs[2].seeds and len(envs[0].seeds) == 1
    assert 0 <= envs[0].seeds[0] < 2**31
    # In 24 steps environment 0 ends six episodes (every fourth step resets), environment 1 four; so do 2 and 3.
    assert result.progress.iteration == 3 and result.progress.env_steps == 2 * (24 * 2 - 6 - 4)
    assert result.metrics["rollout/ep_len_mean"] == pytest.approx((3 * 6 + 5 * 4) / 10)
    assert result.metrics["rollout/ep_rew_mean"] == pytest.approx((3 * 6 + 10 * 4) / 10)


def test_host_environment_continues_from_a_snapshot():
    lengths = ((3, 4), (5, 2), (1,), (7, 1, 2))
    whole = train.run(AGENT, scripted(lengths), env_steps=120, key=KEY)
    half = train.run(AGENT, scripted(lengths), env_steps=60, key=KEY)
    env = scripted(lengths)
    env.restore(half.progress.env.snapshot())
    options = {"resume_from": half.loop_state, "env_steps_done": half.progress.env_steps}
    rest = train.run(AGENT, env, env_steps=120, key=KEY, **options)
    assert env.seeds == [] and same_bits(everything(rest), everything(whole))

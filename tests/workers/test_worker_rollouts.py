import copy
import dataclasses
import pickle
import sys
import threading
import types

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.impala import IMPALA
from polyak.agents.ppo import PPO
from polyak.core.space_check import InvalidValue
from polyak.core.types import copy_buffers
from polyak.envs.gymnasium import GymnasiumEnv
from polyak.loops.host_actor import acts_in_numpy
from polyak.networks.recurrent import LSTM
from polyak.storage.checkpoint import CheckpointError
from polyak.workers.packing import Packing
from polyak.workers.ray_workers import INLINE_BYTES, RayWorkers
from polyak.workers.rollout_worker import PLAIN, Failure, pack_snapshot, unpack_snapshot
from polyak.workers.worker_group import check_versions
from polyak.workers.worker_rollouts import check_lag
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
    train,
)

STEPS = 600


@pytest.fixture(scope="module")
def cartpole():
    return make_env()


@pytest.fixture(scope="module")
def undisturbed(cartpole):
    return train(cartpole).loop_state


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_give_the_bits_of_the_host_loop(cartpole, undisturbed, workers):
    """To the bit, not only within 1e-6."""
    result = train(cartpole, workers)
    assert_same_bits(result.loop_state, undisturbed)
    assert result.metrics["staleness/max"] == 0 and result.metrics["workers/alive"] == workers


@pytest.mark.slow
def test_box_actions_of_shares_of_four_have_the_bits_of_the_host_loop():
    env = make_env("Pendulum-v1")
    agent = make_agent(env.spec, normalize_obs=True, normalize_reward="return")
    assert_same_bits(train(env, 2, agent=agent).loop_state, train(env, agent=agent).loop_state)


@pytest.mark.slow
def test_box_actions_of_other_shares_agree_with_the_host_loop_up_to_rounding():
    """Within 1e-6 in one update."""
    env = make_env("Pendulum-v1", num_envs=6)
    agent = make_agent(env.spec, network=polyak.MLP((8,)), normalize_obs=True)
    ends = [train(env, workers, agent=agent, steps=6 * 16) for workers in (0, 2)]
    assert [int(end.loop_state.iteration) for end in ends] == [1, 1]
    for one, other in zip(*(arrays_of(end.loop_state) for end in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_eight_workers_of_four_environments_have_the_bits_of_one_process():
    env = make_env(num_envs=32)
    agent = make_agent(env.spec, normalize_obs=True)
    result = train(env, 8, agent=agent, steps=1_500)
    assert result.metrics["workers/alive"] == 8 and result.progress.iteration >= 3
    assert_same_bits(result.loop_state, train(env, agent=agent, steps=1_500).loop_state)


def test_a_snapshot_travels_as_one_piece(cartpole):
    """Of hundreds of small arrays, Ray would serialise each on its own."""
    envs = make_workers(cartpole, 2)
    envs.reset(3)
    assert pack_snapshot(make_env().snapshot()) is None, "before the reset"
    env = make_env()
    env.reset(3)
    buffers = []
    pickle.dumps([envs.group.snapshots, pack_snapshot(env.snapshot())], protocol=5, buffer_callback=buffers.append)
    assert buffers == [] and all(isinstance(one, bytes) for one in envs.group.snapshots)
    jax.tree.map(np.testing.assert_array_equal, unpack_snapshot(pack_snapshot(env.snapshot())), env.snapshot())
    jax.tree.map(np.testing.assert_array_equal, envs.snapshot()["batch"], env.snapshot()["batch"])


def test_small_policies_travel_in_the_call_and_large_ones_through_the_store():
    engine = RayWorkers.__new__(RayWorkers)
    engine._ray = types.SimpleNamespace(put=lambda value: "reference")
    small, large = ({"float32": np.zeros(size, np.float32)} for size in (INLINE_BYTES // 4, INLINE_BYTES // 4 + 1))
    assert engine.share(small) is small and engine.share(large) == "reference"


@pytest.mark.slow
def test_impala_whose_rollouts_have_the_policys_outputs_has_the_bits_of_the_host_loop(cartpole):
    agent = IMPALA(cartpole.spec, num_steps=16)
    assert acts_in_numpy(agent.collect_policy(agent.init(KEY)), 4)
    assert_same_bits(train(cartpole, 2, agent=agent).loop_state, train(cartpole, agent=agent).loop_state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [polyak.SAC, polyak.DDPG])
def test_actor_critics_have_the_bits_of_the_host_loop_and_all_but_ddpgs_workers_act_in_numpy(kind):
    env = polyak.envs.make("Pendulum-v1", num_envs=8, vectorization="sync", action_scaling="rescale")
    is_ddpg = kind is polyak.DDPG
    actor, critics = polyak.Actor((8,), std="fixed" if is_ddpg else "state"), polyak.Critics((8,), num_critics=2 - is_ddpg)
    small = {"actor": actor, "critics": critics, "batch_size": 8, "replay": polyak.UniformReplay(256)}
    agent = kind(env.spec, num_steps=8, learning_starts=100, updates_per_step=1 / 64, **small)
    # Ornstein-Uhlenbeck noise is computed in JAX, where several workers have keys of their own.
    assert acts_in_numpy(agent.collect_policy(agent.init(KEY)), 4) == (not is_ddpg)
    ends = [train(env, workers, agent=agent, steps=256).loop_state for workers in (0, 1 if is_ddpg else 2)]
    assert int(ends[0].agent.updates) == 3
    assert_same_bits(*ends)


NARROW = {
    "batch_size": 8,
    "replay": polyak.UniformReplay(256),
    "updates_per_step": 1 / 16,
    "learning_starts": 96,
    "num_steps": 4,
}
# They act in NumPy, in JAX, and in JAX with a recurrent state.
VALUES = {
    "boltzmann": lambda spec: polyak.DQN(spec, network=polyak.MLP((8,)), temperature=0.5, **NARROW),
    "noisy": lambda spec: polyak.DQN(spec, network=polyak.MLP((8,), head=polyak.QValues(noisy=True)), epsilon=0.0, **NARROW),
    "recurrent": lambda spec: polyak.DQN(
        spec, network=polyak.GRU(width=4, hidden=()), **NARROW | {"replay": polyak.SequenceReplay(256, 6, burn_in=2)}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", VALUES)
def test_agents_of_action_values_learn_from_workers_as_in_the_host_loop(cartpole, kind):
    agent = VALUES[kind](cartpole.spec)
    alone, one, two = (train(cartpole, workers, agent=agent, steps=256).loop_state for workers in (0, 1, 2))
    assert int(alone.agent.updates) > 8
    assert_same_bits(one, alone)
    # Where they act in NumPy, random numbers do not depend on how environments are split.
    in_numpy = acts_in_numpy(jax.eval_shape(lambda: agent.collect_policy(agent.init(KEY))), 4)
    assert_same_bits(two, alone if in_numpy else train(cartpole, 2, agent=agent, steps=256).loop_state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prioritized", "frames"])
def test_dqn_whose_replay_has_priorities_or_frames_has_the_bits_of_the_host_loop(cartpole, kind):
    is_prioritized = kind == "prioritized"
    replay = polyak.PrioritizedReplay(256) if is_prioritized else polyak.UniformReplay(256, 2, "first")
    env = cartpole if is_prioritized else make_env(two_frames)
    small = {"network": polyak.MLP((8,)), "batch_size": 8, "replay": replay, "updates_per_step": 1 / 16}
    agent = polyak.DQN(env.spec, num_steps=4, learning_starts=96, target_period=3, n_step=1 if is_prioritized else 3, **small)
    # So any number of workers has the bits of the host loop.
    assert acts_in_numpy(jax.eval_shape(lambda: agent.collect_policy(agent.init(KEY))), 4)
    ends = [train(env, workers, agent=agent, steps=256).loop_state for workers in (0, 1, 2)]
    # The replay has wrapped around, and the target has been copied.
    assert int(ends[0].agent.updates) > 8 and int(ends[0].agent.replay.size) == 31
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])
    disturbed = train(env, 2, lambda: FaultyWorkers({3: "lost", 8: "lost", 15: "lost"}), agent=agent, steps=256).loop_state
    if is_prioritized:
        assert_same_bits(disturbed, ends[2])
    # Environments without snapshots begin new episodes: nothing leads there from those that were lost.
    index = jnp.arange(256, dtype=jnp.int32)
    ring = replay._rows if is_prioritized else replay
    batch = ring.transitions(disturbed.agent.replay, index, num_envs=8, n_step=1, gamma=1.0)
    weight = np.asarray(batch.weight) > 0
    obs, next_obs = (np.asarray(x)[weight].reshape(weight.sum(), -1, 4)[:, -1] for x in (batch.obs, batch.next_obs))
    assert 180 < weight.sum() < 256
    np.testing.assert_allclose(next_obs[:, 0], obs[:, 0] + 0.02 * obs[:, 1], atol=1e-6)


def two_frames():
    return gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 2)


@pytest.mark.slow
def test_one_worker_acts_in_jax_as_the_host_loop(cartpole):
    agent = make_agent(cartpole.spec, network=LSTM(hidden=(), width=4))
    assert_same_bits(train(cartpole, 1, agent=agent).loop_state, train(cartpole, agent=agent).loop_state)


@pytest.mark.slow
def test_several_workers_act_in_jax_with_keys_of_their_own(cartpole):
    agent = make_agent(cartpole.spec, network=LSTM(hidden=(), width=4))
    result = train(cartpole, 2, agent=agent)
    assert result.progress.env_steps >= STEPS
    assert_same_bits(result.loop_state, train(cartpole, 2, agent=agent).loop_state)


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_that_die_leave_no_trace(cartpole, undisturbed, workers):
    generator = np.random.default_rng(workers)
    faults = {int(call): "lost" for call in generator.choice(12, 6, replace=False)}
    result = train(cartpole, workers, lambda: FaultyWorkers(faults))
    assert_same_bits(result.loop_state, undisturbed)
    assert result.metrics["workers/restarts"] > 0 and result.metrics["workers/episodes_lost"] == 0


def test_a_worker_that_hangs_leaves_no_trace(cartpole, undisturbed):
    result = train(cartpole, 2, lambda: FaultyWorkers({1: "late", 4: "late"}), options={"timeout": 0.3})
    assert_same_bits(result.loop_state, undisturbed)
    assert result.metrics["workers/restarts"] == 2


def with_nan(rollout):
    time_steps = rollout.arrays[0]
    obs = np.array(time_steps.obs)
    obs[3] = np.nan
    return dataclasses.replace(rollout, arrays=(dataclasses.replace(time_steps, obs=obs), *rollout.arrays[1:]))


def with_wrong_shape(rollout):
    time_steps, actions, *rest = rollout.arrays
    return dataclasses.replace(rollout, arrays=(time_steps, actions[:-1], *rest))


def without_state(rollout):
    broken = copy.copy(rollout)
    object.__setattr__(broken, "info_sums", None)
    return broken


def without_action(rollout):
    broken = copy.copy(rollout)
    time_steps, _, *rest = rollout.arrays
    object.__setattr__(broken, "arrays", (time_steps, None, *rest))
    return broken


def test_a_rollout_that_arrives_again_is_collected_as_it_was_asked_for(cartpole, undisturbed):
    """Nothing is learned from twice."""
    engine = FaultyWorkers({4: lambda rollout: engine.earlier, 9: lambda rollout: engine.earlier})
    engine.faults[0] = lambda rollout: setattr(engine, "earlier", rollout) or rollout
    result = train(cartpole, 2, lambda: engine)
    assert_same_bits(result.loop_state, undisturbed)
    assert result.metrics["workers/restarts"] == 2 and result.metrics["rollouts/invalid"] == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (with_nan, "time_steps.obs has NaN or infinity"),
        (with_wrong_shape, "actions must be int32[16, 4], got int32[15, 4]"),
        (lambda rollout: "garbage", "a WorkerRollout was expected, got str"),
        (without_state, "the state of the environments is missing"),
        (without_action, "arrays of actions are missing"),
    ],
)
def test_garbage_costs_the_rows_of_its_worker_and_nothing_else(cartpole, fault, said):
    """By worker and leaf."""
    reports, events = [], []
    result = train(
        cartpole,
        2,
        lambda: FaultyWorkers({3: fault}),
        callbacks=[lambda progress, metrics, state: reports.append((progress.env_steps, dict(metrics)))],
        report_every=1,
        events=events,
    )
    failed = [(event.worker, event.detail) for event in events if event.event == "failed"]
    assert failed == [(1, f"returned a rollout in which {said}; begins new episodes in 4 environments")]
    # The second rollout has the rows of one worker only.
    assert reports[1][0] - reports[0][0] <= 4 * 16 < reports[0][0]
    assert [metrics["rollouts/invalid"] for _, metrics in reports][:3] == [0, 1, 0]
    assert all(metrics["train/skipped_steps"] == 0 for _, metrics in reports)
    assert all(metrics["staleness/max"] == 0 for _, metrics in reports)
    assert all(np.isfinite(x).all() for x in arrays_of(result.state.copies))
    assert result.metrics["workers/restarts"] == 1
    # Episodes that were cut are not among the finished ones, whose lengths are those of CartPole.
    assert all(metrics.get("rollout/ep_len_mean", 20) >= 8 for _, metrics in reports)


@pytest.mark.slow
def test_lag_one_is_reproducible_and_one_update_old(cartpole):
    agent = make_agent(cartpole.spec, values_when="collect")
    results = [train(cartpole, 2, agent=agent, options={"lag": 1}) for _ in range(2)]
    assert_same_bits(results[0].loop_state, results[1].loop_state)
    assert results[0].metrics["staleness/max"] == 1
    with pytest.raises(AssertionError):
        assert_same_bits(results[0].loop_state, train(cartpole, 2, agent=agent).loop_state)


def make_td3():
    """TD3 whose noise depends on env_steps, and its environments."""
    env = polyak.envs.make("Pendulum-v1", num_envs=8, vectorization="sync", action_scaling="rescale")
    small = {"actor": polyak.Actor((8,)), "critics": polyak.Critics((8,)), "batch_size": 8, "replay": polyak.UniformReplay(256)}
    noise = polyak.schedules.Linear(1.0, 0.0, env_steps=600)
    return env, polyak.TD3(env.spec, num_steps=16, learning_starts=0, exploration_noise=noise, **small)


def make_ppo():
    env = make_env()
    return env, make_agent(env.spec, values_when="collect")


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_ppo, make_td3])
def test_lag_one_resumes_to_the_bit(make):
    env, agent = make()
    assert acts_in_numpy(agent.collect_policy(agent.init(KEY)), 4)
    saved = {}

    def save(progress, metrics, state):
        saved.setdefault(progress.env_steps, (copy_buffers(state), pickle.dumps(progress.env.snapshot())))

    whole = train(env, 2, agent=agent, options={"lag": 1}, callbacks=[save], report_every=1)
    done, (state, snapshot) = list(saved.items())[1]
    envs = make_workers(env, 2, lag=1)
    envs.restore(pickle.loads(snapshot))
    resumed = polyak.loops.host(agent, envs, env_steps=STEPS, key=KEY, resume_from=state, env_steps_done=done, report_every=1)
    assert_same_bits(resumed.loop_state, whole.loop_state)


@pytest.mark.slow
def test_lag_one_resumes_to_the_bit_after_a_rollout_was_discarded(cartpole, monkeypatch):
    """Some workers have begun the next rollout when a stop discards this one."""
    monkeypatch.setattr("polyak.loops.rollouts.ROLLOUT_SECONDS", 0.0)
    agent = make_agent(cartpole.spec, values_when="collect")
    whole = train(cartpole, 2, agent=agent, options={"lag": 1})
    engine = FaultyWorkers({6: "late"})
    stop = []
    envs = make_workers(cartpole, 2, lambda: engine, lag=1)
    first = polyak.loops.host(
        agent, envs, env_steps=STEPS, key=KEY, should_stop=lambda: engine.calls > 6 and (stop.append(1) or len(stop) > 3)
    )
    assert first.stopped == "request" and int(first.loop_state.iteration) < int(whole.loop_state.iteration)
    resumed_envs = make_workers(cartpole, 2, lag=1)
    resumed_envs.restore(pickle.loads(pickle.dumps(first.progress.env.snapshot())))
    done = first.progress.env_steps
    resumed = polyak.loops.host(
        agent, resumed_envs, env_steps=STEPS, key=KEY, resume_from=first.loop_state, env_steps_done=done
    )
    assert_same_bits(resumed.loop_state, whole.loop_state)


def test_a_worker_that_dies_while_all_begin_again_is_started_once_more(cartpole):
    engine = FaultyWorkers({})
    envs = make_workers(cartpole, 2, lambda: engine)
    before = envs.reset(3)
    call = engine.call
    deaths = []

    def dying(handle, method, arguments):
        if method == "begin" and not deaths:
            deaths.append(handle)
            return Fault("lost")
        return call(handle, method, arguments)

    engine.call = dying
    again = envs.reset(3)
    jax.tree.map(np.testing.assert_array_equal, before, again)
    np.testing.assert_array_equal(envs.reset(4).obs, make_env().reset(4).obs)
    assert deaths and envs.group.supervisor.is_settled()


def test_replacements_must_have_the_learners_versions(cartpole, monkeypatch):
    versions = []

    def changing():
        versions.append(1)
        return {"python": "3", "jax": "0.1" if len(versions) > 3 else "1"}

    monkeypatch.setattr("polyak.workers.rollout_worker.installed_versions", changing)
    monkeypatch.setattr("polyak.workers.worker_group.installed_versions", lambda: {"python": "3", "jax": "1"})
    with pytest.raises(RuntimeError, match=r"has other versions: jax 0\.1"):
        train(cartpole, 2, lambda: FaultyWorkers({1: "lost", 3: "lost", 5: "lost"}))


def test_replacing_a_worker_compiles_nothing(cartpole):
    events, counts = [], []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: events.append(event))

    def count(progress, metrics, state):
        counts.append(sum("backend_compile" in event for event in events))

    result = train(cartpole, 2, lambda: FaultyWorkers({6: "lost", 10: "lost"}), callbacks=[count], report_every=1)
    assert result.metrics["workers/restarts"] == 2 and len(counts) >= 5 and counts[2] == counts[-1]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_snapshots_continue_with_any_number_of_workers(cartpole, undisturbed, workers):
    first = train(cartpole, 2, steps=300)
    snapshot = first.progress.env.snapshot()
    envs = make_workers(cartpole, workers) if workers else make_env()
    envs.restore(snapshot)
    done = first.progress.env_steps
    resumed = polyak.loops.host(
        make_agent(cartpole.spec), envs, env_steps=STEPS, key=KEY, resume_from=first.loop_state, env_steps_done=done
    )
    assert_same_bits(resumed.loop_state, undisturbed)


def test_a_second_training_with_the_same_workers_continues_the_episodes(cartpole, undisturbed):
    """Training twice equals training once."""
    envs, agent = make_workers(cartpole, 2), make_agent(cartpole.spec)
    first = polyak.loops.host(agent, envs, env_steps=300, key=KEY)
    second = polyak.loops.host(
        agent, envs, env_steps=STEPS, key=KEY, resume_from=first.loop_state, env_steps_done=first.progress.env_steps
    )
    assert_same_bits(second.loop_state, undisturbed)


def test_more_lag_stays_within_its_bound(cartpole, monkeypatch):
    monkeypatch.setattr(PPO, "max_lag", None)
    result = train(cartpole, 2, agent=make_agent(cartpole.spec, values_when="collect"), options={"lag": 3})
    assert 0 < result.metrics["staleness/mean"] <= result.metrics["staleness/max"] <= 3


def test_an_agent_that_bears_no_lag_is_rejected_by_name(cartpole):
    with pytest.raises(ValueError, match=r"lag=1, but PPO .* at most 0 updates old"):
        train(cartpole, 2, options={"lag": 1})


def test_the_error_about_a_lag_names_the_setting_that_allows_one(cartpole):
    with pytest.raises(ValueError, match="set lag=0, or values_when='collect', which allows 1, or take an agent"):
        check_lag(make_agent(cartpole.spec), 1)
    with pytest.raises(ValueError, match="set lag=1, or take an agent"):
        check_lag(make_agent(cartpole.spec, values_when="collect"), 2)
    check_lag(make_agent(cartpole.spec, values_when="collect"), 1)


@pytest.mark.slow
def test_environments_without_snapshots_begin_new_episodes():
    env, events = polyak.envs.make(Counting, num_envs=4), []
    # The first two calls are those of the first rollout, whose worker repeats it from the same start.
    envs = make_workers(env, 2, lambda: FaultyWorkers({0: "lost", 3: "lost", 6: "lost"}))
    envs.group.on_event = events.append
    result = polyak.loops.host(make_agent(env.spec), envs, env_steps=300, key=KEY)
    assert result.metrics["workers/episodes_lost"] == 4
    details = [event.detail for event in events if event.event == "failed"]
    assert details == ["died: of a test", *["died: of a test; begins new episodes in 2 environments"] * 2]
    assert result.progress.env_steps >= 300 and result.metrics["workers/restarts"] == 3
    assert result.metrics["rollout/ep_len_mean"] == 5, "a lost episode is not counted"


def test_an_exception_of_an_environment_is_the_users_with_its_worker():
    env = polyak.envs.make(raising_env, num_envs=4)
    with pytest.raises(ArithmeticError, match="of a test") as caught:
        train(env, 2, steps=400)
    assert any("worker 0" in note and "envs 0 to 1" in note and "Traceback" in note for note in caught.value.__notes__)


class Leaving(Counting):
    def step(self, action):
        return sys.exit(4)


def test_an_environment_that_calls_exit_ends_the_training_with_its_worker():
    env = polyak.envs.make(Leaving, num_envs=4)
    with pytest.raises(RuntimeError, match=r"worker 0 .* raised SystemExit: 4"):
        train(env, 2, steps=400)


class WrongShape(Counting):
    """Every step returns an observation of another shape."""

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"restarts": 3}, {"on_env_error": "restart"}], ids=str)
def test_an_environment_that_is_always_wrong_ends_the_training_with_its_error(monkeypatch, options):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    env = polyak.envs.make(WrongShape, num_envs=4)
    with pytest.raises(InvalidValue, match=r"env \d, step 1: the observation must have shape \(3,\), got \(4,\)") as caught:
        train(env, 2, steps=400, options=options)
    assert any("Raised in worker" in note and "Traceback" in note for note in caught.value.__notes__)


def test_an_exception_of_an_environment_can_start_new_episodes():
    env = polyak.envs.make(raising_env, num_envs=4)
    result = train(env, 2, steps=400, options={"on_env_error": "restart"})
    assert result.progress.env_steps >= 400 and result.metrics["workers/restarts"] >= 2


@pytest.mark.slow
def test_episodes_that_cannot_be_restored_make_way_for_new_ones(cartpole, monkeypatch):
    asked = []

    def cannot_restore(self, snapshot):
        asked.append(self)
        raise ArithmeticError("of a test")

    monkeypatch.setattr(GymnasiumEnv, "restore", cannot_restore)
    options = {"on_env_error": "restart", "restarts": 5}
    events = []
    result = train(cartpole, 2, lambda: FaultyWorkers({5: "lost"}), options=options, events=events)
    assert result.progress.env_steps >= 600 and len(asked) == 2
    assert result.metrics["workers/restarts"] == 3 and result.metrics["workers/episodes_lost"] == 4
    details = [event.detail for event in events if event.event == "failed"]
    assert [detail.endswith("; begins new episodes in 4 environments") for detail in details] == [False, False, True], details
    with pytest.raises(ArithmeticError, match="of a test"):
        train(cartpole, 2, lambda: FaultyWorkers({5: "lost"}))


def raising_env():
    return Counting(raises_at=100)


def test_nan_of_an_environment_costs_the_rows_of_its_worker_and_nothing_else():
    """Whatever `on_env_error` is."""
    env, events, reports = polyak.envs.make(OneNaN, num_envs=4, vectorization="sync"), [], []
    OneNaN.made = 0
    envs = make_workers(env, 2)
    envs.group.on_event = events.append
    result = polyak.loops.host(
        make_agent(env.spec),
        envs,
        env_steps=400,
        key=KEY,
        callbacks=[lambda progress, metrics, state: reports.append((progress.env_steps, dict(metrics)))],
        report_every=1,
    )
    assert [metrics["rollouts/invalid"] for _, metrics in reports].count(1) == 1
    assert result.metrics["workers/restarts"] == 1 and result.progress.env_steps >= 400
    assert all(metrics["train/skipped_steps"] == 0 for _, metrics in reports)
    assert "env 3, step 47 " in events[2].detail and "the observation must be finite, got nan" in events[2].detail


def bad_workers(bad):
    """An engine on which the rollouts of these workers end in their death, from the third rollout of all on."""

    class Bad(FaultyWorkers):
        def __init__(self):
            super().__init__({})
            self.payloads = []

        def start(self, payload):
            if payload not in self.payloads:
                self.payloads.append(payload)
            handle = super().start(payload)
            handle.index = self.payloads.index(payload)
            return handle

        def call(self, handle, method, arguments):
            if method == "rollout" and handle.index in bad and self.calls >= 3 * len(self.payloads):
                self.calls += 1
                return Fault("lost")
            return super().call(handle, method, arguments)

    return Bad


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_worker_that_is_lost_costs_its_rows_and_nothing_else(cartpole, monkeypatch, lag):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    agent, reports = make_agent(cartpole.spec, values_when="collect", normalize_obs=True), []
    result = train(
        cartpole,
        4,
        bad_workers({3}),
        agent=agent,
        options={"min_workers": 3, "restarts": 10, "lag": lag},
        callbacks=[lambda progress, metrics, state: reports.append((progress.env_steps, dict(metrics)))],
        report_every=1,
        steps=800,
    )
    assert result.metrics["workers/alive"] == 3 and result.metrics["workers/restarts"] == 4
    assert result.metrics["workers/episodes_lost"] == 2
    steps = np.diff([env_steps for env_steps, _ in reports])
    assert 0.8 * 16 * 6 <= steps[-1] <= 16 * 6, "those of three workers"
    assert all(metrics["train/skipped_steps"] == metrics["rollouts/invalid"] == 0 for _, metrics in reports)
    assert all(metrics["staleness/max"] <= lag for _, metrics in reports)
    assert all(metrics.get("rollout/ep_len_mean", 20) >= 8 for _, metrics in reports)
    assert all(np.isfinite(x).all() for x in arrays_of(result.state.copies))


def test_nobody_waits_for_a_worker_that_waits_to_be_started_again(cartpole, monkeypatch):
    """It comes back with new episodes."""
    pauses = []
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda n: pauses.append(n) or 3600.0 * (n > 1))
    engine = FaultyWorkers({3: "lost", 4: "lost"})
    envs = make_workers(cartpole, 2, lambda: engine, min_workers=1)
    alive = []

    def come_back(progress, metrics, state):
        alive.append(metrics["workers/alive"])
        if len(alive) == 4:
            envs.group.supervisor.workers[1].start_at = 0.0

    result = polyak.loops.host(make_agent(cartpole.spec), envs, env_steps=STEPS, key=KEY, callbacks=[come_back], report_every=1)
    assert pauses == [1, 2] and alive[1:4] == [1, 1, 1] and result.metrics["workers/alive"] == 2
    assert result.metrics["workers/episodes_lost"] == 4
    assert envs.snapshot() is not None and result.metrics["rollout/ep_len_mean"] >= 8


def test_too_few_workers_end_the_training(cartpole, monkeypatch):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    with pytest.raises(RuntimeError, match="only 2 others are left of min_workers=3"):
        train(cartpole, 4, bad_workers({0, 2}), options={"min_workers": 3, "restarts": 12})
    with pytest.raises(ValueError, match="min_workers=3 must be at most workers=2"):
        train(cartpole, 2, options={"min_workers": 3})


def test_workers_that_never_start_leave_the_others_alone(cartpole, monkeypatch):
    monkeypatch.setattr("polyak.workers.supervise.back_off", lambda failures: 0.0)
    engine = bad_workers({})()
    call = engine.call
    engine.call = lambda handle, method, arguments: (
        Fault("lost") if handle.index == 1 and method == "begin" else call(handle, method, arguments)
    )
    result = train(cartpole, 2, lambda: engine, options={"min_workers": 1}, steps=300)
    assert result.progress.env_steps >= 300 and result.metrics["workers/alive"] == 1


class OneNaN(Counting):
    """The last of four environments returns NaN once."""

    made = 0

    def __init__(self):
        # The learner makes one as well, to know the spaces.
        OneNaN.made += 1
        super().__init__(nan_at=40 if OneNaN.made == 4 else None)


class Coded(Exception):
    """It is made of other arguments than it has, and holds what is not plain."""

    def __init__(self, code, lock):
        super().__init__(f"code {code}")
        self.code, self.lock = code, lock


class Holding(Exception):
    """Its arguments are not plain, and would run code where they were unpickled."""

    def __reduce__(self):
        return sys.exit, (3,)


def sent(error):
    """The exception as it arrives from a worker."""
    try:
        raise error
    except Exception as caught:
        failure = Failure.of(caught)
    # As other processes send it: of nothing but plain data.
    assert all(type(value) in (*PLAIN, tuple, dict) for value in vars(failure).values())
    return pickle.loads(pickle.dumps(failure)).exception("worker 3")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        OSError(2, "no such file", "there"),
        UnicodeDecodeError("ascii", b"x", 0, 1, "of a test"),
        CheckpointError("of a test"),
        ArithmeticError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_of_its_type_with_its_arguments(error):
    arrived = sent(error)
    assert type(arrived) is type(error) and arrived.args == error.args and str(arrived) == str(error)
    assert "worker 3" in arrived.__notes__[0] and "in sent" in arrived.__notes__[0]


def test_an_exception_with_a_constructor_of_its_own_has_its_plain_attributes():
    arrived = sent(Coded(7, threading.Lock()))
    assert type(arrived) is Coded and (str(arrived), arrived.code) == ("code 7", 7) and "lock" not in vars(arrived)


def local_error():
    class Local(Exception):
        """This process cannot find it by its name."""

    return Local("of a test")


@pytest.mark.parametrize("make", [lambda: Holding(threading.Lock()), local_error], ids=["arguments", "local"])
def test_an_exception_that_cannot_be_made_again_arrives_as_text(make):
    """With its type, its message and the traceback in the worker; it is not unpickled."""
    error = make()
    arrived = sent(error)
    assert type(arrived) is RuntimeError and str(arrived) == f"worker 3 raised {type(error).__name__}: {error}"
    assert "in sent" in arrived.__notes__[0]


def test_the_type_of_an_exception_is_an_exception_that_is_imported():
    """A worker chooses no other callable, and nothing is imported."""
    for module, name in (("os", "system"), ("builtins", "SystemExit"), ("builtins", "print"), ("antigravity", "X"), ("os", "")):
        failure = Failure(module, name, ("true",), {}, f"{name}: true", "")
        assert type(failure.exception("worker 3")) is RuntimeError
    assert "antigravity" not in sys.modules


def test_workers_must_have_the_learners_versions():
    check_versions("worker 0", dict(polyak.workers.rollout_worker.installed_versions()))
    with pytest.raises(RuntimeError, match=r"worker 3 has other versions: jax 0.1 \(here .*\); install the same"):
        check_versions("worker 3", {**polyak.workers.rollout_worker.installed_versions(), "jax": "0.1"})


def test_a_request_to_stop_ends_the_training_between_rollouts(cartpole):
    result = train(cartpole, 2, should_stop=lambda: True)
    assert result.stopped == "request" and int(result.loop_state.iteration) == 1


def test_a_training_with_a_lag_leaves_no_thread(cartpole):
    before = threading.active_count()
    train(cartpole, 2, agent=make_agent(cartpole.spec, values_when="collect"), steps=150, options={"lag": 1})
    assert threading.active_count() == before


def test_workers_that_were_killed_are_forgotten():
    engine = RayWorkers.__new__(RayWorkers)
    engine._ray = types.SimpleNamespace(kill=lambda handle, **_: None, is_initialized=lambda: True)
    engine._kills = []
    for handle in range(20):
        engine.end(handle)
        engine._kills[-1].join()
    assert len(engine._kills) == 1


def test_packing_returns_the_leaves_with_their_dtypes():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array(3, jnp.uint32), "c": jnp.array([True, False]), "d": KEY}
    packing = pickle.loads(pickle.dumps(Packing.of(tree)))
    vectors = {dtype: np.asarray(vector) for dtype, vector in jax.jit(packing.pack)(tree).items()}
    for leaf, wanted in zip(packing.unpack(vectors), jax.tree.leaves(tree), strict=True):
        assert leaf.dtype == wanted.dtype and leaf.shape == wanted.shape and bool((jnp.asarray(leaf) == wanted).all())
    for wrong in (np.zeros(7, np.float32), np.zeros(6, np.int32), np.zeros((2, 3), np.float32), "garbage", None):
        with pytest.raises(ValueError, match="vectors must be"):
            packing.unpack({**vectors, "float32": wrong})
    with pytest.raises(ValueError, match="vectors must be"):
        packing.unpack({})


def test_steps_can_be_taken_one_by_one(cartpole):
    envs, alone = make_workers(cartpole, 2), make_env()
    for one, other in [(envs.reset(5), alone.reset(5)), *((envs.step(a), alone.step(a)) for a in np.zeros((20, 8), np.int32))]:
        jax.tree.map(np.testing.assert_array_equal, one, other)
    envs.close()
    envs.close()

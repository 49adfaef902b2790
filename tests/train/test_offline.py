"""Training on a data set: gradient steps alone, for every agent with a replay."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.data import content
from polyak.loops.loop import TrainingDiverged
from polyak.train.offline import fit_to_data, spec_for

KEY = jax.random.key(0)
SMALL = {"batch_size": 16}
SMALL_DQN = SMALL | {"network": polyak.MLP((8,))}
SMALL_SAC = SMALL | {"actor": polyak.Actor((8,)), "critics": polyak.Critics((8,))}


@pytest.fixture(scope="module")
def cartpole():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    return polyak.data.collect(polyak.policies.Uniform(env.spec), env, 300, key=KEY)


@pytest.fixture(scope="module")
def pendulum():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=4)
    return polyak.data.collect(polyak.policies.Uniform(env.spec), env, 300, key=KEY)


def assert_same_state(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_array_equal(x, y)


def offline(agent, data, steps, settings, **options):
    return polyak.train.offline(agent, data, gradient_steps=steps, settings=settings, progress=False, **options)


@pytest.mark.slow
def test_behavioral_cloning_with_hindsight_reaches_goals():
    """Random actions are right for the goals that they achieved, and for no others."""
    env = polyak.envs.make("jax/BitFlipping-v0", num_envs=16, env_kwargs={"bits": 5})
    data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 3_000)
    success = {}
    for ratio in (1.0, 0.0):
        settings = {"replay": polyak.HindsightReplay(1_000, ratio=ratio), "network": polyak.MLP((64,)), "batch_size": 64}
        settings |= {"learning_rate": 3e-3}
        success[ratio] = offline("bc", data, 500, settings, env=env, eval_episodes=100).evaluation.success_rate
    assert success[1.0] > 0.95 and success[0.0] < 0.5


def test_hindsight_without_an_environment_is_an_error_that_names_the_argument():
    env = polyak.envs.make("jax/BitFlipping-v0", num_envs=4, env_kwargs={"bits": 3})
    data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 50)
    data = dataclasses.replace(data, spec=dataclasses.replace(data.spec, goals=None))
    with pytest.raises(ValueError, match=r"the agent must be created with env\.spec, and training on data needs it as env"):
        offline("bc", data, 1, {"replay": polyak.HindsightReplay(1_000)})


def test_a_gradient_step_is_that_of_the_agent_on_a_batch_of_the_data(cartpole):
    """Against the agent's own loss on the batch that the keys decide."""
    agent = dataclasses.replace(polyak.DQN(cartpole.spec, **SMALL_DQN), replay=polyak.UniformReplay(1_000))
    state = agent.add_data(agent.init(KEY), cartpole.rollout(pad=True, num_steps=4))
    assert int(state.env_steps) == 0
    new_state, metrics = jax.jit(agent.learn)(state, KEY)
    sample_key, train_key = jax.random.split(KEY)
    batch = agent.replay.sample(state.replay, sample_key, 16, num_envs=1, gamma=0.99)
    batch = dataclasses.replace(batch, weight=batch.weight / batch.weight.sum())
    copies = state.copies
    loss, _ = agent.loss(copies.online.params, batch, online=copies.online, target=copies.variables("target"), key=train_key)
    np.testing.assert_allclose(float(metrics["train/loss"]), float(loss), rtol=1e-5)
    assert int(new_state.updates) == int(new_state.env_steps) == 1
    assert not any(name.startswith("rollout/") for name in metrics)
    assert_same_state(new_state.replay, state.replay)


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path, cartpole):
    """With priorities and a schedule, both of which a checkpoint must hold."""
    settings = SMALL_DQN | {"replay": polyak.PrioritizedReplay(10), "learning_rate": polyak.Linear(1e-3, 0.0, 60)}
    whole = offline("dqn", cartpole, 60, settings)
    first = offline("dqn", cartpole, 60, settings, run_dir=tmp_path / "run", report_every=20, callbacks=[lambda *_: False])
    assert first.stopped == "callback" and first.progress.env_steps == 20
    again = polyak.resume(tmp_path / "run", progress=False)
    assert again.progress.env_steps == 60
    assert_same_state(again.state, whole.state)
    policy = polyak.load_policy(tmp_path / "run")
    action, _ = policy.predict(np.zeros(4, np.float32))
    assert action in (0, 1)


@pytest.mark.slow
def test_evaluations_and_reports_are_on_the_axis_of_gradient_steps(tmp_path, cartpole):
    reports = []
    result = offline(
        "dqn",
        cartpole,
        20,
        SMALL_DQN | {"learning_rate": 1e-3},
        env="jax/CartPole-v1",
        eval_every=10,
        eval_episodes=2,
        run_dir=tmp_path / "run",
        callbacks=[lambda progress, metrics, state: reports.append((progress.env_steps, metrics["train/n_updates"]))],
        report_every=5,
    )
    assert reports == [(5, 5), (10, 10), (15, 15), (20, 20)]
    assert list(result.evaluations) == [10, 20] and result.evaluation.episodes == 2
    assert result.config.env == "jax/CartPole-v1" and result.config.data == "jax/CartPole-v1"
    assert "20 of 20 gradient steps" in repr(result)
    continued = polyak.resume(tmp_path / "run", env_steps=30, progress=False)
    assert continued.progress.env_steps == 30 and continued.evaluation is not None


def test_the_agents_actions_and_statistics_follow_from_the_data(pendulum):
    agent = fit_to_data(polyak.SAC(spec_for("sac", pendulum, None), **SMALL_SAC, normalize_obs=True), pendulum)
    state = agent.add_data(agent.init(KEY), pendulum.rollout(agent.spec, num_steps=agent.num_steps, pad=True))
    stored = np.asarray(state.replay.rows.action)[np.asarray(state.replay.rows.valid)]
    np.testing.assert_allclose(stored, pendulum.action / 2, atol=1e-6)
    obs = np.concatenate([episode.obs[:-1] for episode in pendulum.episodes])
    np.testing.assert_allclose(state.normalizers.obs.stats.mean, obs.mean(axis=0), atol=1e-4)


@pytest.mark.slow
def test_training_that_diverges_stops_with_its_reason(pendulum):
    settings = SMALL_SAC | {"reward_scale": 1e38, "max_skipped_updates": 3}
    with pytest.raises(TrainingDiverged, match="NaN or infin"):
        offline("sac", pendulum, 50, settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "c51", "qrdqn", "bootstrapped_dqn", "iqn", "rainbow", "rnd_dqn"])
def test_agents_of_action_values_learn_offline(name, cartpole):
    settings = SMALL if name != "dqn" else SMALL_DQN
    assert int(offline(name, cartpole, 3, settings).state.updates) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qt_opt", "naf"])
def test_agents_of_box_actions_without_an_actor_learn_offline(name, pendulum):
    assert int(offline(name, pendulum, 3, SMALL).state.updates) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddpg", "td3", "fast_td3", "sac", "tqc", "bro", "crossq", "xqc"])
def test_actor_critics_learn_offline(name, pendulum):
    settings = SMALL | {"actor": polyak.Actor((8,), std="fixed") if name in ("ddpg", "td3", "fast_td3") else polyak.Actor((8,))}
    settings |= {"reset_period": None} if name == "bro" else {}
    if name == "xqc":
        # The scaled rewards are below 0, and the atoms span their largest discounted return, as the page of data says.
        lowest = 1.1 * float(pendulum.reward.min() / pendulum.reward.std()) / (1 - 0.975)
        settings |= {"actor": polyak.Actor((8,), norm="batch"), "normalize_reward": "reward", "v_min": lowest, "v_max": 0.0}
    state = offline(name, pendulum, 3, settings).state
    assert int(state.updates) == 3
    if name == "xqc":
        scaled = np.asarray(state.normalizers.reward.scale(jnp.asarray(pendulum.reward)[None], None))
        assert settings["v_min"] <= scaled.min() / (1 - 0.975) < -5.0 and scaled.max() <= 0.0, "-5 and 5 would clip targets"


@pytest.mark.slow
def test_a_recurrent_network_learns_offline(cartpole):
    settings = SMALL | {"network": polyak.LSTM(8, head=polyak.QValues()), "replay": polyak.SequenceReplay(1_000, 8)}
    assert int(offline("dqn", cartpole, 3, settings).state.updates) == 3


@pytest.mark.parametrize(
    ("agent", "options", "error", "message"),
    [
        ("ppo", {}, ValueError, "PPO has no replay to learn from data; use an agent with one, such as IQL"),
        ("dnq", {}, ValueError, "train.offline: unknown algorithm 'dnq'"),
        ("sac", {"env": "jax/CartPole-v1"}, ValueError, "data set 'jax/Pendulum-v1' is of another environment: obs is Box"),
        ("sac", {"eval_every": 10}, ValueError, "eval_every and eval_episodes need env"),
        ("sac", {"gradient_steps": 0}, ValueError, "train.offline: gradient_steps must be an integer >= 1"),
        ("sac", {"settings": {"gama": 0.9}}, TypeError, "unknown field 'gama'"),
        (
            "sac",
            {"settings": {"normalize_reward": "return"}},
            ValueError,
            "SAC: normalize_reward must be 'reward' or None to learn",
        ),
        ("sac", {"settings": {"n_step": 200}}, ValueError, r"n_step=200 must be at most \d+, the steps of the longest episode"),
        ("dqn", {}, (TypeError, ValueError), "DQN"),
        ("sac", {"run_dir": ""}, ValueError, "train.offline: run_dir must be a directory or None, got an empty name"),
    ],
)
def test_what_does_not_fit_is_an_error_before_training(agent, options, error, message, pendulum, tmp_path):
    with pytest.raises(error, match=message):
        polyak.train.offline(
            agent, pendulum, **{"gradient_steps": 10, "run_dir": tmp_path / "run", "progress": False} | options
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("dnq", "unknown algorithm 'dnq'"),
        (polyak.UniformReplay(9), "agent must"),
        ("ppo", "PPO has no replay to learn from data"),
    ],
)
def test_a_wrong_agent_is_an_error_before_the_data_are_loaded(agent, message, cartpole):
    agent = polyak.PPO(cartpole.spec) if agent == "ppo" else agent
    with pytest.raises((TypeError, ValueError), match=message):
        polyak.train.offline(agent, "none.npz", gradient_steps=1, progress=False)


@pytest.mark.parametrize("source", ["file", "data set"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("has_env", [True, False])
def test_all_values_are_checked_once_between_file_and_replay(source, named, has_env, tmp_path, cartpole, monkeypatch):
    if source == "file":
        polyak.data.save(cartpole, tmp_path / "data.npz")
    checked = []
    check = content.range_error
    monkeypatch.setattr(content, "range_error", lambda name, *rest: checked.append(name.split()[-1]) or check(name, *rest))
    # It returns no training, so that nothing is compiled.
    monkeypatch.setattr(
        sys.modules["polyak.train.offline"], "prepare_offline", lambda agent, data, *rest, **options: loaded.append(data)
    )
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2) if has_env else None
    agent, loaded = "dqn" if named else polyak.DQN(cartpole.spec, **SMALL_DQN), []
    with pytest.raises(TypeError, match="NoneType"):
        offline(agent, tmp_path / "data.npz" if source == "file" else cartpole, 10, None, env=env)
    (data,) = loaded
    parts = ["actions", "final_observations", "observations", "rewards"]
    assert sorted(checked) == (parts if source == "file" else [part for part in parts if part != "final_observations"])
    if source == "data set":
        assert np.shares_memory(data.obs, cartpole.obs) and np.shares_memory(data.action, cartpole.action)


def test_the_replay_has_room_for_sequences_that_are_longer_than_the_data(cartpole):
    replay = polyak.SequenceReplay(10_000, sequence_length=2_000)
    agent = polyak.DQN(cartpole.spec, batch_size=16, network=polyak.LSTM(8, head=polyak.QValues()), replay=replay)
    made = fit_to_data(agent, cartpole)
    assert 2_000 < made.replay.capacity < 5_000
    made.check(1)


def test_a_file_is_loaded_by_its_path(tmp_path, cartpole):
    polyak.data.save(cartpole, tmp_path / "data.npz")
    agent = polyak.DQN(cartpole.spec, **SMALL_DQN)
    result = polyak.train.offline(agent, tmp_path / "data.npz", gradient_steps=2, progress=False)
    assert result.config.data == "data.npz" and result.agent.replay.capacity < 1_000
    with pytest.raises(ValueError, match="env must be passed, as the training on data had no environment"):
        result.evaluate(2)

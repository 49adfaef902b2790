"""QT-Opt: its target against a slow version in NumPy, the lagged copies, masked data, learning and resuming."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.agents.qt_opt import QTOpt
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.export.write_policy import write_policy
from polyak.networks.flow import sample_noise
from polyak.ops.schedules import StepCount
from polyak.replay import UniformReplay
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated
from tests.agents.test_crossq import Aim, AutoReset
from tests.ops.test_cross_entropy_method import slow_cem

KEY = jax.random.key(0)
SMALL = {"batch_size": 16, "learning_starts": 0, "num_steps": 4, "updates_per_step": 0.5, "replay": UniformReplay(512)}
OPTIONS = {"env_steps": StepCount.of(0), "axis_name": None}
SEARCH = {"num_samples": 12, "num_elites": 3, "num_iterations": 2}


def make(spec=SPEC, **settings):
    return QTOpt(spec, **{**SMALL, **SEARCH, "critics": polyak.Critics((8,), num_critics=2), **settings})


def q_of(variables, obs, action):
    """The values of both critics, in NumPy."""
    layer, head = variables.params["layers"][0]["linear"], variables.params["head"]
    x = np.concatenate([obs, action], axis=-1)
    values = []
    for i in range(2):
        hidden = np.maximum(x @ np.asarray(layer["kernel"][i]) + np.asarray(layer["bias"][i, 0]), 0)
        values.append(hidden @ np.asarray(head["kernel"][i, :, 0]) + np.asarray(head["bias"][i, 0, 0]))
    return np.stack(values, axis=-1)


@pytest.mark.parametrize("lag_period", [5, None])
def test_the_loss_is_that_of_a_slow_version(lag_period):
    agent, rows = make(lag_period=lag_period, huber_delta=0.5, reward_scale=2.0), batch(reward=jnp.arange(6.0))
    online, target, *others = (make().init(jax.random.key(i)).copies.critics.online for i in range(4))
    lagged = [target] if lag_period is None else others
    loss, aux = jax.jit(agent.critic_loss)(online.params, rows, critics=online, target=target, lagged=lagged, key=KEY)

    cem_key, _ = jax.random.split(KEY)
    noise = np.asarray(sample_noise(SPEC.action, 2 * 12 * 6, cem_key)).reshape(2, 12, 6, 2)
    obs, next_obs = np.asarray(rows.obs), np.asarray(rows.next_obs)
    score = lambda x, row: q_of(target, next_obs[row], x).min()  # noqa: E731
    next_action = slow_cem(score, noise, num_elites=3, initial_std=1.0, min_std=0.01, action="best")
    value = np.min([q_of(copy, next_obs, next_action) for copy in lagged], axis=(0, 2))
    error = (2.0 * np.arange(6.0) + 0.9 * value)[:, None] - q_of(online, obs, np.asarray(rows.action))
    size = np.abs(error)
    huber = np.where(size <= 0.5, 0.5 * size**2, 0.5 * (size - 0.25))
    np.testing.assert_allclose(loss, huber.sum(1).mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.terms["priority"], size.mean(1), rtol=1e-4)


def test_the_lagged_copies_are_targets_of_two_periods_before():
    agent = make(lag_period=2, tau=0.5, target_period=1, optimizer=optax.sgd(0.1))
    copies, history = agent.init(KEY).copies, []
    step = jax.jit(lambda copies, enabled: agent.train_step(copies, batch(), KEY, enabled, **OPTIONS)[0])
    for i in range(5):
        history.append(copies.critics.target)
        copies = step(copies, jnp.array(True))
        # After the steps 2 and 4: the target before its own update.
        first, second = {1: (1, 0), 2: (1, 0), 3: (3, 1), 4: (3, 1)}.get(i, (0, 0))
        assert equal(copies.lagged, (history[first], history[second])), i
    assert not equal(*copies.lagged)
    disabled = step(copies, jnp.array(False))
    assert equal(disabled.lagged, copies.lagged) and equal(disabled.critics.online, copies.critics.online)


@pytest.mark.slow
def test_masked_samples_do_not_change_a_bit():
    agent, rows = make(), random_rollout(make())
    last = jnp.zeros((5, 2), bool).at[1].set(True)
    rows = dataclasses.replace(rows, time_steps=dataclasses.replace(rows.time_steps, truncated=last))
    hidden = dataclasses.replace(rows, actions=rows.actions.at[1].set(jnp.nan))
    ends = [updated(agent, [each])[0].copies for each in (rows, hidden)]
    assert equal(*ends)


@pytest.mark.slow
def test_policies_act_by_the_best_action_and_explore():
    agent = make(exploration="gaussian", exploration_noise=0.0)
    state, _ = updated(agent, [random_rollout(agent)])
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    greedy = agent.policy(state).predict(obs)[0]
    assert np.array_equal(greedy, agent.policy(state).predict(obs)[0])
    online = state.copies.critics.online
    random = np.random.default_rng(1).uniform(-1, 1, size=(50, 2))
    better = q_of(online, obs, greedy).min(1) - q_of(online, obs, random).min(1)
    assert (better >= -1e-5).mean() > 0.9 and better.mean() > 0.05
    explorer = agent.collect_policy(state)
    np.testing.assert_allclose(explorer.predict(obs)[0], greedy, atol=1e-6)
    noisy = dataclasses.replace(agent, exploration_noise=0.5).collect_policy(state)
    assert np.abs(noisy.predict(obs, deterministic=False, key=KEY)[0] - greedy).mean() > 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, "QTOpt: actions must be Boxes, got Discrete"),
        ({"num_elites": 13}, "QTOpt: num_elites must be at most num_samples=12, got 13"),
        ({"initial_std": 0.001}, "QTOpt: initial_std must be at least min_std=0.01, got 0.001"),
        ({"exploration": "gaussian", "theta": 0.5}, "theta has no effect"),
        ({"critics": polyak.Critics((8,), num_quantiles=3)}, "q of B"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def test_a_state_of_other_settings_is_rejected():
    state = make(lag_period=None).init(KEY)
    with pytest.raises(ValueError, match="created with lag_period=None but the agent sets lag_period"):
        make().update(state, random_rollout(make()), KEY)


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = make(
        env.spec, critics=polyak.Critics((32,), num_critics=1), learning_starts=256, batch_size=32, num_steps=1,
        learning_rate=1e-2, replay=UniformReplay(16_000), exploration="gaussian", num_iterations=3,
    )  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=2_000, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.15)
    (best, _), _, _ = agent.critics.apply(state.copies.critics.online, (jnp.asarray(obs), jnp.asarray(action)))
    np.testing.assert_allclose(best, np.zeros((2, 1)), atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".stablehlo", ".onnx"])
def test_exported_policies_act_as_the_policy_on_trees_of_actions(suffix, tmp_path):
    actions = Dict({"a": Box([-1.0], [1.0]), "b": Box([[-1.0, -1.0]], [[1.0, 1.0]])})
    agent = make(EnvSpec(SPEC.obs, actions))
    policy, path = agent.policy(agent.init(KEY)), tmp_path / f"policy{suffix}"
    write_policy(policy, agent.spec, suffix[1:], path, {})
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    wanted, _ = policy.predict(obs)
    assert wanted["a"].shape == (4, 1) and wanted["b"].shape == (4, 1, 2)
    if suffix == ".stablehlo":
        got = jax.tree.leaves(polyak.load_policy(path).predict(obs)[0])
    else:
        got = pytest.importorskip("onnxruntime").InferenceSession(str(path)).run(None, {"obs": obs})
    for x, y in zip(got, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(
        partial(make, learning_starts=32, lag_period=3), "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale"
    )

"""NAF: its values and loss against the quadratic form in NumPy, masked data, learning and resuming."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.naf import NAF
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.export.write_policy import write_policy
from polyak.networks.quadratic import quadratic_q, quadratic_spec
from polyak.replay import UniformReplay
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated
from tests.agents.test_crossq import Aim, AutoReset

KEY = jax.random.key(0)
SMALL = {"batch_size": 16, "learning_starts": 0, "num_steps": 4, "updates_per_step": 0.5, "replay": UniformReplay(512)}
TREE = EnvSpec(SPEC.obs, Dict({"a": Box([-1.0], [1.0]), "b": Box([[-1.0, -1.0]], [[1.0, 1.0]])}))


def make(spec=SPEC, **settings):
    return NAF(spec, **{**SMALL, "network": polyak.MLP((8,)), **settings})


def slow_q(best, diagonal, below, value, action):
    """One row: P = L Lᵀ, the numbers of L below its diagonal row by row."""
    lower, numbers = np.diag(np.exp(diagonal)), iter(below)
    for row in range(len(best)):
        for column in range(row):
            lower[row, column] = next(numbers)
    distance = action - best
    return value - 0.5 * distance @ (lower @ lower.T) @ distance


def test_values_are_the_quadratic_form():
    rng = np.random.default_rng(0)
    loc, log_scale, action = (rng.normal(size=(5, 3)).astype(np.float32) for _ in range(3))
    below, value = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=5).astype(np.float32)

    def tree(x):
        return {"a": x[:, :1], "b": x[:, None, 1:]}

    first = {name: {"loc": tree(loc)[name], "log_scale": tree(log_scale)[name]} for name in "ab"}
    q, advantage = quadratic_q(TREE, (first, {"loc": below}), jnp.asarray(value), jax.tree.map(jnp.asarray, tree(action)))
    wanted = [slow_q(*row) for row in zip(np.tanh(loc), log_scale, below, value, action, strict=True)]
    np.testing.assert_allclose(q, wanted, rtol=1e-5)
    np.testing.assert_allclose(advantage, wanted - value, rtol=1e-4, atol=1e-5)
    best = {name: jnp.tanh(x) for name, x in tree(loc).items()}
    q, _ = quadratic_q(TREE, (first, {"loc": below}), jnp.asarray(value), best)
    np.testing.assert_allclose(q, value, rtol=1e-6)


def test_the_loss_is_that_of_a_slow_version():
    agent, rows = make(reward_scale=2.0), batch(reward=jnp.arange(6.0))
    created, rng = agent.init(KEY).copies.online, np.random.default_rng(0)

    def noisy(x):
        return x + jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32)

    # The output layer of log σ starts at 0: without random numbers L would be the same in all states.
    online, target = (dataclasses.replace(created, params=jax.tree.map(noisy, created.params)) for _ in range(2))
    loss, aux = jax.jit(agent.loss)(online.params, rows, online=online, target=target)
    (first, second), value = agent.network.apply(online, rows.obs)[0]
    next_value = agent.network.apply(target, rows.next_obs)[0][1]
    parts = np.tanh(first["loc"]), first["log_scale"], second["loc"], value, rows.action
    q = np.array([slow_q(*map(np.asarray, row)) for row in zip(*parts, strict=True)])
    error = 2.0 * np.arange(6.0) + 0.9 * np.asarray(next_value) - q
    np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.terms["priority"], np.abs(error), rtol=1e-4)
    np.testing.assert_allclose(aux.terms["advantage"], (q - np.asarray(value)).mean(), rtol=1e-4)


def test_a_network_may_return_the_diagonal_once_for_the_batch():
    spec = EnvSpec(SPEC.obs, Box(-np.ones(2, np.float32), np.ones(2, np.float32)))
    loc, below = jnp.array([[0.1, 0.2], [0.3, -0.4]]), {"loc": jnp.array([[0.5], [2.0]]), "log_scale": jnp.zeros((2, 1))}
    once = ({"loc": loc, "log_scale": jnp.array([0.0, 1.0])}, below)
    each = ({"loc": loc, "log_scale": jnp.array([[0.0, 1.0], [0.0, 1.0]])}, below)
    q = [quadratic_q(spec, params, jnp.zeros(2), jnp.ones((2, 2)))[0] for params in (once, each)]
    assert equal(*q)


def test_no_gradient_flows_into_the_target():
    agent, rows = make(), batch()
    online = agent.init(KEY).copies.online

    def loss(params, target):
        return agent.loss(params, rows, online=online, target=dataclasses.replace(online, params=target))[0]

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(online.params, online.params)
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(both[1]))
    assert float(jnp.abs(both[0]["policy"]["linear"]["kernel"]).max()) > 0


@pytest.mark.slow
def test_masked_samples_do_not_change_a_bit():
    agent, rows = make(), random_rollout(make())
    last = jnp.zeros((5, 2), bool).at[1].set(True)
    rows = dataclasses.replace(rows, time_steps=dataclasses.replace(rows.time_steps, truncated=last))
    hidden = dataclasses.replace(rows, actions=rows.actions.at[1].set(jnp.nan))
    assert equal(*(updated(agent, [each])[0].copies for each in (rows, hidden)))


@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), TREE, EnvSpec(SPEC.obs, Box([-1.0], [1.0]))])
def test_the_greedy_action_has_the_largest_value(spec):
    agent = make(spec)
    state = agent.init(KEY)
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    greedy, _ = agent.policy(state).predict(obs)
    (params, value), _, _ = agent.network.apply(state.copies.online, jnp.asarray(obs))
    q, _ = quadratic_q(spec, params, value, jax.tree.map(jnp.asarray, greedy))
    np.testing.assert_allclose(q, value, atol=1e-6)
    nearby = jax.tree.map(lambda a: jnp.asarray(a) + 0.1, greedy)
    assert (np.asarray(quadratic_q(spec, params, value, nearby)[0]) < np.asarray(value)).all()
    assert equal(greedy, agent.policy(state).predict(obs, deterministic=False, key=KEY)[0])
    assert not equal(greedy, agent.collect_policy(state).predict(obs, deterministic=False, key=KEY)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": EnvSpec(SPEC.obs, Discrete(2))}, "NAF: actions must be Boxes, got Discrete"),
        (
            {"network": polyak.MLP(head=polyak.PolicyAndValue())},
            "NAF: network must have the head",
        ),
        ({"network": polyak.MLP(head=polyak.QValues())}, "NAF: network must have the head PolicyAndValue"),
        ({"network": polyak.LSTM()}, "NAF: network must not be recurrent"),
        ({"network": polyak.Actor()}, "the value of 97 observations must have shape"),
        ({"exploration": "gaussian", "theta": 0.5}, "theta has no effect"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).init(KEY)


def test_the_spec_of_one_number_has_nothing_below_the_diagonal():
    assert quadratic_spec(EnvSpec(SPEC.obs, Box([-1.0], [1.0]))).action.spaces == (Box([-1.0], [1.0]),)
    assert quadratic_spec(TREE).action.spaces[1].shape == (3,)


def test_rescaled_actions_may_have_several_numbers():
    agent = make(EnvSpec(SPEC.obs, Box([-2.0, 0.0], [2.0, 9.0]), action_scaling="rescale"))
    best, _ = agent.policy(agent.init(KEY)).predict(np.zeros(3, np.float32))
    assert best.shape == (2,) and 0 < best[1] < 9


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_value():
    env = AutoReset(Aim(), 8)
    agent = make(
        env.spec, network=polyak.MLP((32,), activation="relu"), learning_starts=256, batch_size=32, num_steps=1,
        learning_rate=1e-2, replay=UniformReplay(16_000), exploration="gaussian",
    )  # fmt: skip
    state = polyak.loops.compiled(agent, env, env_steps=2_000, key=KEY).state
    obs = np.array([[-1.0], [1.0]], np.float32)
    action = agent.policy(state).predict(obs)[0]
    np.testing.assert_allclose(action, 0.5 * obs, atol=0.1)
    (params, value), _, _ = agent.network.apply(state.copies.online, jnp.asarray(obs))
    np.testing.assert_allclose(value, np.zeros(2), atol=0.1)
    worse, _ = quadratic_q(env.spec, params, value, jnp.asarray(-action))
    np.testing.assert_allclose(worse, np.full(2, -1.0), atol=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".stablehlo", ".onnx"])
def test_exported_policies_act_as_the_policy(suffix, tmp_path):
    agent = make()
    policy, path = agent.policy(agent.init(KEY)), tmp_path / f"policy{suffix}"
    write_policy(policy, agent.spec, suffix[1:], path, {})
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    wanted, _ = policy.predict(obs)
    if suffix == ".stablehlo":
        got, _ = polyak.load_policy(path).predict(obs)
    else:
        (got,) = pytest.importorskip("onnxruntime").InferenceSession(str(path)).run(None, {"obs": obs})
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(partial(make, learning_starts=32), "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")

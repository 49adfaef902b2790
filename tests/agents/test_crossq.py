"""CrossQ of the examples: one file on the bases of agents, with the numbers of a slow version and every loop."""

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.storage.checkpoint import restore, save
from tests.agents.test_actor_critics import SPEC, batch, equal, random_rollout, updated
from tests.agents.test_training_mode import numpy_batch_norm

FILE = Path(__file__).parents[2] / "examples/crossq.py"
KEY = jax.random.key(0)
CRITICS = polyak.Critics((8,), norm="batch")


@pytest.fixture(scope="module")
def crossq():
    spec = importlib.util.spec_from_file_location("crossq", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(crossq):
    small = {"actor": polyak.Actor((8,)), "critics": CRITICS, "replay": polyak.UniformReplay(512), "batch_size": 16}
    return partial(crossq.CrossQ, **small, learning_starts=0, num_steps=4, updates_per_step=0.5)


def test_it_is_a_file_of_at_most_100_lines_without_targets(make):
    assert len(FILE.read_text().splitlines()) <= 100
    agent = make(SPEC)
    assert agent.init(KEY).copies.critics.target is None and "tau" not in agent.__dataclass_fields__


def test_the_loss_of_the_critics_is_that_of_a_slow_version(make):
    agent, rows = make(SPEC), batch(discount=jnp.array([0.9, 0.0, 0.9, 0.9, 0.0, 0.9]))
    copies = agent.init(KEY).copies
    args = {"critics": copies.critics.online, "target": None, "actor": copies.actor.online, "alpha": 0.2, "key": KEY}
    loss, aux = agent.critic_loss(copies.critics.online.params, rows, **args)
    draw, _ = agent.draw_actions(copies.actor.online, rows.next_obs, None, jax.random.split(KEY)[0])
    layer, head = (jax.tree.map(np.asarray, copies.critics.online.params[name]) for name in ("layers", "head"))
    inputs = np.concatenate([np.c_[rows.obs, rows.action], np.c_[rows.next_obs, draw.action]])
    values = []
    for critic in range(2):
        x = inputs @ layer[0]["linear"]["kernel"][critic] + layer[0]["linear"]["bias"][critic]
        values.append(np.maximum(numpy_batch_norm(x), 0) @ head["kernel"][critic] + head["bias"][critic])
    q, next_q = np.split(np.stack(values, axis=1)[..., 0], 2)
    wanted = np.asarray(rows.reward) + np.asarray(rows.discount) * (next_q.min(1) - 0.2 * np.asarray(draw.log_prob))
    np.testing.assert_allclose(loss, np.mean(np.sum(0.5 * (q - wanted[:, None]) ** 2, axis=1)), rtol=1e-4)
    np.testing.assert_allclose(aux.terms["priority"], np.abs(wanted[:, None] - q).mean(1), rtol=1e-3, atol=1e-5)


def test_no_gradient_flows_through_the_target_and_none_into_the_critics_of_the_actor(make):
    agent, rows = make(SPEC), batch(discount=jnp.zeros(6))
    copies = agent.init(KEY).copies
    args = {"critics": copies.critics.online, "target": None, "actor": copies.actor.online, "alpha": 0.2, "key": KEY}
    head = copies.critics.online.params["head"]

    def value(scale, discount):
        params = {**copies.critics.online.params, "head": jax.tree.map(lambda x: scale * x, head)}
        return agent.critic_loss(params, dataclasses.replace(rows, discount=discount), **args)[0]

    # Where the discount is 0 the target is the reward; with another the gradient differs by the target alone.
    slopes = [jax.grad(value)(1.0, jnp.full(6, discount)) for discount in (0.0, 0.9)]
    changed = [value(1.01, jnp.full(6, discount)) - value(0.99, jnp.full(6, discount)) for discount in (0.0, 0.9)]
    np.testing.assert_allclose(changed[0] / 0.02, slopes[0], rtol=0.02)
    assert abs(float(changed[1]) / 0.02 - float(slopes[1])) > 1e-3
    after, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    assert int(after.copies.critics.steps) == 12 and int(after.copies.actor.steps) == 4


def test_rows_that_are_not_learned_from_reach_no_statistics(make):
    agent = make(SPEC, batch_size=64, num_steps=8, updates_per_step=0.25)

    def after(ignored):
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored, rollout.actions)
        return updated(agent, [dataclasses.replace(rollout, actions=actions)] * 3)[0].copies.critics.online

    assert equal(after(0.9), after(-0.9))


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "devices"), [("compiled", 2), ("host", 1)])
def test_a_run_resumes_to_the_bit(make, loop, devices, tmp_path):
    name = "Pendulum-v1" if loop == "host" else "jax/Pendulum-v1"
    env, again = (polyak.envs.make(name, num_envs=4, action_scaling="rescale") for _ in range(2))
    agent = make(env.spec, learning_starts=32)
    options = {"key": KEY} | ({"devices": devices} if loop == "compiled" else {})
    run = getattr(polyak.loops, loop)
    whole = run(agent, env, env_steps=256, **options)
    assert int(whole.state.updates) > 0
    half = run(agent, again, env_steps=128, **options)
    save(tmp_path / "checkpoints", half.loop_state, step=128, meta={}, segmented=".agent.replay")
    restored = restore(tmp_path / "checkpoints", half.loop_state).tree
    if loop == "host":
        snapshot = again.snapshot()
        again.reset(0)
        again.restore(snapshot)
    resumed = run(agent, again, env_steps=256, **options, resume_from=restored, env_steps_done=half.progress.env_steps)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)

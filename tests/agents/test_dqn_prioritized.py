"""DQN with prioritized replay: errors become priorities, in every loop, and runs resume to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops
from polyak.agents.dqn import DQN
from polyak.networks.feedforward import MLP
from polyak.replay import PrioritizedReplay
from polyak.storage.checkpoint import restore, save
from tests.agents.test_dqn import make, random_rollout, updated

KEY = jax.random.key(0)
SMALL = {
    "network": MLP((8,)),
    "num_steps": 2,
    "learning_starts": 32,
    "replay": PrioritizedReplay(128),
    "batch_size": 16,
    "target_period": 5,
}


@pytest.mark.slow
def test_the_error_of_a_transition_becomes_its_priority():
    agent = make(replay=PrioritizedReplay(512, alpha=1.0, eps=0.0), learning_starts=0, updates_per_step=0.125)
    rollout = random_rollout(agent)
    state, metrics = updated(agent, [rollout])
    before = agent.init(KEY)
    copies = before.copies
    online, target = copies.online, copies.variables("target")
    batch = polyak.UniformReplay(512).transitions(state.replay, jnp.arange(8, dtype=jnp.int32), num_envs=2, gamma=agent.gamma)
    _, aux = agent.loss(online.params, batch, online=online, target=target)
    priority = np.asarray(state.replay.priorities.tree.priority)
    drawn = priority[:8] != 1
    assert drawn.sum() >= 4
    np.testing.assert_allclose(priority[:8][drawn], aux.terms["priority"][drawn], rtol=1e-5)
    assert priority[8:].sum() == 0
    np.testing.assert_allclose(metrics["replay/mean_priority"], priority.sum() / 8, rtol=1e-6)
    np.testing.assert_allclose(metrics["replay/max_priority"], max(1.0, priority.max()), rtol=1e-6)
    assert float(metrics["train/importance_weight"]) == 1.0 and int(metrics["replay/rejected_priorities"]) == 0


def test_the_loss_weighs_by_importance():
    """α is 0 in one agent and β in the other: the first draws uniformly with weights of 1, the other does not weigh."""
    agent = make(replay=PrioritizedReplay(512, beta=1.0), learning_starts=0)
    rollouts = [random_rollout(agent, seed=i) for i in range(4)]
    _, corrected = updated(agent, rollouts)
    _, plain = updated(make(replay=PrioritizedReplay(512, beta=0.0), learning_starts=0), rollouts)
    assert float(corrected["train/importance_weight"]) < 0.9 and float(plain["train/importance_weight"]) == 1.0
    assert float(corrected["train/loss"]) < float(plain["train/loss"])


@pytest.mark.slow
def test_nothing_is_set_before_learning_starts():
    agent = make(replay=PrioritizedReplay(512), learning_starts=17)
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(2)])
    np.testing.assert_array_equal(np.asarray(state.replay.priorities.tree.priority)[:16], 1.0)
    state, _ = updated(agent, [random_rollout(agent, seed=2)], state)
    assert (np.asarray(state.replay.priorities.tree.priority)[:24] != 1.0).any()


def test_training_that_diverges_leaves_priorities_finite_and_is_diagnosed():
    agent = make(
        replay=PrioritizedReplay(512), learning_starts=0, learning_rate=1e38, max_grad_norm=None, max_skipped_updates=2
    )
    state, metrics = updated(agent, [random_rollout(agent, seed=i, reward=lambda x: x * 1e30) for i in range(3)])
    assert "consecutive updates were skipped" in agent.diagnose(metrics)
    assert bool(jnp.isfinite(state.replay.priorities.tree.nodes).all())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [polyak.UniformReplay, PrioritizedReplay])
@pytest.mark.parametrize("loop", ["compiled", "host", "seeds"])
def test_no_copy_of_the_replay_in_the_compiled_update(loop, kind):
    agent = make(replay=kind(65_536), learning_starts=64, n_step=3)
    state, rollout = agent.init(KEY), random_rollout(agent)

    def several(state, key):
        return jax.lax.scan(lambda state, key: (agent.update(state, rollout, key)[0], None), state, jax.random.split(key, 3))[0]

    update, key = (lambda state, key: agent.update(state, rollout, key), KEY) if loop == "host" else (several, KEY)
    if loop == "seeds":
        update, key = jax.vmap(several), jax.random.split(KEY, 2)
        state = jax.vmap(agent.init)(key)
    text = jax.jit(update, donate_argnums=0).lower(state, key).compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and any(size in line for size in ("65536", "131072"))]
    assert "65536" in text and not copies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "env", "devices"),
    [("host", "CartPole-v1", 1), ("compiled", "jax/CartPole-v1", 2)],
)
def test_a_run_resumes_to_the_bit_from_a_checkpoint(loop, env, devices, tmp_path):
    env = polyak.envs.make(env, num_envs=4)
    agent = DQN(env.spec, **SMALL)
    options = {"key": KEY} | ({"devices": devices} if loop == "compiled" else {})
    run = getattr(loops, loop)
    whole = run(agent, env, env_steps=256, **options)
    assert int(whole.state.updates) > 0 and float(whole.metrics["replay/max_priority"]) != 1.0
    half = run(agent, again := polyak.envs.make(env.spec.id, num_envs=4), env_steps=128, **options)
    save(tmp_path / "checkpoints", half.loop_state, step=128, meta={}, segmented=".agent.replay")
    restored = restore(tmp_path / "checkpoints", half.loop_state).tree
    if loop == "host":
        snapshot = again.snapshot()
        again.reset(0)
        again.restore(snapshot)
    rest = {"resume_from": restored, "env_steps_done": half.progress.env_steps}
    resumed = run(agent, again, env_steps=256, **options, **rest)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_devices_agree_on_what_is_replicated():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = DQN(env.spec, **SMALL)
    state = loops.compiled(agent, env, env_steps=256, key=KEY, devices=2).state
    whole = dataclasses.replace(state, replay=dataclasses.replace(state.replay, rows=None))
    whole = (whole.copies, whole.replay.priorities.largest, whole.replay.priorities.rejected, whole.replay.size)
    for leaf in jax.tree.leaves(whole):
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        np.testing.assert_array_equal(first, second)
    priority = np.asarray(state.replay.priorities.tree.nodes).reshape(2, 2, 64)[:, 0]
    valid = np.asarray(state.replay.rows.valid).reshape(2, 64)
    np.testing.assert_array_equal(priority > 0, valid)
    assert (priority[0] != priority[1]).any()


@pytest.mark.slow
def test_compiled_seeds_learn_by_their_own_priorities():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = DQN(env.spec, **SMALL)
    keys = jax.random.split(KEY, 2)
    together = loops.compiled_seeds(agent, env, env_steps=128, keys=keys)
    alone = loops.compiled(agent, env, env_steps=128, key=keys[1])
    trees = [state.replay.priorities.tree.nodes for state in (together[1].state, alone.state)]
    np.testing.assert_allclose(*trees, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_priorities_are_in_32_bits_where_jax_has_64(unchecked):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    settings = {"num_steps": 4, "replay": PrioritizedReplay(64), "batch_size": 4, "learning_starts": 8}
    dqn = make(**settings)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # as users have it
        result = polyak.loops.compiled(polyak.IQN(env.spec, **settings), env, env_steps=40, key=jax.random.key(0))
        # In the loop, DQN is IQN but for its loss.
        state, _ = jax.eval_shape(dqn.update, jax.eval_shape(dqn.init, KEY), random_rollout(dqn), KEY)
    assert not {str(x.dtype) for x in jax.tree.leaves((result.state, state))} & {"float64", "int64", "uint64"}
    assert int(result.state.updates) > 0

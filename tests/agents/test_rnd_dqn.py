"""DQN with random network distillation: one gradient step against slow NumPy, Q_E as DQN's, masks, exploration, resuming."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import polyak
from polyak.agents.rnd_dqn import RNDDQN
from polyak.envs.autoreset import AutoReset
from polyak.networks.feedforward import MLP
from polyak.networks.heads import QValues
from polyak.networks.sum_of_values import SumOfValues
from polyak.ops.schedules import StepCount
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.rollouts import same_bits
from tests.agents.test_bootstrapped_dqn import Chain
from tests.agents.test_rnd import normalized, slow_error, slow_features
from tests.agents.test_value_family import MASKED, SMALL, SPEC, rollout_of, transitions

KEY = jax.random.key(0)
SGD = 0.1
OPTIONS = {**SMALL, "network": MLP((5,)), "random_network": MLP((6,)), "num_features": 4}


def make(spec=SPEC, **settings):
    return RNDDQN(spec, **OPTIONS | settings)


@jax.jit
def step(agent, copies, batch):
    return agent.train_step(copies, batch, KEY, jnp.array(True), env_steps=StepCount.of(0), axis_name=None)


@pytest.fixture(scope="module")
def stepped():
    """An agent, copies after two batches, with targets that differ, a batch, and the third gradient step, on it."""
    agent = make(MASKED, optimizer=optax.sgd(SGD), intrinsic_gamma=0.8, coefficient=0.7, target_period=3)
    copies = jax.jit(agent.create_copies)(KEY)
    batches = [transitions(8, masked=True, seed=seed, weight=jnp.full(8, 1 / 8)) for seed in range(3)]
    for batch in batches[:2]:
        copies, _ = step(agent, copies, batch)
    # Where an episode has terminated, and a transition that is not learned from.
    batch = dataclasses.replace(batches[2], discount=batches[2].discount.at[1].set(0.0))
    batch = dataclasses.replace(batch, weight=jnp.array([0.1, 0.2, 0.0, 0.1, 0.1, 0.3, 0.1, 0.1]))
    return agent, copies, batch, step(agent, copies, batch)


def gradient_of(loss, params):
    """By differences, in float64, or they are rounding."""
    leaves, tree = jax.tree.flatten(params)
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def at(vector):
        parts = np.split(vector, sizes)
        return loss(jax.tree.unflatten(tree, [x.reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)]))

    start = np.asarray(ravel_pytree(params)[0], np.float64)
    return np.array([(at(start + e) - at(start - e)) / 2e-5 for e in 1e-5 * np.eye(len(start))])


def check_step(before, after, loss):
    """The parameters moved along the gradient of `loss`."""
    moved = ravel_pytree(after.online.params)[0] - ravel_pytree(before.online.params)[0]
    np.testing.assert_allclose(moved, -SGD * gradient_of(loss, before.online.params), rtol=2e-3, atol=2e-6)


def test_a_gradient_step_is_that_of_a_slow_numpy_version(stepped):
    _, copies, batch, (after, log) = stepped
    weight, obs, next_obs = (np.asarray(x, np.float64) for x in (batch.weight, batch.obs, batch.next_obs))
    used = weight > 0

    # Statistics of all next observations of weight, then errors, their statistics, and intrinsic rewards.
    seen = np.concatenate([transitions(8, masked=True, seed=seed).next_obs for seed in range(2)] + [next_obs[used]])
    np.testing.assert_allclose(after.obs_stats.variance, seen.var(0), rtol=1e-4)
    error = slow_error(copies.random.params, copies.predictor.online.params, normalized(seen, next_obs))
    old = copies.error_stats
    count, mean, variance = int(old.count), float(old.mean), float(old.variance)
    assert count == 16 and int(after.error_stats.count) == 16 + used.sum()
    total = count + used.sum()
    all_mean = (count * mean + error[used].sum()) / total
    all_variance = (count * (variance + (mean - all_mean) ** 2) + ((error[used] - all_mean) ** 2).sum()) / total
    reward = error / np.sqrt(all_variance + 1e-8)
    np.testing.assert_allclose(log.terms["intrinsic_reward"], weight @ reward, rtol=1e-4)

    # L_I: the next action is the best allowed one of the sum, after a terminal state nothing comes.
    q_e, q_i = (slow_features(network.online.params, next_obs) for network in (copies.extrinsic, copies.intrinsic))
    allowed = np.where(batch.next_action_mask, q_e + 0.7 * q_i, -np.inf)
    assert (allowed.argmax(1) != np.where(batch.next_action_mask, q_e, -np.inf).argmax(1)).any()
    next_value = slow_features(copies.intrinsic.target.params, next_obs)[np.arange(8), allowed.argmax(1)]
    y = reward + np.where(np.asarray(batch.discount) > 0, 0.8, 0.0) * next_value

    def intrinsic_loss(params):
        delta = np.abs(y - slow_features(params, obs)[np.arange(8), batch.action])
        return weight @ np.where(delta <= 1, 0.5 * delta**2, delta - 0.5)

    def predictor_loss(params):
        return weight @ slow_error(copies.random.params, params, normalized(seen, next_obs))

    np.testing.assert_allclose(log.terms["intrinsic_loss"], intrinsic_loss(copies.intrinsic.online.params), rtol=1e-4)
    np.testing.assert_allclose(log.terms["predictor_loss"], predictor_loss(copies.predictor.online.params), rtol=1e-4)
    check_step(copies.intrinsic, after.intrinsic, intrinsic_loss)
    check_step(copies.predictor, after.predictor, predictor_loss)
    assert same_bits(after.random, copies.random) and log.applied.tolist() == [True] * 3


def test_what_a_row_without_weight_holds_changes_no_bit(stepped):
    agent, copies, batch, (wanted, _) = stepped
    # Finite, as all that a replay stores.
    junk = {name: getattr(batch, name).at[2].set(-7.0) for name in ("obs", "next_obs", "reward", "discount")}
    found, _ = step(agent, copies, dataclasses.replace(batch, **junk))
    assert same_bits(found, wanted)


def test_nan_of_one_row_skips_the_step_of_all_networks_and_leaves_the_statistics(stepped):
    agent, copies, batch, _ = stepped
    found, log = step(agent, copies, dataclasses.replace(batch, next_obs=batch.next_obs.at[0].set(jnp.nan)))
    assert log.skipped.tolist() == [True] * 3
    for name in ("extrinsic", "intrinsic", "predictor"):
        assert same_bits(getattr(found, name).online, getattr(copies, name).online), name
    assert same_bits((found.obs_stats, found.error_stats), (copies.obs_stats, copies.error_stats))


def test_both_targets_follow_after_a_period(stepped):
    _, before, _, (after, _) = stepped
    for name in ("extrinsic", "intrinsic"):
        old, new = getattr(before, name), getattr(after, name)
        assert not same_bits(old.online.params, old.target.params) and same_bits(new.online.params, new.target.params), name


def test_q_e_learns_as_dqn_does():
    """The same networks, priorities and greedy policy after updates with the same rollouts and keys."""
    replay = polyak.PrioritizedReplay(512)
    agent = make(replay=replay)
    plain = polyak.DQN(
        SPEC, **{name: value for name, value in OPTIONS.items() if name in ("network", *SMALL)} | {"replay": replay}
    )
    states = [each.init(KEY) for each in (agent, plain)]
    updates = [jax.jit(each.update) for each in (agent, plain)]
    for seed in range(4):
        data, key = rollout_of(agent, seed), jax.random.key(seed)
        states = [update(state, data, key)[0] for update, state in zip(updates, states, strict=True)]
    found, wanted = states
    assert int(found.updates) == 16
    # Compiled without the tests' options, they are equal to the bit.
    trees = (found.replay, found.copies.extrinsic), (wanted.replay, wanted.copies)
    for x, y in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    assert not same_bits(found.copies.intrinsic.online, agent.init(KEY).copies.intrinsic.online)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.testing.assert_array_equal(agent.policy(found).predict(obs)[0], plain.policy(wanted).predict(obs)[0])


def test_new_weights_of_a_sum_of_values_are_two_sets():
    network = SumOfValues(MLP((5,), head=QValues()))
    (q, _), _, _ = network.apply(network.init(KEY, SPEC), jnp.ones((2, 3)))
    first, second = (MLP((5,), head=QValues()).init(key, SPEC) for key in jax.random.split(KEY))
    of_each = [MLP((5,), head=QValues()).apply(variables, jnp.ones((2, 3)))[0][0] for variables in (first, second)]
    np.testing.assert_allclose(q, of_each[0] + of_each[1], rtol=1e-6)


def test_the_agent_acts_by_the_sum_of_both_values():
    agent = make(epsilon=0.0, learning_starts=0, coefficient=2.0)
    state = agent.init(KEY)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    networks = state.copies.extrinsic, state.copies.intrinsic
    q_e, q_i = (slow_features(network.online.params, obs) for network in networks)
    np.testing.assert_array_equal(agent.collect_policy(state).predict(obs)[0], (q_e + 2 * q_i).argmax(1))
    np.testing.assert_array_equal(agent.policy(state).predict(obs)[0], q_e.argmax(1))
    assert (q_e.argmax(1) != (q_e + 2 * q_i).argmax(1)).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_step": 3}, "RNDDQN: n_step=3 must be 1: a replay has no intrinsic rewards of the steps between"),
        ({"network": polyak.LSTM()}, "RNDDQN: network must not be recurrent"),
        ({"replay": polyak.SequenceReplay(64, 4)}, "RNDDQN: replay must draw transitions"),
        ({"random_network": polyak.GRU(4)}, "RNDDQN: random_network must be an MLP or a NatureCNN"),
        ({"coefficient": -1.0}, "RNDDQN: coefficient must be"),
        ({"gamma": 0.0}, "RNDDQN: gamma must be"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**settings)


def test_observations_whose_squares_are_infinite_have_one_error():
    metrics = {"train/consecutive_skipped_updates": 0, "train/nonfinite_source": 0, "train/n_updates": 9.0}
    agent = make()
    assert agent.diagnose(metrics | {"train/intrinsic_stats": 0.0}) is None
    assert agent.diagnose(metrics | {"train/intrinsic_stats": 1.0, "train/n_updates": 99.0}) is None
    reason = agent.diagnose(metrics | {"train/intrinsic_stats": 0.0, "train/n_updates": 10.0})
    assert reason is not None and reason.startswith("RNDDQN: 10 updates had no intrinsic rewards, as an observation of each")


def test_a_reset_leaves_no_statistics_and_is_no_error():
    agent = make(reset_period=100)
    state = jax.eval_shape(agent.init, KEY)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(state, replay=None))
    again = dataclasses.replace(state, resets=dataclasses.replace(state.resets, count=jnp.uint32(1)))
    assert [float(agent.metrics(state, new)["train/intrinsic_stats"]) for new in (state, again)] == [0.0, 1.0]


def test_a_wide_predictor_computes_on_several_threads():
    assert make().prefers_single_thread(8, 1)
    assert not make(random_network=MLP((257,))).prefers_single_thread(8, 1)


@pytest.mark.slow
def test_intrinsic_rewards_explore_a_chain_and_random_actions_do_not():
    """The greedy policy takes all 12 steps; actions are still random with probability 0.1 while it learns."""
    env = AutoReset(Chain(), 1)
    options = {
        "learning_starts": 64, "batch_size": 64, "num_steps": 2, "updates_per_step": 0.5, "learning_rate": 1e-3,
        "replay": polyak.UniformReplay(20_000), "target_period": 50, "network": MLP((50,)), "epsilon": 0.1,
    }  # fmt: skip
    agents = RNDDQN(env.spec, random_network=MLP((32,)), num_features=32, **options), polyak.DQN(env.spec, **options)
    for agent, seed, is_solved in ((agents[0], 1, True), (agents[0], 2, True), (agents[1], 1, False)):
        state = polyak.loops.compiled(agent, env, env_steps=5_000, key=jax.random.key(seed)).state
        assert (polyak.evaluate(agent.policy(state), env, episodes=1, key=KEY).mean_return > 0.9) == is_solved


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    check_resuming(partial(make, learning_starts=32), "CartPole-v1", loop, devices, tmp_path)

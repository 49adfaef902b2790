"""Batch normalization and dropout: on in the losses that allow them, with statistics that advance, and off where one acts."""

import dataclasses
import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyak
from polyak.core.spaces import Discrete, EnvSpec
from polyak.networks.adapters import Equinox, FlaxLinen, FlaxNNX
from tests.agents import test_pqn
from tests.agents.test_actor_critics import KEY, OBS, SPEC, batch, equal, first_steps, make, random_rollout, updated
from tests.selection import quick

DISCRETE = EnvSpec(OBS, Discrete(3))
BATCH_NORM = polyak.Critics((8,), num_critics=2, norm="batch")


@pytest.fixture(autouse=True)
def _lenient():
    """Flax's own arithmetic mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Normalized(nnx.Module):
    """Action values of an own module, with batch normalization and dropout."""

    def __init__(self, outputs, rngs):
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, outputs, rngs=rngs)
        self.outputs = outputs

    def __call__(self, obs):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(obs)))))


class Values(Normalized):
    """`(q, value)`, as DQN and PQN take them."""

    def __init__(self, spec, rngs):
        super().__init__(spec.action.n, rngs)

    def __call__(self, obs):
        q = super().__call__(obs)
        return q, q.max(axis=-1)


class ActorCritic(Normalized):
    """`(action_params, value)`, as PPO and A2C take them."""

    def __init__(self, spec, rngs):
        super().__init__(spec.action.n + 1, rngs)

    def __call__(self, obs):
        out = super().__call__(obs)
        return out[:, :-1], out[:, -1]


class LinenValues(linen.Module):
    """The same in Linen, with an argument that switches the training mode."""

    actions: int = 3

    @linen.compact
    def __call__(self, obs, train=False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(obs))
        q = linen.Dense(self.actions)(linen.Dropout(0.5, deterministic=not train)(linen.relu(x)))
        return q, q.max(axis=-1)


def distribution_of(outputs):
    class Distribution(Normalized):
        def __init__(self, spec, rngs):
            super().__init__(spec.action.n * outputs, rngs)

        def __call__(self, obs):
            return super().__call__(obs).reshape(len(obs), -1, outputs)

    return Distribution


def discrete_rollout(agent, seed=0):
    rollout = random_rollout(agent, seed=seed)
    return dataclasses.replace(rollout, actions=(rollout.actions[..., 0] > 0).astype(jnp.int32))


def others_than_floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jnp.floating)]


# Critics of polyak's own


def numpy_batch_norm(x):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


def test_each_critic_normalizes_its_own_features_over_the_batch():
    variables = BATCH_NORM.init(KEY, SPEC)
    rows = batch()
    (q, _), _, stats = BATCH_NORM.apply(variables, (rows.obs, rows.action), train=True)
    layer, head = variables.params["layers"][0]["linear"], variables.params["head"]
    inputs = np.concatenate([rows.obs, rows.action], axis=1)
    for critic in range(2):
        x = inputs @ layer["kernel"][critic] + layer["bias"][critic]
        wanted = np.maximum(numpy_batch_norm(x), 0) @ head["kernel"][critic] + head["bias"][critic]
        np.testing.assert_allclose(q[:, critic], wanted[:, 0], rtol=1e-4, atol=1e-5)
        mean = stats["layers"][0]["norm"]["norm"]["mean"].reshape(2, 8)[critic]
        np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-4, atol=1e-6)


def of_loss(name, state):
    copies = state.copies
    args = {"critics": copies.critics.online, "target": copies.critics.variables("target"), "key": KEY}
    if name in ("sac", "tqc"):
        return args | {"actor": copies.actor.online, "alpha": jnp.array(0.1)}
    return args | {"target_actor": copies.actor.variables("target")}


@pytest.mark.parametrize("name", quick("sac", of=["sac", "tqc", "td3", "ddpg"]))
def test_the_critics_loss_has_the_statistics_of_its_batch_and_all_else_the_running_ones(name):
    critics = dataclasses.replace(BATCH_NORM, num_critics=1 if name == "ddpg" else 2)
    agent = make(name, critics=critics)
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    online, rows = state.copies.critics.online, batch()
    loss = jax.jit(partial(agent.critic_loss, **of_loss(name, state)))
    _, aux = loss(online.params, rows)
    _, _, wanted = agent.critics.apply(online, (rows.obs, rows.action), train=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), aux.stats, wanted)
    # Of a row's target nothing depends on the other rows of the batch.
    args = {name: value for name, value in of_loss(name, state).items() if name != "critics"}
    if name in ("td3", "ddpg"):
        others = dataclasses.replace(rows, next_obs=rows.next_obs.at[1:].mul(3.0))
        targets = [agent.td_target(one, **args) for one in (rows, others)]
        np.testing.assert_allclose(targets[0][0], targets[1][0], rtol=1e-6)


@pytest.mark.parametrize("name", quick("sac", of=["sac", "td3"]))
def test_statistics_advance_with_every_gradient_step_and_the_target_follows(name):
    agent = make(name, critics=BATCH_NORM, tau=0.5, target_period=1, policy_delay=1)
    before = agent.init(KEY).copies.critics
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(4)])
    after = state.copies.critics
    means = [c.stats["layers"][0]["norm"]["norm"]["mean"] for c in (before.online, after.online, after.target)]
    assert not np.any(np.asarray(means[0])) and np.all(np.asarray(means[1]) != 0)
    assert int(after.steps) > 4 and not equal(means[1], means[2])
    # Almost there: the target has half of the way at each step.
    np.testing.assert_allclose(means[2], means[1], atol=0.02)


def test_skipped_steps_leave_the_statistics():
    agent = make("sac", critics=BATCH_NORM, optimizer=polyak.ops.gradient_step.adam(jnp.nan, eps=1e-8, max_grad_norm=None))
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    assert int(metrics["train/skipped_steps"]) > 0
    assert equal(state.copies.critics.online, agent.init(KEY).copies.critics.online)


# Own networks


@pytest.mark.parametrize("network", quick("NNX", of={"NNX": FlaxNNX(Values), "Linen": FlaxLinen(LinenValues(), "train")}))
def test_an_own_network_of_dqn_trains_with_batch_normalization_and_dropout(network):
    agent = polyak.DQN(
        DISCRETE, network=network, replay=polyak.UniformReplay(512), batch_size=16, learning_starts=0, num_steps=4
    )
    state, _ = updated(agent, [discrete_rollout(agent, seed=i) for i in range(3)])
    before, after = agent.init(KEY).copies.online.stats, state.copies.online.stats
    floats = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 2 and not equal(before, after)
    # Random numbers come from the key of the update, and no stream of the module moves.
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *(others_than_floats(stats) for stats in (before, after))))
    online, rows = state.copies.online, dataclasses.replace(batch(), action=jnp.zeros(6, jnp.int32))
    loss = jax.jit(lambda key: agent.loss(online.params, rows, online=online, target=online, key=key)[0])
    assert float(loss(KEY)) != float(loss(jax.random.key(1))), "dropout draws by the key"
    policy = agent.policy(state).policy
    one, many = (policy.distribution(first_steps(obs), ())[0].logits for obs in (rows.obs[:1], rows.obs))
    np.testing.assert_allclose(one[0], many[0], rtol=1e-5, err_msg="acting is in evaluation mode")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "outputs"), [(polyak.C51, 51), (polyak.QRDQN, 50)])
def test_an_own_network_of_a_distribution_trains_with_batch_normalization(kind, outputs):
    agent = kind(
        DISCRETE,
        network=FlaxNNX(distribution_of(outputs)),
        replay=polyak.UniformReplay(512),
        batch_size=16,
        learning_starts=0,
        num_steps=4,
    )
    state, _ = updated(agent, [discrete_rollout(agent, seed=i) for i in range(2)])
    assert not equal(agent.init(KEY).copies.online.stats["norm"], state.copies.online.stats["norm"])


def test_pqn_trains_with_batch_normalization_of_the_transitions_alone():
    agent = test_pqn.make(network=FlaxNNX(Values))
    state, rollout = agent.init(KEY), test_pqn.rollout_of(agent)
    after = jax.jit(agent.update)(state, rollout, KEY)[0].copies.online
    # Where the rows 9 and 10 only reset, the transition before them stands.
    rows = np.array(rollout.obs).reshape(-1, 3)
    rows[9:11] = rows[8]
    layer = state.copies.online.params["hidden"]
    hidden = rows @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    np.testing.assert_allclose(after.stats["norm"]["mean"], 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(after.stats["norm"]["var"], 0.99 + 0.01 * hidden.var(0), rtol=1e-5)


class EquinoxValues(eqx.Module):
    """`(q, value)` of one observation, with dropout."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, spec, key):
        self.linear = eqx.nn.Linear(3, spec.action.n, key=key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, obs, key=None):
        q = self.linear(self.dropout(obs, key=key))
        return q, q.max()


@pytest.mark.parametrize(
    "network",
    [FlaxNNX(Values), FlaxLinen(LinenValues(4), "train"), Equinox(EquinoxValues)],
    ids=["NNX", "Linen", "Equinox"],
)
def test_dropout_of_pqn_follows_the_key_of_the_update(network):
    agent = test_pqn.make(network=network)
    state, rollout = agent.init(KEY), test_pqn.rollout_of(agent)
    update = jax.jit(lambda key: agent.update(state, rollout, key)[0].copies.online.params)
    assert equal(update(KEY), update(KEY)) and not equal(update(KEY), update(jax.random.key(1)))


class Acting(Normalized):
    """An actor of two numbers."""

    def __init__(self, spec, rngs):
        super().__init__(4, rngs)

    def __call__(self, obs):
        loc, log_scale = jnp.split(super().__call__(obs), 2, axis=-1)
        return {"loc": loc, "log_scale": jnp.clip(log_scale, -5.0, 2.0)}, None


@pytest.mark.parametrize("name", quick("sac", of=["sac", "td3"]))
def test_an_own_actor_trains_with_batch_normalization_and_dropout_in_its_own_loss(name):
    agent = make(name, actor=FlaxNNX(Acting), ema_tau=0.5)
    before = agent.init(KEY).copies.actor.online.stats
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    copies, rows = state.copies, batch()
    assert not equal(before["norm"], copies.actor.online.stats["norm"])
    assert not equal(copies.average.stats["norm"], copies.actor.online.stats["norm"]), "the average follows"
    args = {"actor": copies.actor.online, "critics": copies.critics.online}
    args |= {"alpha": jnp.array(0.1)} if name in ("sac", "tqc") else {}
    loss = jax.jit(lambda key: agent.actor_loss(copies.actor.online.params, rows, **args, key=key))
    (one, aux), (other, _) = loss(KEY), loss(jax.random.key(1))
    assert float(one) != float(other) and not equal(aux.stats["norm"], copies.actor.online.stats["norm"])
    # The target does not depend on the other rows, so the actor is in evaluation mode there.
    args = {key: value for key, value in of_loss(name, state).items() if key != "critics"}
    others = dataclasses.replace(rows, next_obs=rows.next_obs.at[1:].mul(3.0))
    targets = [agent.td_target(one, **args) for one in (rows, others)]
    np.testing.assert_allclose(targets[0][0], targets[1][0], rtol=1e-5)


def test_rows_that_are_not_learned_from_reach_no_statistics():
    agent = make("sac", critics=BATCH_NORM, batch_size=64, num_steps=8, updates_per_step=0.25)

    def after(ignored_action):
        # Every second row only resets: of 64 rows about four have no transition in any of their draws.
        ends = jnp.arange(9)[:, None] % 2 == jnp.ones((1, 2), jnp.int32)
        rollout = random_rollout(agent, terminated=lambda x: ends, first=lambda x: jnp.roll(ends, 1, axis=0).at[0].set(False))
        actions = jnp.where(ends[:-1, :, None], ignored_action, rollout.actions)
        state, _ = updated(agent, [dataclasses.replace(rollout, actions=actions)] * 3)
        return state.copies.critics.online

    assert equal(after(0.9), after(-0.9))


@pytest.mark.parametrize("kind", [polyak.PPO, polyak.A2C])
def test_an_agent_that_keeps_its_network_in_evaluation_mode_warns_with_the_names_of_layers(kind):
    with pytest.warns(
        UserWarning, match=rf"{kind.__name__}: the network is always in evaluation mode, .*BatchNorm norm, Dropout"
    ):
        kind(DISCRETE, network=FlaxNNX(ActorCritic)).init(KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(DISCRETE).init(KEY)

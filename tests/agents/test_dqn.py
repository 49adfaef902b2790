"""DQN: when it learns, from what, and what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import polyak
from polyak import loops
from polyak.agents.dqn import DQN
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Tuple
from polyak.core.types import Rollout, TimeStep
from polyak.networks.feedforward import MLP
from polyak.ops.losses import huber

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
SMALL = {"network": MLP((8,)), "replay": polyak.UniformReplay(512), "batch_size": 16, "learning_starts": 8, "num_steps": 4}


def make(**settings):
    return DQN(SPEC, **{**SMALL, "updates_per_step": 0.5, **settings})


def random_rollout(agent, num_envs=2, seed=0, **changes):
    rng = np.random.default_rng(seed)
    steps = agent.num_steps
    shape = steps + 1, num_envs
    zeros = jnp.zeros(shape, bool)
    time_steps = TimeStep(
        obs=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        terminated=zeros,
        truncated=zeros,
        first=zeros,
    )
    time_steps = dataclasses.replace(
        time_steps, **{name: change(getattr(time_steps, name)) for name, change in changes.items()}
    )
    return Rollout(time_steps, jnp.asarray(rng.integers(0, 4, size=(steps, num_envs)), jnp.int32))


# The agent is a pytree: tests with the same static settings share one program.
update = jax.jit(lambda agent, state, rollout, key: agent.update(state, rollout, key))


def updated(agent, rollouts, state=None):
    state = agent.init(KEY) if state is None else state
    for number, rollout in enumerate(rollouts):
        state, metrics = update(agent, state, rollout, jax.random.fold_in(KEY, number))
    return state, metrics


def test_no_gradient_step_before_learning_starts():
    agent = make(learning_starts=17)
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(2)])
    assert int(state.updates) == 0 and int(state.env_steps) == 16 and int(state.replay.size) == 8
    jax.tree.map(np.testing.assert_array_equal, state.copies.online.params, agent.init(KEY).copies.online.params)
    assert float(metrics["rollout/exploration_rate"]) == 1.0
    state, _ = updated(agent, [random_rollout(agent, seed=2)], state)
    assert int(state.updates) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("num_envs", "ratio", "steps"), [(1, 0.25, 1), (2, 0.5, 4), (8, 1.0, 32)])
def test_gradient_steps_are_a_ratio_of_steps_also_of_those_that_only_reset(num_envs, ratio, steps):
    agent = make(updates_per_step=ratio, learning_starts=0)
    state, _ = updated(agent, [random_rollout(agent, num_envs)])
    assert int(state.updates) == steps
    resets = {"terminated": lambda x: x.at[1].set(True), "first": lambda x: x.at[2].set(True)}
    state, _ = updated(agent, [random_rollout(agent, num_envs, **resets)])
    assert int(state.updates) == steps and int(state.env_steps) == 3 * num_envs


def test_gradient_steps_must_be_whole():
    wanted = r"0\.3 \* 4 \* 2 must be a whole number of gradient steps, got 2\.4; num_steps=5 makes it 3"
    with pytest.raises(ValueError, match=wanted):
        make(updates_per_step=0.3).check(2)
    make(updates_per_step=0.3, num_steps=5).check(2)
    with pytest.raises(ValueError, match=r"got 4e-07$"):
        make(updates_per_step=1e-7).check(1)
    make(updates_per_step=0.0625).check(4, 4)
    # 49 times a 49th is a little less than 1.
    make(updates_per_step=1 / 49, num_steps=49).check(1)


@pytest.mark.parametrize(
    ("settings", "num_envs", "devices", "message"),
    [
        ({"replay": polyak.UniformReplay(8)}, 2, 1, "capacity=8 must be at least 16"),
        ({"replay": polyak.UniformReplay(12), "n_step": 9}, 1, 1, "capacity=12 must be at least 13"),
        (
            {"replay": polyak.UniformReplay(4, frame_stack=4), "num_steps": 2},
            1,
            1,
            "capacity=4 must be at least 6 .* draws of 4 consecutive steps",
        ),
        ({"replay": polyak.UniformReplay(511)}, 2, 2, "capacity=511 must be divisible by devices=2"),
        ({"batch_size": 7}, 1, 4, "batch_size=7 must be divisible by devices=4"),
    ],
)
def test_the_replay_and_batches_must_fit_environments_and_devices(settings, num_envs, devices, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).check(num_envs, devices)


def test_the_target_is_copied_every_period_and_stays_in_between():
    agent = make(target_period=6, learning_starts=0)
    initial = agent.init(KEY)
    state, _ = updated(agent, [random_rollout(agent)])
    jax.tree.map(np.testing.assert_array_equal, state.copies.target.params, initial.copies.online.params)
    # 8 steps: the target is the online network after 6 of them.
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(2)])
    leaves = [jax.tree.leaves(x.params) for x in (state.copies.target, state.copies.online, initial.copies.online)]
    assert all((np.asarray(a) != b).any() and (np.asarray(a) != c).any() for a, b, c in zip(*leaves, strict=True))
    assert int(state.copies.target_count.fired) == 1 and int(state.copies.target_count.elapsed) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dict, tuple])
def test_dict_and_tuple_observations_are_learned_from_as_the_vector_of_their_parts(kind):
    low, high = np.full(3, -9.0, np.float32), np.full(3, 9.0, np.float32)

    def parts(x):
        first, second = x[..., :2], x[..., 2:]
        return {"first": first, "second": second} if kind is dict else (first, second)

    space = jax.tree.map(Box, parts(low), parts(high))
    agent = make(learning_starts=0, replay=polyak.PrioritizedReplay(512))
    divided = dataclasses.replace(agent, spec=EnvSpec(Dict(space) if kind is dict else Tuple(space), Discrete(4)))
    rollouts = [random_rollout(agent, seed=i) for i in range(2)]
    whole, _ = updated(agent, rollouts)
    state, metrics = updated(
        divided, [Rollout(dataclasses.replace(x.time_steps, obs=parts(x.time_steps.obs)), x.actions) for x in rollouts]
    )
    assert int(state.updates) == 8 and float(metrics["train/td_error"]) > 0
    jax.tree.map(np.testing.assert_array_equal, state.replay.rows.obs, parts(whole.replay.rows.obs))
    for a, b in zip(*(jax.tree.leaves(x.copies.online.params) for x in (whole, state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    action, _ = divided.policy(state).predict(parts(np.zeros(3, np.float32)))
    assert action == agent.policy(whole).predict(np.zeros(3, np.float32))[0]


def test_rows_that_only_reset_do_not_reach_the_network():
    def ends(terminated):
        return terminated.at[2].set(True)

    agent = make(learning_starts=0)
    rollout = random_rollout(agent, terminated=ends)
    # The row after the end: its action, and the observation that it leads to, count as the start of an episode only.
    actions = rollout.actions.at[2].set((rollout.actions[2] + 1) % 4)
    reward = rollout.time_steps.reward.at[3].set(1e6)
    other = Rollout(dataclasses.replace(rollout.time_steps, reward=reward), actions)
    results = [updated(agent, [x])[0].copies.online.params for x in (rollout, other)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_nan_reaches_neither_the_replay_nor_the_network(where):
    agent = make(learning_starts=0)
    rollout = random_rollout(agent, **{where: lambda x: x.at[1].set(jnp.nan)})
    state, metrics = updated(agent, [rollout])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    assert float(metrics["replay/dropped"]) == (4.0 if where == "obs" else 2.0)
    assert int(metrics["train/skipped_steps"]) == 0 and int(state.updates) == 4


def test_an_environment_without_finite_data_is_diagnosed():
    agent = make(max_skipped_updates=2)
    state, metrics = updated(agent, [random_rollout(agent, reward=lambda x: x * jnp.nan, seed=i) for i in range(2)])
    assert "'reward'" in agent.diagnose(metrics) and int(state.replay.dropped) == 16


def test_another_period_or_tau_holds_from_the_next_update_on():
    agent = make(learning_starts=0)
    state, _ = updated(agent, [random_rollout(agent)])
    state, _ = updated(make(learning_starts=0, target_period=1, tau=0.5), [random_rollout(agent, seed=1)], state)
    assert int(state.copies.target_count.fired) == 4


class ListOfTwo(linen.Module):
    """Returns a list in place of a tuple."""

    @linen.compact
    def __call__(self, obs):
        q = linen.Dense(4)(obs)
        return [q, q.max(axis=-1)]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (polyak.MLP(head=polyak.PolicyAndValue()), r"DQN: network must have the head QValues, got PolicyAndValue\(\)"),
        (polyak.LSTM(head=polyak.PolicyAndValue()), r"DQN: network must have the head QValues, got PolicyAndValue\(\)"),
        (
            polyak.FlaxLinen(linen.Dense(5)),
            r"must return a tuple \(q, value\), q \[B, \d\] and its maximum as value \[B\]; got for B = 97 float32\[97,5\]$",
        ),
        (polyak.FlaxLinen(ListOfTwo()), r"a tuple .*; got for B = 97 \[float32\[97,4\], float32\[97\]\]$"),
        ("mlp", "network must have init and apply"),
    ],
)
def test_networks_are_checked(network, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(network=network).init(KEY)


def test_training_that_diverges_is_diagnosed():
    agent = make(learning_starts=0, learning_rate=1e38, max_grad_norm=None, max_skipped_updates=2)
    _, metrics = updated(agent, [random_rollout(agent, seed=i, reward=lambda x: x * 1e30) for i in range(3)])
    assert "consecutive updates were skipped" in agent.diagnose(metrics)


def test_an_optimizer_of_ones_own_takes_the_place_of_adam():
    agent = make(learning_starts=0, optimizer=optax.sgd(0.0))
    state, metrics = updated(agent, [random_rollout(agent)])
    jax.tree.map(np.testing.assert_array_equal, state.copies.online.params, agent.init(KEY).copies.online.params)
    assert int(state.updates) == 4 and "train/learning_rate" not in metrics
    with pytest.raises(ValueError, match="created with another optimizer"):
        updated(make(), [random_rollout(agent)], state)
    with pytest.raises(ValueError, match=r"DQN: learning_rate has no effect with optimizer=\.\.\."):
        make(optimizer=optax.sgd(0.1), learning_rate=1e-3)


def test_skipped_steps_are_counted_for_the_update_and_for_the_network():
    agent = make(learning_starts=0, learning_rate=1e38, max_grad_norm=None)
    state, _ = updated(agent, [random_rollout(agent, seed=i, reward=lambda x: x * 1e30) for i in range(3)])
    assert int(state.guard.skipped) == int(state.copies.guard.skipped) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "weight"), [("compiled", None), ("host", None), ("compiled", 0.1)])
def test_no_copy_of_the_replay_in_the_compiled_update(loop, weight):
    agent = make(replay=polyak.UniformReplay(65_536), learning_starts=64, n_step=3, monte_carlo_weight=weight)
    state, rollout = agent.init(KEY), random_rollout(agent)

    def several(state, key):
        return jax.lax.scan(lambda state, key: (agent.update(state, rollout, key)[0], None), state, jax.random.split(key, 3))[0]

    learn = several if loop == "compiled" else lambda state, key: agent.update(state, rollout, key)
    text = jax.jit(learn, donate_argnums=0).lower(state, KEY).compile().as_text()
    assert "65536" in text and not [line for line in text.splitlines() if " copy(" in line and "[65536" in line]


@pytest.mark.slow
def test_host_and_compiled_loop_and_two_devices_learn():
    settings = {"network": MLP((16,)), "num_steps": 4, "learning_starts": 64, "replay": polyak.UniformReplay(4096)}
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    agent = DQN(env.spec, **settings)
    compiled = loops.compiled(agent, env, env_steps=512, key=KEY)
    host = loops.host(agent, env, env_steps=512, key=KEY)
    for a, b in zip(jax.tree.leaves(compiled.state), jax.tree.leaves(host.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    split = loops.compiled(agent, env, env_steps=512, key=KEY, devices=2)
    assert int(split.state.updates) == int(compiled.state.updates) > 0
    assert len({int(shard.data) for shard in split.state.replay.dropped.addressable_shards}) == 1
    # Each device has the rows of its environments: together all that one device has.
    rows = [np.sort(np.asarray(x.state.replay.rows.obs).ravel()) for x in (compiled, split)]
    np.testing.assert_array_equal(rows[0][rows[0] != 0], rows[1][rows[1] != 0])


def test_the_huber_loss_is_half_the_square_up_to_delta_and_linear_beyond():
    error = jnp.array([-3.0, -1.0, 0.5, 2.0])
    np.testing.assert_allclose(huber(error, 1.0), [2.5, 0.5, 0.125, 1.5])
    np.testing.assert_allclose(huber(error, 0.5), [1.375, 0.375, 0.125, 0.875])
    np.testing.assert_allclose(huber(error, None), [9.0, 1.0, 0.25, 4.0])


def test_actions_must_be_discrete():
    with pytest.raises(ValueError, match="DQN: actions must be Discrete"):
        DQN(EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])))

"""PPO with networks that have a memory: whole sequences, what a mask hides, devices, loops, and a task that needs it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.flatten_util import ravel_pytree

from polyak import loops
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Variables
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole
from polyak.learning.epochs import epoch_seeds, shuffled_minibatches
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import mesh_over, run_env_key, update_on
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU, LSTM
from polyak.ops.distributions import for_space
from tests.agents.oracle import advantages
from tests.agents.rollouts import fresh, on_device, ppo, rollout, same_bits

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_STEPS, NUM_ENVS = 8, 4
KEY = jax.random.key(5)
OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
NETWORKS = {
    "lstm": LSTM(3, hidden=(3,), head=PolicyAndValue()),
    "gru": GRU(3, hidden=(2,), head=PolicyAndValue(shared_torso=True)),
}
EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())

update = jax.jit(lambda agent, state, data: agent.update(state, data, KEY))


def make(network, **settings):
    defaults = {"num_steps": NUM_STEPS, "num_epochs": 2, "num_minibatches": 2, "gamma": 0.9, "gae_lambda": 0.8}
    return ppo(SPEC, network=network, **(defaults | {"learning_rate": 1e-2} | settings))


def noise(agent, seed=0, ends=0.2):
    """A rollout in the middle of episodes, which the network remembers the beginning of."""
    rng = np.random.default_rng(seed + 1)
    carry = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), agent.network.initial_carry(NUM_ENVS))
    return rollout(SPEC, seed, num_steps=NUM_STEPS, num_envs=NUM_ENVS, ends=ends, carry=carry)


def step_by_step(agent, variables, data):
    """`(logits, value)` of all observations, the network called once for each step."""
    initial = agent.network.initial_carry(NUM_ENVS)

    def step(carry, now):
        first, obs = now
        carry = jax.tree.map(lambda new, old: jnp.where(first[:, None], new, old), initial, carry)
        out, carry, _ = agent.network.apply(variables, obs, carry)
        return carry, out

    return jax.lax.scan(step, data.carry, (data.time_steps.first, data.time_steps.obs))[1]


@pytest.mark.slow
@EACH_NETWORK
def test_recurrent_minibatches_are_whole_sequences(network):
    share = 0.1
    agent = make(network, num_epochs=1, adam_eps=1e8, learning_rate=share * 1e8, max_grad_norm=None, clip_range=None)
    state, data = fresh(agent), noise(agent)
    steps, counts = data.time_steps, ~data.time_steps.last[:-1]
    assert steps.first[1:-1].any() and not steps.first[0].all()
    logits, value = jax.jit(lambda variables: step_by_step(agent, variables, data))(state.copies.online)
    advantage = advantages(steps.reward[1:], np.asarray(value), steps.terminated[1:], steps.truncated[1:], 0.9, 0.8)
    goal = advantage + np.asarray(value[:-1])
    old = scipy.special.log_softmax(logits[:-1], axis=-1)
    old = np.take_along_axis(old, data.actions[..., None], -1)[..., 0]

    @jax.jit
    @jax.grad
    def gradient(params, envs):
        now, values = step_by_step(agent, dataclasses.replace(state.copies.online, params=params), data)
        its = jnp.asarray(counts, jnp.float32)[:, envs]
        chosen = jnp.asarray(advantage, jnp.float32)[:, envs]
        mean = lambda x: jnp.sum(its * x) / its.sum()  # noqa: E731
        centred = chosen - mean(chosen)
        normal = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
        ratio = jnp.exp(for_space(SPEC.action, now[:-1]).log_prob(data.actions) - old)[:, envs]
        return -mean(ratio * normal) + 0.5 * mean((values[:-1] - jnp.asarray(goal, jnp.float32))[:, envs] ** 2)

    (words,) = epoch_seeds(KEY, 1, 1, NUM_ENVS, 2)
    first, second = np.asarray(shuffled_minibatches(words, 1, NUM_ENVS, 2))
    assert sorted([*first, *second]) == list(range(NUM_ENVS))
    one, unravel = ravel_pytree(state.copies.online.params)
    g1 = ravel_pytree(gradient(unravel(one), first))[0]
    two = one - share * g1
    g2 = ravel_pytree(gradient(unravel(two), second))[0]
    # Adam's mean of two gradients, g1 and g2.
    wanted = two - share * (0.09 * g1 + 0.1 * g2) / 0.19
    after, metrics = update(agent, state, on_device(data))
    np.testing.assert_allclose(ravel_pytree(after.copies.online.params)[0], wanted, atol=2e-6)
    assert metrics["train/skipped_steps"] == 0 and float(jnp.max(jnp.abs(g1))) > 0.05


def overwritten(data, garbage):
    """Everything that is no transition replaced, and the memory where an episode begins."""
    steps = data.time_steps
    after_end = steps.last[:-1]
    assert after_end.any() and steps.terminated.any() and steps.first[0].any()
    obs, reward, actions = steps.obs.copy(), steps.reward.copy(), data.actions.copy()
    obs[steps.terminated] = garbage
    reward[steps.first] = garbage
    actions[after_end] = 1_000_000_000
    carry = jax.tree.map(lambda x: np.where(steps.first[0][:, None], np.float32(garbage), x), data.carry)
    return dataclasses.replace(
        data, time_steps=dataclasses.replace(steps, obs=obs, reward=reward), actions=actions, carry=carry
    )


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        (NETWORKS["lstm"], {}),
        (NETWORKS["gru"], {"normalize_obs": True, "recompute_values": True, "kl_beta": 1.0, "kl_target": 0.01}),
    ],
    ids=NETWORKS.keys(),
)
def test_masked_sample_changes_no_bit_in_sequences(network, settings):
    agent = make(network, **settings)
    data = noise(agent, seed=5, ends=0.3)
    data.time_steps.first[0, 1] = True
    clean = update(agent, fresh(agent), on_device(data))
    assert clean[1]["train/nonfinite_source"] == 0 and np.isfinite(float(clean[1]["train/kl"]))
    for garbage in (1e9, np.nan, -np.inf):
        assert same_bits(clean, update(agent, fresh(agent), on_device(overwritten(data, garbage))))


def test_zero_weight_sample_changes_the_carry_but_not_the_loss():
    agent = make(NETWORKS["gru"], num_epochs=1, num_minibatches=1)
    weighted = jax.jit(lambda state, data, weights: agent.update(state, data, KEY, weights=weights))
    state, data = fresh(agent), noise(agent, ends=0.0)
    weight = np.ones((NUM_STEPS, NUM_ENVS), np.float32)
    weight[2, 1] = 0.0
    clean, _ = weighted(state, on_device(data), weight)
    other = dataclasses.replace(data, actions=data.actions.copy())
    other.actions[2, 1] = (data.actions[2, 1] + 1) % 3
    assert same_bits(clean, weighted(state, on_device(other), weight)[0])
    data.time_steps.obs[2, 1] += 1.0
    assert not same_bits(clean.copies.online, weighted(state, on_device(data), weight)[0].copies.online)


def test_num_minibatches_that_does_not_divide_num_envs_is_rejected():
    agent = make(NETWORKS["gru"], num_minibatches=4)
    agent.check(8)
    with pytest.raises(ValueError, match=r"PPO: num_minibatches=4 must divide num_envs=6: .* whole sequences"):
        agent.check(6)
    with pytest.raises(ValueError, match="num_minibatches=8 must divide num_envs=4"):
        agent = make(NETWORKS["gru"], num_minibatches=8)
        jax.eval_shape(agent.update, jax.eval_shape(agent.init, KEY), noise(agent), KEY)
    make(MLP((4,), head=PolicyAndValue()), num_minibatches=8).check(6)


@pytest.mark.slow
def test_recurrent_update_on_two_devices_equals_update_on_one():
    agent = make(NETWORKS["lstm"], normalize_obs=True, kl_beta=1.0, kl_target=0.01, normalize_advantage="batch")
    whole, split = (jax.jit(update_on(mesh)) for mesh in (None, mesh_over(2, NUM_ENVS)))
    one = two = fresh(agent)
    for i in range(2):
        data = on_device(noise(agent, i))
        one, metrics = whole(agent, one, data, KEY)
        two, metrics_of_two = split(agent, two, data, KEY)
    for x, y in zip(jax.tree.leaves((one, metrics)), jax.tree.leaves((two, metrics_of_two)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=3e-6, rtol=2e-5)


@pytest.mark.to_the_bit
def test_the_compiled_and_the_host_loop_give_the_same_bits():
    env = AutoReset(CartPole(max_episode_steps=12), NUM_ENVS)
    agent = PPO(
        env.spec,
        network=GRU(4, hidden=(4,)),
        num_steps=NUM_STEPS,
        num_epochs=2,
        num_minibatches=2,
        normalize_obs=True,
        normalize_reward="return",
        values_when="collect",
    )
    results = [
        loops.compiled(agent, env, env_steps=200, key=KEY),
        loops.host(agent, JaxEnvOnHost(env, run_env_key(KEY)), env_steps=200, key=KEY),
    ]
    one, two = ((r.state, r.loop_state.carry, r.loop_state.time_step) for r in results)
    assert results[0].progress.iteration > 5 and same_bits(one, two)
    # What acted and what learns are one network: without a step in between, their ratios are 1.
    assert float(results[0].metrics["train/ratio"]) == pytest.approx(1.0, abs=1e-2)


# A task that needs a memory


@struct
class Recall:
    """A sign is shown at the beginning; at the last of `length` steps the action must agree with it."""

    length: int = static(default=4)

    @property
    def spec(self):
        return EnvSpec(Box([-1.0, 0.0], [1.0, 1.0]), Discrete(2), "recall")

    def reset(self, key, num_envs):
        return jnp.where(jax.random.bernoulli(key, 0.5, (num_envs,)), 1.0, -1.0), jnp.zeros(num_envs, jnp.int32)

    def step(self, state, action, key):
        sign, done = state
        agrees = jnp.where(action == 1, sign, -sign)
        over = done + 1 == self.length
        return (sign, done + 1), jnp.where(over, agrees, 0.0), over, jnp.zeros(over.shape, bool)

    def observe(self, state):
        sign, done = state
        return jnp.stack([jnp.where(done == 0, sign, 0.0), (done + 1 == self.length).astype(jnp.float32)], axis=-1)


def mean_return(network):
    """Of the greedy policy after training."""
    env = AutoReset(Recall(), 32)
    agent = PPO(
        env.spec, network=network, num_steps=32, num_epochs=4, num_minibatches=4, learning_rate=1e-2, gamma=0.95, ent_coef=0.01
    )
    result = loops.compiled(agent, env, env_steps=30_000, key=jax.random.key(20))
    policy = agent.policy(result.state)

    @jax.jit
    def play(policy, key):
        state, time_step = env.init(key)
        carry, total = policy.initial_state(env.num_envs), jnp.zeros(env.num_envs)
        for _ in range(Recall().length):
            acted = policy.action(time_step, carry, key)
            state, time_step = env.step(state, acted.action, key)
            carry, total = acted.carry, total + time_step.reward
        return total.mean()

    return float(jnp.mean(jnp.stack([play(policy, jax.random.key(i)) for i in range(20)])))


@pytest.mark.slow
def test_recurrent_network_learns_a_task_that_needs_memory():
    assert mean_return(GRU(16, hidden=(16,), head=PolicyAndValue(shared_torso=True))) > 0.9


@pytest.mark.slow
def test_feedforward_network_does_not_learn_a_task_that_needs_memory():
    assert abs(mean_return(MLP((16, 16), head=PolicyAndValue()))) < 0.2


class OneScale:
    """A user's network that sums what it sees, and has one deviation for all environments."""

    def init(self, key, spec):
        return Variables({"w": jnp.ones(3), "log_std": jnp.zeros(2)}, {})

    def initial_carry(self, batch_size):
        return jnp.zeros((batch_size, 3))

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        carry = (jnp.zeros_like(obs) if isinstance(carry, tuple) else carry) + obs
        value = carry @ variables.params["w"]
        loc = jnp.stack([value, -value], axis=-1)
        return ({"loc": loc, "log_scale": variables.params["log_std"]}, value), carry, {}


def test_user_recurrent_network_may_return_one_std_for_all_environments():
    spec = EnvSpec(Box([-1.0] * 3, [1.0] * 3), Box([-1.0] * 2, [1.0] * 2))
    agent = PPO(spec, network=OneScale(), num_steps=6, num_epochs=1, num_minibatches=2)
    state = agent.init(jax.random.key(0))
    data = dataclasses.replace(rollout(spec, num_steps=6, num_envs=4), carry=np.zeros((4, 3), np.float32))
    after, metrics = jax.jit(agent.update)(state, on_device(data), jax.random.key(1))
    assert float(metrics["train/skipped_steps"]) == 0
    assert bool(jnp.any(after.copies.online.params["log_std"] != 0)) and bool(jnp.any(after.copies.online.params["w"] != 1))

"""REINFORCE: one whole gradient step against slow NumPy, incomplete episodes, truncation, and probe environments."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import polyak
from polyak.agents.reinforce import REINFORCE
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import update_on
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU
from tests.agents.oracle import forward, log_prob_and_entropy
from tests.agents.rollouts import fresh, on_device, rollout, same_bits
from tests.probe_envs import probe, settings
from tests.selection import quick

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
BOX = EnvSpec(OBS, Box(-np.ones(2, np.float32), np.ones(2, np.float32)))
KEY = jax.random.key(3)

update = jax.jit(lambda agent, state, data, weights=None: agent.update(state, data, KEY, weights=weights))


def small(spec=SPEC, **settings):
    return REINFORCE(spec, **{"network": MLP((4,)), "num_steps": 8, "gamma": 0.9} | settings)


def slow_samples(data, gamma):
    """`(t, env, return)` of each step of the complete episodes, one step at a time."""
    steps, samples = data.time_steps, []
    last = np.asarray(steps.terminated) | np.asarray(steps.truncated)
    num_steps, num_envs = data.actions.shape[:2]
    for env in range(num_envs):
        for start in range(num_steps):
            if last[start, env]:
                continue  # This step only resets.
            total = 0.0
            for t in range(start, num_steps):
                total += gamma ** (t - start) * float(steps.reward[t + 1, env])
                if last[t + 1, env]:
                    samples.append((start, env, total))
                    break
    return samples


def slow_loss(agent, params, old_params, data):
    """`(loss, terms)` in float64; `old_params` compute the baseline of the advantages."""
    box, samples = isinstance(agent.spec.action, Box), slow_samples(data, float(agent.gamma))
    t, env = (np.array(x) for x in list(zip(*samples, strict=True))[:2])
    returns = np.array([sample[2] for sample in samples])
    obs, action = np.asarray(data.time_steps.obs, np.float64)[t, env], np.asarray(data.actions)[t, env]
    _, old_value = forward(old_params, obs, box)
    advantage = returns - old_value if agent.vf_coef > 0 else returns
    if agent.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    dist, value = forward(params, obs, box)
    log_prob, entropy = log_prob_and_entropy(dist, action)
    terms = {
        "policy_gradient_loss": -(log_prob * advantage).mean(),
        "value_loss": ((value - returns) ** 2).mean(),
        "entropy_loss": -entropy.mean(),
    }
    return sum(c * x for c, x in zip((1.0, float(agent.vf_coef), float(agent.ent_coef)), terms.values(), strict=True)), terms


VARIANTS = {
    "baseline": {},
    "no baseline": {"vf_coef": 0.0},
    "plain returns": {"vf_coef": 0.0, "normalize_advantage": False},
    "plain advantages": {"normalize_advantage": False},
}


@pytest.mark.parametrize("changes", quick("baseline", "plain returns", of=VARIANTS))
@pytest.mark.parametrize("spec", quick("discrete", of={"discrete": SPEC, "box": BOX}))
def test_one_step_is_that_of_a_slow_numpy_version(spec, changes):
    agent = small(spec, ent_coef=0.02, max_grad_norm=0.1, learning_rate=1e-2, **changes)
    state, data = fresh(agent), rollout(spec, 3, num_steps=8, num_envs=5, ends=0.12)
    samples, valid = slow_samples(data, 0.9), np.asarray(data.valid)
    last = np.asarray(data.time_steps.terminated | data.time_steps.truncated)[1:]
    assert 0 < len(samples) < valid.sum() and not valid.all() and last.sum() > 2, "the rollout cuts some episodes short"

    after, metrics = update(agent, state, on_device(data))
    to_float64 = partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
    params = to_float64(state.copies.online.params)
    loss, terms = slow_loss(agent, params, params, data)
    for name, term in (terms | {"loss": loss, "complete_fraction": len(samples) / valid.sum()}).items():
        metric = metrics[f"train/{name}"]
        np.testing.assert_allclose(metric.total / metric.count, term, rtol=2e-4, atol=1e-5, err_msg=name)

    vector, unravel = ravel_pytree(state.copies.online.params)
    vector = np.asarray(vector, np.float64)
    with jax.enable_x64():
        _, unravel = ravel_pytree(params)

        def loss_at(change):
            return slow_loss(agent, to_float64(unravel(vector + change)), params, data)[0]

        eps = 1e-5 * np.eye(len(vector))
        gradient = np.array([(loss_at(e) - loss_at(-e)) / 2e-5 for e in eps])
    assert np.linalg.norm(gradient) > 0.1, "it is clipped"
    gradient *= 0.1 / np.linalg.norm(gradient)
    step = -1e-2 * gradient / np.sqrt(0.99 + 0.01 * gradient**2 + 1e-5)
    found = np.asarray(ravel_pytree(after.copies.online.params)[0], np.float64) - vector
    np.testing.assert_allclose(found, step, rtol=1e-3, atol=3e-7)
    if agent.vf_coef == 0:
        assert same_bits(after.copies.online.params["critic"], state.copies.online.params["critic"]), "nothing trains the value"
    assert int(after.env_steps) == valid.sum()


@pytest.mark.parametrize(("vf_coef", "tf_agents"), [(0.0, 1.9609693), (0.2, 0.5493384)])
def test_the_loss_of_the_policy_is_that_of_tf_agents_per_episode(vf_coef, tf_agents):
    """Of `ReinforceAgent` of TF-Agents 0.19 with these weights and this rollout, without and with a value network.

    Its losses of value and entropy count rows that only reset as well: 2.572187 and -0.010227 there, where the transitions
    alone have 2.331265 and -0.009050.
    """
    agent, data = small(vf_coef=vf_coef, normalize_advantage=False), rollout(SPEC, 3, num_steps=8, num_envs=5, ends=0.12)
    _, summary = jax.jit(lambda state: agent.gradients(state, on_device(data), KEY))(fresh(agent))
    transitions = len(slow_samples(data, 0.9))
    ends = int(np.asarray(data.terminated | data.truncated).sum())
    per_episode = transitions / ends
    np.testing.assert_allclose(summary.terms["policy_gradient_loss"] * per_episode, tf_agents, rtol=1e-5)
    if vf_coef > 0:
        np.testing.assert_allclose(vf_coef * summary.terms["value_loss"] * per_episode, 2.331265, rtol=1e-5)


@pytest.mark.parametrize(
    "network", quick("feedforward", of={"feedforward": MLP((4,)), "recurrent": GRU(3, head=PolicyAndValue())})
)
def test_incomplete_episodes_and_masked_samples_change_no_bit(network):
    agent = small(network=network, normalize_obs=True, normalize_reward="return")
    state = fresh(agent)
    carry = on_device(agent.collect_policy(state).initial_state(5))
    data = rollout(SPEC, 3, num_steps=8, num_envs=5, ends=0.12, carry=carry)
    weights = jnp.array([1.0, 2.0, 0.0, 1.0, 1.0])
    expected, metrics = update(agent, state, on_device(data), weights)
    learned = np.zeros((8, 5), bool)
    for t, env, _ in slow_samples(data, 0.9):
        learned[t, env] = weights[env] > 0

    junk = jax.tree.map(np.array, data)
    junk.time_steps.obs[:-1][~learned & ~junk.time_steps.truncated[:-1]] = np.nan
    junk.time_steps.reward[1:][~learned] = np.nan
    junk.time_steps.obs[-1][~learned[-1]] = np.nan
    got, metrics = update(agent, state, on_device(junk), weights)
    assert same_bits(got, expected) and metrics["train/skipped_steps"] == 0
    assert not same_bits(got.copies.online, state.copies.online)


def test_a_rollout_without_a_complete_episode_is_no_step():
    agent = small(optimizer_name="adam", normalize_obs=True)
    state = fresh(agent)
    after, metrics = update(agent, state, on_device(rollout(SPEC, 0, num_steps=8, num_envs=4, ends=0.0)))
    assert same_bits(after.copies.online, state.copies.online) and metrics["train/skipped_steps"] == 0
    assert same_bits(after.obs_normalizer, state.obs_normalizer) and int(after.env_steps) == 32


def test_a_truncated_episode_has_the_return_of_a_terminated_one():
    """Without a value of the final observation, which A2C adds."""
    agent = small()
    state, data = fresh(agent), rollout(SPEC, 3, num_steps=8, num_envs=5, ends=0.12)
    steps = data.time_steps
    both = steps.terminated | steps.truncated
    ended, cut = (
        dataclasses.replace(data, time_steps=TimeStep(steps.obs, steps.reward, flags, both & ~flags, steps.first))
        for flags in (both, np.zeros_like(both))
    )
    (a, _), (b, _) = (update(agent, state, on_device(x)) for x in (ended, cut))
    assert same_bits(a.copies.online, b.copies.online)


GAMMA = 0.9
PROBES = {
    "value of the obs": settings(sees="sign", pays="sign"),
    "action of the obs": settings(sees="sign", pays="agreement"),
    "first step": settings(sees="step", pays="at the end", length=3),
    "time limit": settings(length=4, terminates=False),
}


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})
@partial(jax.vmap, in_axes=(None, 0))
def learn(agent, dynamics):
    env = AutoReset(dynamics, 32)
    body = partial(iteration, agent, env, update_on(None))
    once = lambda state, _: (body(state)[0], None)  # noqa: E731
    return jax.lax.scan(once, start_compiled(agent, env, KEY), length=600)[0].agent


@pytest.mark.slow
@pytest.mark.parametrize("vf_coef", [0.5, 0.0])
def test_probe_environments_are_solved(vf_coef):
    agent = REINFORCE(probe(1).spec, MLP((32,)), num_steps=16, gamma=GAMMA, vf_coef=vf_coef, learning_rate=1e-2)
    together = learn(agent, jax.tree.map(lambda *leaves: jnp.stack(leaves), *PROBES.values()))
    states = {name: jax.tree.map(lambda x, i=i: x[i], together) for i, name in enumerate(PROBES)}

    def value(name, obs):
        return float(network_value(agent, states[name], obs))

    policy = agent.policy(states["action of the obs"])
    assert [int(policy.predict(np.array([sign], np.float32))[0]) for sign in (1, -1)] == [1, 0]
    if vf_coef > 0:
        assert value("value of the obs", 1.0) == pytest.approx(1.0, abs=0.05)
        assert value("value of the obs", -1.0) == pytest.approx(-1.0, abs=0.05)
        assert value("first step", 0.0) == pytest.approx(GAMMA**2, abs=0.05)
        # The mean of the returns of the four steps: the time limit ends them.
        mean = np.mean([sum(GAMMA**k for k in range(n)) for n in (1, 2, 3, 4)])
        assert value("time limit", 0.0) == pytest.approx(mean, abs=0.2)


def network_value(agent, state, obs):
    (_, value), _, _ = agent.network.apply(state.copies.online, jnp.array([[obs]], jnp.float32))
    return value[0]


@pytest.mark.slow
def test_resumed_equals_uninterrupted_in_both_loops(tmp_path):
    for env in ("jax/CartPole-v1", "CartPole-v1"):
        runs = [tmp_path / f"{name}_{len(env)}" for name in ("whole", "parts")]
        settings = {"num_steps": 64, "network": MLP((8,)), "learning_rate": 1e-2}
        options = {"num_envs": 4, "settings": settings, "seed": 2, "progress": False}
        whole = polyak.train.run("reinforce", env, env_steps=1_500, run_dir=runs[0], **options)
        polyak.train.run("reinforce", env, env_steps=600, run_dir=runs[1], **options)
        parts = polyak.train.resume(runs[1], env_steps=1_500, progress=False)
        assert same_bits(parts.state, whole.state)


def test_bad_settings_are_rejected_by_name():
    with pytest.raises(ValueError, match="REINFORCE: learning_rate has no effect with optimizer="):
        REINFORCE(SPEC, optimizer=optax.sgd(0.1), learning_rate=0.1)
    with pytest.raises(ValueError, match="REINFORCE: vf_coef"):
        REINFORCE(SPEC, vf_coef=-1.0)
    with pytest.raises(TypeError, match="gae_lambda"):
        REINFORCE(SPEC, gae_lambda=0.9)

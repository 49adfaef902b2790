"""A2C and IMPALA: every term against NumPy, what a mask hides, on-policy equality, the two halves of an update."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import polyak
from polyak import train
from polyak.agents.a2c import A2C
from polyak.agents.impala import IMPALA
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import mesh_over, update_on
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU
from tests.agents.oracle import advantages, forward, log_prob_and_entropy
from tests.agents.rollouts import fresh, on_device, random_variables, rollout, same_bits
from tests.ops.test_returns import slow_vtrace
from tests.probe_envs import probe, settings
from tests.selection import quick

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
BOX = EnvSpec(OBS, Box(-np.ones(2, np.float32), np.ones(2, np.float32)))
MASKED = dataclasses.replace(SPEC, has_action_mask=True)
SIZES = {"num_steps": 6, "num_envs": 4}
KEY = jax.random.key(3)
AGENTS = {"a2c": A2C, "impala": IMPALA}
every_agent = pytest.mark.parametrize("cls", quick("a2c", of=AGENTS))

update = jax.jit(lambda agent, state, data, weights=None: agent.update(state, data, KEY, weights=weights))
gradients = jax.jit(lambda agent, state, data: agent.gradients(state, data, KEY))
apply = jax.jit(lambda agent, state, *halves: agent.apply(state, *halves))
behave = jax.jit(lambda agent, state, steps, carry: _params(agent, state, steps, carry))


def small(cls, spec=SPEC, **settings):
    defaults = {"network": MLP((4,)), "num_steps": 6, "gamma": 0.9, "gae_lambda": 0.8, "learning_rate": 1e-2}
    return cls(spec, **defaults | settings)


def _params(agent, state, steps, carry):
    """What `collect_policy` stores at each step."""
    policy = agent.collect_policy(state)

    def step(carry, now):
        acted = policy.action(now, carry, KEY)
        return acted.carry, acted.info

    return jax.lax.scan(step, carry, steps)[1]


def with_info(agent, state, data):
    """The rollout, as the policy of this state would have collected it."""
    if not isinstance(agent, IMPALA):
        return data
    steps = jax.tree.map(lambda x: x[:-1], data.time_steps)
    carry = agent.collect_policy(state).initial_state(data.actions.shape[1]) if data.carry == () else data.carry
    return dataclasses.replace(data, info=behave(agent, state, on_device(steps), on_device(carry)))


def with_masks(data, seed=0):
    mask = np.random.default_rng(seed).random((*data.time_steps.reward.shape, 3)) < 0.5
    np.put_along_axis(mask[:-1], data.actions[..., None], True, axis=-1)
    mask[-1] = True
    return dataclasses.replace(data, time_steps=dataclasses.replace(data.time_steps, action_mask=mask))


def in_numpy(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def slow_loss(agent, params, fixed, data):
    """`(loss, terms)` of a rollout in float64, where `fixed` parameters make the targets and the advantages."""
    box, steps = isinstance(agent.spec.action, Box), data.time_steps
    obs, valid = np.asarray(steps.obs, np.float64), np.asarray(data.valid)
    flags = [np.asarray(flag)[1:] for flag in (steps.terminated, steps.truncated)]
    dist, old_value = forward(fixed, obs, box)
    reward = np.asarray(steps.reward[1:], np.float64)
    advantage = advantages(reward, old_value, *flags, float(agent.gamma), float(agent.gae_lambda))
    target = advantage + old_value[:-1]
    if isinstance(agent, IMPALA):
        new, _ = log_prob_and_entropy((dist[0][:-1], dist[1]), data.actions)
        then = jax.tree.map(np.asarray, data.info["params"])
        old, _ = log_prob_and_entropy((then["loc"], then["log_scale"]) if box else (then, None), data.actions)
        numbers = (float(getattr(agent, name)) for name in ("gamma", "gae_lambda", "rho_clip", "c_clip"))
        target, advantage = slow_vtrace(new - old, reward, old_value[:-1], old_value[1:], *flags, *numbers)
    (out, log_std), value = forward(params, obs[:-1], box)
    log_prob, entropy = log_prob_and_entropy((out, log_std), data.actions)
    terms = {
        "policy_gradient_loss": -(log_prob * advantage)[valid].mean(),
        "value_loss": ((value - target) ** 2)[valid].mean(),
        "entropy_loss": -entropy[valid].mean(),
    }
    coefs = (1.0, float(agent.vf_coef), float(agent.ent_coef))
    return sum(c * x for c, x in zip(coefs, terms.values(), strict=True)), terms


@every_agent
@pytest.mark.parametrize("spec", [SPEC, BOX], ids=["discrete", "box"])
def test_terms_and_gradient_are_those_of_a_slow_numpy_version(cls, spec):
    agent = small(cls, spec, ent_coef=0.02, vf_coef=0.3)
    state = fresh(agent)
    # Collected by another policy, so that IMPALA's ratios are far from 1.
    then = dataclasses.replace(state, copies=dataclasses.replace(state.copies, online=random_variables(state.copies.online, 5)))
    data = with_info(agent, then, rollout(spec, 1, **SIZES))
    assert not data.valid.all()
    got, summary = gradients(agent, state, on_device(data))
    params = in_numpy(state.copies.online.params)
    loss, terms = slow_loss(agent, params, params, data)
    for name, term in (terms | {"loss": loss}).items():
        np.testing.assert_allclose(summary.terms[name], term, rtol=2e-4, atol=1e-5)

    vector, unravel = ravel_pytree(params)
    rng, eps = np.random.default_rng(0), 1e-5
    for _ in range(4):
        way = rng.normal(size=len(vector))
        up, down = (slow_loss(agent, in_numpy(unravel(vector + sign * eps * way)), params, data)[0] for sign in (1, -1))
        np.testing.assert_allclose(np.dot(ravel_pytree(got)[0], way), (up - down) / (2 * eps), rtol=2e-2, atol=2e-3)


@every_agent
def test_an_update_is_one_step_of_rmsprop_with_epsilon_inside_the_root(cls):
    agent = small(cls, max_grad_norm=0.1)
    state = fresh(agent)
    data = on_device(with_info(agent, state, rollout(SPEC, 0, **SIZES)))
    gradient, summary = gradients(agent, state, data)
    after, metrics = update(agent, state, data)
    g = np.asarray(ravel_pytree(gradient)[0], np.float64)
    assert np.linalg.norm(g) == pytest.approx(float(summary.terms["grad_norm"]), rel=1e-5)
    g *= 0.1 / np.linalg.norm(g)
    wanted = -1e-2 * g / np.sqrt(0.99 + 0.01 * g**2 + 1e-5)
    before, now = (ravel_pytree(s.copies.online.params)[0] for s in (state, after))
    np.testing.assert_allclose(np.asarray(now, np.float64) - np.asarray(before, np.float64), wanted, atol=2e-7)
    assert metrics["train/n_updates"] == 1 and metrics["train/learning_rate"] == np.float32(1e-2)


@every_agent
@pytest.mark.parametrize("spec", [SPEC, MASKED], ids=["all actions", "masked"])
@pytest.mark.parametrize(
    "network", [MLP((4,), head=PolicyAndValue()), GRU(3, hidden=(3,), head=PolicyAndValue())], ids=["feedforward", "recurrent"]
)
def test_masked_samples_change_no_bit(cls, spec, network):
    agent = small(cls, spec, network=network, normalize_obs=True, normalize_reward="return")
    state = fresh(agent)
    carry = agent.collect_policy(state).initial_state(4)
    data = rollout(spec, 2, **SIZES, ends=0.3, carry=on_device(carry))
    data = with_masks(data) if spec.has_action_mask else data
    data = with_info(agent, state, data)
    weights = jnp.array([1.0, 0.0, 2.0, jnp.nan])
    expected, metrics = update(agent, state, on_device(data), weights)
    assert metrics["train/skipped_steps"] == 0 and not data.valid.all()

    # The final observation of a terminated episode; all that a reset, or an environment without weight, brought.
    junk = jax.tree.map(np.array, data)
    reset, ended = ~np.asarray(data.valid), np.asarray(data.time_steps.terminated)
    junk.time_steps.obs[ended] = np.nan
    junk.time_steps.reward[1:][reset] = np.nan
    for x in (junk.time_steps.obs, junk.time_steps.reward):
        x[:, [1, 3]] = np.nan
    for leaf in jax.tree.leaves(junk.info):
        leaf[reset] = np.nan
        leaf[:, [1, 3]] = np.nan
    got, metrics = update(agent, state, on_device(junk), weights)
    assert same_bits(got, expected) and metrics["train/skipped_steps"] == 0


@every_agent
@pytest.mark.parametrize("name", ["obs", "reward"])
def test_nan_in_a_valid_sample_skips_the_step_and_is_reported(cls, name):
    agent = small(cls, normalize_obs=True, normalize_reward="reward", max_skipped_updates=1)
    state = fresh(agent)
    data = with_info(agent, state, rollout(SPEC, 0, **SIZES, ends=0.0))
    getattr(data.time_steps, name)[2, 1] = np.nan
    after, metrics = update(agent, state, on_device(data))
    assert same_bits(after.copies.online, state.copies.online)
    assert same_bits(after.copies.optimizer_state, state.copies.optimizer_state)
    assert same_bits((after.obs_normalizer, after.reward_scaler), (state.obs_normalizer, state.reward_scaler))
    assert f"{cls.__name__}: 1 consecutive updates were skipped" in agent.diagnose(metrics) and name in agent.diagnose(metrics)
    good, metrics = update(agent, after, on_device(with_info(agent, state, rollout(SPEC, 1, **SIZES))))
    assert agent.diagnose(metrics) is None and not same_bits(good.copies.online, state.copies.online)


@pytest.mark.slow
def test_impala_on_policy_is_a2c_with_n_step_returns():
    """Also through its recurrent state, a mask and normalised rewards; the ratios are 1 up to rounding."""
    both = [small(cls, MASKED, network=GRU(3, hidden=(3,)), gae_lambda=1.0, normalize_reward="return") for cls in (A2C, IMPALA)]
    state = fresh(both[0])
    data = with_masks(rollout(MASKED, 4, **SIZES, carry=on_device(both[1].collect_policy(state).initial_state(4))))
    (a, of_a), (b, of_b) = (gradients(agent, state, on_device(with_info(agent, state, data))) for agent in both)
    np.testing.assert_allclose(ravel_pytree(a)[0], ravel_pytree(b)[0], atol=1e-6)
    assert of_b.terms["rho"] == pytest.approx(1.0, abs=1e-6) and "rho" not in of_a.terms
    for name, term in of_a.terms.items():
        np.testing.assert_allclose(of_b.terms[name], term, atol=1e-5)


@pytest.mark.slow
def test_a2c_is_ppo_with_one_step():
    ppo = PPO(SPEC, network=MLP((4,)), num_steps=6, gamma=0.9, gae_lambda=0.8, learning_rate=1e-2, num_epochs=1,
              num_minibatches=1, normalize_advantage="batch", normalize_obs=True, normalize_reward="reward")  # fmt: skip
    agent = small(A2C, optimizer_name="adam", normalize_advantage=True, normalize_obs=True, normalize_reward="reward")
    data = on_device(rollout(SPEC, 0, **SIZES))
    state, of_ppo = fresh(agent), fresh(ppo)
    assert same_bits(state.copies.online, of_ppo.copies.online)
    for _ in range(2):
        state, _ = update(agent, state, data)
        of_ppo, _ = update(ppo, of_ppo, data)
    for x, y in zip(jax.tree.leaves(state.copies.online), jax.tree.leaves(of_ppo.copies.online), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for name in ("obs_normalizer", "reward_scaler", "env_steps"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), getattr(state, name), getattr(of_ppo, name))


@every_agent
def test_an_update_is_its_two_halves(cls):
    agent = small(cls, normalize_obs=True, normalize_reward="return")
    state = fresh(agent)
    carry = on_device(agent.collect_policy(state).initial_state(4))
    data = on_device(with_info(agent, state, rollout(SPEC, 0, **SIZES, carry=carry)))
    whole, metrics = update(agent, state, data)
    halves, of_halves = apply(agent, state, *gradients(agent, state, data))
    for x, y in zip(jax.tree.leaves((whole, metrics)), jax.tree.leaves((halves, of_halves)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    assert int(whole.env_steps) == int(np.asarray(data.valid).sum()) and int(whole.updates) == 1


@pytest.mark.slow
@every_agent
def test_an_update_over_devices_is_that_of_one(cls):
    agent = small(cls, normalize_obs=True, normalize_advantage=True)
    state = fresh(agent)
    data = on_device(with_info(agent, state, rollout(SPEC, 0, num_steps=6, num_envs=8)))
    one, split = (jax.jit(update_on(mesh))(agent, state, data, KEY) for mesh in (None, mesh_over(4, 8)))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-5)


def test_a_rollout_without_transitions_is_no_step():
    agent = small(A2C, optimizer_name="adam")
    state = fresh(agent)
    state, _ = update(agent, state, on_device(rollout(SPEC, 0, **SIZES)))
    after, metrics = update(agent, state, on_device(rollout(SPEC, 0, **SIZES)), jnp.zeros(4))
    assert same_bits(after.copies, state.copies) and metrics["train/skipped_steps"] == 0


@every_agent
def test_bad_settings_are_rejected_by_name(cls):
    name = cls.__name__
    for settings_, said in [
        ({"optimizer": optax.sgd(0.1), "learning_rate": 0.1}, f"{name}: learning_rate has no effect with optimizer="),
        ({"optimizer": optax.sgd(0.1), "rms_decay": 0.5}, f"{name}: rms_decay has no effect with optimizer="),
        ({"optimizer_name": "adam", "rms_eps": 0.1}, f"{name}: rms_eps has no effect with optimizer_name='adam'"),
        ({"adam_eps": 0.1}, f"{name}: adam_eps has no effect with optimizer_name='rmsprop'"),
        ({"squash": True}, "squash"),
    ]:
        with pytest.raises(ValueError, match=said):
            cls(SPEC, **settings_)
    with pytest.raises(ValueError, match=f"{name}: normalize_obs must be False"):
        cls(EnvSpec(Discrete(4), Discrete(3)), normalize_obs=True)


@pytest.mark.slow
def test_rollouts_and_states_that_do_not_fit_are_rejected():
    agent = small(IMPALA)
    state = fresh(agent)
    data = on_device(rollout(SPEC, 0, **SIZES))
    with pytest.raises(ValueError, match="update: IMPALA needs rollouts of collect_policy"):
        jax.eval_shape(agent.update, state, data, KEY)
    with pytest.raises(ValueError, match="normalize_obs=False but the agent sets normalize_obs=True"):
        jax.eval_shape(small(A2C, normalize_obs=True).update, state, data, KEY)
    with pytest.raises(ValueError, match="created with another optimizer"):
        jax.eval_shape(small(A2C, optimizer_name="adam").update, state, data, KEY)
    with pytest.raises(ValueError, match="normalize_reward='return' needs rollouts of collect_policy"):
        scaled = small(A2C, normalize_reward="return")
        jax.eval_shape(scaled.update, fresh(scaled), data, KEY)


GAMMA, NUM_ENVS = 0.9, 32
PROBES = {
    "value of the obs": settings(sees="sign", pays="sign"),
    "two steps": settings(sees="step", pays="at the end", length=2),
    "action of the obs": settings(sees="sign", pays="agreement"),
    "time limit": settings(length=4, terminates=False),
    "terminal state": settings(sees="step", length=4),
}


@pytest.fixture(scope="module", params=AGENTS.values(), ids=AGENTS.keys())
def trained(request):
    """Trains in all probes as one program; returns `(value, policy)` by the probe's name."""
    agent = request.param(
        probe(1).spec,
        network=MLP((32,)),
        num_steps=8,
        learning_rate=polyak.Linear(2e-2, 1e-3, 400_000),
        gamma=GAMMA,
        ent_coef=0.01,
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})
    @jax.vmap
    def learn(dynamics):
        env = AutoReset(dynamics, NUM_ENVS)
        body = partial(iteration, agent, env, update_on(None))
        once = lambda state, _: (body(state)[0], None)  # noqa: E731
        return jax.lax.scan(once, start_compiled(agent, env, KEY), length=1500)[0].agent

    states = learn(jax.tree.map(lambda *leaves: jnp.stack(leaves), *PROBES.values()))

    def answers(name):
        state = jax.tree.map(lambda x: x[list(PROBES).index(name)], states)

        def value(obs):
            (_, value), _, _ = agent.network.apply(state.copies.online, jnp.array([[obs]], jnp.float32))
            return float(value[0])

        return value, lambda obs: int(agent.policy(state).predict(np.full(1, obs, np.float32))[0])

    return answers


@pytest.mark.slow
def test_the_value_depends_on_the_observation(trained):
    value, _ = trained("value of the obs")
    assert value(1.0) == pytest.approx(1.0, abs=0.05) and value(-1.0) == pytest.approx(-1.0, abs=0.05)


@pytest.mark.slow
def test_the_value_is_bootstrapped_over_two_steps(trained):
    value, _ = trained("two steps")
    assert value(1.0) == pytest.approx(1.0, abs=0.05) and value(0.0) == pytest.approx(GAMMA, abs=0.05)


@pytest.mark.slow
def test_the_action_follows_the_observation(trained):
    _, policy = trained("action of the obs")
    assert policy(1.0) == 1 and policy(-1.0) == 0


@pytest.mark.slow
def test_truncation_does_not_lower_the_value_and_termination_does(trained):
    value, _ = trained("time limit")
    assert value(0.0) == pytest.approx(1 / (1 - GAMMA), rel=0.05)
    value, _ = trained("terminal state")
    for step in range(4):
        assert value(float(step)) == pytest.approx(sum(GAMMA**k for k in range(4 - step)), abs=0.2)


@pytest.mark.slow
def test_both_loops_train_a_recurrent_network():
    agent = polyak.envs.make("jax/CartPole-v1", num_envs=2).spec
    agent = small(IMPALA, agent, network=GRU(4, hidden=(4,)))
    for loop, env in (("compiled", "jax/CartPole-v1"), ("host", "CartPole-v1")):
        result = train.run(agent, env, num_envs=2, env_steps=64, seed=0, loop=loop, progress=False)
        assert int(result.state.updates) >= 5 and int(result.state.guard.skipped) == 0

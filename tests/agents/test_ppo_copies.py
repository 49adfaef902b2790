"""PPO's network copies: a target that follows every update, and any optimizer for the online copy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import fresh, on_device, ppo, rollout, same_bits

pytestmark = pytest.mark.usefixtures("unchecked")

SPEC = EnvSpec(Box([-1.0, -1.0], [1.0, 1.0]), Discrete(3))
KEY = jax.random.key(0)
update = jax.jit(lambda agent, state, data: agent.update(state, data, KEY))


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A linear network in bfloat16."""

    def init(self, key, spec):
        return Variables({"w": jnp.full((2, 4), 0.1, jnp.bfloat16)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out = obs @ variables.params["w"].astype(jnp.float32)
        return (out[:, :3], out[:, 3]), carry, ()


def make(**settings):
    defaults = {"network": MLP((4,)), "num_steps": 8, "num_epochs": 2, "num_minibatches": 2}
    return ppo(SPEC, **(defaults | settings))


def data():
    return on_device(rollout(SPEC, num_steps=8, num_envs=4))


def params(variables):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(variables.params)])


def test_the_target_follows_the_online_copy_after_every_update():
    agent = make(ema_tau=0.25)
    state = agent.init(KEY)
    expected = params(state.copies.target)
    for _ in range(3):
        state, _ = update(agent, state, data())
        expected = expected + 0.25 * (params(state.copies.online) - expected)
        np.testing.assert_allclose(params(state.copies.target), expected, rtol=1e-5, atol=1e-7)
    assert np.abs(params(state.copies.target) - params(state.copies.online)).max() > 1e-4


def test_the_target_is_evaluated_and_the_online_copy_collects():
    agent = make(ema_tau=0.01)
    state, _ = update(agent, agent.init(KEY), data())
    assert same_bits(agent.policy(state).policy.variables, state.copies.target)
    assert same_bits(agent.collect_policy(state).variables, state.copies.online)
    plain = make()
    state, _ = update(plain, plain.init(KEY), data())
    assert state.copies.target is None and same_bits(plain.policy(state).policy.variables, state.copies.online)


def test_target_copy_leaves_the_online_copy_unchanged():
    with_target, without = make(ema_tau=0.1), make()
    (one, metrics), (other, metrics_of_other) = (update(agent, agent.init(KEY), data()) for agent in (with_target, without))
    assert same_bits((one.copies.online, metrics), (other.copies.online, metrics_of_other))


def test_changed_ema_tau_takes_effect_at_the_next_update():
    agent = make(ema_tau=0.0)
    state, _ = update(agent, agent.init(KEY), data())
    assert same_bits(state.copies.target, agent.init(KEY).copies.target)
    state, _ = update(dataclasses.replace(agent, ema_tau=1.0), state, data())
    assert same_bits(state.copies.target, state.copies.online)


def test_state_without_a_target_is_rejected_with_ema_tau():
    with pytest.raises(ValueError, match="created with ema_tau=None but the agent sets ema_tau"):
        jax.eval_shape(make(ema_tau=0.1).update, fresh(make()), data(), KEY)


@pytest.mark.slow
def test_any_optimizer_trains_on_the_tree_of_parameters():
    """One epoch of one minibatch is one step of it along the gradient that plain SGD takes."""
    one_step = {"num_epochs": 1, "num_minibatches": 1}
    optimizer = optax.adamw(1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    agent, sgd = make(**one_step, optimizer=optimizer), make(**one_step, optimizer=optax.sgd(1.0))
    state = agent.init(KEY)
    after, metrics = update(agent, state, data())
    before, stepped = state.copies.online.params, update(sgd, sgd.init(KEY), data())[0].copies.online.params
    gradient = jax.tree.map(jnp.subtract, before, stepped)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradient, optimizer.init(before), before)
    expected = optax.apply_updates(before, updates)
    for got, want in zip(jax.tree.leaves(after.copies.online.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert "train/learning_rate" not in metrics and metrics["train/skipped_steps"] == 0


def test_max_grad_norm_does_not_apply_to_a_user_optimizer():
    agent = make(num_epochs=1, num_minibatches=1, optimizer=optax.sgd(1.0))
    _, metrics = update(agent, agent.init(KEY), data())
    assert float(metrics["train/grad_norm"]) > 0.5
    assert float(metrics["train/grad_norm_clipped"]) == float(metrics["train/grad_norm"])


@pytest.mark.parametrize("name", ["learning_rate", "adam_eps", "max_grad_norm"])
def test_adam_settings_are_rejected_with_an_optimizer(name):
    with pytest.raises(ValueError, match=f"PPO: {name} has no effect with optimizer"):
        make(optimizer=optax.sgd(1e-2), **{name: 1e-2})


def test_adam_defaults_are_accepted_with_an_optimizer():
    agent = make(optimizer=optax.sgd(1e-2), max_grad_norm=0.5, learning_rate=3e-4)
    agent = dataclasses.replace(jax.tree.map(jnp.asarray, agent), gamma=0.9)
    assert PPO.tf_agents(SPEC, optimizer=agent.optimizer).optimizer is agent.optimizer


def test_narrow_parameters_are_trained_in_float32_by_any_optimizer():
    agent = make(optimizer=optax.adam(1e-3), network=Narrow())
    state, metrics = update(agent, agent.init(KEY), data())
    floats = [x.dtype for x in jax.tree.leaves(state.copies.optimizer_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype(jnp.float32)} and metrics["train/skipped_steps"] == 0


def test_integer_ema_tau_works_in_a_compiled_loop():
    agent = make(ema_tau=1)
    step = jax.jit(lambda agent, state, data: agent.update(state, data, KEY)[0])
    state = agent.init(KEY)
    after = jax.lax.fori_loop(0, 2, lambda i, state: step(agent, state, data()), state)
    assert same_bits(after.copies.target, after.copies.online)


@pytest.mark.slow
def test_new_state_can_be_donated_with_any_optimizer():
    agent = make(optimizer=optax.contrib.prodigy(), kl_beta=jnp.float32(0.5), kl_target=0.01)
    state = agent.init(KEY)
    jax.jit(lambda state: agent.update(state, data(), KEY)[0], donate_argnums=0)(state)
    assert float(agent.kl_beta) == 0.5


def test_state_of_another_optimizer_is_rejected():
    with pytest.raises(ValueError, match="created with another optimizer"):
        jax.eval_shape(make(optimizer=optax.sgd(1e-2)).update, fresh(make()), data(), KEY)


def test_copies_without_an_optimizer_raise_on_gradient_steps():
    copies = make().init(KEY).copies
    for verb in (lambda: copies.restart(copies.online), lambda: copies.apply_gradients(gradients=copies.online.params)):
        with pytest.raises(ValueError, match="these copies have no optimizer; create them with optimizer="):
            verb()


def test_kl_cutoff_rejects_microbatches():
    cutoff = {"kl_cutoff_coef": 1.0, "kl_cutoff_factor": 2.0, "kl_target": 0.01}
    with pytest.raises(ValueError, match="PPOKL: microbatch_size must be None with kl_cutoff_coef"):
        make(**cutoff, microbatch_size=8)

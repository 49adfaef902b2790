"""One update of PPO against a slow oracle, and against everything that a rollout can hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Rollout, TimeStep, Variables
from polyak.learning.epochs import epoch_seeds, shuffled_minibatches
from polyak.learning.rollout_batch import sample_weights
from polyak.networks.adapters import FlaxNNX
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU
from polyak.ops.gradient_step import QUANTITIES
from polyak.ops.schedules import Linear
from tests.agents.oracle import OraclePPO
from tests.agents.rollouts import fresh, on_device, ppo, rollout, same_bits, with_online
from tests.selection import quick

OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
BOX_SPEC = EnvSpec(OBS, Box([-1.0, -1.0], [1.0, 1.0]))
NUM_STEPS, NUM_ENVS = 8, 4
KEY = jax.random.key(3)
# Limits that no number here reaches: a float that is there but idle, so that tests share one compiled update.
IDLE = 1e6

update = jax.jit(lambda agent, state, data, key: agent.update(state, data, key))
batch_of = jax.jit(lambda agent, state, data: agent._make_batch(state, data, sample_weights(data.valid, None), None))


def make(spec=SPEC, **settings):
    defaults = {
        "network": MLP((4, 3)),
        "num_steps": NUM_STEPS,
        "num_epochs": 2,
        "num_minibatches": 2,
        "learning_rate": 1e-2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "clip_range_vf": IDLE,
        "max_grad_norm": IDLE,
        "target_kl": IDLE,
        "normalize_obs": True,
        "normalize_reward": "return",
    }
    return ppo(spec, **(defaults | settings))


def carry(value=0.0):
    return ((), np.full(NUM_ENVS, value, np.float32))


def noise(spec=SPEC, seed=0, **options):
    return rollout(spec, seed, num_steps=NUM_STEPS, num_envs=NUM_ENVS, carry=carry(), **options)


def learned(state):
    """What no bad number may touch."""
    return state.copies.online, state.copies.optimizer_state, state.obs_normalizer, state.reward_scaler


def oracle_of(agent, state):
    names = ("gamma", "gae_lambda", "clip_range", "clip_range_vf", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
    settings = {name: float(IDLE if getattr(agent, name) is None else getattr(agent, name)) for name in names}
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.copies.online.params)
    return OraclePPO(
        params,
        box=isinstance(agent.spec.action, Box),
        normalize_obs=agent.normalize_obs,
        normalize_reward=agent.normalize_reward,
        normalize_advantage=agent.normalize_advantage,
        adam_eps=float(agent.adam_eps),
        **settings,
    )


def minibatches(agent, key):
    sizes = NUM_STEPS, NUM_ENVS, agent.num_minibatches
    for words in epoch_seeds(key, agent.num_epochs, *sizes):
        yield from np.asarray(shuffled_minibatches(words, *sizes))


def stream(spec, seed, ends, count=3):
    """Rollouts of one stream, each beginning with the last time step of the one before."""
    long = rollout(spec, seed, num_steps=count * NUM_STEPS, num_envs=NUM_ENVS, ends=ends)
    long.time_steps.reward[0] = 0.0
    long.time_steps.first[0] = True
    long.time_steps.terminated[0] = long.time_steps.truncated[0] = False
    for start in range(0, count * NUM_STEPS, NUM_STEPS):
        steps = jax.tree.map(lambda x, start=start: x[start : start + NUM_STEPS + 1], long.time_steps)
        yield Rollout(steps, long.actions[start : start + NUM_STEPS])


@jax.jit
def carry_after(policy, data):
    """The collecting policy's memory at the end of a rollout."""
    steps = jax.tree.map(lambda x: x[:-1], data.time_steps)
    step = lambda carry, time_step: (policy.action(time_step, carry, KEY).carry, None)  # noqa: E731
    return jax.lax.scan(step, data.carry, steps)[0]


OFF = {"normalize_obs": False} | dict.fromkeys(
    ("clip_range_vf", "max_grad_norm", "target_kl", "normalize_advantage", "normalize_reward")
)
CASES = {
    "nothing limits": {},
    "the ratio is clipped": {"clip_range": 0.02, "learning_rate": 0.05},
    "the value is clipped": {"clip_range_vf": 0.02, "learning_rate": 0.05},
    "the gradient is clipped": {"max_grad_norm": 0.05},
    "with an entropy bonus": {"ent_coef": 0.1, "vf_coef": 0.0},
    "Monte Carlo": {"gamma": 1.0, "gae_lambda": 1.0},
    "one-step TD error": {"gae_lambda": 0.0},
    "no future": {"gamma": 0.0},
    "large divergence stops it": {"target_kl": 3e-4, "learning_rate": 0.05},
    "all options off": OFF,
    "Box actions": {"spec": BOX_SPEC, "clip_range": 0.1},
}


def check_against_oracle(agent, ends, seed=1):
    state = fresh(agent)
    oracle = oracle_of(agent, state)
    memory = on_device(carry())
    for i, data in enumerate(stream(agent.spec, seed, ends)):
        key = jax.random.fold_in(KEY, i)
        oracle.update(data, list(minibatches(agent, key)), float(agent.learning_rate))
        data = on_device(dataclasses.replace(data, carry=memory if agent.normalize_reward else ()))
        memory = carry_after(agent.collect_policy(state), data)
        state, metrics = update(agent, state, data, key)
        got = jax.tree.leaves(state.copies.online.params)
        for mine, theirs in zip(got, jax.tree.leaves(oracle.params), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=3e-5)
        assert metrics["train/skipped_steps"] == 0
    return state, oracle


# Cases that differ in numbers share one program.
@pytest.mark.parametrize("settings", quick(*(CASES.keys() - {"all options off", "Box actions"}), of=CASES))
def test_update_matches_the_oracle(settings):
    state, oracle = check_against_oracle(make(**settings), ends=0.15)
    if state.obs_normalizer is not None:
        np.testing.assert_allclose(state.obs_normalizer.stats.mean, oracle.obs_stats.mean, atol=1e-5)
        np.testing.assert_allclose(state.reward_scaler.stats.stddev(), oracle.return_stats.deviation, rtol=1e-5)
    assert any(oracle.kept) and (settings.get("target_kl") != 3e-4 or not all(oracle.kept))


@pytest.mark.parametrize("ends", [0.0, 0.5, 1.0], ids=["no end", "many ends", "every step is an episode"])
def test_episodes_of_any_length_match_the_oracle(ends):
    check_against_oracle(make(), ends)


def test_a_float_field_does_not_recompile():
    before = update._cache_size()
    state, data = fresh(make()), on_device(noise())
    settings = [{}, {"gamma": 0.5}, {"clip_range": 0.3}, {"learning_rate": 1e-3}, {"target_kl": 0.01}, {"vf_coef": 2.0}]
    for floats in settings:
        update(make(**floats), state, data, KEY)
    assert update._cache_size() - before <= 1


def overwritten(data, garbage):
    """The rollout with everything that is no transition replaced."""
    steps = data.time_steps
    after_end = (steps.terminated | steps.truncated)[:-1]
    assert after_end.any() and steps.terminated.any() and steps.first.any()
    obs, reward = steps.obs.copy(), steps.reward.copy()
    obs[steps.terminated] = garbage
    reward[steps.first] = garbage
    actions = data.actions.copy()
    actions[after_end] = garbage if actions.dtype == np.float32 else 1_000_000_000
    return dataclasses.replace(data, time_steps=dataclasses.replace(steps, obs=obs, reward=reward), actions=actions)


@pytest.mark.parametrize("garbage", [1e9, np.nan, -np.inf])
@pytest.mark.parametrize("settings", [{}, OFF, {"spec": BOX_SPEC}], ids=["Discrete", "all off", "Box"])
def test_masked_sample_changes_no_bit(settings, garbage):
    agent = make(**settings)
    data = noise(agent.spec, seed=5, ends=0.3)
    data = data if agent.normalize_reward else dataclasses.replace(data, carry=())
    clean = update(agent, fresh(agent), on_device(data), KEY)
    assert clean[1]["train/nonfinite_source"] == 0
    assert same_bits(clean, update(agent, fresh(agent), on_device(overwritten(data, garbage)), KEY))


def test_final_obs_of_a_truncated_episode_is_not_masked():
    agent, data = make(), noise(seed=5, ends=0.3)
    clean, _ = update(agent, fresh(agent), on_device(data), KEY)
    assert data.time_steps.truncated[1:].any()
    data.time_steps.obs[data.time_steps.truncated] += 1.0
    new_params, _ = update(agent, fresh(agent), on_device(data), KEY)
    assert not same_bits(clean.copies.online, new_params.copies.online)


def all_masked():
    data = noise()
    data.time_steps.truncated[:] = True
    return data


def test_fully_masked_rollout_changes_nothing_and_skips_no_step():
    agent = make()
    # Adam has momentum by now, on which a step without a gradient would move.
    state, _ = update(agent, fresh(agent), on_device(noise()), KEY)
    after, metrics = update(agent, state, on_device(all_masked()), KEY)
    assert same_bits(learned(after), learned(state)) and after.env_steps == state.env_steps
    assert metrics["train/loss"].count == 0, "a mean of nothing"
    assert metrics["train/skipped_steps"] == 0 and metrics["train/consecutive_skipped_updates"] == 0


def test_single_valid_sample_trains_without_advantage_normalization():
    agent, state = make(), fresh(make())
    data = all_masked()
    data.time_steps.truncated[2, 1] = data.time_steps.terminated[2, 1] = False
    after, metrics = update(agent, state, on_device(data), KEY)
    assert metrics["train/skipped_steps"] == 0 and after.env_steps == 1
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(learned(after)) if x.dtype == jnp.float32)
    # Its advantage minus its own mean would be 0, and the policy would not move.
    assert float(metrics["train/policy_gradient_loss"]) != 0
    assert not same_bits(after.copies.online.params["policy"], state.copies.online.params["policy"])


@pytest.mark.slow
def test_minibatches_of_one_sample_train_without_advantage_normalization():
    agent = make(num_minibatches=NUM_STEPS * NUM_ENVS, num_epochs=1)
    state = fresh(agent)
    after, metrics = update(agent, state, on_device(noise()), KEY)
    raw, _ = update(dataclasses.replace(agent, normalize_advantage=None), state, on_device(noise()), KEY)
    assert metrics["train/skipped_steps"] == 0
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(learned(after)) if x.dtype == jnp.float32)
    # Each advantage alone, minus its own mean, would be 0.
    assert same_bits(after.copies.online, raw.copies.online)
    assert not same_bits(after.copies.online.params["policy"], state.copies.online.params["policy"])


def test_equal_advantages_train_value_and_entropy_but_not_the_policy():
    agent = make(gamma=0.0, vf_coef=0.0)
    state = fresh(agent)
    value_head = jax.tree.map(jnp.zeros_like, state.copies.online.params["value"])
    params = state.copies.online.params | {"value": value_head}
    state = with_online(state, dataclasses.replace(state.copies.online, params=params))
    data = noise()
    data.time_steps.reward[~data.time_steps.first] = 1.1
    _, metrics = update(agent, state, on_device(data), KEY)
    # Rounding errors of the mean, divided by their own deviation, would make advantages of about 1.
    assert float(metrics["train/grad_norm"]) < 1e-4
    _, metrics = update(make(gamma=0.0, vf_coef=0.5, ent_coef=0.01), state, on_device(data), KEY)
    assert float(metrics["train/grad_norm"]) > 0.1 and metrics["train/skipped_steps"] == 0


@struct(kw_only=True)
class OneStepPPO(PPO):
    """PPO with the error of one step as advantage."""

    def compute_advantages(self, state, rollout, value):
        target = rollout.reward + self.gamma * jnp.where(rollout.terminated, 0.0, value[1:])
        return target - value[:-1], target


def test_a_variant_may_compute_other_advantages():
    agent = make(normalize_reward=None, gae_lambda=0.0)
    state, data = fresh(agent), on_device(dataclasses.replace(noise(), carry=()))
    variant = OneStepPPO(**{field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)})
    batches = [batch_of(each, state, data)[0] for each in (variant, agent, dataclasses.replace(agent, gae_lambda=0.8))]
    got, wanted, other = (jnp.where(batch.weight > 0, batch.advantage, 0.0) for batch in batches)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert not np.allclose(got, other, atol=1e-3)


def test_terminated_and_truncated_differ_by_the_discounted_value_of_the_final_obs():
    agent = make(normalize_obs=False, normalize_reward=None)
    state = fresh(agent)
    data = dataclasses.replace(noise(ends=0.0), carry=())
    env, end = 2, 5
    advantage = {}
    for name in ("terminated", "truncated"):
        steps = jax.tree.map(np.copy, data.time_steps)
        getattr(steps, name)[end, env] = True
        steps.first[end + 1, env] = True
        steps.reward[end + 1, env] = 0.0
        batch, _ = batch_of(agent, state, on_device(dataclasses.replace(data, time_steps=steps)))
        advantage[name] = np.asarray(batch.advantage, np.float64).reshape(NUM_STEPS, NUM_ENVS)
    (_, value), _, _ = agent.network.apply(state.copies.online, jnp.asarray(data.time_steps.obs[end]))
    difference = advantage["truncated"] - advantage["terminated"]
    wanted = np.zeros((NUM_STEPS, NUM_ENVS))
    for t in range(end):
        wanted[t, env] = 0.9 * float(value[env]) * (0.9 * 0.8) ** (end - 1 - t)
    np.testing.assert_allclose(difference, wanted, atol=1e-6)
    assert abs(wanted[end - 1, env]) > 0.1


def poisoned(where, value):
    data = noise(seed=2)
    t, env = np.argwhere(~data.time_steps.last[:-1] & ~data.time_steps.last[1:])[3]
    if where == "reward":
        data.time_steps.reward[t + 1, env] = value
    elif where == "obs":
        data.time_steps.obs[t, env, 1] = value
    else:
        data.actions[t, env] = value
    return on_device(data)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("obs", np.nan, 1),
        ("obs", np.inf, 1),
        ("reward", np.nan, 2),
        ("reward", -np.inf, 2),
        ("action", 7, 4),
    ],
)
def test_nan_or_infinity_never_reaches_the_state(where, value, named):
    agent = make()
    state, _ = update(agent, fresh(agent), on_device(noise()), KEY)
    after, metrics = update(agent, state, poisoned(where, value), KEY)
    assert same_bits(learned(after), learned(state))
    assert metrics["train/skipped_steps"] == 4 and metrics["train/consecutive_skipped_updates"] == 1
    assert metrics["train/nonfinite_source"] == named
    recovered, metrics = update(agent, after, on_device(noise(seed=1)), KEY)
    assert metrics["train/consecutive_skipped_updates"] == 0 and metrics["train/skipped_steps"] == 4
    assert not same_bits(recovered.copies.online, state.copies.online)


def test_huge_reward_makes_a_loss_whose_step_is_skipped():
    agent = make(**OFF)
    state = fresh(agent)
    data = dataclasses.replace(noise(ends=0.0), carry=())
    data.time_steps.reward[4] = 1e30
    after, metrics = update(agent, state, on_device(data), KEY)
    assert same_bits(learned(after), learned(state)) and metrics["train/nonfinite_source"] == 5


def test_nonfinite_values_are_named():
    agent = make()
    state = fresh(agent)
    params = state.copies.online.params | {"value": jax.tree.map(lambda x: x * jnp.nan, state.copies.online.params["value"])}
    state = with_online(state, dataclasses.replace(state.copies.online, params=params))
    _, metrics = update(agent, state, on_device(noise()), KEY)
    assert metrics["train/nonfinite_source"] == 3


class Steep:
    """A value √root + scale · w: finite, with a derivative that is infinite at root = 0, and as large as `scale`."""

    def init(self, key, spec):
        return Variables({"root": jnp.ones(()), "w": jnp.zeros(())}, {"scale": jnp.ones(())})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        assert not train, "an update leaves dropout and statistics alone"
        value = jnp.sqrt(variables.params["root"]) + variables.stats["scale"] * variables.params["w"]
        return (jnp.zeros((obs.shape[0], 3)), jnp.broadcast_to(value, obs.shape[:1])), carry, variables.stats


STEEP = make(network=Steep(), max_grad_norm=None)


@pytest.mark.parametrize(
    ("root", "scale", "nonfinite_source"),
    [(0.0, 1.0, "gradient"), (1.0, 1e25, "step"), (1.0, 1.0, None)],
    ids=["infinite", "infinite moments", "usual"],
)
def test_gradient_with_nonfinite_entries_or_norm_is_skipped(root, scale, nonfinite_source):
    state = STEEP.init(KEY)
    variables = Variables({"root": jnp.array(root), "w": jnp.zeros(())}, {"scale": jnp.array(scale)})
    state = with_online(state, variables)
    after, metrics = update(STEEP, state, on_device(noise()), KEY)
    assert same_bits(learned(after)[:2], learned(state)[:2]) == (nonfinite_source is not None)
    assert metrics["train/skipped_steps"] == (4 if nonfinite_source else 0)
    assert metrics["train/nonfinite_source"] == (QUANTITIES.index(nonfinite_source) + 1 if nonfinite_source else 0)


def test_training_is_diagnosed_after_enough_consecutive_bad_updates():
    agent, state = make(max_skipped_updates=3), fresh(make())
    for i in range(3):
        state, metrics = update(make(), state, poisoned("reward", np.nan), KEY)
        said = agent.diagnose(metrics)
        assert (said is None) == (i < 2)
    assert "3 consecutive updates" in said and "'reward'" in said and "max_skipped_updates=3" in said


def test_bad_reward_does_not_stay_in_the_running_return():
    agent = make()
    state = fresh(agent)
    data = poisoned("reward", np.nan)
    after = carry_after(agent.collect_policy(state), data)
    assert bool(jnp.all(jnp.isfinite(after[1])))


def test_ratios_start_at_one():
    agent = make(learning_rate=1e-12)
    _, metrics = update(agent, fresh(agent), on_device(noise()), KEY)
    assert abs(float(metrics["train/approx_kl"])) < 1e-6 and float(metrics["train/clip_fraction"]) == 0
    # min(ρ A, ...) is A at ρ = 1, and normalised advantages have mean 0.
    assert abs(float(metrics["train/policy_gradient_loss"])) < 1e-6


def test_target_kl_stops_within_an_update():
    data = on_device(noise())
    agent = make(target_kl=1e-9, learning_rate=0.05)
    state, metrics = update(agent, fresh(agent), data, KEY)
    assert state.copies.optimizer_state[1].count == 1 and metrics["train/skipped_steps"] == 0
    # The last epoch is the last with a step, which was the first here.
    for name in ("loss", "ratio", "grad_norm"):
        assert metrics[f"train/last_epoch/{name}"] == metrics[f"train/{name}"] != 0
    state, _ = update(make(learning_rate=0.05), fresh(agent), data, KEY)
    assert state.copies.optimizer_state[1].count == 4


@pytest.mark.parametrize(("share", "steps"), [(0.99, 1), (1.01, 2)])
def test_target_kl_stops_at_one_and_a_half_times_its_value(share, steps):
    agent, data = make(learning_rate=0.05), noise()
    oracle = oracle_of(agent, fresh(agent))
    oracle.update(data, list(minibatches(agent, KEY))[:2], 0.05)
    first, second = oracle.divergences
    assert abs(first) < 1e-9 and second > 1e-4
    state, _ = update(make(learning_rate=0.05, target_kl=float(share * second / 1.5)), fresh(agent), on_device(data), KEY)
    assert (state.copies.optimizer_state[1].count == 1) == (steps == 1)


def test_linear_schedules_follow_the_env_steps():
    agent = make(learning_rate=Linear(1.0, 0.0, env_steps=100.0), clip_range=Linear(0.2, 0.1, env_steps=100.0))
    state = fresh(agent)
    done = 0
    for i in range(3):
        data = noise(seed=i)
        state, metrics = update(agent, state, on_device(data), KEY)
        assert float(metrics["train/learning_rate"]) == pytest.approx(1.0 - done / 100)
        assert float(metrics["train/clip_range"]) == pytest.approx(0.2 - 0.1 * done / 100)
        done += int((~data.time_steps.last[:-1]).sum())
        assert state.env_steps == done and metrics["train/n_updates"] == i + 1


@pytest.mark.slow
def test_learning_rates_can_be_mapped_over():
    rates = [1e-3, 1e-2, 0.0]
    many = dataclasses.replace(make(), learning_rate=1.0)
    many = jax.tree.unflatten(jax.tree.structure(many), [jnp.array(rates) if x == 1.0 else x for x in jax.tree.leaves(many)])
    axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, many)
    state, data = fresh(make()), on_device(noise())
    states, _ = jax.jit(jax.vmap(lambda agent: agent.update(state, data, KEY), in_axes=(axes,)))(many)
    for i, rate in enumerate(rates[:2]):
        alone, _ = update(make(learning_rate=rate), state, data, KEY)
        for a, b in zip(jax.tree.leaves(alone.copies.online), jax.tree.leaves(states.copies.online), strict=True):
            np.testing.assert_allclose(a, b[i], atol=1e-6)
    assert same_bits(state.copies.online, jax.tree.map(lambda x: x[2], states.copies.online))


def test_obs_normaliser_is_updated_after_the_epochs():
    agent = make()
    state = fresh(agent)
    data = noise()
    after, _ = update(agent, state, on_device(data), KEY)
    seen = data.time_steps.obs[:-1][~data.time_steps.last[:-1]]
    assert after.obs_normalizer.stats.count == len(seen)
    np.testing.assert_allclose(after.obs_normalizer.stats.mean, seen.mean(0), atol=1e-6)
    np.testing.assert_allclose(after.obs_normalizer.stats.variance, seen.var(0), rtol=1e-5)


def test_time_steps_may_come_from_numpy():
    agent, data = make(), noise()
    assert isinstance(data.time_steps, TimeStep) and isinstance(data.actions, np.ndarray)
    assert same_bits(update(agent, fresh(agent), data, KEY), update(agent, fresh(agent), on_device(data), KEY))


@pytest.mark.parametrize("network", [MLP((4,), head=PolicyAndValue()), GRU(3, hidden=(4,), head=PolicyAndValue())])
def test_rollouts_may_come_from_numpy_also_where_all_rows_are_one_minibatch(network):
    agent, data = make(network=network, num_minibatches=1), noise()
    state = jax.eval_shape(agent.init, KEY)
    # The rollout is no argument: as where update is called without jit.
    jax.eval_shape(lambda state: agent.update(state, dataclasses.replace(data, carry=carry()), KEY), state)


class Narrow(nnx.Module):
    """Parameters and layers in bfloat16, answers in float32."""

    def __init__(self, spec, rngs):
        narrow = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.policy, self.value = nnx.Linear(3, 3, **narrow), nnx.Linear(3, 1, **narrow)

    def __call__(self, obs):
        return self.policy(obs).astype(jnp.float32), self.value(obs)[..., 0].astype(jnp.float32)


@pytest.mark.slow
def test_narrow_parameters_are_trained_in_float32_and_stay_narrow():
    agent, data = make(network=FlaxNNX(Narrow), learning_rate=0.1), on_device(noise())
    state = agent.init(KEY)
    after, metrics = update(agent, state, data, KEY)
    before, new_params = (np.asarray(ravel_pytree(s.copies.online.params)[0], np.float32) for s in (state, after))
    assert {x.dtype for x in jax.tree.leaves(after.copies.online.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(after.copies.optimizer_state) if x.ndim} == {jnp.dtype(jnp.float32)}
    # Adam's first steps are about as long as the rate, and there are four.
    assert metrics["train/skipped_steps"] == 0 and 0.1 < np.abs(new_params - before).max() < 0.5


@pytest.mark.parametrize(
    ("made_with", "updated_with", "said"),
    [
        ({}, {"normalize_obs": False}, "created with normalize_obs=True but the agent sets normalize_obs=False"),
        ({"normalize_obs": False}, {}, "created with normalize_obs=False but the agent sets normalize_obs=True"),
        ({}, {"clip_obs": 3.0}, "created with clip_obs=10.0 but the agent sets clip_obs=3.0"),
        (
            {},
            {"normalize_reward": "reward"},
            "created with normalize_reward='return' but the agent sets",
        ),
        ({"l2_value": 0.0}, {"kl_beta": 1.0}, "created with kl_beta=None but the agent sets kl_beta"),
        ({"kl_beta": 1.0}, {"l2_value": 0.0}, "created with kl_beta but the agent has kl_beta=None"),
    ],
)
def test_state_created_with_other_settings_is_rejected(made_with, updated_with, said):
    state = jax.eval_shape(make(**made_with).init, KEY)
    with pytest.raises(ValueError, match=f"update: this state was {said}"):
        jax.eval_shape(make(**updated_with).update, state, noise(), KEY)


def test_info_of_a_rollout_may_hold_any_objects():
    agent = make()
    data = dataclasses.replace(noise(), info={"said": "north"})
    jax.eval_shape(lambda state: agent.update(state, data, KEY), jax.eval_shape(agent.init, KEY))


def test_carry_of_another_number_of_environments_is_rejected():
    agent, data = make(), dataclasses.replace(noise(), carry=((), np.zeros(NUM_ENVS + 1, np.float32)))
    with pytest.raises(ValueError, match=r"normalize_reward='return' needs rollouts of collect_policy"):
        jax.eval_shape(agent.update, jax.eval_shape(agent.init, KEY), data, KEY)


def test_states_of_an_agent_with_other_state_are_rejected(unchecked):
    mine, other = make(), make(l2_value=0.0)
    for agent, state in ((mine, other.init(KEY)), (other, mine.init(KEY))):
        with pytest.raises(TypeError, match=r"PPO(KL)?: state must be of type \w+State, got \w+State; agent\.init\(key\)"):
            agent.update(state, noise(), KEY)

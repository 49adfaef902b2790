"""The options of PPO's update: loss and gradient against a whole-batch formula, and what each option is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from scipy import stats

from polyak import loops
from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete
from polyak.core.struct import struct
from polyak.core.types import Rollout
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole
from polyak.learning.rollout_batch import sample_weights
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import update_on
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue
from polyak.networks.layers import DenseSettings
from polyak.ops import gradient_step
from polyak.ops.distributions import for_space
from tests.agents.oracle import advantages
from tests.agents.rollouts import fresh, on_device, ppo, random_variables, rollout, same_bits, shapes_of, with_online

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_STEPS, NUM_ENVS = 4, 8
KEY = jax.random.key(5)
OBS = Box(-np.ones(3, np.float32), np.ones(3, np.float32))
SPEC = EnvSpec(OBS, Discrete(3))
BOX = EnvSpec(OBS, Box([-1.0, -1.0], [1.0, 1.0]), action_scaling="rescale")
ZOO = EnvSpec(
    OBS,
    Dict({"gear": Discrete(3), "knobs": MultiDiscrete((2, 3)), "steer": Box([-1.0], [1.0])}),
    has_action_mask=True,
)
# An ε beside which the root of the second moment is nothing turns Adam's first step into the gradient itself.
GRADIENT_STEP = {"adam_eps": 1e8, "learning_rate": 1e8, "max_grad_norm": None}

update = jax.jit(lambda agent, state, data, weights=None: agent.update(state, data, KEY, weights=weights))
batch_of = jax.jit(lambda agent, state, data: agent._make_batch(state, data, sample_weights(data.valid, None), None))


def make(spec=SPEC, **settings):
    """One step along the gradient, from what another policy collected."""
    defaults = {
        "network": MLP((4, 3)),
        "num_steps": NUM_STEPS,
        "num_epochs": 1,
        "num_minibatches": 1,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "values_when": "collect",
    }
    return ppo(spec, **(defaults | GRADIENT_STEP | settings))


answers = jax.jit(lambda network, variables, obs: network.apply(variables, obs)[0], static_argnums=0)


def kept_by(network, variables, obs):
    """What a policy with these variables would have kept."""
    params, value = answers(network, variables, obs.reshape(-1, 3))
    return jax.tree.map(lambda x: np.array(x).reshape(len(obs), -1, *x.shape[1:]), {"value": value, "params": params})


def noise(agent, seed=0, ends=0.2, other=1):
    """A rollout of another policy, with what that one kept; masks allow the actions that were taken, and some others."""
    spec = agent.spec
    data = rollout(spec, seed, num_steps=NUM_STEPS, num_envs=NUM_ENVS, ends=ends)
    actions, steps = data.actions, data.time_steps
    if agent.squash:
        actions = np.tanh(actions)
    if spec.has_action_mask:
        rng, eye = np.random.default_rng(seed), lambda n: np.eye(n, dtype=bool)
        knobs = [eye(n)[actions["knobs"][..., i]] for i, n in enumerate((2, 3))]
        taken = {"gear": eye(3)[actions["gear"]], "knobs": np.concatenate(knobs, -1)}
        allowed = {name: x | (rng.random(x.shape) < 0.5) for name, x in taken.items()}
        mask = {name: np.concatenate([x, np.ones_like(x[:1])]) for name, x in allowed.items()} | {"steer": None}
        steps = dataclasses.replace(steps, action_mask=mask)
    info = kept_by(agent.network, random_variables(shapes_of(agent.network, spec), other), steps.obs[:-1])
    if spec.has_action_mask:
        # What a narrow distribution hardly ever does would make a ratio beyond those that are told apart.
        of = info["params"]["steer"]
        actions["steer"] = of["loc"] + np.exp(of["log_scale"]) * actions["steer"]
    return Rollout(steps, actions, info)


def learned_from(agent, state, data):
    """Advantages and value targets `[T, B]`, by their definitions."""
    steps, value = data.time_steps, np.asarray(data.info["value"], np.float64)
    last = kept_by(agent.network, state.copies.online, steps.obs[-1:])["value"]
    flags = (steps.terminated[1:], steps.truncated[1:], float(agent.gamma))
    trace, whole = (
        advantages(steps.reward[1:], np.concatenate([value, last]), *flags, gae_lambda) for gae_lambda in (agent.gae_lambda, 1)
    )
    return trace if agent.advantages == "gae" else whole, value + (trace if agent.value_targets == "td_lambda" else whole)


def formula(agent, state, data, weight=None):
    """The loss and its terms, of the whole batch at once, as a function of the parameters."""
    weight = (~data.time_steps.last[:-1]).astype(np.float32) if weight is None else weight
    advantage, goal = learned_from(agent, state, data)
    if agent.normalize_advantage:
        mean = np.average(advantage, weights=weight)
        advantage = (advantage - mean) / (np.sqrt(np.average((advantage - mean) ** 2, weights=weight)) + 1e-8)
    flat = lambda tree: jax.tree.map(lambda x: np.asarray(x, jnp.result_type(x)).reshape(-1, *x.shape[2:]), tree)  # noqa: E731
    advantage, goal, weight = (np.asarray(x, np.float32).reshape(-1) for x in (advantage, goal, weight))

    def mean(x):
        return jnp.sum(jnp.where(weight > 0, x, 0.0) * weight) / weight.sum()

    def loss(params):
        mask, old, action, obs = jax.tree.map(jnp.asarray, flat((data.action_mask, data.info, data.actions, data.obs)))
        (out, value), _, _ = agent.network.apply(dataclasses.replace(state.copies.online, params=params), obs)
        new, before = (for_space(agent.spec.action, p, mask, squash=agent.squash) for p in (out, old["params"]))
        log_prob = new.log_prob(action)
        told = jnp.exp(log_prob - before.log_prob(action))
        if agent.clip_log_prob is not None:
            log_prob = jnp.clip(log_prob, -agent.clip_log_prob, agent.clip_log_prob)
        ratio = jnp.exp(log_prob - before.log_prob(action))
        limit = jnp.inf if agent.clip_range is None else agent.clip_range
        near = jnp.inf if agent.clip_range_vf is None else agent.clip_range_vf
        new_params = old["value"] + jnp.clip(value - old["value"], -near, near)
        terms = {
            "policy_gradient_loss": -mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - limit, 1 + limit) * advantage)),
            "value_loss": mean(jnp.maximum((value - goal) ** 2, (new_params - goal) ** 2)),
            "entropy_loss": -mean(new.entropy()),
            "ratio": mean(told),
        }
        total = terms["policy_gradient_loss"] + agent.vf_coef * terms["value_loss"] + agent.ent_coef * terms["entropy_loss"]
        kl = mean(before.kl_divergence(new))
        if not isinstance(agent, PPOKL):
            return total, terms | {"loss": total}
        if agent.kl_beta is not None:
            terms["kl_penalty_loss"] = agent.kl_beta * kl
            total += terms["kl_penalty_loss"]
        if agent.kl_cutoff_coef is not None:
            terms["kl_cutoff_loss"] = (
                agent.kl_cutoff_coef * jnp.maximum(kl - agent.kl_cutoff_factor * agent.kl_target, 0.0) ** 2
            )
            total += terms["kl_cutoff_loss"]
        if agent.l2_policy is not None:
            terms["l2_loss"] = agent.l2_policy * squares(params, "actor", "policy") + agent.l2_value * squares(
                params, "critic", "value"
            )
            total += terms["l2_loss"]
        return total, terms | {"loss": total}

    return loss


def squares(params, *names):
    """Σ of all squared kernels below these names."""
    leaves = jax.tree_util.tree_leaves_with_path({name: params[name] for name in names})
    return sum(jnp.sum(x**2) for path, x in leaves if "kernel" in jax.tree_util.keystr(path))


def flat_params(state):
    return np.asarray(ravel_pytree(state.copies.online.params)[0], np.float64)


def gradient_taken(before, after):
    return flat_params(before) - flat_params(after)


def check_is_the_formula(agent, state, data, after, metrics, weight=None):
    gradient, terms = jax.jit(jax.grad(formula(agent, state, data, weight), has_aux=True))(state.copies.online.params)
    gradient = np.asarray(ravel_pytree(gradient)[0])
    for name, term in terms.items():
        np.testing.assert_allclose(metrics[f"train/{name}"], term, rtol=3e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(metrics[f"train/last_epoch/{name}"], metrics[f"train/{name}"], rtol=1e-6)
    np.testing.assert_allclose(gradient_taken(state, after), gradient, rtol=2e-5, atol=3e-6)
    np.testing.assert_allclose(metrics["train/grad_norm"], np.linalg.norm(gradient), rtol=1e-5)
    np.testing.assert_array_equal(metrics["train/grad_norm_clipped"], metrics["train/grad_norm"])
    assert metrics["train/skipped_steps"] == 0 and np.abs(gradient).max() > 0.01


KL = {"kl_beta": 0.7, "kl_target": 0.01}
CUTOFF = {"kl_cutoff_coef": 3.0, "kl_cutoff_factor": 2.0, "kl_target": 0.01}
ALL = {
    **KL,
    **CUTOFF,
    "l2_policy": 0.01,
    "l2_value": 0.02,
    "ent_coef": 0.05,
    "clip_range_vf": 0.1,
}
# The cutoff needs the mean of a whole minibatch.
IN_PARTS = {name: value for name, value in ALL.items() if "cutoff" not in name}
CASES = {
    "KL penalty": KL,
    "KL cutoff": CUTOFF | {"clip_range": None},
    "L2": {"l2_policy": 0.3, "l2_value": 0.1, "normalize_advantage": None},
    "Monte Carlo": {
        "advantages": "monte_carlo",
        "value_targets": "monte_carlo",
        "gae_lambda": 0.95,
        "normalize_advantage": "batch",
    },
    "clipped log-probabilities": {"clip_log_prob": 1.0, "clip_range": None},
    "tanh": {"spec": BOX, "squash": True, "ent_coef": 0.1, **KL},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_loss_and_gradient_are_those_of_the_formula(settings):
    agent = make(**settings)
    state, data = fresh(agent), noise(agent)
    check_is_the_formula(agent, state, data, *update(agent, state, on_device(data)))


class TestInPartsAndOnDevices:
    """All options at once: whatever way the batch is cut, loss and gradient are those of the whole."""

    @pytest.mark.slow
    def test_update_in_one_microbatch_matches_the_oracle(self, monkeypatch):
        monkeypatch.undo()
        agent = make(ZOO, **ALL)
        state, data = fresh(agent), noise(agent)
        check_is_the_formula(agent, state, data, *update(agent, state, on_device(data)))

    @pytest.mark.slow
    @pytest.mark.parametrize("microbatch_size", [None, 8], ids=["that fit the cache", "of a size"])
    def test_update_in_microbatches_matches_the_oracle(self, microbatch_size, monkeypatch):
        if microbatch_size is None:
            monkeypatch.setattr(gradient_step, "SAMPLES_IN_CACHE", 8)
        agent = make(ZOO, **IN_PARTS, microbatch_size=microbatch_size)
        state, data = fresh(agent), noise(agent)
        anew = jax.jit(lambda agent, state, data: agent.update(state, data, KEY))
        check_is_the_formula(agent, state, data, *anew(agent, state, on_device(data)))

    @pytest.mark.parametrize(("microbatch_size", "rows"), [(8, {8}), (16, {16, 8}), (None, {32, 8})])
    def test_network_receives_one_microbatch_at_a_time(self, microbatch_size, rows, monkeypatch):
        seen, apply = set(), MLP.apply

        def counted(self, variables, obs, *rest, **settings):
            seen.add(obs.shape[0])
            return apply(self, variables, obs, *rest, **settings)

        monkeypatch.setattr(MLP, "apply", counted)
        agent = make(**IN_PARTS, microbatch_size=microbatch_size)
        state, data = fresh(agent), on_device(noise(agent))
        seen.clear()
        # Values were collected, but for the last one of eight environments; one row shows which kernels are whose.
        jax.eval_shape(agent.update, state, data, KEY)
        assert seen - {1} == rows

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("spec", "devices", "microbatch_size"),
        [(ZOO, 8, None), (SPEC, 2, 4)],
        ids=["masked Joint on 8", "Discrete on 2 in microbatches"],
    )
    def test_update_on_several_devices_matches_the_oracle(self, spec, devices, microbatch_size):
        settings = ALL if microbatch_size is None else IN_PARTS
        agent = make(spec, **settings, microbatch_size=microbatch_size)
        state, data = fresh(agent), noise(agent)
        weight = np.random.default_rng(3).random((NUM_STEPS, NUM_ENVS)).astype(np.float32)
        counts = np.where(data.time_steps.last[:-1], 0.0, weight)
        after, metrics = on_devices(devices, agent, state, on_device(data), jnp.asarray(weight))
        check_is_the_formula(agent, state, data, after, metrics, counts)
        one, metrics_of_one = update(agent, state, on_device(data), jnp.asarray(weight))
        # The step was the gradient's own length, so the parameters are as far apart as the gradients are.
        for x, y in zip(jax.tree.leaves((one, metrics_of_one)), jax.tree.leaves((after, metrics)), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=3e-6, rtol=2e-5)


def on_devices(devices, agent, state, data, weights):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("envs",))
    rows, whole = P(None, "envs"), P()
    by_env = Rollout(time_steps=rows, actions=rows, info=rows, carry=P("envs"))

    def step(agent, state, data, weights):
        return agent.update(state, data, KEY, weights=weights, axis_name="envs")

    split = jax.shard_map(step, mesh=mesh, in_specs=(whole, whole, by_env, rows), out_specs=whole, check_vma=False)
    return jax.jit(split)(agent, state, data, weights)


# The KL penalty's coefficient


def divergence(agent, state, after, data):
    """The exact E[KL(π_old ‖ π)] over what counts."""
    new = kept_by(agent.network, after.copies.online, data.time_steps.obs[:-1])["params"]
    of = lambda old, new: for_space(agent.spec.action, old, None).kl_divergence(for_space(agent.spec.action, new, None))  # noqa: E731
    return float(np.mean(np.asarray(jax.jit(of)(data.info["params"], new))[~data.time_steps.last[:-1]]))


def test_kl_beta_adapts_to_the_divergence_after_the_update():
    agent = make(**KL, learning_rate=1e7)
    state, data = fresh(agent), noise(agent)
    after, metrics = update(agent, state, on_device(data))
    kl = divergence(agent, state, after, data)
    assert kl > 0.01 and float(metrics["train/kl"]) == pytest.approx(kl, rel=1e-5)
    for target, factor in ((kl / 1.6, 1.5), (kl / 1.4, 1.0), (kl, 1.0), (kl / 0.6, 1.0), (kl / 0.4, 1 / 1.5)):
        after, metrics = update(dataclasses.replace(agent, kl_target=target), state, on_device(data))
        assert float(after.kl_beta) == float(metrics["train/kl_beta"]) == pytest.approx(0.7 * factor, rel=1e-6)


@pytest.mark.parametrize("bad", ["masked", "reward"])
def test_update_without_an_applied_step_leaves_kl_beta(bad):
    agent = make(**KL, kl_tolerance=0.0, learning_rate=1e7)
    state, data = fresh(agent), noise(agent, ends=0.0)
    if bad == "masked":
        data.time_steps.truncated[:] = True
    else:
        data.time_steps.reward[2, 1] = np.nan
    after, _ = update(agent, state, on_device(data))
    assert same_bits(
        (after.copies.online, after.copies.optimizer_state, after.kl_beta),
        (state.copies.online, state.copies.optimizer_state, state.kl_beta),
    )


# Weights


def duplicated(data):
    """Environment 0 twice, and none of environment 3."""
    order = [0, 1, 2, 0, 4, 5, 6, 7]
    return Rollout(*(jax.tree.map(lambda x: x[:, order], tree) for tree in (data.time_steps, data.actions, data.info)))


def test_sample_weight_scales_the_loss():
    agent = make(**KL)
    state, data = fresh(agent), noise(agent)
    weight = np.array([2, 1, 1, 0, 1, 1, 1, 1], np.float32)
    weighted, metrics = update(agent, state, on_device(data), jnp.asarray(weight))
    twice, metrics_of_twice = update(agent, state, on_device(duplicated(data)))
    np.testing.assert_allclose(gradient_taken(state, weighted), gradient_taken(state, twice), atol=1e-6)
    for name in ("loss", "kl", "entropy_loss", "explained_variance", "clip_fraction", "approx_kl"):
        np.testing.assert_allclose(metrics[f"train/{name}"], metrics_of_twice[f"train/{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("none", [-3.0, np.nan, -np.inf])
def test_samples_without_positive_weight_are_masked(none):
    agent = make(normalize_obs=True, normalize_reward="reward")
    state, data = fresh(agent), noise(agent)
    weight = np.ones((NUM_STEPS, NUM_ENVS), np.float32)
    weight[:, 5] = weight[1, 2] = 0.0
    clean = update(agent, state, on_device(data), jnp.asarray(weight))
    assert clean[0].obs_normalizer.stats.count == int((~data.time_steps.last[:-1] & (weight > 0)).sum())
    weight = np.where(weight == 0, np.float32(none), weight)
    data.time_steps.obs[:, 5] = data.time_steps.reward[:, 5] = np.nan
    data.info["value"][:, 5] = np.nan
    data.actions[:, 5] = data.actions[1, 2] = 7
    assert same_bits(clean, update(agent, state, on_device(data), jnp.asarray(weight)))


@pytest.mark.parametrize("shape", [(NUM_ENVS, NUM_STEPS), (NUM_STEPS,), (1, NUM_ENVS), (), (NUM_STEPS, NUM_ENVS, 1)])
def test_weights_of_another_shape_are_rejected(shape):
    agent = make()
    state = jax.eval_shape(agent.init, KEY)
    with pytest.raises(ValueError, match=r"weights must have the shape \(4, 8\) or \(8,\), got ") as caught:
        jax.eval_shape(lambda s, d, w: agent.update(s, d, KEY, weights=w), state, noise(agent), np.ones(shape, np.float32))
    assert str(shape) in str(caught.value)


def test_sample_with_zero_return_and_advantage_is_not_masked():
    agent = make(ent_coef=0.1, normalize_advantage=None)
    state, data = fresh(agent), noise(agent)
    data.time_steps.reward[:] = 0.0
    data.info["value"][:] = 0.0
    zero_head = jax.tree.map(jnp.zeros_like, state.copies.online.params["value"])
    variables = dataclasses.replace(state.copies.online, params=state.copies.online.params | {"value": zero_head})
    state = with_online(state, variables)
    after, metrics = update(agent, state, on_device(data))
    assert float(metrics["train/policy_gradient_loss"]) == 0
    check_is_the_formula(agent, state, data, after, metrics)
    assert after.env_steps == int((~data.time_steps.last[:-1]).sum())


# Values


@pytest.fixture(scope="module")
def looped():
    """What two agents learned in the same loop, one from its own values, the other from those kept when it acted."""
    env = AutoReset(CartPole(max_episode_steps=6), NUM_ENVS)
    ended = {}
    for when in ("update", "collect"):
        agent = PPO(
            env.spec,
            network=MLP((4,)),
            num_steps=8,
            num_epochs=1,
            num_minibatches=1,
            learning_rate=1e-2,
            normalize_obs=True,
            normalize_reward="return",
            values_when=when,
        )
        body = jax.jit(lambda agent, state: iteration(agent, env, update_on(None), state))
        state = jax.jit(lambda agent: start_compiled(agent, env, KEY))(agent)
        for _ in range(3):
            state, _, _, metrics = body(agent, state)
        ended[when] = state.agent, metrics.unpack()
    return ended


@pytest.mark.slow
def test_values_stored_while_collecting_equal_those_of_the_update(looped):
    for x, y in zip(*(jax.tree.leaves(looped[when]) for when in ("update", "collect")), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["update", "collect"])
def test_ratios_start_at_one_after_statistics_have_changed(looped, when):
    state, metrics = looped[when]
    assert float(metrics["train/ratio"]) == pytest.approx(1.0, abs=1e-6) and float(metrics["train/clip_fraction"]) == 0
    assert float(metrics["train/approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    # Had the statistics new_params before the epochs, the network would have seen other numbers than it acted on.
    assert state.obs_normalizer.stats.count > 50 and float(jnp.max(jnp.abs(state.obs_normalizer.stats.mean))) > 1e-3


def test_values_when_collect_needs_info_in_the_rollout():
    agent = make()
    data = dataclasses.replace(noise(agent), info=())
    with pytest.raises(ValueError, match=r"values_when='collect' needs .* collect_policy\(state\), got .*\(\)"):
        jax.eval_shape(agent.update, jax.eval_shape(agent.init, KEY), data, KEY)


@pytest.mark.slow
def test_recomputed_values_use_the_parameters_of_the_epoch():
    steps = {"learning_rate": 0.05, "adam_eps": 1e-5, "value_targets": "monte_carlo"}
    agent = make(**steps)
    state, data = fresh(agent), noise(agent)
    obs = data.time_steps.obs[:-1]
    old = kept_by(agent.network, state.copies.online, obs)
    once, _ = update(agent, state, on_device(dataclasses.replace(data, info=old)))
    # The second epoch by hand: values of the parameters after the first, distributions from before it.
    info = old | {"value": kept_by(agent.network, once.copies.online, obs)["value"]}
    by_hand, _ = update(agent, once, on_device(dataclasses.replace(data, info=info)))
    twice = make(values_when="update", num_epochs=2, recompute_values=True, **steps)
    after, _ = update(twice, state, on_device(dataclasses.replace(data, info=())))
    np.testing.assert_allclose(flat_params(after), flat_params(by_hand), atol=1e-6)
    frozen, _ = update(agent, once, on_device(dataclasses.replace(data, info=old)))
    assert np.abs(flat_params(after) - flat_params(frozen)).max() > 1e-3


# The policy's part


def test_without_a_clip_range_the_first_step_is_the_plain_policy_gradient():
    agent = make(clip_range=None, vf_coef=0.0, values_when="update", normalize_advantage=None)
    state, data = fresh(agent), noise(agent)
    after, metrics = update(agent, state, on_device(data))
    data = dataclasses.replace(data, info=kept_by(agent.network, state.copies.online, data.time_steps.obs[:-1]))
    advantage, _ = learned_from(agent, state, data)
    counts = ~data.time_steps.last[:-1]

    def plain(params):
        variables = dataclasses.replace(state.copies.online, params=params)
        (logits, _), _, _ = agent.network.apply(variables, jnp.asarray(data.time_steps.obs[:-1][counts]))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), data.actions[counts][:, None], axis=1)[:, 0]
        return -jnp.mean(chosen * jnp.asarray(advantage[counts], jnp.float32))

    gradient = ravel_pytree(jax.jit(jax.grad(plain))(state.copies.online.params))[0]
    np.testing.assert_allclose(gradient_taken(state, after), gradient, rtol=1e-5, atol=1e-6)
    assert "train/clip_fraction" not in metrics and "train/clip_range" not in metrics


# Normalisation


@pytest.mark.parametrize("of", ["return", "reward"])
def test_empty_statistics_leave_the_first_batch_unscaled(of):
    carry = ((), jnp.zeros(NUM_ENVS)) if of == "return" else ()
    plain = make(normalize_reward=None)
    data = on_device(noise(plain))
    wanted, _ = batch_of(plain, fresh(plain), data)
    agent = make(normalize_reward=of)
    got, _ = batch_of(agent, fresh(agent), dataclasses.replace(data, carry=carry))
    np.testing.assert_allclose(got.advantage, wanted.advantage, atol=1e-6)
    np.testing.assert_allclose(got.value_target, wanted.value_target, atol=1e-6)


@pytest.mark.parametrize("of", ["return", "reward"])
def test_rewards_are_divided_by_the_std_of_reward_or_return(of):
    agent = make(normalize_reward=of, gamma=0.9)
    data = noise(agent, ends=0.0)
    reward = np.array([[1.0], [2.0], [0.0], [-3.0]]) * np.ones((1, NUM_ENVS))
    data.time_steps.reward[1:] = reward
    data = dataclasses.replace(data, carry=((), np.ones(NUM_ENVS, np.float32)) if of == "return" else ())
    after, _ = update(agent, fresh(agent), on_device(data))
    # R = r + 0.9 R, from 1: the first time step begins no episode and has its own reward, which counts too.
    first = data.time_steps.reward[0].astype(np.float64) + 0.9
    returns = [reward[0] + 0.9 * first]
    for r in reward[1:]:
        returns.append(r + 0.9 * returns[-1])
    seen = np.array(returns) if of == "return" else reward
    np.testing.assert_allclose(after.reward_scaler.stats.stddev(), seen.std(), rtol=1e-5)
    scaled = after.reward_scaler.scale(jnp.asarray(reward, jnp.float32), 0.5)
    np.testing.assert_allclose(scaled, np.clip(reward / seen.std(), -0.5, 0.5), rtol=1e-5)


def test_integer_observations_work_beside_normalised_ones():
    spec = EnvSpec(Dict({"n": Discrete(3), "x": OBS}), Discrete(3))
    agent = PPO(spec, network=MLP((4,)), num_steps=NUM_STEPS, num_epochs=1, num_minibatches=1, normalize_obs=True)
    state, data = fresh(agent), rollout(spec, num_steps=NUM_STEPS, num_envs=NUM_ENVS)
    after, metrics = update(agent, state, on_device(data))
    seen = after.obs_normalizer.normalize(data.time_steps.obs)
    assert seen["n"] is data.time_steps.obs["n"] and seen["x"].dtype == jnp.float32
    kernels = [s.copies.online.params["actor"]["dense"]["layers"][0]["kernel"] for s in (state, after)]
    # The first three rows are those of the one-hot integer: had it been normalised to zero, they would not have new_params.
    assert metrics["train/skipped_steps"] == 0 and bool(jnp.all(jnp.any(kernels[0] != kernels[1], axis=1)))


# Actions through tanh


def test_squashed_log_probs_are_those_of_the_change_of_variables():
    agent = make(BOX, squash=True)
    state, data = fresh(agent), noise(agent)
    batch, bad = batch_of(agent, state, on_device(data))
    params = data.info["params"]
    u = np.arctanh(data.actions.astype(np.float64))
    density = stats.norm(params["loc"], np.exp(params["log_scale"])).logpdf(u) - np.log(1 - np.tanh(u) ** 2)
    counts = ~data.time_steps.last[:-1].reshape(-1)
    assert not any(bad.values())
    np.testing.assert_allclose(np.asarray(batch.log_prob)[counts], density.sum(-1).reshape(-1)[counts], atol=1e-4)


def test_the_entropy_bonus_of_squashed_actions_has_a_gradient():
    agent = make(BOX, squash=True, vf_coef=0.0, ent_coef=0.0)
    state, data = fresh(agent), noise(agent)
    log_std = jax.tree.map(lambda x: x * 0 - 2.0, state.copies.online.params["policy"]["log_std"])
    params = state.copies.online.params | {"policy": state.copies.online.params["policy"] | {"log_std": log_std}}
    state = with_online(state, dataclasses.replace(state.copies.online, params=params))
    # Small weights: tanh is not saturated, and of a narrow normal the entropy grows by 1 with each log deviation.
    steps = [
        update(dataclasses.replace(agent, ent_coef=c), state, on_device(data))[0].copies.online.params["policy"]["log_std"]
        for c in (0.0, 1.0)
    ]
    difference = np.concatenate([np.ravel(b - a) for a, b in zip(*map(jax.tree.leaves, steps), strict=True)])
    assert (difference > 0.5).all() and (difference < 1.0).all()


@struct
class Aim:
    """Episodes of one step; the nearer the action is to 1, in [-2, 2], the better."""

    @property
    def spec(self):
        return EnvSpec(Box([-1.0], [1.0]), Box([-2.0], [2.0]), "aim")

    def reset(self, key, num_envs):
        return jnp.zeros(num_envs)

    def step(self, state, action, key):
        over = jnp.ones(state.shape, bool)
        return action[:, 0], -jnp.square(action[:, 0] - 1.0), over, ~over

    def observe(self, state):
        return jnp.zeros((len(state), 1))


@pytest.mark.slow
def test_a_squashed_policy_learns_and_stays_inside_the_bounds():
    env = AutoReset(Aim(), 32, action_scaling="rescale")
    agent = PPO(
        env.spec, network=MLP((8,)), num_steps=16, num_epochs=4, num_minibatches=4, learning_rate=1e-2, squash=True, gamma=0.0
    )
    result = loops.compiled(agent, env, env_steps=30_000, key=KEY)
    policy = agent.policy(result.state)
    assert policy.predict(np.zeros(1, np.float32))[0] == pytest.approx(1.0, abs=0.1)
    wild = with_online(result.state, random_variables(result.state.copies.online, 0))
    drawn, _ = agent.collect_policy(wild).predict(np.zeros((500, 1), np.float32), deterministic=False, key=KEY)
    assert drawn.min() >= -2 and drawn.max() <= 2 and len(np.unique(drawn)) > 100


# Of the 37 implementation details (Huang et al. 2022), those that are no option


def test_defaults_match_the_37_implementation_details():
    agent = PPO(SPEC)
    assert (agent.adam_eps, agent.max_grad_norm, agent.clip_range, agent.gae_lambda) == (1e-5, 0.5, 0.2, 0.95)
    assert (agent.normalize_advantage, agent.clip_obs, agent.clip_reward) == ("minibatch", 10.0, 10.0)
    network, head = agent.network, PolicyAndValue(std="free", log_std=0.0)
    assert network == MLP((64, 64), head=head) and network.critic == network.dense == DenseSettings((64, 64), "tanh", True)
    image = EnvSpec(Box(0, 255, (84, 84, 4), np.uint8), Discrete(4))
    shared = PPO(image).network
    assert shared == NatureCNN((512,), head=head) and shared.critic is None and shared.dense.activation == "relu"


def test_pixels_are_scaled_to_between_zero_and_one():
    image = Box(0, 255, (36, 36, 1), np.uint8)
    network = NatureCNN((), head=PolicyAndValue())
    variables = jax.jit(lambda key: network.init(key, EnvSpec(image, Discrete(2))))(KEY)
    _, value = answers(network, variables, np.full((1, 36, 36, 1), 51, np.uint8))

    @jax.jit
    def by_hand(params, x):
        layers, axes = params["actor"]["encoder"]["images"]["all"]["layers"], ("NHWC", "HWIO", "NHWC")
        for i, by in enumerate((4, 2, 1)):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, layers[i]["kernel"], (by, by), "VALID", dimension_numbers=axes))
        return (x.reshape(1, -1) @ params["value"]["kernel"])[:, 0]

    np.testing.assert_allclose(value, by_hand(variables.params, jnp.full((1, 36, 36, 1), 0.2)), rtol=1e-5)
    assert abs(float(value[0])) > 1e-4


def test_update_learns_from_the_unclipped_action():
    tiny = EnvSpec(OBS, Box([-0.01, -0.01], [0.01, 0.01]))
    agent = make(tiny, values_when="update")
    state, data = fresh(agent), noise(agent)
    batch, _ = batch_of(agent, state, on_device(dataclasses.replace(data, info=())))
    params = kept_by(agent.network, state.copies.online, data.time_steps.obs[:-1])["params"]
    density = stats.norm(params["loc"], np.exp(params["log_scale"])).logpdf(data.actions).sum(-1)
    counts = ~data.time_steps.last[:-1]
    np.testing.assert_allclose(np.asarray(batch.log_prob)[counts.reshape(-1)], density[counts], rtol=1e-5)
    drawn = agent.collect_policy(state).action(jax.tree.map(lambda x: jnp.asarray(x[0]), data.time_steps), (), KEY).action
    assert float(jnp.abs(drawn).max()) > 0.01 and np.abs(tiny.native_action(np.asarray(drawn))).max() <= 0.01


# Settings that do not go together


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"spec": EnvSpec(Discrete(4), Discrete(2)), "normalize_obs": True}, "normalize_obs must be False"),
        ({"spec": EnvSpec(Box([0], [9], dtype=np.uint8), Discrete(2)), "normalize_obs": True}, "normalize_obs must be False"),
        ({"spec": dataclasses.replace(BOX, action_scaling="clip"), "squash": True}, "squash must be False .*'clip'"),
        ({"spec": dataclasses.replace(SPEC, action_scaling="rescale"), "squash": True}, "squash must be False without a Box"),
        ({"kl_beta": None, "kl_target": 0.1}, "kl_target has no effect without kl_beta and kl_cutoff_coef"),
        ({"l2_shared": 0.1}, "l2_shared must be None for a network without shared kernels"),
    ],
)
def test_incompatible_settings_are_rejected_by_name(settings, said):
    owner = "PPOKL" if {"kl_beta", "l2_shared"} & settings.keys() else "PPO"
    with pytest.raises(ValueError, match=f"^{owner}: {said}"):
        ppo(**({"spec": SPEC} | settings))


def test_compatible_settings_are_accepted():
    PPOKL(SPEC, kl_cutoff_coef=1000.0, l2_policy=0.1, l2_value=0.0)
    PPOKL(SPEC, network=MLP((4,), head=PolicyAndValue(shared_torso=True)), l2_shared=0.1)
    PPO(BOX, squash=True, normalize_obs=True)

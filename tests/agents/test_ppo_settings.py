"""Settings of PPO: each wrong one gets one error that says which, what was got and what is wanted."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Agent
from polyak.networks.adapters import FlaxNNX
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU
from polyak.ops.schedules import Constant, Exponential, Linear, Piecewise
from polyak.runs import config_classes
from polyak.storage.config import from_json, to_json
from tests.agents.rollouts import rollout

SPEC = EnvSpec(Box([-1.0], [1.0]), Discrete(2), "somewhere")
BOX = Box([-1.0], [1.0])
NAN, INF = float("nan"), float("inf")

WRONG = {
    "num_steps": [0, -1, 2.0, True, "8", None],
    "num_epochs": [0, -3, 1.5, None],
    "num_minibatches": [0, -1, 4.0, "4", None],
    "microbatch_size": [0, -1, 4.0, "4", True],
    "max_skipped_updates": [0, -1, 1.0],
    "ema_tau": [-0.1, 1.5, NAN, "0.005", True],
    "optimizer": ["adam", 3e-4, optax.adam],
    "learning_rate": [0.0, -1e-3, NAN, INF, "3e-4", None, True, Linear(-1.0), Linear(1e-3, -1.0)],
    "clip_range": [0.0, -0.2, NAN, INF, "0.2", Linear(0.0)],
    "gamma": [1.5, -1.0, NAN, INF, "0.9", None, True],
    "gae_lambda": [2.0, -0.1, NAN, None],
    "clip_range_vf": [0.0, -0.2, NAN, "0.2"],
    "ent_coef": [-0.1, NAN, INF, None],
    "vf_coef": [-0.1, NAN, "1"],
    "max_grad_norm": [0.0, -1.0, NAN, INF],
    "target_kl": [0.0, -1.0, NAN, "0.1"],
    "adam_b1": [-0.1, 1.0, NAN, None],
    "adam_eps": [0.0, -1e-5, NAN, None],
    "normalize_advantage": [True, "yes", 0],
    "normalize_obs": [0, "no"],
    "normalize_reward": [True, "rewards"],
    "advantages": ["td", None],
    "value_targets": ["gae", None],
    "values_when": ["later", None],
    "recompute_values": [1, None],
    "clip_log_prob": [0.0, -1.0, NAN, "1"],
    "clip_obs": [0.0, -1.0, NAN, "5"],
    "clip_reward": [0.0, -1.0, NAN, "5"],
    "histograms": [1, None],
    "sde_sample_freq": [0, -1, 1.5, True, "4"],
    "squash": [1, None],
    "actor_obs": ["state", 3, ()],
    "critic_obs": ["state", 3],
    "network": ["mlp", 3, MLP],
    "spec": [None, "CartPole-v1", SPEC.obs],
}
WRONG_PENALTY = {
    "kl_beta": [0.0, -1.0, NAN, INF, "1"],
    "kl_target": [0.0, -0.1, NAN],
    "kl_tolerance": [-0.1, 1.5, NAN, None],
    "kl_cutoff_coef": [0.0, -1.0, NAN],
    "kl_cutoff_factor": [0.0, -1.0, NAN],
    "l2_policy": [-0.1, NAN, "0"],
    "l2_value": [-0.1, NAN],
    "l2_shared": [-0.1, NAN],
}
CASES = [
    (agent, field, value)
    for agent, wrong in ((PPO, WRONG), (PPOKL, WRONG_PENALTY))
    for field, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("agent", "field", "value"), CASES)
def test_invalid_setting_error_names_field_value_and_requirement(agent, field, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        agent(**({"spec": SPEC} | {field: value}))
    message = str(caught.value)
    shown = getattr(value, "start", value) if isinstance(value, Linear) and value.start <= 0 else value
    shown = shown.end if isinstance(shown, Linear) else shown
    assert message.startswith(f"{agent.__name__}: ") and field in message and repr(shown) in message and "must" in message
    assert "\n" not in message


def test_every_field_has_wrong_values_here():
    assert set(WRONG) == {field.name for field in dataclasses.fields(PPO)}
    assert set(WRONG) | set(WRONG_PENALTY) == {field.name for field in dataclasses.fields(PPOKL)}


@pytest.mark.parametrize(
    ("misspelt", "field"), [("gama", "gamma"), ("learningrate", "learning_rate"), ("clip_rnge", "clip_range"), ("lr", None)]
)
def test_misspelt_field_suggests_the_right_one(misspelt, field):
    with pytest.raises(TypeError, match=f"PPO: unknown field '{misspelt}'") as caught:
        PPO(SPEC, **{misspelt: 0.5})
    assert field is None or f"did you mean '{field}'?" in str(caught.value)
    assert "num_minibatches" in str(caught.value)


def test_replacing_a_field_validates_too():
    with pytest.raises(ValueError, match=r"PPO: gamma must be a number in \[0, 1\], got 1.5"):
        dataclasses.replace(PPO(SPEC), gamma=1.5)


@pytest.mark.parametrize("settings", [{"gamma": 0}, {"gamma": 1}, {"gae_lambda": 0.0}, {"ent_coef": 0}, {"target_kl": None}])
def test_bounds_of_settings_are_inclusive(settings):
    PPO(SPEC, **settings)


def test_float_fields_are_leaves_and_the_rest_is_structure():
    floats = {"learning_rate", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm", "adam_eps"}
    floats |= {"clip_reward"}
    leaves = {jax.tree_util.keystr(path).strip(".") for path, _ in jax.tree_util.tree_leaves_with_path(PPO(SPEC))}
    assert leaves == floats
    penalties = {"kl_beta", "kl_target", "kl_tolerance", "kl_cutoff_factor"}
    paths = jax.tree_util.tree_leaves_with_path(PPOKL(SPEC))
    assert {jax.tree_util.keystr(path).strip(".") for path, _ in paths} == floats - {"clip_range"} | penalties
    fields = inspect.signature(PPO).parameters
    assert set(fields) > floats


def test_default_network_depends_on_the_spec():
    image = EnvSpec(Box(0, 255, (40, 40, 3), np.uint8), Discrete(2))
    assert PPO(SPEC).network == MLP(head=PolicyAndValue()) and PPO(image).network == NatureCNN(head=PolicyAndValue())


def test_num_minibatches_that_does_not_divide_the_samples_is_rejected():
    agent = PPO(SPEC, num_steps=6, num_minibatches=4)
    message = r"num_minibatches=4.* num_steps \* num_envs = 6 \* 3 = 18"
    with pytest.raises(ValueError, match=message):
        agent.check(3)
    with pytest.raises(ValueError, match=message):
        state = jax.eval_shape(agent.init, jax.random.key(0))
        jax.eval_shape(agent.update, state, rollout(SPEC, num_steps=6, num_envs=3), jax.random.key(0))


@pytest.mark.parametrize(
    ("settings", "num_envs", "message"),
    [
        (
            {"num_minibatches": 2, "microbatch_size": 6},
            4,
            "PPO: microbatch_size=6 must divide the 16 samples of a minibatch",
        ),
        ({"num_minibatches": 2, "microbatch_size": 32}, 4, "microbatch_size=32 must divide the 16 samples"),
        (
            {"num_minibatches": 1, "microbatch_size": 3, "network": GRU(2, hidden=())},
            4,
            "microbatch_size=3 must divide the 4 sequences",
        ),
    ],
)
def test_microbatch_size_that_does_not_divide_a_minibatch_is_rejected(settings, num_envs, message):
    agent = PPO(SPEC, num_steps=8, **settings)
    with pytest.raises(ValueError, match=message):
        agent.check(num_envs)
    with pytest.raises(ValueError, match=message):
        state = jax.eval_shape(agent.init, jax.random.key(0))
        jax.eval_shape(agent.update, state, rollout(SPEC, num_steps=8, num_envs=num_envs), jax.random.key(0))


def test_ppo_implements_the_agent_protocol():
    agent = PPO(SPEC)
    assert isinstance(agent, Agent)
    state = agent.init(jax.random.key(0))
    assert isinstance(jax.tree.leaves(state)[0], jax.Array)


def test_equal_agents_compile_once():
    agents = [PPO(SPEC, gamma=0.9), PPO(dataclasses.replace(SPEC), network=MLP((64, 64)), gamma=0.5)]
    structures = [jax.tree.structure(agent) for agent in agents]
    assert structures[0] == structures[1] and hash(structures[0]) == hash(structures[1])


@pytest.mark.parametrize("scheduled", [Linear(1e-3), 1e-3, jnp.float32(1e-3), np.float32(1e-3)])
def test_settings_accept_python_numpy_and_jax_numbers(scheduled):
    assert isinstance(PPO(SPEC, learning_rate=scheduled), PPO)


def test_tf_agents_defaults_can_be_changed():
    clip, kl = PPO.tf_agents(SPEC), PPOKL.tf_agents(SPEC, kl_target=0.02)
    assert (clip.num_epochs, clip.num_minibatches, clip.advantages, clip.normalize_reward) == (25, 1, "monte_carlo", "reward")
    assert clip.normalize_obs and clip.clip_obs == 5.0 and clip.max_grad_norm is None
    assert kl.clip_range is None and (kl.kl_beta, kl.kl_target, kl.advantages) == (1.0, 0.02, "gae")
    assert not kl.normalize_obs and kl.clip_reward is None
    with pytest.raises(TypeError, match="unknown field 'kl_targett'; did you mean 'kl_target'"):
        PPOKL.tf_agents(SPEC, kl_targett=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"spec": dataclasses.replace(SPEC, action=BOX, action_scaling="rescale"), "squash": True}
            | {"network": MLP(head=PolicyAndValue(squash_mean=True))},
            "PPO: squash must be False with a network that has squash_mean=True",
        ),
        ({"squash": True}, "PPO: squash must be False unless the spec's action_scaling is 'rescale', got 'clip'"),
        (
            {"spec": EnvSpec(Discrete(4), Discrete(2)), "normalize_obs": True},
            "PPO: normalize_obs must be False for obs",
        ),
    ],
)
def test_setting_that_needs_another_one_is_rejected_without_it(settings, message):
    with pytest.raises(ValueError, match=message):
        PPO(**({"spec": SPEC} | settings))


def test_scaling_by_returns_needs_the_carry_of_the_collect_policy():
    agent = PPO(SPEC, num_steps=6, num_minibatches=1, normalize_reward="return")
    state = jax.eval_shape(agent.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"normalize_reward='return' needs .*collect_policy\(state\).*got carry \(\)"):
        jax.eval_shape(agent.update, state, rollout(SPEC, num_steps=6, num_envs=3), jax.random.key(0))


def test_every_schedule_survives_a_run_config():
    rate = Piecewise((3e-4, Exponential(3e-4, 0.5, 1000, end=1e-5)), (5000,))
    agent = PPO(SPEC, learning_rate=rate, clip_range=Constant(0.2))
    again = from_json(to_json(agent), config_classes())
    assert again == agent and float(again.learning_rate(6000)) == pytest.approx(1.5e-4)
    with pytest.raises(ValueError, match=r"PPO: learning_rate.schedules\[1\].end must be a number in \[0, inf\), got -1.0"):
        PPO(SPEC, learning_rate=Piecewise((1.0, Linear(1.0, -1.0)), (10,)))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (linen.Dense(2), r"must be polyak.FlaxLinen\(module\), got the module itself, a Dense"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), r"must be polyak.FlaxNNX\(make\), .* got the module itself, a Linear"),
        (FlaxNNX, "must have init and apply, such as MLP.*, got <class"),
    ],
)
def test_flax_module_without_adapter_is_rejected_with_the_adapter(network, said):
    with pytest.raises(TypeError, match=f"^PPO: network {said}"):
        PPO(SPEC, network=network)


@pytest.mark.parametrize("limit", [np.float32(5.0), np.array(5.0), jnp.float32(5.0)])
def test_static_numbers_become_python_numbers(limit, unchecked):
    agent = PPO(SPEC, clip_obs=limit, normalize_obs=True)
    assert type(agent.clip_obs) is float and agent == PPO(SPEC, clip_obs=5.0, normalize_obs=True)
    with pytest.raises(TypeError, match="PPO: clip_obs must be a single number known at compile time, got "):
        PPO(SPEC, clip_obs=np.stack([limit, limit]), normalize_obs=True)


def test_integers_beyond_32_bits_become_floats():
    agent = PPO(SPEC, target_kl=10**30)
    assert agent.target_kl == 1e30 and isinstance(agent.target_kl, float)

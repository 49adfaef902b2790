"""A rollout with other shapes than the agent's environment has is rejected by the name of what is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete
from polyak.core.types import Rollout, TimeStep
from polyak.learning.check_rollout import as_arrays, check_carry, check_rollout
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import GRU

SPEC = EnvSpec(Dict({"far": Box(np.zeros(3), np.ones(3)), "near": Discrete(4)}), Box(np.zeros(2), np.ones(2)))
CHOICES = Dict({"by": Box(np.zeros(2), np.ones(2)), "go": Discrete(3), "on": MultiDiscrete((2, 3))})
MASKED = dataclasses.replace(SPEC, action=CHOICES, has_action_mask=True)


def good():
    flags, lead = np.zeros((6, 2), bool), (6, 2)
    obs = {"far": np.zeros((*lead, 3), np.float32), "near": np.zeros(lead, np.int32)}
    steps = TimeStep(obs, np.zeros(lead, np.float32), flags, flags, flags)
    return Rollout(steps, np.zeros((5, 2, 2), np.float32))


def with_steps(**changes):
    rollout = good()
    return dataclasses.replace(rollout, time_steps=dataclasses.replace(rollout.time_steps, **changes))


def test_a_rollout_of_the_environment_passes_also_while_tracing():
    assert check_rollout(good(), SPEC) == (5, 2)
    assert jax.jit(lambda r: jnp.array(check_rollout(r, SPEC)))(good()).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (with_steps(reward=np.zeros(6)), r"reward must be \[T\+1, B\].*got \(6,\)"),
        (with_steps(reward=np.zeros((1, 2))), r"reward must be .* got \(1, 2\)"),
        (
            with_steps(terminated=np.zeros((5, 2), bool)),
            r"terminated must have shape \(6, 2\), got \(5, 2\)",
        ),
        (with_steps(first=np.zeros(2, bool)), r"first must have shape \(6, 2\), got \(2,\)"),
        (
            with_steps(obs={**good().time_steps.obs, "far": np.zeros((6, 2, 4))}),
            r"obs 'far' must have shape \(6, 2, 3\), got \(6, 2, 4\)",
        ),
        (with_steps(obs=good().obs), r"obs 'far' must have shape \(6, 2, 3\), got \(5, 2, 3\)"),
        (
            with_steps(obs={"far": np.zeros((6, 2, 3))}),
            r"obs must be a tree of 'far', 'near'; 'near' is missing, got a dict with keys \['far'\]",
        ),
        (
            with_steps(obs=np.zeros((6, 2, 3))),
            r"obs must be a tree of 'far', 'near'; 'far' is missing, got an array of float64",
        ),
        (dataclasses.replace(good(), actions=np.zeros((6, 2, 2))), r"actions must have shape \(5, 2, 2\), got \(6, 2, 2\)"),
        (
            dataclasses.replace(good(), actions=np.zeros((5, 2), np.int32)),
            r"actions must have shape \(5, 2, 2\), got \(5, 2\)",
        ),
        (dataclasses.replace(good(), actions=()), r"actions must have shape \(5, 2, 2\), got \(0,\)"),
    ],
)
def test_wrong_shapes_raise_with_the_leaf_name(rollout, message):
    with pytest.raises(ValueError, match=f"update: .*{message}"):
        check_rollout(rollout, SPEC)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            with_steps(terminated=np.zeros((6, 2), np.int32)),
            "rollout.time_steps.terminated must have dtype bool .*, got int32",
        ),
        (
            with_steps(first=np.zeros((6, 2), np.float32)),
            "rollout.time_steps.first must have dtype bool .*, got float32",
        ),
        (
            with_steps(reward=np.zeros((6, 2), np.int32)),
            "rollout.time_steps.reward must have dtype float32 .*, got int32",
        ),
        (
            dataclasses.replace(good(), actions=np.zeros((5, 2, 2), np.int32)),
            r"rollout.actions must have dtype float32 \(floats\), got int32",
        ),
    ],
)
def test_wrong_dtypes_raise_with_the_leaf_name(rollout, message):
    with pytest.raises(TypeError, match=f"update: {message}"):
        check_rollout(rollout, SPEC)


def masked(mask):
    actions = {"by": np.zeros((5, 2, 2), np.float32), "go": np.zeros((5, 2), np.int32), "on": np.zeros((5, 2, 2), np.int32)}
    return dataclasses.replace(with_steps(action_mask=mask), actions=actions)


def allowed(**changes):
    return masked({"by": None, "go": np.ones((6, 2, 3), bool), "on": np.ones((6, 2, 5), bool)} | changes)


def test_masks_of_the_choices_pass_also_those_of_some_only():
    assert check_rollout(allowed(), MASKED) == (5, 2)
    assert check_rollout(allowed(on=None), MASKED) == (5, 2)
    assert check_rollout(masked(None), dataclasses.replace(MASKED, has_action_mask=False)) == (5, 2)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (masked(None), "action_mask must be given since the spec has_action_mask, got None"),
        (allowed(go=np.ones((5, 2, 3), bool)), r"action_mask 'go' must have shape \(6, 2, 3\), got \(5, 2, 3\)"),
        (allowed(on=np.ones((6, 2, 2), bool)), r"action_mask 'on' must have shape \(6, 2, 5\), got \(6, 2, 2\)"),
        (allowed(by=np.ones((6, 2, 2), bool)), "action_mask 'by' must be None for .*; only Discrete and MultiDiscrete"),
        (masked(np.ones((6, 2, 3), bool)), "action_mask must be None for Dict.*; only Discrete"),
    ],
)
def test_wrong_masks_raise_with_the_leaf_name(rollout, message):
    with pytest.raises(ValueError, match=f"update: rollout.time_steps.{message}"):
        check_rollout(rollout, MASKED)


def test_where_nothing_can_be_masked_a_mask_cannot_be_missing():
    assert check_rollout(good(), dataclasses.replace(SPEC, has_action_mask=True)) == (5, 2)


def test_masks_of_wrong_dtype_raise_with_the_leaf_name():
    with pytest.raises(TypeError, match="action_mask 'go' must be bool, got float32"):
        check_rollout(allowed(go=np.ones((6, 2, 3), np.float32)), MASKED)


def test_boxes_of_integers_are_acted_in_by_floats():
    spec = dataclasses.replace(SPEC, action=Box([0, 0], [9, 9], dtype=np.int32))
    assert check_rollout(good(), spec) == (5, 2)
    with pytest.raises(TypeError, match=r"update: rollout\.actions must have dtype float32 \(floats\), got int32"):
        check_rollout(dataclasses.replace(good(), actions=np.zeros((5, 2, 2), np.int32)), spec)


def test_who_put_environments_first_is_told():
    swapped = dataclasses.replace(good(), actions=np.zeros((2, 5, 2), np.float32))
    with pytest.raises(ValueError, match=r"must have shape \(5, 2, 2\), got \(2, 5, 2\): time comes first"):
        check_rollout(swapped, SPEC)


def test_carry_of_wrong_shape_or_dtype_raises():
    network = GRU(4, hidden=(3,), head=PolicyAndValue())
    memory = network.initial_carry(2)
    check_carry(memory, network, 2)
    check_carry((), network, 2)
    for other in (network.initial_carry(3), {"h": memory}, jax.tree.map(lambda x: x[..., :1], memory)):
        with pytest.raises(ValueError, match=r"update: rollout.carry must be the network's carry with shapes .*\(2, 4\)"):
            check_carry(other, network, 2)
    with pytest.raises(ValueError, match=r"update: rollout.carry must have the dtypes of .*float32.*got .*int32"):
        check_carry(jax.tree.map(lambda x: x.astype(jnp.int32), memory), network, 2)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_rewards_are_summed_in_float32(dtype):
    rewards = np.linspace(-1, 1, 12).reshape(6, 2).astype(dtype)
    got = as_arrays(with_steps(reward=rewards)).time_steps.reward
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, rewards.astype(np.float32))
